"""Queue of an agent's writes to etcd on behalf of others: commits of checkpoints, store addresses.

Requests arrive at any time, also while a call to etcd is under way: the loop makes the writes in
its next turn. A worker gets its reply within its `patience_s` and the time of one call.
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
"""Replies to a worker: is its commit granted; why not; was it refused only for lack of etcd."""


@dataclass(kw_only=True)
class _Commit:
    """A worker's request to publish a checkpoint."""

    round: int
    fence: int
    request: CommitRequest
    reply: Reply
    until_s: float
    """While etcd is out of reach the commit is tried again until then."""
    logged: bool = False
    """Whether the log has reported that this commit waits."""


class StoreWrites:
    """The writes that etcd has not taken yet."""

    def __init__(
        self, journal: Journal, clock: Clock, on_failure: Callable[[StoreError], None]
    ) -> None:
        """No write is queued; `on_failure` learns why etcd takes no address of a TCPStore."""
        self._journal = journal
        self._clock = clock
        self._on_failure = on_failure
        self.on_published: Callable[[CommitRequest], None] = lambda request: None
        """Called with the request of each checkpoint that may be published."""
        self._commits: list[_Commit] = []
        self._master: tuple[int, str] | None = None
        self._refused = Stopwatch(clock)
        self._ending: CommitRequest | None = None
        """For the last checkpoint of a script, which waits for etcd."""

    @property
    def remark(self) -> str:
        """What is lost, unless a user saves it, if this agent ends now; empty: nothing."""
        if self._ending is None:
            return ""
        step, where = self._ending.step, self._ending.written
        return (
            f"; the last checkpoint of the script, of step {step}, is written in {where} and not "
            "published: to keep it, rename MANIFEST.json.tmp there to MANIFEST.json when nothing "
            "of the job runs any more"
        )

    def commit(self, n: int, fence: int, request: CommitRequest, reply: Reply) -> None:
        """Queue the publication of a checkpoint; it is granted only while its round is current."""
        until_s = self._clock.now() + request.patience_s
        self._commits.append(
            _Commit(round=n, fence=fence, request=request, reply=reply, until_s=until_s)
        )

    def master(self, fence: int, address: str) -> None:
        """The TCPStore of the round of this fence listens at this address, which is published."""
        self._master = (fence, address)

    def run(self, rdzv: Rendezvous, fence: int) -> None:
        """Make all queued writes; one that fails stays queued. Without workers the fence is 0."""
        # Those that fail are queued again; workers may ask for others meanwhile.
        commits, self._commits = self._commits, []
        for commit in commits:
            # The workers of another fence are gone: nobody waits for a reply.
            if commit.fence == fence:
                self._publish(rdzv, commit)
        job, master = rdzv.snapshot, self._master
        # Also if it was there before: etcd may have been restored from a copy that lacks it.
        if master is not None and job.fence == master[0] and job.master is None:
            try:
                rdzv.publish_master(job, master[1])
            except STORE_FAILS as error:
                self._on_failure(error)

    def _publish(self, rdzv: Rendezvous, commit: _Commit) -> None:
        request = commit.request
        try:
            granted = rdzv.commit(commit.fence, request)
        except STORE_FAILS as error:
            # An etcd that is full answers everything else: log that from time to time.
            if isinstance(error, StoreRefused) and self._refused.again(FULL_AGAIN_S):
                self._journal.tell(
                    "store",
                    f"etcd takes no checkpoints ({error}); the workers continue, and nothing that "
                    "they save is published until etcd does",
                    level=logging.WARNING,
                )
            left_s = commit.until_s - self._clock.now()
            # Etcd may have taken it, and only its answer be lost: the worker keeps the files.
            if left_s <= 0:
                commit.reply(False, f"etcd did not take it: {error}", True)
                return
            # Trying twice is safe: the fence is compared each time, and the value is the same.
            self._commits.append(commit)
            self._log_waiting(commit, left_s)
        else:
            # Whatever the answer is, the end of the agent loses no checkpoint any more.
            self._ending = None
            if self._refused.stop():
                self._journal.tell("store", "etcd takes checkpoints again")
            if granted:
                self.on_published(request)
            commit.reply(granted, "" if granted else f"round {commit.round} is over", False)

    def _log_waiting(self, commit: _Commit, left_s: float) -> None:
        """Log once that a checkpoint waits for etcd."""
        request, known = commit.request, self._ending
        # A script asks again and again for its last checkpoint, each time with another request.
        if commit.logged or (request.written and known and known.written == request.written):
            return
        commit.logged = True
        if request.written:
            self._ending = request
            text = (
                f"the last checkpoint of the script, of step {request.step}, is written in "
                f"{request.written}, and is published when etcd answers, within --etcd-grace"
            )
        else:
            text = (
                f"checkpoint {request.tag}, with which the workers leave, is published "
                f"when etcd answers, within {left_s:.0f} s"
            )
        self._journal.tell("commit", text, level=logging.WARNING)
