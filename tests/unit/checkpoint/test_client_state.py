"""What a script keeps in a checkpoint comes back as it went in."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.support.structures import STRUCTURES, bits
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.dtypes import DTYPES
from zero_checkpoint.state.client_state import LARGEST_BYTES, pack, unpack


class Point(NamedTuple):
    x: int
    y: int


def again(value: Any) -> Any:
    """Through a manifest and back."""
    return unpack(json.loads(json.dumps(pack(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"epoch": 3, "best": math.inf, "name": "a", "done": False, "rates": [1e-3, [0.5]]},
        (1, (2.5, None), [()]),
        {3: "a", (1, 2): {"b": (4,)}, None: [], True: 1.0},
        {"$tensor": ["F32", [1], "no tensor"], "and": {"$tuple": 3}},
        {"$items": {}},
        {},
    ],
)
def test_what_json_has_and_lacks(value: Any) -> None:
    assert repr(again(value)) == repr(value)


def test_json_stays_as_it_is() -> None:
    plain = {"epoch": 3, "rates": [1e-3, None], "of": {"a": "b"}}
    assert pack(plain) == plain
    assert again(OrderedDict(plain)) == plain


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 0, 3)])
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    found = again({"best": [value]})["best"][0]
    assert (found.dtype, found.shape) == (dtype, value.shape)
    assert bytes(found.flatten().view(torch.uint8)) == bytes(value.flatten().view(torch.uint8))


def test_a_view_is_stored_alone_and_what_comes_back_can_be_changed() -> None:
    wide = torch.arange(1 << 19, dtype=torch.float32, requires_grad=True)
    found = again(wide.view(2, -1).t()[3])
    assert found.tolist() == [3.0, float(3 + (1 << 18))]
    found += 1
    assert again(np.arange(4)[::2]).tolist() == [0, 2]


LAZY = torch.tensor([[1 + 2j, 3 - 4j]]).conj()
"""Its bits in memory are not its values; nor are those of its imaginary part."""


@pytest.mark.parametrize("value", [LAZY, LAZY.imag, LAZY[0, 1], LAZY.imag.t()])
def test_a_view_that_conjugates_or_negates_when_it_is_read(value: torch.Tensor) -> None:
    assert again(value).tolist() == value.tolist()


@pytest.mark.parametrize(
    "value",
    [
        *(np.float64(0.1), np.int32(7), np.bool_(True), np.str_("a"), np.str_()),
        *(np.bytes_(b"a"), np.bytes_()),
    ],
)
def test_numbers_and_texts_of_numpy(value: np.generic) -> None:
    found = again({"loss": value})["loss"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"client_state\.a\[1\] is a set, which no checkpoint can hold; convert"),
        ({"a": {3: object()}}, r"client_state\.a\[3\] is a object"),
        (np.array([object()]), "client_state is a ndarray"),
        ({"a": torch.zeros(LARGEST_BYTES + 1, dtype=torch.uint8)}, r"client_state\.a has 1048577 "),
        (np.zeros(LARGEST_BYTES // 8 + 1), "of the module, or a tensor in the state_dict"),
        (torch.zeros(2, dtype=torch.complex128), "complex128 cannot be stored; cast the tensor"),
        (
            {"a": torch.eye(2).to_sparse()},
            r"client_state\.a is a tensor of another kind \(sparse_co",
        ),
        (torch.empty(2, device="meta"), r"another kind \(meta\)"),
        (Point(1, 2), "client_state is a Point, which no checkpoint can hold"),
        (defaultdict(list, a=[1]), "client_state is a defaultdict"),
        (np.ma.masked_array([1], [True]), "client_state is a MaskedArray"),
    ],
)
def test_what_would_not_come_back_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        pack(value)


@given(STRUCTURES)
def test_what_is_stored_comes_back_with_its_types_and_bits(value: Any) -> None:
    assert bits(again({"value": value})["value"]) == bits(value)


def test_as_much_as_fits_comes_back() -> None:
    assert again(torch.ones(LARGEST_BYTES, dtype=torch.uint8)).sum() == LARGEST_BYTES


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": ["F32", [3], "AAAA"]},
        {"$tensor": ["F31", [1], "AAAAAA=="]},
        {"$array": ["|O", [1], "AAAAAAAAAAA="]},
        {"$array": ["<f4", [1], "no text"]},
        {"$items": [[[], 1]]},
        {"$tuple": [1], "and": 2},
    ],
)
def test_a_damaged_or_hostile_state_is_refused_in_words(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"is not as it was written: .*; load another one"):
        unpack({"inner": value})
