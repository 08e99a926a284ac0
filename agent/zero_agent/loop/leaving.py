"""How one node leaves a running job (drain, preemption), and the log of how workers and jobs end.

A node leaves because of a signal (preemption), a notice of its machine, or `zero-ctl drain`. The
first request decides the exit code. `signalled` and `check_limit` may also run while a call to etcd
is under way: they write nothing to it.
"""

from __future__ import annotations

import logging
import signal
import socket
import textwrap
from math import inf

from zero_agent.errors import AgentFailed
from zero_agent.loop.node_workers import NodeWorkers
from zero_agent.node.state import LOST_PEER
from zero_contract.clock import Clock, Stopwatch
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_orchestrator.membership.job_state import DrainOrder, Failure, Snapshot, State
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.membership.rendezvous import Rendezvous

log = logging.getLogger("zero")

_RULE = "=" * 60
_SOON = "leaving at the next step boundary, if the workers can"

PROMPT_S = 0.7
"""Etcd takes a request within milliseconds; after this time the log reports that it waits."""
SKEW_S = 2.0
"""A scheduler signals all nodes of a job, each within this time of the others.

Until then this node does not announce that it leaves: the other nodes would send SIGTERM to their
workers, which are about to get the scheduler's signal, and may be needed for what all of them save
together.
"""


class Leaving:
    """This node's request to leave, once there is one."""

    def __init__(
        self, rdzv: Rendezvous, journal: Journal, clock: Clock, shutdown_timeout_s: float
    ) -> None:
        self._rdzv = rdzv
        self._journal = journal
        self._since = Stopwatch(clock)
        self._timeout_s = shutdown_timeout_s
        self._signals: set[int] = set()
        self._who = ""
        self._announced = self._warned = self._held = False
        self.code: int = AgentExit.OK
        """The agent's exit code when it has left."""

    @property
    def begun(self) -> bool:
        """Whether this node is to leave."""
        return self._since.running

    def signalled(self, number: int) -> None:
        """Leave at the next step boundary, or at once if the same signal has come before.

        Raises:
            AgentFailed: This signal has come before.
        """
        name = signal.Signals(number).name
        # Another signal is no hurry: Slurm sends SIGTERM after the one of `--signal`, and systemd
        # SIGHUP after SIGTERM.
        if number in self._signals:
            raise AgentFailed(128 + number, f"{name} again: the workers are killed")
        self._signals.add(number)
        if not self._begin(128 + number, name):
            self._journal.tell("drain", f"{name}: {_SOON}; once more to leave at once")

    def noticed(self, text: str) -> None:
        """Leave at the next step boundary, as at SIGTERM, before the machine goes."""
        if not self._begin(128 + signal.SIGTERM, text):
            self._journal.tell("drain", f"{text}: {_SOON}")

    def obey(self, order: DrainOrder | None, *, stopping: bool = False) -> None:
        """Leave if a drain was ordered, and announce it to the job; called in every turn.

        Raises:
            StoreError: The announcement could not be written.
        """
        if order is not None:
            self._begin(AgentExit.DRAINED, f"zero-ctl drain by {order.by}")
        # The announcement waits while the workers stop for the signal of a scheduler: see `SKEW_S`.
        self._held = stopping and bool(self._signals) and not self._since.past(SKEW_S)
        if self.begun and not (self._announced or self._held):
            revision = self._rdzv.drain()  # raises while etcd is away: announced in a later turn
            self._announced = True
            self._journal.tell("drain", f"{self._who}: {_SOON}{self._hint}", revision=revision)

    def check_limit(self) -> None:
        """Check the limit of leaving; log once if it could not be announced yet.

        Raises:
            AgentFailed: Leaving takes longer than --shutdown-timeout.
        """
        if not (self._announced or self._warned or self._held) and self._since.past(PROMPT_S):
            self._warned = True
            within = f"within {self._timeout_s:g} s in any case"
            text = f"{self._who}: leaving when etcd answers, {within}{self._hint}"
            self._journal.tell("drain", text)
        if self._since.past(self._timeout_s):
            raise AgentFailed(
                self.code,
                f"the node could not leave within {self._timeout_s:g} s "
                "(--shutdown-timeout); its workers are killed",
            )

    @property
    def left_s(self) -> float:
        """Seconds that leaving may still take; infinite if this node is not to leave."""
        elapsed_s = self._since.elapsed_s
        return inf if elapsed_s is None else self._timeout_s - elapsed_s

    @property
    def _hint(self) -> str:
        return "; once more to leave at once" if self._signals else ""

    def _begin(self, code: int, who: str) -> bool:
        """Exit with `code` after the next step boundary; True if that was not decided before."""
        fresh = self._since.start()
        if fresh:
            self.code, self._who = code, who
        return fresh


