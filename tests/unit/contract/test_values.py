"""Sizes and durations are read in every spelling; what is neither is shown with the right form."""

from __future__ import annotations

import argparse

import pytest

from zero_contract.values import (
    argument_type,
    in_words,
    nearest,
    parse_seconds,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), (".5", 0.5), ("90s", 90), ("10m", 600), ("2h", 7200)]
)
def test_a_duration_is_a_number_and_a_unit_from_seconds_to_days(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("12", 12),
        ("5GB", 5 * 10**9),
        ("200 mib", 200 << 20),
        ("1.5Gi", 3 << 29),
        ("64KiB", 64 << 10),
        ("2Ti", 2 << 40),
    ],
)
def test_a_size_may_be_decimal_or_binary_in_any_spelling(text, size_bytes):
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("parse", [parse_seconds, parse_size_bytes])
@pytest.mark.parametrize("text", ["", "-1", "1e3", "5 apples", "nan", "1.2.3"])
def test_what_is_neither_is_shown_with_the_right_form(parse, text):
    with pytest.raises(
        argparse.ArgumentTypeError, match=rf"^{text} is not a .*; write .*such as \d"
    ):
        argument_type(parse)(text)


def test_a_duration_is_told_in_the_largest_unit_of_which_there_are_two():
    shown = [in_words(length_s) for length_s in (-1, 40, 119, 120, 1860, 7200, 3 * 86400)]
    assert shown == ["0 s", "40 s", "119 s", "2 minutes", "31 minutes", "2 hours", "3 days"]


def test_the_nearest_name_is_one_that_is_near():
    assert nearest("max-restart", ["nnodes", "max-restarts"]) == "max-restarts"
    assert nearest("xyz", ["nnodes"]) is None
