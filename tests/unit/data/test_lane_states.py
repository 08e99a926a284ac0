"""What a dataset says of its position is stored and read again as it was, without pickle."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_contract.errors import ConfigError
from zero_data.lanes import Packed
from zero_data.lanes.stored import dump, load


def packed(*documents: tuple[int, int, int]) -> Packed:
    sample = Packed(input_ids=torch.arange(3))
    sample.documents = documents
    return sample


NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
ARRAYS = st.one_of(
    st.sampled_from(
        [
            np.arange(6).reshape(2, 3),
            np.zeros((0, 2), np.float16),
            np.float64(0.1),
            np.int8(-3),
            np.array(["a", "bc"]),
            np.ones(3, [("at", "<i4"), ("to", "<f8", (2,)), ("in", [("a", "u1"), ("b", "S3")])]),
            np.ones(2, np.dtype([("at", "i1"), ("to", "<f8")], align=True))[0],
        ]
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]).map(
        lambda dtype: torch.ones(2, 3).to(dtype)
    ),
    st.just(torch.tensor(7)),
    st.just(torch.empty(3, 0)),
    st.lists(st.tuples(*[st.integers(0, 9)] * 3)).map(lambda parts: packed(*parts)),
)
STATES = st.recursive(
    NUMBERS | ARRAYS,
    lambda each: (
        st.lists(each)
        | st.lists(each).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9) | st.binary(), each)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case dict():
            documents = [getattr(each, "documents", ()) for each in (one, other)]
            alike = list(one) == list(other) and documents[0] == documents[1]
            return alike and all(same(one[k], other[k]) for k in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case torch.Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case np.ndarray():
            return one.dtype == other.dtype and np.array_equal(one, other)
        case _:
            pass
    return bool(one == other)


@given(STATES)
def test_whatever_is_stored_is_read_again_as_it_was(state: Any) -> None:
    assert same(load(dump(state)), state)


def test_the_states_of_all_generators_are_stored() -> None:
    states = (
        random.Random(1).getstate(),
        np.random.default_rng(1).bit_generator.state,
        np.random.RandomState(1).get_state(),
        torch.Generator().manual_seed(1).get_state(),
    )
    assert same(load(dump(states)), states)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"a": [object()]}, "it has a value of type object, which no checkpoint stores"),
        ({"a": {1, 2}}, "it has a value of type set"),
        ({(1, 2): 3}, r"a key of a dictionary is \(1, 2\)"),
        (np.array([object()]), "it has a value of type ndarray"),
    ],
)
def test_a_value_that_would_be_lost_is_refused_by_name(state: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        dump(state)


EXTENSIONS = st.builds(
    lambda kind, data: b"\xc7" + bytes([len(data), kind]) + data,
    st.integers(0, 9),
    st.binary(max_size=12) | STATES.map(dump).filter(lambda data: len(data) < 200),
)


@given(st.binary() | EXTENSIONS)
def test_bytes_of_another_origin_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        load(data)
