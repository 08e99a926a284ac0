"""What an agent has to tell etcd for others: for its workers, for the process with their store.

These wishes arrive at any time, also while a call to etcd is under way; the loop runs the errands
in its next turn, before it looks at the job.

Must always hold: a worker that asks whether its checkpoint may be published gets an answer within
its patience and the time of one call; only an answer of etcd's publishes; nothing is published for
workers that are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from zero_agent.loop.limits import FULL_AGAIN_S, STORE_FAILS
from zero_contract.clock import Clock, Stopwatch
from zero_contract.journal import Journal
from zero_contract.worker import CommitRequest
from zero_orchestrator.errors import StoreError, StoreRefused
from zero_orchestrator.membership.rendezvous import Rendezvous

Reply = Callable[[bool, str, bool], None]
"""Takes the answer to a worker: granted; why not; whether only for want of etcd."""


@dataclass(kw_only=True)
class _Commit:
    """A worker's wish to publish a checkpoint."""

    round: int
    fence: int
    request: CommitRequest
    reply: Reply
    until_s: float
    """While etcd is away it is asked again until then."""
    told: bool = False


class StoreWrites:
    """The wishes that have not been told yet."""

    def __init__(
        self, journal: Journal, clock: Clock, on_failure: Callable[[StoreError], None]
    ) -> None:
        """There is none at the beginning.

        Args:
            journal: Told what has become of them.
            clock: Measures the patience of workers.
            on_failure: Told when etcd does not take what must be told.
        """
        self._journal = journal
        self._clock = clock
        self._on_failure = on_failure
        self._commits: list[_Commit] = []
        self._master: tuple[int, str] | None = None
        self._refused = Stopwatch(clock)

    def commit(self, n: int, fence: int, request: CommitRequest, reply: Reply) -> None:
        """May this checkpoint be published? Only while round n of the workers is the current one.

        Args:
            n: Their round.
            fence: Its fence.
            request: What a worker has asked.
            reply: Answers it.
        """
        until_s = self._clock.now() + request.patience_s
        self._commits.append(
            _Commit(round=n, fence=fence, request=request, reply=reply, until_s=until_s)
        )

    def master(self, n: int, address: str) -> None:
        """The TCPStore of round n listens there."""
        self._master = (n, address)

    def run(self, rdzv: Rendezvous, fence: int) -> None:
        """Tell all of it.

        Args:
            rdzv: Of the agent.
            fence: Of the workers that run; 0 if there are none.
        """
        commits, self._commits = self._commits, []
        for commit in commits:
            if commit.fence == fence:
                self._publish(rdzv, commit)
        if self._master is not None:
            self._publish_master(rdzv, *self._master)

    def _publish(self, rdzv: Rendezvous, commit: _Commit) -> None:
        request = commit.request
        try:
            granted = rdzv.commit(
                commit.fence,
                step=request.step,
                tag=request.tag,
                digest=request.digest,
                samples=request.samples,
                in_ram=request.in_ram,
            )
        except STORE_FAILS as error:
            self._say_refused(error)
            self._postpone(commit, error)
        else:
            if self._refused.stop():
                self._journal.tell("store", "etcd takes checkpoints again")
            commit.reply(granted, "" if granted else f"round {commit.round} is over", False)

    def _say_refused(self, error: StoreError) -> None:
        """Now and then, until etcd takes one again: one that is full answers everything else."""
        if isinstance(error, StoreRefused) and self._refused.again(FULL_AGAIN_S):
            self._journal.tell(
                "store",
                f"etcd takes no checkpoints ({error}); the workers go on, and nothing that they "
                "save is published until it does",
                level=logging.WARNING,
            )

    def _postpone(self, commit: _Commit, error: StoreError) -> None:
        """Asking twice does no harm: the fence is compared each time, and the value is the same."""
        left_s = commit.until_s - self._clock.now()
        if left_s <= 0:
            commit.reply(False, f"etcd did not take it: {error}", True)
            return
        self._commits.append(commit)
        if not commit.told:
            commit.told = True
            self._journal.tell(
                "commit",
                f"checkpoint {commit.request.tag}, with which the workers leave, is published "
                f"when etcd answers, within {left_s:.0f} s",
                level=logging.WARNING,
            )

    def _publish_master(self, rdzv: Rendezvous, n: int, address: str) -> None:
        try:
            rdzv.publish_master(n, address)
        except STORE_FAILS as error:
            self._on_failure(error)
            return
        if self._master == (n, address):  # not another round's, which came meanwhile
            self._master = None
