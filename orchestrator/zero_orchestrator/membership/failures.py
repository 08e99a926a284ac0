"""What failures cost a job: the restart budget, and hosts that it goes on without for a while.

**The budget.** Each round that ends in a failure leaves one `Charge`. With `--refill-after-steps=N`
a charge counts until N further steps have been committed. And a job that fails again and again
without finishing a step that it had not finished before is in a crash loop: it ends after
`--max-restarts-without-progress` restarts, whatever is left of the budget. Workers that say
nothing of their steps are not judged by that, and neither are nodes that were lost.

**Exclusion.** A host that is lost, or whose workers fail, `--exclude-after` times in a row, while
others do not, is excluded together with the charge for the last failure, in one transaction, and a
spare takes its place at once. The exclusion is a key under a lease that nobody keeps alive: it ends
by the clock of the store, whatever becomes of the agents. The next one of the same host is twice as
long. An exclusion that would leave too few nodes is not made; should others go later, the host
takes part again for as long as the minimum needs it (`Snapshot.eligible`).

Must always hold: no round begins with an excluded host that can be done without; a host, not an
agent: one that is started again there is excluded as well. Pure: everything follows from the
charges and from what is committed. Who calls it: `rounds`.

Source of the ideas: systemd's StartLimitInterval (restarts are forgiven in time; here in steps,
since no two clocks are compared), NVRx's cut-off after 3 cycles without progress; Horovod's
blacklist with its exponential cooldown; DLRover's exclusion.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One round that ended in a failure."""

    n: int
    """The round."""
    cause: str
    committed: int = 0
    """The step of the newest checkpoint at that time; 0 without one."""
    reached: int | None = None
    """The last step that any worker of the job was known to have finished; None: nobody says."""
    workers: bool = False
    """Workers failed by themselves; otherwise a node was lost, or nobody knows what broke."""
    host: str = ""
    """Whose workers failed, or which was lost; empty where no single one can be blamed."""
    excluded_s: int = 0
    """That host was excluded for so long because of it."""

    def to_json(self) -> str:
        """The value of its key."""
        return json.dumps(dataclasses.asdict(self))


def in_force(charges: Sequence[Charge], committed: int, refill_after: int) -> int:
    """How many charges still count.

    Args:
        charges: All of the job.
        committed: The step of the newest checkpoint; 0 without one.
        refill_after: A charge is forgiven so many committed steps later; 0: never.
    """
    if refill_after == 0:
        return len(charges)
    return sum(1 for charge in charges if committed < charge.committed + refill_after)


def next_refill(charges: Sequence[Charge], committed: int, refill_after: int) -> int:
    """At which committed step the next restart comes back; only if one is in force."""
    due = (charge.committed + refill_after for charge in charges)
    return min(step for step in due if step > committed)


def fruitless(charges: Sequence[Charge], reached: int | None) -> int:
    """Restarts in a row after which workers failed without a new step, up to now.

    Args:
        charges: All of the job, in order of rounds.
        reached: The last step known to be finished; None if nobody says.
    """
    if reached is None:
        return 0
    failures = [charge for charge in charges if charge.workers]
    fruitful = [i for i, c in enumerate(failures) if c.reached is None or c.reached < reached]
    return len(failures) - (fruitful[-1] + 1 if fruitful else 0)


# ---- exclusion ----

LONGEST_S = 3600
"""No exclusion that the job decides on is longer."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A host that no round begins with."""

    host: str
    why: str
    for_s: int = 0
    """It ends so long after it began; 0: when somebody ends it."""
    by_user: bool = False
    """Somebody wants it, rather than the job itself: it holds whatever becomes of the others."""

    def to_json(self) -> str:
        """The value of its key."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        length = f" for {self.for_s} s" if self.for_s else ""
        return f"{self.host} is excluded{length}: {self.why}"


def in_a_row(charges: Sequence[Charge], host: str, *, lost: bool) -> list[Charge]:
    """The last charges, newest first, for which this host was at fault: it failed, or was lost.

    What nobody can be blamed for (several hosts lost at once, a symptom without a cause) says
    nothing; workers that fail on several hosts at once do: it is not this host's. And the loss of
    another host says that machines go, but nothing of a host whose workers fail.
    """
    telling = [
        charge
        for charge in reversed(charges)
        if charge.workers or charge.host == host or (lost and charge.host)
    ]
    return list(takewhile(lambda charge: charge.host == host, telling))


def cooldown_s(charges: Sequence[Charge], host: str, first_s: int) -> int:
    """For how long to exclude a host: twice as long each time, up to `LONGEST_S`."""
    before = sum(1 for charge in charges if charge.host == host and charge.excluded_s)
    return int(min(first_s * 2.0 ** min(before, 32), max(LONGEST_S, first_s)))


def due(
    charges: Sequence[Charge], host: str, *, after: int, first_s: int, lost: bool = False
) -> Exclusion | None:
    """The exclusion that one more failure of this host brings about, or None.

    Args:
        charges: Those before this failure, in order of rounds.
        host: Whose workers have failed, or which was lost; empty if nobody can be blamed.
        after: Failures in a row that are too many; 0: none are.
        first_s: The length of a host's first exclusion.
        lost: It was lost. Once may happen to any machine: only the second time counts.
    """
    row = in_a_row(charges, host, lost=lost)
    if not host or after == 0 or len(row) + 1 < (max(after, 2) if lost else after):
        return None
    losses = lost + sum(not charge.workers for charge in row)
    how = {0: "its workers failed", len(row) + 1: "it was lost"}
    why = f"{how.get(losses, 'it was lost, or its workers failed,')} {len(row) + 1} times in a row"
    return Exclusion(host=host, why=why, for_s=cooldown_s(charges, host, first_s))
