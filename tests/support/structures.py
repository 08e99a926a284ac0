"""Structures that scripts keep in checkpoints: every kind of value that fits, for properties."""

from __future__ import annotations

import io
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy
from torch import Tensor

from zero_checkpoint.format.dtypes import DTYPES

KEYS = st.sampled_from(["a", "b", "a.b", "b#2", "", "$tuple", "$tensor", 1, "1", (1, 2), None])
"""With names that others are made of, and keys that JSON does not have."""
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.sampled_from([*DTYPES.values()]),
    st.sampled_from([(), (0,), (3,), (2, 3)]),
    st.integers(0, 9),
)
ARRAYS = of_numpy.arrays(
    st.one_of(
        of_numpy.scalar_dtypes(),
        of_numpy.unicode_string_dtypes(max_len=3),
        of_numpy.array_dtypes(of_numpy.scalar_dtypes(), max_size=3),
        of_numpy.nested_dtypes(of_numpy.scalar_dtypes(), max_leaves=4),
    ).filter(lambda dtype: not dtype.hasobject and dtype.shape == ()),
    of_numpy.array_shapes(min_dims=0, min_side=0, max_side=3),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.just(torch.Size([2, 3])),
    st.builds(io.BytesIO, st.binary(max_size=3)),
    st.builds(Counter, st.text(max_size=3)),
)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, tuples and dictionaries of what is given."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
            st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=6,
    )


STRUCTURES = nested(st.one_of(SCALARS, TENSORS, ARRAYS))


def bits(value: Any) -> Any:
    """A value by its type and its bits, for comparisons; mappings are dictionaries."""
    match value:
        case Tensor():
            shown: Any = (value.dtype, tuple(value.shape), _raw(value))
        case np.ndarray() | np.generic():
            shown = (value.dtype, value.shape, value.tobytes())
        case io.BytesIO():
            shown = value.getvalue()
        case float():
            shown = "nan" if math.isnan(value) else (value, math.copysign(1, value))
        case torch.Size():
            shown = tuple(value)
        case Counter():
            shown = {bits(key): bits(inner) for key, inner in value.items()}
        case dict():
            return dict, {(type(key), key): bits(inner) for key, inner in value.items()}
        case list() | tuple():
            shown = [bits(inner) for inner in value]
        case _:
            shown = value
    return type(value), shown


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
