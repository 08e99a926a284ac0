"""Shorten the list of faults of a simulation that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.simulation.faults import HEAL, Fault
from tests.simulation.simulation import Result, run


def shrink(failed: Result, say: Callable[[str], None] = lambda text: None) -> Result:
    """A simulation of the same seed with as few faults as possible that breaks the same invariant.

    Halves, quarters and so on of the faults are left out, as delta debugging does, and then each
    fault that lasts is made shorter.
    """
    kind = _kind(failed)

    def still(faults: list[Fault]) -> Result | None:
        found = run(replace(failed.plan, faults=tuple(faults)))
        return found if found.problems and _kind(found) == kind else None

    best = failed
    happened = [f for f in failed.plan.faults if f.at_s <= failed.simulated_s or f.kind == HEAL]
    if shorter := still(happened):
        best = shorter
    size = max(1, len(best.plan.faults) // 2)
    while size:
        at = 0
        while at < len(best.plan.faults):
            faults = list(best.plan.faults)
            kept = [f for f in faults[at : at + size] if f.kind in {"start", HEAL}]
            shorter = [*faults[:at], *kept, *faults[at + size :]]
            if len(shorter) < len(faults) and (found := still(shorter)):
                best = found
                say(f"{len(shorter)} faults")
            else:
                at += size
        size //= 2
    return best


def _kind(result: Result) -> str:
    """Which invariant it breaks, without the numbers."""
    return "".join(c for c in result.problems[0][:30] if not c.isdigit())
