"""A micro-batch that is run for its bits alone: see `zero_step.checks.self_test`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zero_comm.sums.reduction import Turn
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.parts import Core, Run
from zero_engine.sharding.flat_unit import overlap
from zero_step.checks.bit_sum import bit_sum
from zero_step.checks.self_test import Gradient, Replay, bits_of, differentiate, roots_of


def replay(core: Core, run: Run, call: Callable[[], Any]) -> Replay:
    """Forward and backward of a micro-batch, whose gradients the next micro-step drops."""
    zero, reducer = core.zero, core.reducer
    assert zero is not None
    assert reducer is not None
    with reducer.phase.aside():
        outputs = call()
        bits, gradients = bits_of(outputs), tuple[Gradient, ...]()
        if roots := roots_of(outputs):
            core.coordinator.begin_backward()
            # A micro-step that is a whole step, so that nothing is kept for a later one.
            reducer.begin(Turn(live=run.plan().live(0, run.world), first=True, last=True))
            differentiate(roots)
            with core.guard():
                core.coordinator.end_gathers()
                reducer.finish()
            core.coordinator.end_backward()
            for each in zero.sums:
                each.settle()
            gradients = tuple(_gradients(core, zero))
    return Replay(outputs=bits, gradients=gradients)


def _gradients(core: Core, zero: ZeroOptimizer) -> Iterator[Gradient]:
    """The bits of this rank's share of each gradient sum."""
    # Backward begins with the last one.
    turns = {name: -number for number, (name, _) in enumerate(core.module.named_parameters())}
    for unit, total in zip(zero.units, zero.totals, strict=True):
        low, high = unit.interval
        for slot in unit.layout.slots:
            start, stop = overlap(low, high, slot.start, slot.stop)
            if start < stop:
                bits = int(bit_sum(total[start - low : stop - low]))
                yield Gradient(turns[slot.fqn], slot.fqn, bits)
