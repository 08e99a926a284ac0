"""The agent's next action: a pure function of the job and of its own workers.

The agent's loop gathers a `Situation`, calls `next_action`, and carries the action out; it makes
no decision itself. The round machine decides for the job, this module decides for the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from zero_agent.node.state import BUSY, WAITING, Workers
from zero_orchestrator.membership.job_state import ENDED, Node, Snapshot, State


class Action(StrEnum):
    """What an agent can do."""

    WAIT = "wait"
    HOST_STORE = "host store"
    START = "start"
    STAND_BACK = "stand back"
    """Tell the others that rounds may begin without this node: its workers warm up first."""
    WARM_UP = "warm up"
    """Start workers that have no round yet, and wait for one at their engine."""
    STAND_BY = "stand by"
    """Tell the others that this node takes part in the next round."""
    ASK_TO_LEAVE = "ask to leave"
    RELEASE = "release"
    """Have the workers stop using their group at once, and wait where they can."""
    STOP = "stop"
    KILL = "kill"
    REPORT_DONE = "report done"
    REPORT_QUIET = "report quiet"
    REPORT_FAILURE = "report failure"
    ABANDON = "abandon"
    """Leave the job although some workers cannot be killed; the fence makes that safe."""
    EXIT = "exit"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything the next action depends on."""

    job: Snapshot
    node: Node
    workers: Workers
    round: int
    """The round of these workers; 0 before the first."""
    asked_to_leave: bool = False
    can_leave: bool = False
    """Whether every worker can save and leave when asked, without losing its progress."""
    overdue: bool = False
    """Whether the workers have not left in time after they were asked to."""
    can_stay: bool = False
    """Whether a worker may wait in its process for the next round, and has the time for it."""
    released: bool = False
    """Whether the workers were told that their group is lost."""
    cold: bool = False
    """Whether workers here start only with a round, since they cannot warm up."""
    unkillable: str = ""
    """Why workers still exist long after SIGKILL; empty if none does."""
    checking: bool = False
    """Whether health checks run: the node's health for the next round is not known yet."""
    hosting: bool = False
    """Whether this agent hosts, or is about to host, the TCPStore of the job's round."""
    holds: str = ""
    """Why this node has to stay a moment although it may leave; empty: nothing holds it."""

    @property
    def busy(self) -> bool:
        """Whether workers may use the process group of their round."""
        return self.workers in BUSY

    @property
    def reported(self) -> bool:
        """Whether this node has reported how its part of the job's round ended."""
        failed = {failure.node for failure in self.job.failures}
        return self.node.id in self.job.quiet | self.job.done | failed

    @property
    def stands_back(self) -> bool:
        """Whether this node, which has no workers, is better not waited for."""
        if self.node.starting or self.cold:
            return False
        job = self.job
        if any(one.node == self.node.id for one in job.aside):  # it joins when its links work
            return self.node.stays and self.workers is Workers.STOPPED
        if self.workers is not Workers.FAILED:
            return False
        if not self.round:  # they have warmed up in vain
            return True
        # In-memory checkpoints survive the loss of one node, and not that of two.
        alone = {failure.node for failure in job.failures if not failure.symptom} == {self.node.id}
        enough = job.spec.is_enough(len(job.eligible) - 1)
        return self.node.stays and alone and enough and not job.lost


Step = tuple[Action, str]


def next_action(now: Situation) -> Step:
    """The next thing to do and its reason; WAIT until something changes."""
    if now.unkillable and now.job.state not in ENDED:
        return Action.ABANDON, now.unkillable
    if now.node.starting and now.job.state not in ENDED and (now.cold or now.workers in _WARM):
        how = "cannot warm up" if now.cold else "have warmed up"
        return Action.STAND_BY, f"the workers {how}"
    action, reason = _BY_STATE[now.job.state](now)
    if action is Action.EXIT and now.workers in WAITING:
        # They wait for a round that does not come; the node exits when they have ended.
        return Action.STOP, reason
    if action is Action.EXIT and now.job.state not in ENDED and now.holds:
        return Action.WAIT, f"{reason}; {now.holds}"
    return action, reason


_WARM = WAITING | {Workers.READY, Workers.RUNNING}
"""States of workers that have warmed up, or run without having done so."""
_BACK = "the other nodes may go on while the workers of this one warm up"


def _forming(now: Situation) -> Step:
    job = now.job
    if now.busy:
        over = f"round {job.n} is over: {job.cause}"
        if now.workers is Workers.RUNNING and now.can_stay:
            return Action.WAIT if now.released else Action.RELEASE, over
        return _kill(now, over)
    if job.has_member(now.node) and now.node.id not in job.quiet:
        return _gone(now)
    if now.node.draining:
        return Action.EXIT, "drained"
    return Action.WAIT, f"round {job.n + 1} is forming"


def _gone(now: Situation) -> Step:
    # The report lets the next round begin, with what this node has said of itself until then.
    if now.checking:
        return Action.WAIT, "this node is being checked"
    if now.stands_back:
        return Action.STAND_BACK, _BACK
    return Action.REPORT_QUIET, f"the workers of round {now.job.n} are gone"


