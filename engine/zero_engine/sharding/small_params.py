"""Small parameters of a unit: whole between uses at stage 3, and what scripts write to them counts.

Owns their memory at stage 3, and the way of a script's writes to the shards. Must always hold:

- A small parameter shows its values at any time, at every stage: a script reads `scale.item()`, and
  clamps it, without a context. Larger parameters show NaN between uses at stage 3.
- What all ranks write to one counts as if the optimizer had made it, in every precision: `take`
  copies elements that differ from the shard in the compute dtype. The others keep the precision
  that they have in the shard.
- `checksums` tells the ranks whether they have written the same.

Source of the idea: DeepSpeed's persistent parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from zero_comm.exchange.collectives import Collectives, Pending


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

        Apart, they have memory of their own, since that of `full` is freed.
        """
        self._collectives = collectives
        self._padded = full.numel()
        ends = [0]
        for _, param, _ in params:
            ends.append(ends[-1] + param.numel())
        self._apart = full.new_empty(ends[-1]) if apart else None
        shown = (
            [full[start : start + p.numel()] for _, p, start in params]
            if self._apart is None
            else [self._apart[a:b] for a, b in pairwise(ends)]
        )
        self.members = tuple(
            SmallParam(name, param, start, own)
            for (name, param, start), own in zip(params, shown, strict=True)
        )
        if self._apart is not None:
            for each in self.members:
                each.shown.copy_(full[each.start : each.stop])
                each.param.data = each.shown.view(each.param.shape)

    # ---- at stage 3 ----

    def write_to(self, full: Tensor) -> None:
        """Write what they show to their places in the gathered weights."""
        if self._apart is not None:
            for each in self.members:
                full[each.start : each.stop].copy_(each.shown)

    def refresh(self, fetch: Callable[[int, int, Tensor], None]) -> Pending:
        """Begin to bring them up to date on all ranks; `fetch` copies elements of this one."""
        if self._apart is None or not self.members:
            return Pending("small parameters")
        low, high = self._interval(self._collectives.rank)
        for each, start, stop in self._inside(low, high):
            fetch(start, stop, each.shown[start - each.start : stop - each.start])
        rows = {rank: self._row(rank) for rank in range(self._collectives.world)}
        return self._collectives.share(rows, f"small parameters beside {self._padded} elements")

    def _row(self, rank: int) -> Tensor:
        """What a rank's shard holds of them."""
        assert self._apart is not None
        sizes = [stop - start for _, start, stop in self._inside(*self._interval(rank))]
        before = [stop - start for _, start, stop in self._inside(0, self._interval(rank)[0])]
        return self._apart[sum(before) : sum(before) + sum(sizes)]

    def _interval(self, rank: int) -> tuple[int, int]:
        return self._collectives.interval(self._padded, rank)

    def _inside(self, low: int, high: int) -> Iterator[tuple[SmallParam, int, int]]:
        """Each of them that has elements in [low, high), with these: [start, stop)."""
        for each in self.members:
            start, stop = max(each.start, low), min(each.stop, high)
            if start < stop:
                yield each, start, stop

    # ---- what a script writes ----

    def take(self, held: Tensor, low: int, wrote: Callable[[int, int], None] | None) -> None:
        """Copy what a script has written to the weights `held` that the optimizer steps.

        These begin with element `low` of the unit. `wrote` is called with the elements that have
        changed; without it no device is waited for.
        """
        for each in self.members:
            self._put_back(each)
        for each, start, stop in self._inside(low, low + held.numel()):
            own = each.shown[start - each.start : stop - each.start]
            part = held[start - low : stop - low]
            if own.data_ptr() == part.data_ptr():
                return  # the optimizer steps what the parameters show
            changed = own != part.to(own.device, own.dtype)
            if wrote is None:
                part.copy_(torch.where(changed, own.to(part.dtype), part))
            elif bool(changed.any()):
                changed = changed.to(part.device)
                part.copy_(torch.where(changed, own.to(part.device, part.dtype), part))
                wrote(start, stop)

    def _put_back(self, each: SmallParam) -> None:
        """Take a tensor that a script has put in place of the parameter's memory."""
        data, shape = each.param.data, each.param.shape
        same = data.dtype == each.shown.dtype and data.device == each.shown.device
        moved = data.data_ptr() != each.shown.data_ptr()
        if moved and same and data.numel() == each.shown.numel() and data.numel():
            with torch.no_grad():
                each.shown.view(shape).copy_(data)
                each.param.data = each.shown.view(shape)

    def checksums(self) -> Tensor:
        """A number for each of them that differs, almost surely, if a bit of its values does."""
        if not self.members:
            return torch.zeros(0)
        return torch.stack([_checksum(each.shown) for each in self.members])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = 1 << 23
"""Whole numbers below it are exact in fp32."""


def _checksum(values: Tensor) -> Tensor:
    bits = values.view(_INTEGERS[values.element_size()]) if not values.is_complex() else values
    if values.is_complex():
        bits = torch.view_as_real(values).reshape(-1).view(_INTEGERS[values.element_size() // 2])
    weights = 2 * torch.arange(bits.numel(), device=bits.device) + 1
    return ((bits.to(torch.int64) * weights).sum() % _EXACT).float()
