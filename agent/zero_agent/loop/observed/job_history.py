"""What this agent knows of the job's history, of which the agent of rank 0 writes the record.

Every agent keeps the steps of one of its workers, the first that reports in a round: when rank 0
comes to this node because another one was lost, it continues the record without a gap.

Must always hold: a look costs nothing while nothing changes, so the agent looks in every turn of
its loop. Used on the agent's thread alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from zero_contract import worker
from zero_contract.journal import Journal
from zero_contract.worker import CommitRequest, Progress
from zero_orchestrator.membership.job_state import Node, Snapshot
from zero_orchestrator.observe.history import Failing, History, Saved


class JobHistory:
    """The steps that this node has seen, and the checkpoints since rank 0 has been on it."""

    def __init__(self) -> None:
        self.history = History()
        self.reign = 0
        """How often this node has come to have rank 0."""
        self.leads = False
        """Whether rank 0 of the round is on this node."""
        self.published: Mapping[bool, int] = {}
        """In memory or not -> the checkpoints of workers here; replaced, so read on any thread."""
        self._workers = 0
        self._round = 0
        self._rank: int | None = None
        self._in_memory: Saved | None = None
        """The in-memory checkpoint that was published last, whose save has not ended."""
        self._told: Failing | None = None
        """What `news` has told of saves that fail."""

    def look(self, job: Snapshot, node: Node) -> None:
        """Note the round, and whether this node has rank 0."""
        members = job.members
        leads = bool(members.nodes) and members.nodes[0].id == node.id
        if leads and not self.leads:
            self.reign += 1
            # All the rest is in the record, which this agent continues.
            self.history = History(points=self.history.points, stride=self.history.stride)
        self.leads, self._workers = leads, members.world_size
        if job.n != self._round:
            self._round, self._rank = job.n, None

    def report(self, rank: int, progress: Progress, took_s: float | None = None) -> None:
        """A worker has reported its step; those of one worker count, the first that reports."""
        if self._rank is None:
            self._rank = rank
        if rank == self._rank:
            self.history = self.history.stepped(
                progress.step,
                time_s=time.time(),
                samples=progress.samples,
                workers=self._workers,
                loss=progress.loss,
                tokens=progress.tokens,
            )
            if took_s is not None and self.leads:
                self.history = self.history.with_duration(took_s)

    def saved(self, request: CommitRequest) -> None:
        """A checkpoint is published; one in memory, as each step may have, replaces the last."""
        self.published = {
            **self.published,
            request.in_memory: self.published.get(request.in_memory, 0) + 1,
        }
        if not self.leads:
            return
        made = Saved(
            step=request.step,
            tag=request.tag,
            time_s=time.time(),
            samples=request.samples,
            digest=request.digest,
        )
        if request.in_memory:
            self._in_memory = made
            self.history = replace(self.history, kept=self.history.kept + 1)
        else:
            self.history = self.history.with_checkpoint(made)

    def heard(
        self,
        saved: worker.Saved | worker.SaveWaits,
        journal: Journal,
        trace: Callable[[worker.Saved], None],
    ) -> None:
        """A save of rank 0 has ended, or waits: note it, and tell what is new."""
        if isinstance(saved, worker.SaveWaits):
            self.waits(saved)
        else:
            self.written(saved)
            if not saved.in_memory:  # there may be one in each step
                trace(saved)
        if text := self.news():
            failing = self.history.failing
            level = logging.INFO if failing is None else logging.WARNING
            saves, failed = (0, False) if failing is None else (failing.saves, True)
            journal.tell("save", text, level=level, step=saved.step, failed=failed, saves=saves)

    def waits(self, waits: worker.SaveWaits) -> None:
        """Training waits to repeat the save that has failed."""
        left_s, now_s = waits.left_s, time.time()
        self.history = self.history.with_wait(waits.step, waits.what, left_s, now_s)

    def news(self) -> str:
        """What is new about saves that fail, as a sentence; "" if it has been told."""
        before, after = self._told, self.history.failing
        self._told = after
        if after is None:
            return (
                f"checkpoints are saved again, after {before.saves} that failed" if before else ""
            )
        if before is None or after.waits_for != before.waits_for:
            return f"saves: {after.in_words()}"
        return ""

    def written(self, saved: worker.Saved) -> None:
        """The save of the checkpoint that was published last has ended, as rank 0 reports."""
        times: dict[str, float] = {
            "size_bytes": saved.whole_bytes,
            "stall_s": saved.stall_s,
            "write_s": saved.write_s,
            "publish_s": saved.publish_s,
        }
        if not saved.committed:
            if saved.problem and not saved.in_memory:
                failed = self.history.with_failure(saved.step, saved.problem, time.time())
                self.history = failed
            return
        if not saved.in_memory:
            self.history = self.history.with_times(saved.step, **times)
        elif self._in_memory is not None and self._in_memory.step == saved.step:
            ended = replace(self._in_memory, **times)  # type: ignore[arg-type]
            self.history = replace(self.history, in_memory=ended)
