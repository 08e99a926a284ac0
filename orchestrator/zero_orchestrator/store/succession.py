"""A new store in the place of a job's own that has lost its quorum for good: who begins it.

Of the members of a store (`members`) fewer than a quorum may be left for ever. All nodes can look
where the checkpoints are, so it is settled there: whoever first creates the file that names the
heir of the lost store has begun the new one, and everybody else goes there. A store has one heir at
most, so two halves cannot both go on, whatever each of them believes; once there is an heir,
nothing is published through the old store, even if its quorum comes back (rank 0 looks before it
publishes).

Source of the idea: the witness of a two-node cluster (a disk that both reach), as in quorum disks;
the conditional put as a lock, https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BEAT_S = 2.0
"""Interval at which a store with a quorum shows that it lives."""
WATCH_S = 10.0
"""A store that has not shown it for so long, after --etcd-grace without an answer, is lost."""


class Act(StrEnum):
    """The choices of a node without a store."""

    JOIN = "join"
    """Go on with the store that has followed."""
    BEGIN = "begin"
    """Try to begin the one that follows: the exclusive create decides."""
    END = "end"
    """End: the job cannot go on from here."""


@dataclass(frozen=True, kw_only=True)
class Heir:
    """The store that follows another one."""

    store: str
    """Its id: that of its etcd cluster, hex."""
    endpoint: str
    """The endpoint at which it began."""
    node: str
    """The node that began it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The newest checkpoint that a node sees; compared as (round, step)."""

    round: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The knowledge of a node that has had no answer from the store for --etcd-grace."""

    root: str
    """The directory or URL of the job's checkpoints; empty: this node knows of none."""
    round: int = 0
    """The last round that it knows."""
    step: int = 0
    """The newest published step that it knows."""
    newest: Checkpoint | None = None
    """The newest checkpoint at `root` now."""
    heir: Heir | None = None
    lives: bool = False
    """The store has shown meanwhile that it lives."""


def decide(seen: Seen) -> tuple[Act, str]:
    """The choice of this node, and the reason."""
    if seen.heir is not None:
        heir = seen.heir
        return Act.JOIN, f"node {heir.node} has begun a new store at {heir.endpoint}"
    if not seen.root:
        return Act.END, (
            "this node knows of no checkpoint that was published, so there is nothing to go on "
            "from: start the agents again"
        )
    if "://" in seen.root:
        return Act.END, (
            f"the checkpoints are in {seen.root}, and agents begin a new store only beside those "
            "in a directory: start the agents again, and the script loads the newest checkpoint"
        )
    # A newer round that has fewer steps counts: it has gone back to an earlier checkpoint.
    newest = seen.newest
    if newest is None or (newest.step < seen.step and newest.round <= seen.round):
        return Act.END, (
            f"the newest checkpoint, of step {seen.step}, is not in {seen.root} on this node: put "
            "checkpoints on storage that all nodes share"
        )
    # The old store's members show it while they have a quorum. A matter of patience alone: without
    # the sign a store that lives could get an heir, and would end, but nothing would be lost.
    if seen.lives:
        return Act.END, (
            "the store lives, as its members show beside the checkpoints: this node is cut off "
            "from them, and the job goes on without it"
        )
    return Act.BEGIN, (
        f"the store has lost its quorum for good; the job goes on from the checkpoint of step "
        f"{newest.step} in {seen.root}"
    )


def next_round(seen: Seen) -> int:
    """The round that the new store has as its last: its own ones are newer than any checkpoint."""
    return max(seen.round, seen.newest.round if seen.newest is not None else 0)