# ---- the end ----


def root_cause(job: Snapshot) -> Failure | None:
    """The failure that made the job fail, from any node; None if no worker reported one."""
    # By revisions: no two clocks are compared. Lost peers come last, whenever they were reported.
    return min(job.failures, key=lambda cause: (cause.symptom, cause.revision), default=None)


def failure_of(node_workers: NodeWorkers, node: str) -> Failure:
    """The failure that a node reports for its failed workers."""
    end = node_workers.group.first_failure
    return Failure(
        node=node,
        symptom=node_workers.group.state in LOST_PEER,
        summary=f"{end.summary} on node {node}",
        rank=end.rank,
        traceback=end.traceback,
        hang=node_workers.group.hung,
        step=node_workers.steps.finished,
        host=socket.gethostname(),
        local_rank=end.local_rank,
        pid=end.pid,
        status=end.status,
        error_file=end.error_file,
        permanent=end.permanent,
    )


def root_cause_block(job: Snapshot) -> str:
    """The root cause of a failed job, with the heading and the field names of torchrun's summary.

    A field that is not known is left out.
    """
    facts = {"cause": job.cause}
    if (cause := root_cause(job)) is not None:
        local = "" if cause.local_rank is None else f" (local_rank: {cause.local_rank})"
        traceback = textwrap.indent(cause.traceback.rstrip(), "    ")
        code = ""
        if cause.status is not None:
            process = "" if cause.pid is None else f" (pid: {cause.pid})"
            # Most real-time signals have no name.
            by_signal = -cause.status in list(signal.Signals)
            name = f" ({signal.Signals(-cause.status).name})" if by_signal else ""
            code = f"{cause.status}{process}{name}"
        facts = {
            "host": cause.host,
            "node": cause.node,
            "rank": f"{cause.rank}{local}" if cause.rank >= 0 else "",
            "exitcode": code,
            "error_file": cause.error_file,
            "traceback": f"\n{traceback}" if traceback else f"none; {cause.summary}",
        }
        facts = {name: value for name, value in facts.items() if value}
    lines = (f"  {name:<10}: {value}" for name, value in facts.items())
    return "\n".join((_RULE, "Root Cause (first observed failure):", *lines, _RULE))


def log_end(
    name: str, rdzv: Rendezvous, journal: Journal, *, left: int, stopped: int, named: bool
) -> int:
    """Log how the job `name`, or this node's part in it, ended; returns the agent's exit code.

    It is `left` if the node has left a running job, and `stopped` if the job was stopped. A job
    that the user has not `named` has a name that is derived from the command.
    """
    job = rdzv.snapshot
    if job.state is State.FAILED:
        journal.tell("failed", f"job {name} has failed: {job.cause}", level=logging.ERROR)
        log.error("%s", root_cause_block(job))
        return AgentExit.NO_PROGRESS if job.by == Move.GIVE_UP else AgentExit.JOB_FAILED
    if job.state is State.DONE:
        journal.tell("done", f"job {name} is done")
        return AgentExit.OK
    if job.state is State.STOPPED:
        again = "give another --rdzv-id" if named else "type the command again"
        text = f"job {name} has been stopped: {job.cause}; to run it again, {again}"
        journal.tell("stopped", text)
        return stopped
    journal.tell("drained", f"node {rdzv.node.id} has left the job")
    return left
