"""The verdicts about the ranks of a job: made by the agent of rank 0, from what the ranks measure.

A verdict is an event when it is made, and another one when it is withdrawn. While it holds,
`zero-ctl status` shows it. The cause is looked for in what the node of the rank has published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from zero_contract.journal import Journal
from zero_contract.worker import RankTimes
from zero_orchestrator.ctl.events import Publisher
from zero_orchestrator.ctl.straggler import Straggler, Stragglers
from zero_orchestrator.ctl.strain import cause
from zero_orchestrator.ctl.verdicts import Kind, Verdict
from zero_orchestrator.membership.job_state import NOBODY, Snapshot

Post = Callable[[Callable[..., None]], Callable[..., None]]
"""Wraps a handler so that it runs on the agent's thread."""


class Verdicts:
    """The verdicts of the round; used on the agent's thread alone."""

    def __init__(self, publisher: Publisher, journal: Journal, post: Post) -> None:
        """No verdict yet.

        Args:
            publisher: Writes the verdicts, and reads what other nodes have published.
            journal: Receives the events.
            post: Wraps handlers so that they run on the agent's thread.
        """
        self._publisher = publisher
        self._journal = journal
        self._post = post
        self._round, self._members = 0, NOBODY
        self._lease = 0
        self._stragglers = Stragglers()
        self._asked: set[int] = set()
        """Slow ranks whose nodes are being asked for the cause."""
        self._slow: dict[int, Verdict] = {}

    def follow(self, job: Snapshot, lease: int) -> None:
        """Forget the verdicts of a round that is over, and keep the key of the others alive."""
        before, self._lease = self._lease, lease
        published = self._slow
        if job.n != self._round:
            self._round, self._members = job.n, job.members
            self._stragglers, self._asked, self._slow = Stragglers(), set(), {}
        if published and (published is not self._slow or lease != before):
            self._write()

    def times(self, report: RankTimes) -> None:
        """Judge the times of all ranks, as rank 0 has reported them."""
        if len(report.compute_s) != self._members.world_size:
            return
        self._stragglers = self._stragglers.add(report)
        found = {one.rank: one for one in self._stragglers.verdicts}
        self._asked &= found.keys()
        for rank in self._slow.keys() - found.keys():
            self._withdraw(rank, report.step)
        for rank in found.keys() - self._slow.keys() - self._asked:
            self._asked.add(rank)
            name = partial(self._post(self._name), found[rank], self._round)
            self._publisher.read_progress(name)

    def _name(self, straggler: Straggler, n: int, published: Mapping[str, Any]) -> None:
        """Make the verdict about a straggler of round n, given what all nodes have published."""
        rank = straggler.rank
        if n != self._round or rank not in self._asked:
            return  # meanwhile it was withdrawn
        self._asked.discard(rank)
        node = self._members.node_of(rank).id
        slow = {self._members.node_of(one.rank).id for one in self._stragglers.verdicts}
        strain = {name: of.get("strain") or {} for name, of in published.items()}
        others = [strain.get(one.id, {}) for one in self._members.nodes if one.id not in slow]
        why = cause(strain.get(node, {}), others)
        text = (
            f"rank {rank} on {node} computes {straggler.factor:.1f} x slower since step "
            f"{straggler.since_step:,}, and each step takes {straggler.lost_s:.2g} s longer"
        )
        text += f": {why}" if why else ""
        self._slow[rank] = Verdict(
            kind=Kind.STRAGGLER,
            text=text,
            rank=rank,
            node=node,
            since_step=straggler.since_step,
            factor=round(straggler.factor, 3),
        )
        self._journal.tell(
            "straggler",
            text,
            level=logging.WARNING,
            rank=rank,
            host=node,
            slow=True,
            factor=straggler.factor,
            since_step=straggler.since_step,
            lost_s=straggler.lost_s,
            cause=why,
        )
        self._write()

    def _withdraw(self, rank: int, step: int) -> None:
        node = self._slow.pop(rank).node
        text = f"rank {rank} on {node} computes as fast as the other ranks again, at step {step:,}"
        self._journal.tell("straggler", text, rank=rank, host=node, step=step, slow=False)
        self._write()

    def _write(self) -> None:
        self._publisher.verdicts(tuple(self._slow.values()), lease=self._lease)
