"""Small parameters of a unit: whole between uses at stage 3, and what scripts write to them counts.

Owns their memory at stage 3, and the way of a script's writes to the shards. A small parameter
shows its values at any time, at every stage: a script reads `scale.item()`, and clamps it, without
a context. What all ranks write to one counts as if the optimizer had made it.

Source of the idea: DeepSpeed's persistent parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_comm.exchange.collectives import Collectives, Pending
from zero_step.checks.bit_sum import bit_sum
from zero_step.gradients.norm import BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class SmallParam:
    """One of them, and what it shows."""

    name: str
    param: nn.Parameter
    start: int
    """Where it lies in its unit, in elements."""
    shown: Tensor
    """Its values, flat."""

    @property
    def stop(self) -> int:
        """One past its last element in the unit."""
        return self.start + self.shown.numel()


class Beside(NamedTuple):
    """What a small parameter shows of a rank's weights, and these; both flat, of the same size."""

    shown: Tensor
    held: Tensor


class SmallParams:
    """The small parameters of one unit, in its order."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, int]],
        full: Tensor,
        collectives: Collectives,
        *,
        apart: bool,
    ) -> None:
        """Take parameters, each with its name and its offset in the unit, ascending.

        Apart, they have separate memory, since that of `full` is freed.
        """
        self._collectives = collectives
        self._padded = full.numel()
        starts, end = [], 0
        for _, param, _ in params:
            # Aligned as in the unit: kernels of a GPU, and their bits, depend on the alignment of
            # what they read. Packed, stage 3 had other weights than stages 0-2.
            starts.append(end)
            end += -(-param.numel() // BLOCK) * BLOCK
        self._apart = full.new_zeros(end) if apart else None
        self.members = tuple(
            SmallParam(name, param, start, _part(full, start, param))
            if self._apart is None
            else SmallParam(name, param, start, _part(self._apart, alone, param))
            for (name, param, start), alone in zip(params, starts, strict=True)
        )
        if self._apart is not None:
            for each in self.members:
                each.shown.copy_(full[each.start : each.stop])
                each.param.data = each.shown.view(each.param.shape)

    # ---- at stage 3 ----

    def write_to(self, full: Tensor) -> None:
        """Write what they show to their places in the gathered weights."""
        if self._apart is not None:
            copy([(full[each.start : each.stop], each.shown) for each in self.members])

    def refresh(self, local: Tensor) -> Pending:
        """Begin to bring them up to date on all ranks, from this one's interval of the weights."""
        if self._apart is None or not self.members:
            return Pending("small parameters")
        low, high = self._interval(self._collectives.rank)
        copy(
            [
                (
                    each.shown[start - each.start : stop - each.start],
                    local[start - low : stop - low],
                )
                for each, start, stop in self._inside(low, high)
            ]
        )
        rows = {rank: self._row(rank) for rank in range(self._collectives.world)}
        return self._collectives.share(rows, f"small parameters beside {self._padded} elements")

    def _row(self, rank: int) -> Tensor:
        """The part of their memory that a rank's shard holds, with the padding in between."""
        assert self._apart is not None
        inside = list(self._inside(*self._interval(rank)))
        if not inside:
            return self._apart[:0]
        (first, start, _), (last, _, stop) = inside[0], inside[-1]
        begin = first.shown.storage_offset() + start - first.start
        return self._apart[begin : last.shown.storage_offset() + stop - last.start]

    def _interval(self, rank: int) -> tuple[int, int]:
        return self._collectives.interval(self._padded, rank)

    def _inside(self, low: int, high: int) -> Iterator[tuple[SmallParam, int, int]]:
        """Each of them that has elements in [low, high), with these: [start, stop)."""
        for each in self.members:
            start, stop = max(each.start, low), min(each.stop, high)
            if start < stop:
                yield each, start, stop

    # ---- what a script writes ----

    def beside(self, held: Tensor, low: int) -> list[Beside]:
        """The values that each shows, beside its weights in `held`, whose first element is `low`.

        No pairs if they show these weights themselves.
        """
        for each in self.members:
            # A script may have put a tensor in the place of the parameter's memory.
            data, shape = each.param.data, each.param.shape
            same = data.dtype == each.shown.dtype and data.device == each.shown.device
            moved = data.data_ptr() != each.shown.data_ptr()
            if moved and same and data.numel() == each.shown.numel() and data.numel():
                with torch.no_grad():
                    each.shown.view(shape).copy_(data)
                    each.param.data = each.shown.view(shape)
        found = [
            Beside(
                each.shown[start - each.start : stop - each.start], held[start - low : stop - low]
            )
            for each, start, stop in self._inside(low, low + held.numel())
        ]
        # All of them or none: they have separate memory together, or are parts of one buffer.
        is_one = found and found[0].shown.data_ptr() == found[0].held.data_ptr()
        return [] if is_one else found

    def take_far(self, held: Tensor, low: int) -> list[tuple[int, int]]:
        """Copy what a script has written to weights `held` that are in a far tier, or have a copy.

        Returns the elements [start, stop) of `held` that have changed.
        """
        found, changes = self.beside(held, low), list[tuple[int, int]]()
        # Mostly nothing has: a device is waited for once, and not for each of them.
        if not found or not bool(_changes(found)[0].any()):
            return changes
        inside = self._inside(low, low + held.numel())
        for pair, (_, start, stop) in zip(found, inside, strict=True):
            changed, new = _changes([pair])
            if bool(changed.any()):
                pair.held.copy_(new)
                changes.append((start - low, stop - low))
        return changes


def _part(of: Tensor, start: int, param: Tensor) -> Tensor:
    return of[start : start + param.numel()]


def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy (to, from) each: on a GPU in a few kernels."""
    # A model has hundreds of them: a kernel for each would take a GPU longer than its optimizer's
    # step.
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def take(found: Iterable[Beside]) -> None:
    """Copy what a script has written to the weights beside it; no device is waited for."""
    alike: dict[tuple[torch.dtype, torch.dtype], list[Beside]] = defaultdict(list)
    for each in found:
        alike[each.shown.dtype, each.held.dtype].append(each)
    for group in alike.values():
        _, new = _changes(group)
        held = [each.held for each in group]
        copy(list(zip(held, new.split([each.numel() for each in held]), strict=True)))


def _changes(found: Sequence[Beside]) -> tuple[Tensor, Tensor]:
    """Which elements a script has written, and what the weights then are, of one dtype; flat."""
    shown, held = (torch.cat(each) for each in zip(*found, strict=True))
    held = held.to(shown.device)
    # In the dtype that the script sees: what it has not written keeps the precision of the shard.
    changed = shown != held.to(shown.dtype)
    return changed, torch.where(changed, shown.to(held.dtype), held)


def checksum(params: Iterable[SmallParam], device: torch.device) -> Tensor:
    """A whole number that differs, almost surely, if a bit of any value does: [] on this device."""
    alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for each in params:
        alike[each.shown.dtype].append(each.shown)
    sums = [bit_sum(torch.cat(shown)).to(device) for shown in alike.values()]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=device)
