"""Where two checkpoints differ, tensor by tensor.

Tensors are equal if their bits are: two NaNs of the same bits are, -0.0 and 0.0 are not. Numbers
are compared in float64, so a bf16 tensor can be held against its fp32 original.

Called by `cli`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from zero_checkpoint.candidates import Candidate
from zero_checkpoint.format.dtypes import byte_view
from zero_checkpoint.format.pieces import TensorId
from zero_checkpoint.tools.tensors import read_tensors
from zero_checkpoint.tools.verify import Progress

_BATCH_BYTES = 64 << 20
_CHUNK = 1 << 22
"""Elements that are widened to float64 at once."""


class Relation(StrEnum):
    """What became of a tensor of the first checkpoint in the second."""

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
    """All tensors of both checkpoints, in the order of the first, then what only the second has.

    Raises:
        DamagedCheckpoint: One of them is not what was saved.
        OSError: One of them could not be read.
    """
    partner = {t: _stored(t, right) for t in left.manifest.tensors}
    same = [t for t in partner if _same_shape(t, partner[t], left, right)]
    ours = read_tensors(left, same, batch_bytes=_BATCH_BYTES)
    theirs = read_tensors(right, [partner[t] for t in same], batch_bytes=_BATCH_BYTES)
    for tensor in left.manifest.tensors:
        if partner[tensor] not in right.manifest.tensors:
            yield _only(tensor, Relation.MISSING)
        elif not _same_shape(tensor, partner[tensor], left, right):
            yield _reshaped(tensor, partner[tensor], left, right)
        else:
            (_, a), (_, b) = next(ours), next(theirs)
            progress(a.numel() * a.element_size())
            yield _measured(tensor, a, b)
    used = set(partner.values())
    yield from (_only(t, Relation.EXTRA) for t in right.manifest.tensors if t not in used)


def _stored(tensor: TensorId, other: Candidate) -> TensorId:
    """Under which name the other checkpoint stores a tensor: it may be a tied one there."""
    if tensor in other.manifest.tensors:
        return tensor
    return TensorId(tensor.kind, other.manifest.aliases.get(tensor.fqn, tensor.fqn))


def _same_shape(tensor: TensorId, partner: TensorId, left: Candidate, right: Candidate) -> bool:
    theirs = right.manifest.tensors.get(partner)
    return theirs is not None and theirs.shape == left.manifest.tensors[tensor].shape


def _only(tensor: TensorId, relation: Relation) -> Difference:
    return Difference(kind=tensor.kind, name=tensor.fqn, relation=relation)


def _reshaped(tensor: TensorId, partner: TensorId, left: Candidate, right: Candidate) -> Difference:
    ours, theirs = left.manifest.tensors[tensor], right.manifest.tensors[partner]
    return Difference(
        kind=tensor.kind,
        name=tensor.fqn,
        relation=Relation.RESHAPED,
        detail=f"{list(ours.shape)} / {list(theirs.shape)}",
    )


def _measured(tensor: TensorId, a: Tensor, b: Tensor) -> Difference:
    if a.dtype == b.dtype and torch.equal(byte_view(a.reshape(-1)), byte_view(b.reshape(-1))):
        return _only(tensor, Relation.EQUAL)
    max_abs, max_rel = distance(a, b)
    return Difference(
        kind=tensor.kind,
        name=tensor.fqn,
        relation=Relation.DIFFERENT,
        max_abs=max_abs,
        max_rel=max_rel,
        detail="" if a.dtype == b.dtype else f"{a.dtype} / {b.dtype}".replace("torch.", ""),
    )


def distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Largest absolute and largest relative difference of two tensors of one shape.

    Elements that are the same infinity, or NaN on both sides, do not differ; an element that is
    finite on one side only differs infinitely.
    """
    max_abs = max_rel = 0.0
    for x, y in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True):
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        left, right = x.to(wide), y.to(wide)
        same = (left == right) | (left.isnan() & right.isnan())
        gap = torch.where(same, 0.0, (left - right).abs()).nan_to_num(torch.inf, torch.inf)
        scale = torch.maximum(left.abs(), right.abs()).nan_to_num(0.0, posinf=1.0)
        share = torch.where(gap == 0, 0.0, gap / scale)
        max_abs = max(max_abs, float(gap.max()) if gap.numel() else 0.0)
        max_rel = max(max_rel, float(share.max()) if share.numel() else 0.0)
    return max_abs, max_rel
