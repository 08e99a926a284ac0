"""Steps segments whose state rests elsewhere, one sub-group after the other.

A *sub-group* is a part of one unit's shard, of at most `SUB_GROUP` elements. It is read into
memory, stepped, and written back, while the next one is read and the one before is written. Its
*rows* are parts of those of the shard, the master weights and the optimizer's keys, wherever they
rest.

Source of the idea: ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857), whose
sub-groups are parameters of one buffer in the same way.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zero_engine.optim.rows import WEIGHTS, Moments, brought, rows_of, widened
from zero_engine.optim.steps import StepAtOnce, only, step
from zero_engine.optim.whole import LooksAtWhole
from zero_engine.sharding.flat_unit import FlatUnit, overlap
from zero_engine.sharding.segments import Segment, elementwise_keys
from zero_engine.tiers.places import Lease, Tier, TierError, wait

_GRADIENT = ".gradient"

SUB_GROUP = 1 << 24
"""Elements of a sub-group, a multiple of GRAIN: 64 MiB of each row in fp32. Kernels and disks are
as fast with these as with more."""
UNDER_WAY = 3
"""Sub-groups in memory: the one that is stepped, the next and the one before."""


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The part of a segment in a sub-group: elements [start, stop) of the sub-group."""

    segment: Segment
    start: int
    stop: int

    def of(self, row: Tensor) -> Tensor:
        """This part of a row of the sub-group."""
        return row[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Before:
    """A segment's optimizer state before a step."""

    scalars: dict[str, Any]
    keys: list[str]
    """The keys that have rows; none before the first step."""


@dataclass(frozen=True, slots=True, eq=False)
class SubGroup:
    """Elements [start, stop) of the shard of a unit."""

    unit: FlatUnit
    tier: Tier
    total: Tensor
    start: int
    stop: int
    parts: tuple[GroupPart, ...]

    def of(self, row: Tensor) -> Tensor:
        """This sub-group's part of a row of the unit."""
        return row[self.start : self.stop]


class StepBySubGroups:
    """Steps state that rests in tiers; state on the device is stepped at once."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        segments: Sequence[Segment],
        totals: Mapping[FlatUnit, Tensor],
        tiers: Mapping[FlatUnit, Tier],
        moments: torch.dtype = torch.float32,
    ) -> None:
        """Cut the shards into sub-groups; state that is not in `tiers` is on the device."""
        self._moments = Moments(moments)
        self._optimizer = optimizer
        self._tiers = dict(tiers)
        streamed = [s for s in segments if s.unit in tiers and s.stop > s.start]
        options = [frozenset(group) for group in optimizer.param_groups]
        self._rows = rows_of(tiers, streamed, options, self._moments)
        others = [s for s in segments if s not in streamed]
        self._segments = streamed
        self._failure = ""
        self._others = StepAtOnce(optimizer, others) if others else None
        self._empty = [segment for segment in others if segment.stop == segment.start]
        sub_groups = [
            SubGroup(unit, tier, totals[unit], start, stop, _parts(unit, streamed, start, stop))
            for unit, tier in tiers.items()
            for start, stop in self._rows[unit].cuts(range(0, unit.shard.numel(), SUB_GROUP))
        ]
        self._sub_groups = [sub_group for sub_group in sub_groups if sub_group.parts]
        for segment in streamed:
            self._adopt(segment)

    # ---- where state rests ----

    def make_state(
        self, segment: Segment, dtypes: Mapping[str, torch.dtype], before: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Parts of rows, to be filled."""
        dtypes = {key: self._moments.resting(dtype) for key, dtype in dtypes.items()}
        if segment not in self._segments:
            return StepAtOnce(self._optimizer, ()).make_state(segment, dtypes, before)
        rows = self._rows[segment.unit]
        # A row is used again, and nothing fills what lies between parameters.
        return {key: rows.place(segment, key, dtype).zero_() for key, dtype in dtypes.items()}

    def _adopt(self, segment: Segment) -> None:
        """Copy state that is elsewhere (made with the optimizer, or loaded into it) to its row."""
        state = self._optimizer.state.get(segment.param, {})
        for key in elementwise_keys(segment, state):
            place = self._rows[segment.unit].place(segment, key, state[key].dtype)
            if place.data_ptr() != state[key].data_ptr():
                state[key] = place.copy_(state[key])

    # ---- a step ----

    def step(self) -> None:
        """Step all segments.

        Raises:
            TierError: The disk has failed. State is then inconsistent, and every further step is
                refused.
        """
        if self._failure:
            raise TierError(
                f"a step has failed half way: {self._failure}; start again from the newest "
                "checkpoint"
            )
        try:
            step(self._optimizer, self)
        except BaseException as error:
            # A sub-group that has been stepped cannot be taken back, and must not be stepped twice.
            self._failure = str(error) or type(error).__name__
            raise

    def parts(self, *, weights_only: bool = False) -> Iterator[None]:
        """The segments on the device at once, then each sub-group while it is in memory."""
        groups = self._optimizer.param_groups
        # Each sub-group counts this step from the same number also where a param group counts.
        before = [_options(group) for group in groups]
        after = list(before)
        for _ in self._each_part(weights_only=weights_only):
            yield
            for index, group in enumerate(groups):
                # One without parameters here may not have counted.
                if group["params"]:
                    after[index] = _options(group)
                _set_options(group, before[index])
        for group, options in zip(groups, after, strict=True):
            _set_options(group, options)

    def _each_part(self, *, weights_only: bool) -> Iterator[None]:
        if self._others is not None:
            # Where state rests in 16 bits, those on the device are empty and only count steps.
            for segment in self._empty:
                self._convert(segment, self._moments.as_stepped)
            yield from self._others.parts(weights_only=weights_only)
            for segment in self._empty:
                self._convert(segment, lambda state: state.to(self._moments.resting(state.dtype)))
        before = {}
        for segment in self._segments:
            # A script, or a load, may have put other tensors there since the last step.
            self._adopt(segment)
        for segment in self._segments:
            state = self._optimizer.state.get(segment.param, {})
            own = elementwise_keys(segment, state)
            before[segment] = Before({key: state[key] for key in state.keys() - set(own)}, own)
        directs = isinstance(self._optimizer, LooksAtWhole) and not weights_only
        keys = dict.fromkeys(before, ()) if weights_only else {s: b.keys for s, b in before.items()}
        try:
            # Steps, and passes of a `LooksAtWhole`, are elementwise: the bits are those of one
            # call.
            for sub_group, lease in self._leases(keys):
                self._show(sub_group, lease, before, keys)
                with only(self._optimizer, [part.segment for part in sub_group.parts]):
                    yield
                self._take_back(sub_group, lease, directs=directs)
        finally:
            # Between steps, and after an error, parameters and state show their parts of the rows.
            for segment in self._segments:
                state = self._optimizer.state.get(segment.param, {})
                whole = {*elementwise_keys(segment, state), *before[segment].keys}
                rows = self._rows[segment.unit]
                segment.param.grad = None
                segment.param.data = rows.weights(segment)
                state.update((key, rows.place(segment, key)) for key in sorted(whole))
        # Units share tiers: each is settled once.
        resting = [tier for unit, tier in self._tiers.items() for tier in (tier, unit.rests)]
        for tier in {id(tier): tier for tier in resting}.values():
            tier.settle()

    def _convert(self, segment: Segment, how: Callable[[Tensor], Tensor]) -> None:
        state = self._optimizer.state.get(segment.param, {})
        state.update((key, how(state[key])) for key in elementwise_keys(segment, state))

    def _leases(self, keys: Mapping[Segment, Sequence[str]]) -> Iterator[tuple[SubGroup, Lease]]:
        """Bring one sub-group after the other into memory, with the rows of some keys."""
        coming = iter(self._sub_groups)
        opened: deque[tuple[Future[Lease], Callable[[], Tensor]]] = deque()
        closing: deque[Future[None]] = deque()
        for sub_group in self._sub_groups:
            # The one that is stepped and the next; the third of `UNDER_WAY` is being written.
            room = 2 - len(opened)
            for each in islice(coming, room):
                name = self._rows[each.unit].name
                wanted = {name(p.segment, key) for p in each.parts for key in keys[p.segment]}
                gradient = _to_host(each.of(each.total), each.unit.shard.device)
                rows = self._between(each, {WEIGHTS, *wanted})
                opened.append((each.tier.open(rows), gradient))
            future, gradient = opened.popleft()
            lease = wait(future)
            lease.rows[_GRADIENT] = gradient()
            yield sub_group, lease
            closing.append(sub_group.tier.close(self._between(sub_group, lease.rows), lease))
            while len(closing) > 1:
                wait(closing.popleft())
        while closing:
            wait(closing.popleft())

    def _between(self, sub_group: SubGroup, names: Container[str]) -> dict[str, Tensor]:
        return self._rows[sub_group.unit].between(sub_group.start, sub_group.stop, names)

    def _show(
        self,
        sub_group: SubGroup,
        lease: Lease,
        before: Mapping[Segment, Before],
        keys: Mapping[Segment, Sequence[str]],
    ) -> None:
        """Point the parameters and their state to the parts that are in a sub-group."""
        name = self._rows[sub_group.unit].name
        for part in sub_group.parts:
            param = part.segment.param
            param.data = widened(part.of(lease.rows[WEIGHTS]))
            param.grad = part.of(lease.rows[_GRADIENT])
            resting = {k: part.of(lease.rows[name(part.segment, k)]) for k in keys[part.segment]}
            rows = {key: self._moments.as_stepped(row) for key, row in resting.items()}
            # Each sub-group counts this step from the same number: an optimizer counts in place.
            self._optimizer.state[param] = copy.deepcopy(before[part.segment].scalars) | rows

    def _take_back(self, sub_group: SubGroup, lease: Lease, *, directs: bool) -> None:
        for part in sub_group.parts:
            # Bring what the optimizer has made anew, or seen widened, into the lease.
            param, rows = part.segment.param, self._rows[sub_group.unit]
            param.grad = None
            param.data = brought(param.data, part.of(lease.rows[WEIGHTS]))
            state = self._optimizer.state[param]
            for key in elementwise_keys(part.segment, state):
                row = rows.place(part.segment, key, state[key].dtype)
                name = rows.name(part.segment, key)
                if name not in lease.rows:
                    size = sub_group.stop - sub_group.start
                    lease.rows[name] = state[key].new_zeros(size, dtype=row.dtype)
                state[key] = brought(state[key], part.of(lease.rows[name]))
        direction, total = lease.rows[_GRADIENT], sub_group.of(sub_group.total)
        if not directs:
            sub_group.unit.accept(sub_group.start, lease.rows[WEIGHTS])
        elif direction.device != total.device:
            total.copy_(direction, non_blocking=True)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the options of a param group; whoever counts in place does not change it."""
    options = {key: value for key, value in group.items() if key != "params"}
    copied: dict[str, Any] = tree_map_only(Tensor, lambda each: each.detach().clone(), options)
    return copied


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key in group.keys() - options.keys() - {"params"}:
        del group[key]
    for key, value in _options(options).items():
        if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
            group[key].data.copy_(value)  # a compiled step reads the rate from this very tensor
        else:
            group[key] = value


def _parts(
    unit: FlatUnit, segments: Sequence[Segment], start: int, stop: int
) -> tuple[GroupPart, ...]:
    """The part of each segment in elements [start, stop) of a shard."""
    low, parts = unit.interval[0], []
    for segment in segments:
        if segment.unit is unit:
            first, last = overlap(segment.start - low, segment.stop - low, start, stop)
            if last > first:
                parts.append(GroupPart(segment, first - start, last - start))
    return tuple(parts)


def _to_host(source: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Begin to copy a gradient to the device of the optimizer; call the result to wait for it."""
    if source.device.type == device.type:
        return lambda: source
    copied = torch.empty_like(source, device=device, pin_memory=source.is_cuda)
    copied.copy_(source, non_blocking=True)
    # Not by the stream, which has more to do by the time when somebody waits.
    event = torch.cuda.Event()
    event.record()

    def arrived() -> Tensor:
        event.synchronize()
        return copied

    return arrived
