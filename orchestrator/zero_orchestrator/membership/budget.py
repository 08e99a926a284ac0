"""The restart budget of a job: what failures cost, what comes back, and when to give up early.

Each round that ends in a failure leaves one `Charge`. With `--refill-after-steps=N` a charge
counts until N further steps have been committed. And a job that fails again and again without
finishing a step that it had not finished before is in a crash loop: it ends after
`--max-restarts-without-progress` restarts, whatever is left of the budget. Workers that say
nothing of their steps are not judged by that, and neither are nodes that were lost.

Pure: everything follows from the charges and from what is committed. Who calls it: `rounds`.

Source of the ideas: systemd's StartLimitInterval (restarts are forgiven in time; here in steps,
since no two clocks are compared), NVRx's cut-off after 3 cycles without progress.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass


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
