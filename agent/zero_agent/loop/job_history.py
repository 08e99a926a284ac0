"""The part of the job's history that this agent adds: its steps while rank 0 is on this node.

Must always hold: a look costs nothing while nothing changes, so the agent looks in every turn of
its loop. Used on the agent's thread alone.
"""

from __future__ import annotations

import time

from zero_contract.worker import CommitRequest, Progress
from zero_orchestrator.ctl.history import History, Saved
from zero_orchestrator.membership.job_state import Node, Snapshot


class JobHistory:
    """What rank 0 has reported since it has been on this node."""

    def __init__(self) -> None:
        self.history = History()
        self.reign = 0
        """How often this node has come to have rank 0."""
        self.leads = False
        """Whether rank 0 of the round is on this node."""
        self._workers = 0

    def look(self, job: Snapshot, node: Node) -> None:
        """Note whether this node has rank 0."""
        members = job.members
        leads = bool(members.nodes) and members.nodes[0].id == node.id
        if leads and not self.leads:
            self.history, self.reign = History(), self.reign + 1
        self.leads, self._workers = leads, members.world_size

    def report(self, rank: int, progress: Progress) -> None:
        """A worker has reported its step; those of rank 0 count."""
        if rank == 0 and self.leads:
            self.history = self.history.stepped(
                progress.step,
                time_s=time.time(),
                samples=progress.samples,
                workers=self._workers,
                loss=progress.loss,
            )

    def saved(self, request: CommitRequest) -> None:
        """A checkpoint is published; one in memory, as each step may have, is not recorded."""
        if self.leads and not request.in_memory:
            self.history = self.history.with_checkpoint(
                Saved(
                    step=request.step,
                    tag=request.tag,
                    time_s=time.time(),
                    samples=request.samples,
                    digest=request.digest,
                )
            )
