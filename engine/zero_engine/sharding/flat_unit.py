"""A unit: the parameters of one module in one flat buffer, and this rank's share of them.

Owns the layout and the buffers. Parameters are views of the buffer while it holds them, and show
NaN while it does not (`parameter_views`). The shard rests in a tier.

Source of the idea: FSDP's FlatParameter (arXiv 2304.11277), with block-aligned tails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_comm.exchange import left_under_way
from zero_comm.exchange.collectives import Collectives, Pending, wait
from zero_engine.layout import Layout, UnitFacts, UnitPlaces
from zero_engine.sharding.parameter_views import ShownBuffer
from zero_engine.sharding.partition import DTYPES, UnitSpec
from zero_engine.sharding.small_params import Beside, SmallParams
from zero_engine.sharding.wire import Wire
from zero_engine.tiers.places import Memory, Tier
from zero_step.gradients.norm import BLOCK, SHARD_GRAIN

ALIGN = BLOCK
"""Elements; parameters begin at multiples of it, so that the blocks of their norm are those of a
unit. In bytes it is 256 in fp32, 128 in bf16: cache lines."""
GRAIN = 4 * SHARD_GRAIN
"""Elements of a shard; multiples of it begin on whole pages of a disk in every dtype."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in its unit: [start, start + numel)."""

    fqn: str
    shape: torch.Size
    group: int | None
    start: int
    stop: int
    """One past the last element."""

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The slots of a unit, in order, and the aligned end of the last one."""

    slots: tuple[Slot, ...]
    numel: int

    def padded(self, world: int) -> int:
        """The length of the buffer when `world` ranks share it."""
        return round_up(self.numel, world * SHARD_GRAIN)

    def runs(self) -> dict[int, tuple[int, int]]:
        """Param group -> the one run [start, stop) of the unit that it covers, aligned."""
        runs: dict[int, tuple[int, int]] = {}
        for slot in self.slots:
            if slot.group is not None:
                start, _ = runs.get(slot.group, (slot.start, 0))
                runs[slot.group] = (start, round_up(slot.stop, ALIGN))
        return runs


def plan_layout(members: Sequence[tuple[str, torch.Size, int | None]]) -> UnitLayout:
    """The layout of (fqn, shape, group), in the given order."""
    # Offsets know no world size, only the tail is padded to one: so norms, blocks and checkpoints
    # do not depend on it either.
    slots, end = [], 0
    for fqn, shape, group in members:
        slots.append(Slot(fqn, shape, group, end, end + shape.numel()))
        end = round_up(slots[-1].stop, ALIGN)
    # Padding alone, if no parameter has an element: nothing else need know such a unit.
    return UnitLayout(tuple(slots), max(end, ALIGN))


def unit_facts(spec: UnitSpec, world: int) -> UnitFacts:
    """The facts of a unit, which is not made yet, that the layout of a run depends on."""
    layout = plan_layout([(m.fqn, m.param.shape, m.group) for m in spec.members])
    short = {dtype: name for name, dtype in DTYPES.items()}
    return UnitFacts(
        shard=layout.padded(world) // world,
        dtype=short.get(spec.dtype, str(spec.dtype)),
        trained=spec.trained,
    )


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


def overlap(start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """The intersection of [start, stop) and [low, high); (x, x) if it is empty."""
    start, stop = max(start, low), min(stop, high)
    return start, max(start, stop)


@dataclass(frozen=True, slots=True)
class UnitTiers:
    """The tiers in which the shard of a unit rests."""

    state: Tier
    """The master weights; of a unit that is not trained, its weights."""
    weights: Tier
    """At stage 3, a copy in the compute dtype, if the master weights are far."""
    offloaded: bool
    """Whether the optimizer state is offloaded, and so stepped by sub-groups."""


Write = Callable[[UnitSpec, Sequence[Slot], Tensor], None]
"""Writes the first weights of a unit to their slots, on all ranks."""


class FlatUnit:
    """One unit on one rank.

    Attributes:
        shard: [padded / world], this rank's interval in the highest precision: that of master
            weights for trained units, the compute dtype for others. A view if it can be one.
        master: The weights that the optimizer steps: `shard`, or [padded] if every rank steps all.
        local: [padded / world], the source of the gather of the full parameters: `shard` if it is
            near, else its copy in the compute dtype.
        rests: The tier of `local`.
        gathered: Whether `full` has all weights, and the parameters show them.
        large: The parameters that are not small; at stage 3 they show NaN between uses.
        on_change: Called after `gathered` has changed.
        holders: The number of open contexts of a script that keep the unit gathered.
        wire: How the full parameters travel.
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: Layout,
        places: UnitPlaces,
        tiers: UnitTiers,
        collectives: Collectives,
        device: torch.device,
        node: Collectives | None,
        write: Write,
    ) -> None:
        self.spec = spec
        self.params = tuple(member.param for member in spec.members)
        self.layout = plan_layout([(m.fqn, m.param.shape, m.group) for m in spec.members])
        self._stage = stage = layout.stage
        self._collectives = collectives
        self.tiers = tiers
        self._arriving: Pending | None = None
        self.wire = Wire(
            collectives,
            node if stage.shards_parameters else None,
            rounds=places.rounded and spec.dtype.is_floating_point,
        )
        highest = DTYPES[layout.config.master] if spec.trained else spec.dtype
        # Zeros, since what lies between parameters takes part in the norms of LAMB.
        source = torch.zeros(self.padded, dtype=highest, device=device)
        write(spec, self.layout.slots, source)
        full = source.to(spec.dtype)
        self._build(source, full, places)
        freed = stage.shards_parameters
        members = [
            (slot.fqn, member.param, slot.start, member.small)
            for member, slot in zip(spec.members, self.layout.slots, strict=True)
        ]
        others = [(param, start) for _, param, start, small in members if not (small and freed)]
        self.large = tuple(param for param, _ in others)
        self.on_change: Callable[[FlatUnit], None] = lambda _: None
        kept = [(name, param, start) for name, param, start, small in members if small]
        self.small = SmallParams(kept, full, collectives, apart=freed)
        self._shown = ShownBuffer(full, self.large, [start for _, start in others])
        self.gathered = True
        self.holders = 0
        if stage.shards_parameters:
            self.release()

    def _build(self, source: Tensor, full: Tensor, places: UnitPlaces) -> None:
        """Put the first weights where they rest; `full` may be `source`."""
        # A tensor that can be an alias is no copy: at stages 0-2 master weights of the dtype that
        # the model computes in are the buffer itself.
        own = self._collectives.own(source)
        self._replica = source if places.replica else None
        self.shard = own if places.replica else self.tiers.state.hold(own)
        self.master = self.shard if self._stage.shards_optimizer else source
        # What to gather from, and the tier in which that rests.
        self.local: Tensor = self.shard
        self.rests: Tier = Memory(full.device, used_on=full.device)
        # From a far tier nothing is read to compute with: `accept` keeps a copy up to date.
        if places.source == "copy":
            self.rests = self.tiers.weights
            self.local = self.rests.hold(own.to(full.dtype))
        elif places.source == "buffer":
            self.local = self._collectives.own(full)
        elif not places.replica:
            self.rests = self.tiers.state

    @property
    def label(self) -> str:
        """The name, with the first and the last parameter."""
        members = self.spec.members
        return f"{self.spec.name} ({members[0].fqn} ... {members[-1].fqn})"

    @property
    def padded(self) -> int:
        """The length of `full`."""
        return self.layout.padded(self._collectives.world)

    @property
    def interval(self) -> tuple[int, int]:
        """The elements [start, stop) of this rank's shard."""
        return self.interval_of(self._collectives.rank)

    @property
    def full(self) -> Tensor:
        """The full parameters, see `ShownBuffer`."""
        return self._shown.full

    def interval_of(self, rank: int) -> tuple[int, int]:
        """The elements [start, stop) of a rank's shard."""
        return self._collectives.interval(self.padded, rank)

    def leave_arriving(self, pending: Pending) -> None:
        """Let what `refresh` has begun arrive later (stages 1 and 2); `gather` waits for it."""
        left_under_way.leave(pending)
        self._arriving, self.gathered = pending, False
        self._shown.hide()
        self.on_change(self)

    def begin_gather(self) -> None:
        """Begin the all-gather of the full parameters (stage 3); `gather` waits for it."""
        if not self.gathered and self._arriving is None:
            self._shown.fill()
            self._arriving = self._publish()

    def gather(self) -> None:
        """Return when the full parameters are there, which are all-gathered if need be."""
        self.begin_gather()
        if self._arriving is not None:
            left_under_way.finish(self._arriving)
            self.wire.arrive(self.full)
            self._shown.show()
            self._arriving, self.gathered = None, True
            self.on_change(self)

    def release(self) -> None:
        """Free the full parameters (stage 3); a gather brings them back."""
        if self._arriving is not None:  # they must not arrive in memory that is freed
            self.gather()
        if self.gathered:
            self._shown.hide()
        self._shown.free()
        if self.gathered:
            self.gathered = False
            self.on_change(self)

    def shows_in(self, structure: Any) -> bool:
        """See `ShownBuffer.shows_in`."""
        return self._shown.shows_in(structure)

    def is_written(self) -> bool:
        """Whether a script has written to this rank's part of gathered parameters (stage 3).

        Not known of those that are rounded, or rest in a far tier.
        """
        if self.wire.rounds or self.rests.far or not self.gathered:
            return False
        own = self._collectives.own(self.full)
        published = self.local.to(own.device, own.dtype)
        # By bits: NaN is not equal to itself.
        return not torch.equal(own.view(torch.uint8), published.view(torch.uint8))

    def let_go(self) -> None:
        """Release parameters that a script has seen; tensors that it has kept stay valid."""
        # Freed memory under them would end the process when they are read.
        if self.gathered:
            self._shown.leave_memory()
        self.release()

    def show_what_is_there(self) -> None:
        """Point the parameters to `full`, or show NaN while `full` is moved and has no memory."""
        if self.gathered and self._shown.has_memory:
            self._shown.show()
        else:
            self._shown.hide()

    def replaced(self) -> str:
        """A parameter to which a script has given other memory (stages 0-2); empty: none."""
        if self._stage.shards_parameters or not self.gathered:  # is shown anew at each gather
            return ""
        at = self._shown.replaced()
        return "" if at is None else self.layout.slots[at].fqn

    def take_writes(self) -> list[Beside]:
        """Let what a script has written to small parameters here count as their weights.

        What is left to `small_params.take`, which does it for all units at once.
        """
        # Parameters that show NaN, since their weights arrive late, have nothing of a script.
        if self._arriving is not None or not (self.gathered or self._stage.shards_parameters):
            return []
        if self._replica is not None:  # this rank has all of it
            return self.small.beside(self._replica, 0)
        if self.local is self.shard and not self.rests.far:
            return self.small.beside(self.shard, self.interval[0])
        for start, stop in self.small.take_far(self.shard, self.interval[0]):
            self.rests.changed()
            self.tiers.state.changed()
            # In whole pages, as a disk takes them: what lies beside is as it was.
            begin = start // GRAIN * GRAIN
            self.accept(begin, self.shard[begin : round_up(stop, GRAIN)])
        self.rests.settle()
        return []

    def refresh(self) -> Pending:
        """Begin to bring the full parameters up to date after `master` has been stepped."""
        if self._stage.shards_parameters:
            self.release()
            self.wire.secondary = None  # of the old weights
            # A view of what rests on a disk, too: a few elements, no pages.
            return self.small.refresh(self.local)
        if self._stage.shards_optimizer:
            return self._publish()
        # Every rank has stepped all weights: nothing travels.
        if self.full is not self.master:
            self.full.copy_(self.master)
        return Pending(self.spec.name)

    def restore(self) -> None:
        """Update all copies after `shard` has been written to."""
        self.end_restore(self.begin_restore())

    def begin_restore(self) -> Pending:
        """Begin `restore`; until `end_restore`, `shard` must not be written to."""
        if self._replica is not None:
            return self._collectives.all_gather(
                self._replica, f"loaded weights of {self.spec.name}"
            )
        # What was read ahead is older than the write.
        self.rests.changed()
        self.accept(0, self.shard)
        self.rests.settle()
        return self.refresh()

    def end_restore(self, pending: Pending) -> None:
        """Wait until the weights of the other ranks have arrived."""
        wait(pending)
        if self._replica is not None and self.full is not self._replica:
            self.full.copy_(self._replica)

    def accept(self, start: int, values: Tensor) -> None:
        """Begin to copy new values of `shard`, from element `start` on; `rests.settle` ends it."""
        if self.local is not self.shard:
            self.rests.put(self.local[start : start + values.numel()], values)

    def open(self) -> Tensor:
        """`full`, to be written to and adopted; undefined where it is not gathered."""
        # What arrives later would overwrite what is written now.
        if self._arriving is not None:
            self.gather()
        if not self.gathered:
            self._shown.fill()
        self.small.write_to(self.full)
        return self.full

    def adopt_full(self, source: int, slots: Sequence[Slot] | None = None) -> None:
        """Broadcast what rank `source` has written into its full parameters. Collective.

        Without `slots` it may have written to all.
        """
        self._collectives.broadcast(self.full, f"changed weights of {self.spec.name}", source)
        own = self._collectives.own(self.full)
        shard = self.shard.to(own.device)
        low, high = self.interval
        small = (overlap(each.start, each.stop, low, high) for each in self.small.members)
        exact = [slice(start - low, stop - low) for start, stop in small]
        published = self.wire.as_seen(shard.to(self.full.dtype), exact)
        written = [(low, high)] if slots is None else [(slot.start, slot.stop) for slot in slots]
        for limits in written:
            start, stop = overlap(*limits, low, high)
            part = slice(start - low, stop - low)
            # Elements that it has not written to keep the precision that they have in the shard.
            changed = own[part] != published[part]
            new = torch.where(changed, own[part].to(shard.dtype), shard[part])
            self.shard[part].copy_(new)
        if self._stage.shards_parameters:
            # A script that has written may have kept views of it.
            self.let_go()
        self.restore()

    def gather_highest(self) -> Tensor:
        """All weights [padded] in the highest precision; do not write to them. Collective."""
        if self._replica is not None:
            self.gather()  # it may be arriving
            return self._replica
        whole = self.full.new_empty(self.padded, dtype=self.shard.dtype)
        self._collectives.own(whole).copy_(self.shard)
        wait(self._collectives.all_gather(whole, f"weights of {self.spec.name}"))
        return whole

    def _publish(self) -> Pending:
        fetch = partial(self.rests.fetch, self.local)
        return self.wire.publish(self.full, fetch, f"parameters of {self.label}")
