"""What a run of a peer's suite comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.peers.cases import Case, Outcome


def lost(expected: Mapping[str, Case], found: Mapping[str, Case]) -> list[Case]:
    """The cases that passed before."""
    return [
        case
        for name, case in found.items()
        if name in expected
        and expected[name].outcome is Outcome.PASSED
        and case.outcome is not Outcome.PASSED
    ]


def table(name: str, found: Mapping[str, Case]) -> str:
    """A line of counts, and one for each failure of public behaviour."""
    counts = Counter(case.outcome for case in found.values())
    line = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    rest = [f"    {c.name}: {c.reason}" for c in found.values() if c.outcome is Outcome.PUBLIC]
    return "\n".join([f"{name}: {len(found)} cases: {line}", *rest])
