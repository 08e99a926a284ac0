"""Where a worker's output goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_agent.workers.output.streams import (
    RankSelection,
    Route,
    Std,
    Streams,
    parse_ranks,
    parse_selection,
)
from zero_orchestrator.errors import SpecError

ATTEMPT = Path("/logs/job_1a2b/attempt_0")
OUT, ERR = ATTEMPT / "1/stdout.log", ATTEMPT / "1/stderr.log"


def routes(streams: Streams, local_rank: int = 1) -> tuple[Route, Route]:
    """Of stdout and stderr of rank 5, a trainer."""
    return tuple(
        streams.route(std, ATTEMPT, 5, local_rank, "trainer") for std in (Std.OUT, Std.ERR)
    )


@pytest.mark.parametrize(
    ("text", "of_rank_0", "of_rank_1"),
    [
        ("0", Std.NONE, Std.NONE),
        ("3", Std.ALL, Std.ALL),
        ("0:1,1:3", Std.OUT, Std.ALL),
        ("1:2", Std.NONE, Std.ERR),
    ],
)
def test_streams_are_selected_as_torchrun_selects_them(text, of_rank_0, of_rank_1):
    selection = parse_selection("--tee", text)
    assert (selection.of(0), selection.of(1)) == (of_rank_0, of_rank_1)


@pytest.mark.parametrize("text", ["4", "x", "", "0:4", "0:1;1:3", "0-1:3"])
def test_a_wrong_selection_is_named_with_the_right_forms(text):
    with pytest.raises(SpecError) as refused:
        parse_selection("--tee", text)
    assert str(refused.value).startswith(f"--tee={text}: write 0 (nothing), 1 (stdout)")


def test_without_flags_everything_is_shown_as_it_is_and_nothing_is_kept():
    assert routes(Streams()) == (Route(), Route())
    assert not Streams().needs_files


def test_a_log_directory_alone_keeps_everything_and_shows_it():
    assert routes(Streams(keep_all=True)) == (Route(file=OUT), Route(file=ERR))


def test_a_redirected_stream_goes_to_its_file_only():
    streams = Streams(redirects=RankSelection(Std.OUT))
    assert routes(streams) == (Route(shown=False, file=OUT), Route())
    assert streams.needs_files


def test_a_teed_stream_is_shown_with_the_workers_name_even_if_it_is_redirected_as_well():
    streams = Streams(
        tee=RankSelection(by_local_rank={1: Std.OUT}), redirects=RankSelection(Std.ALL)
    )
    teed, redirected = routes(streams)
    assert teed == Route(prefix="[trainer1]:", file=OUT)
    assert redirected == Route(shown=False, file=ERR)


def test_the_name_before_a_line_can_be_chosen():
    template = "${role_name}/${rank}/${local_rank}/${other} "
    streams = Streams(tee=RankSelection(Std.ALL), prefix=template)
    assert routes(streams)[0].prefix == "trainer/5/1/${other} "


def test_ranks_that_are_not_to_be_shown_are_kept_all_the_same():
    streams = Streams(tee=RankSelection(Std.ALL), local_ranks=parse_ranks("0,2"))
    assert [routes(streams, local)[0].shown for local in range(3)] == [True, False, True]
    assert routes(streams, 1)[0].file == OUT
    assert parse_ranks("") is None
    with pytest.raises(SpecError, match="--local-ranks-filter=a: write local ranks"):
        parse_ranks("a")


def test_filters_copy_what_is_shown_with_the_workers_name_and_need_no_other_flag():
    streams = Streams(filters={Std.ERR: ("error",)}, local_ranks=frozenset({1}))
    copy = ATTEMPT / "filtered_stderr.log"
    assert routes(streams) == (
        Route(),
        Route(copy=copy, copy_prefix="[trainer1]:", filters=("error",)),
    )
    assert routes(streams, local_rank=0)[1] == Route(shown=False)
    assert streams.needs_files
