"""How workers and jobs end, as an agent tells it: a failure's report, the last words, the code.

Who calls it: the agent's loop, when `supervise` says REPORT_FAILURE or EXIT.
"""

from __future__ import annotations

import logging

from zero_agent.crew import Crew
from zero_agent.supervise import Workers
from zero_orchestrator.exit_codes import AgentExit
from zero_orchestrator.journal import Journal
from zero_orchestrator.membership.job_state import Failure, Snapshot, State
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.membership.rendezvous import Rendezvous

log = logging.getLogger("zero")


def root_cause(job: Snapshot) -> Failure | None:
    """What made the job fail, from whichever node; None if no worker reported a failure."""
    return min(job.failures, key=lambda cause: (cause.symptom, cause.revision), default=None)


def failure_of(crew: Crew, node: str) -> Failure:
    """What a node reports of its failed workers."""
    end = crew.first_failure
    return Failure(
        node=node,
        symptom=crew.state is Workers.PEER_LOST,
        summary=f"{end.summary} on node {node}",
        rank=end.rank,
        traceback=end.traceback,
        hang=crew.hung,
        step=crew.steps.finished,
    )


def tell_traceback(cause: Failure) -> None:
    """Show where a worker failed, if it has left that."""
    if cause.traceback:
        log.error("rank %d on node %s:\n%s", cause.rank, cause.node, cause.traceback.rstrip())


def tell_end(
    name: str, rdzv: Rendezvous, journal: Journal, *, left: int, stopped: int, named: bool
) -> int:
    """Say how the job `name`, or this node's part in it, ended; the agent's exit code.

    Args:
        name: Of the job.
        rdzv: The agent's.
        journal: Of the agent.
        left: The exit code if the job goes on without this node.
        stopped: The exit code if somebody has stopped the job.
        named: The job's name is the user's, not made of the command.
    """
    job = rdzv.snapshot
    if job.state is State.FAILED:
        _tell_failure(name, job, journal)
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


def _tell_failure(name: str, job: Snapshot, journal: Journal) -> None:
    journal.tell("failed", f"job {name} has failed: {job.cause}", level=logging.ERROR)
    if cause := root_cause(job):
        tell_traceback(cause)