def _active(now: Situation) -> Step:
    job = now.job
    # The others gave this node up, or evicted it, and began a round without its report.
    if now.busy and now.round != job.n:
        return _kill(now, f"round {now.round} is over, round {job.n} runs")
    index = job.members.index(now.node)
    if index is None:
        return _outside(now)
    if now.round != job.n and not now.reported:
        return _enter(now, index)
    return _IN_ROUND[now.workers](now)


def _outside(now: Situation) -> Step:
    not_in = f"not in round {now.job.n}"
    if now.node.draining:
        return Action.EXIT, "drained"
    if now.workers in WAITING:
        return Action.STOP, f"{not_in}, for which the workers have waited"
    if now.stands_back:
        return Action.STAND_BACK, _BACK
    if now.node.starting and now.workers is not Workers.STARTING:
        return Action.WARM_UP, not_in
    return Action.WAIT, f"{not_in}: a spare, or waiting to join"


def _enter(now: Situation, index: int) -> Step:
    job = now.job
    # In a round that is being left, the first node may have gone before it opened the store.
    reasons = (job.stop, job.yielding, "draining" if now.node.draining else None)
    why = next((reason for reason in reasons if reason is not None), None)
    if why is not None:
        return Action.REPORT_QUIET, f"{why}: no workers are started"
    # Workers that warm up may take minutes, and a round that has begun waits for nobody's start.
    if now.workers is Workers.STARTING:
        return Action.KILL, f"round {job.n} needs this node: its workers start anew"
    if job.master is not None:
        return Action.START, f"round {job.n} begins"
    if index == 0 and not now.hosting:
        return Action.HOST_STORE, f"first node of round {job.n}"
    return Action.WAIT, f"the store of round {job.n} is being opened"


_REPEATED = "what they have done since their last save is done again"
_STOPPED = (
    f"the workers are stopped at once, and {_REPEATED}: not all of them can save and leave when "
    "asked, as with zero_agent.should_leave()"
)
_LATE = f"the workers have not left in time: they are stopped, and {_REPEATED}"


def _running(now: Situation) -> Step:
    job = now.job
    if job.yielding is None:
        return Action.WAIT, f"round {job.n} runs"
    if not now.can_leave:
        return Action.STOP, f"{job.yielding}; {_STOPPED}"
    if now.overdue:
        return Action.STOP, f"{job.yielding}; {_LATE}"
    if not now.asked_to_leave:
        return Action.ASK_TO_LEAVE, job.yielding
    return Action.WAIT, f"{job.yielding}; waiting for the workers to leave"


def _without_workers(now: Situation) -> Step:
    return Action.WAIT, f"no workers of this node are in round {now.job.n}"


def _once(action: Action, reason: str) -> Callable[[Situation], Step]:
    """Report how this node's part of the round ended, unless that is done."""

    def rule(now: Situation) -> Step:
        if not now.reported:
            return action, reason
        if now.node.draining:  # after the report: the others do not take its exit for a loss
            return Action.EXIT, "drained"
        return Action.WAIT, f"{reason}; waiting for the job"

    return rule


def _succeeded(now: Situation) -> Step:
    reason = "the workers have finished"
    # Without its TCPStore the workers of other nodes, which are not done, would fail.
    if now.reported and now.node.draining and now.hosting:
        return Action.WAIT, f"{reason}; this node hosts the store of those that have not"
    return _once(Action.REPORT_DONE, reason)(now)


def _ended(now: Situation) -> Step:
    # A worker that cannot be killed must not keep the agent: nothing that it does counts any more.
    if now.busy and not now.unkillable:
        return _kill(now, f"the job is {now.job.state}")
    return Action.EXIT, f"the job is {now.job.state}: {now.job.cause}"


def _kill(now: Situation, reason: str) -> Step:
    if now.workers is Workers.STOPPING:
        return Action.WAIT, reason
    return Action.KILL, reason


_IN_ROUND: Mapping[Workers, Callable[[Situation], Step]] = {
    Workers.NONE: _without_workers,
    Workers.STARTING: _without_workers,
    Workers.READY: _without_workers,
    Workers.RUNNING: _running,
    Workers.STOPPING: lambda now: (Action.WAIT, "the workers are stopping"),
    Workers.STOPPED: _once(Action.REPORT_QUIET, "the workers have stopped"),
    Workers.PARKED: _once(Action.REPORT_QUIET, "the workers wait for the next round"),
    Workers.STRANDED: _once(Action.REPORT_FAILURE, "the workers lost a peer, and wait"),
    Workers.LEFT: _once(Action.REPORT_QUIET, "the workers have left"),
    Workers.SUCCEEDED: _succeeded,
    Workers.PEER_LOST: _once(Action.REPORT_FAILURE, "the workers lost a peer"),
    Workers.FAILED: _once(Action.REPORT_FAILURE, "a worker failed"),
}
_BY_STATE: Mapping[State | None, Callable[[Situation], Step]] = {
    None: lambda now: (Action.WAIT, "the job has not begun"),
    State.FORMING: _forming,
    State.ACTIVE: _active,
    State.DONE: _ended,
    State.FAILED: _ended,
    State.STOPPED: _ended,
}
