"""Where two checkpoints differ, tensor by tensor.

Tensors are equal if their bits are: two NaNs of the same bits are, -0.0 and 0.0 are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from zero_checkpoint.format.dtypes import byte_view
from zero_checkpoint.format.match import stored_id
from zero_checkpoint.format.pieces import TensorId
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.tools.tensors import WIDENED, read_tensor, read_tensors
from zero_checkpoint.tools.verify import Progress

_BATCH_BYTES = 64 << 20


class Relation(StrEnum):
    """The fate of a tensor of the first checkpoint in the second."""

    EQUAL = "equal"
    DIFFERENT = "different"
    RESHAPED = "reshaped"
    MISSING = "missing"
    """Only the first has it."""
    EXTRA = "extra"
    """Only the second has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor of either checkpoint."""

    kind: str
    name: str
    relation: Relation
    max_abs: float | None = None
    """Largest absolute difference; infinite where only one side is a number."""
    max_rel: float | None = None
    """Largest difference of an element, as a fraction of the larger of its two values."""
    detail: str = ""


def compare(
    left: Candidate, right: Candidate, *, progress: Progress = lambda _: None
) -> Iterator[Difference]:
    """All tensors of both checkpoints, in the order of the first, then those only in the second.

    Raises:
        DamagedCheckpoint: One of them is not what was saved.
        OSError: One of them could not be read.
    """
    ours, theirs = left.manifest.tensors, right.manifest.tensors
    # A tensor may be stored under its tied name in the other checkpoint.
    partner = {t: stored_id(t, right.manifest) for t in ours}
    same = [t for t, p in partner.items() if p in theirs and theirs[p].shape == ours[t].shape]
    left_data = read_tensors(left, same, batch_bytes=_BATCH_BYTES)
    first_of = {partner[t]: t for t in reversed(same)}
    once = dict.fromkeys(partner[t] for t in same)
    right_data = read_tensors(right, once, batch_bytes=_BATCH_BYTES)
    for tensor, info in ours.items():
        other = theirs.get(partner[tensor])
        if other is None:
            yield _difference(tensor, Relation.MISSING)
            continue
        if other.shape != info.shape:
            shapes = f"{list(info.shape)} / {list(other.shape)}"
            yield _difference(tensor, Relation.RESHAPED, detail=shapes)
            continue
        _, a = next(left_data)  # both are read in this order
        # Several of ours may be one of theirs, under its tied names: that is read again.
        again = first_of[partner[tensor]] != tensor
        b = read_tensor(right, partner[tensor]) if again else next(right_data)[1]
        progress(a.numel() * a.element_size())
        if a.dtype == b.dtype and torch.equal(byte_view(a.reshape(-1)), byte_view(b.reshape(-1))):
            yield _difference(tensor, Relation.EQUAL)
            continue
        max_abs, max_rel = distance(a, b)
        dtypes = "" if a.dtype == b.dtype else f"{a.dtype} / {b.dtype}".replace("torch.", "")
        found = _difference(tensor, Relation.DIFFERENT, detail=dtypes)
        yield replace(found, max_abs=max_abs, max_rel=max_rel)
    used = set(partner.values())
    yield from (_difference(t, Relation.EXTRA) for t in theirs if t not in used)


def _difference(tensor: TensorId, relation: Relation, *, detail: str = "") -> Difference:
    return Difference(kind=tensor.kind, name=tensor.fqn, relation=relation, detail=detail)


def distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Largest absolute and largest relative difference of two tensors of one shape.

    Elements that are the same infinity, or NaN on both sides, do not differ; an element that is
    finite on one side only differs infinitely.
    """
    max_abs = max_rel = 0.0
    for x, y in zip(a.reshape(-1).split(WIDENED), b.reshape(-1).split(WIDENED), strict=True):
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        # So that a bf16 tensor can be compared with its fp32 original.
        left, right = x.to(wide), y.to(wide)
        same = (left == right) | (left.isnan() & right.isnan())
        # What is finite on one side only differs infinitely, also from NaN.
        gap = torch.where(same, 0.0, (left - right).abs()).nan_to_num(torch.inf, torch.inf)
        # An infinite scale would make that a share of 0 or NaN.
        scale = torch.maximum(left.abs(), right.abs()).nan_to_num(0.0, posinf=1.0)
        share = torch.where(gap == 0, 0.0, gap / scale)
        max_abs = max(max_abs, float(gap.max()) if gap.numel() else 0.0)
        max_rel = max(max_rel, float(share.max()) if share.numel() else 0.0)
    return max_abs, max_rel
