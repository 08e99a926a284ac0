"""Is this node fit to take part? All checks at once, each with a deadline.

A check runs on a thread of its own, so that a call that never returns is a finding and not a
hang: it is left behind, and named.

Must always hold: `examine` returns within the longest deadline of its checks.
Who calls it: `fitness`, for the agent; `preflight`, for the user.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zero_agent.fitness.checks import CHECKS, Check, Sick, Surroundings


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str
    fit: bool
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


def examine(node: Surroundings) -> tuple[Finding, ...]:
    """Run every check that applies; takes as long as the slowest of them."""
    runs = [_Run(name, check, node) for name, check in CHECKS.items() if check.applies(node)]
    return tuple(run.finding() for run in runs)


def complaint(findings: Sequence[Finding]) -> str:
    """Why a node is not fit, in one line; empty if it is."""
    return "; ".join(str(finding) for finding in findings if not finding.fit)


class _Run:
    """One check on its thread."""

    def __init__(self, name: str, check: Check, node: Surroundings) -> None:
        self._name = name
        self._limit_s = check.limit_s(node)
        self._deadline_s = time.monotonic() + self._limit_s
        self._result: Finding | None = None
        self._thread = threading.Thread(
            target=self._look, args=(check, node), name=f"check {name}", daemon=True
        )
        self._thread.start()

    def finding(self) -> Finding:
        """What it found, when it has or when its time is up."""
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        hangs = f"no answer within {self._limit_s:g} s"
        return self._result or self._told(False, hangs, "the machine or a disk of it hangs")

    def _look(self, check: Check, node: Surroundings) -> None:
        try:
            self._result = self._told(True, check.look(node))
        except Sick as sick:
            self._result = self._told(False, sick.found, sick.remedy)
        except Exception as error:
            self._result = self._told(False, str(error))

    def _told(self, fit: bool, found: str, remedy: str = "") -> Finding:
        return Finding(check=self._name, fit=fit, found=found, remedy=remedy)
