"""The cost of failures: the restart budget, and the exclusion of failing hosts.

**Restart budget.** Each round that ends in a failure leaves one `Charge`. With
`--refill-after-steps=N` a charge counts until N further steps have been committed. A job that fails
repeatedly without finishing a new step is in a crash loop: it ends after
`--max-restarts-without-progress` restarts, whatever is left of the budget.

**Exclusion.** A host that is lost, or whose workers fail, `--exclude-after` times in a row, while
others do not, is excluded in the transaction of the last charge, and a spare takes its place at
once; the host, not the agent. No round begins with an excluded host that is not needed for the
minimum (`Snapshot.eligible`). All functions are pure.

Source of the ideas: systemd's StartLimitInterval (restarts are forgiven in time; here in steps,
since no two clocks are compared), NVRx's cut-off after 3 cycles without progress; Horovod's
blacklist with its exponential cooldown; DLRover's exclusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from zero_orchestrator.membership.records import Record


@dataclass(frozen=True, kw_only=True)
class Charge(Record):
    """One round that ended in a failure."""

    n: int
    """Number of the round."""
    cause: str
    committed: int = 0
    """The step of the newest checkpoint at that time; 0 without one."""
    reached: int | None = None
    """The last step known to be finished by any worker of the job; None: no worker reported one."""
    workers: bool = False
    """Workers failed by themselves; otherwise a node was lost, or the cause is unknown."""
    symptom: bool = False
    """Workers lost their peers, and no cause appeared."""
    host: str = ""
    """Host whose workers failed, or that was lost; empty if no single host is at fault."""
    excluded_s: int = 0
    """Seconds for which the host was excluded because of this failure; 0: it was not."""


def in_force(charges: Sequence[Charge], committed: int, refill_after: int) -> int:
    """The number of charges in force; each ends after so many committed steps, 0: never."""
    if refill_after == 0:
        return len(charges)
    return sum(1 for charge in charges if committed < charge.committed + refill_after)


def next_refill(charges: Sequence[Charge], committed: int, refill_after: int) -> int:
    """The committed step at which the next restart returns; requires a charge in force."""
    due = (charge.committed + refill_after for charge in charges)
    return min(step for step in due if step > committed)


def fruitless(charges: Sequence[Charge], reached: int | None) -> int:
    """Restarts in a row after which workers failed, or lost peers, without a new step, up to now.

    `charges` are all of the job, in order of rounds; `reached` is None if no worker reported a
    step.
    """
    if reached is None:  # whether there is progress is not known
        return 0
    # Lost nodes do not count: nothing of the job has caused that.
    failures = [charge for charge in charges if charge.workers or charge.symptom]
    fruitful = [i for i, c in enumerate(failures) if c.reached is None or c.reached < reached]
    return len(failures) - (fruitful[-1] + 1 if fruitful else 0)


# ---- exclusion ----

LONGEST_S = 3600
"""Longest exclusion that the job itself decides on, seconds."""
FOR_EVER_S = 9_000_000_000
"""Longest exclusion of all: etcd has no longer leases."""


@dataclass(frozen=True, kw_only=True)
class Exclusion(Record):
    """A host that no round begins with."""

    host: str
    why: str
    for_s: int = 0
    """Seconds until it ends by itself; 0: until a user ends it."""
    by_user: bool = False
    """Asked for by a user, not by the job itself: it holds even if too few nodes are left."""

    def __str__(self) -> str:
        length = f" for {self.for_s} s" if self.for_s else ""
        return f"{self.host} is excluded{length}: {self.why}"


def in_a_row(charges: Sequence[Charge], host: str, *, lost: bool) -> list[Charge]:
    """The latest charges in a row, newest first, for which this host was at fault."""
    # Skipped are losses of several hosts at once and symptoms without a cause: they say nothing
    # about this host. If workers fail on several hosts at once, it is not the cause: that ends the
    # row. The loss of another host ends a row of losses, but no row of failed workers.
    relevant = [
        charge
        for charge in reversed(charges)
        if charge.workers or charge.host == host or (lost and charge.host)
    ]
    return list(takewhile(lambda charge: charge.host == host, relevant))


def cooldown_s(charges: Sequence[Charge], host: str, first_s: int) -> int:
    """Seconds to exclude a host: twice as long each time, up to `LONGEST_S`."""
    before = sum(1 for charge in charges if charge.host == host and charge.excluded_s)
    # The exponent is bounded, since no float holds 2 to the power of 1024.
    return int(min(first_s * 2.0 ** min(before, 32), max(LONGEST_S, first_s)))


def due(
    charges: Sequence[Charge], host: str, *, after: int, first_s: int, lost: bool = False
) -> Exclusion | None:
    """The exclusion that one more failure of this host brings about, or None.

    Args:
        charges: Those before this failure, in order of rounds.
        host: Host whose workers failed, or that was lost; empty if no single host is at fault.
        after: Failures in a row that exclude a host; 0: never.
        first_s: The length of a host's first exclusion.
        lost: The host was lost. Any machine may be lost once: only the second time counts.
    """
    row = in_a_row(charges, host, lost=lost)
    if not host or after == 0 or len(row) + 1 < (max(after, 2) if lost else after):
        return None
    losses = lost + sum(not charge.workers for charge in row)
    how = {0: "its workers failed", len(row) + 1: "it was lost"}
    why = f"{how.get(losses, 'it was lost, or its workers failed,')} {len(row) + 1} times in a row"
    return Exclusion(host=host, why=why, for_s=cooldown_s(charges, host, first_s))
