"""How workers and jobs end, as an agent tells it: a failure's report, the last words, the code.

Who calls it: the agent's loop, when `supervise` says REPORT_FAILURE or EXIT.
"""

from __future__ import annotations

import logging
import signal
import socket
import textwrap

from zero_agent.crew import Crew
from zero_agent.supervise import Workers
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal
from zero_orchestrator.membership.job_state import Failure, Snapshot, State
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.membership.rendezvous import Rendezvous

log = logging.getLogger("zero")

_RULE = "=" * 60


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
        host=socket.gethostname(),
        local_rank=end.local_rank,
        pid=end.pid,
        status=end.status,
        error_file=end.error_file,
    )


def tell_traceback(cause: Failure) -> None:
    """Show where a worker failed, if it has left that."""
    if cause.traceback:
        log.error("rank %d on node %s:\n%s", cause.rank, cause.node, cause.traceback.rstrip())


def root_cause_block(job: Snapshot) -> str:
    """The end of a failed job, to be found by a search: as torchrun writes it, word for word."""
    cause = root_cause(job)
    facts = {"cause": job.cause} if cause is None else _facts(cause)
    lines = (f"  {name:<10}: {value}" for name, value in facts.items())
    return "\n".join((_RULE, "Root Cause (first observed failure):", *lines, _RULE))


def _facts(cause: Failure) -> dict[str, str]:
    """What is known of a failure, by torchrun's names; what is not known is left out."""
    local = "" if cause.local_rank is None else f" (local_rank: {cause.local_rank})"
    traceback = textwrap.indent(cause.traceback.rstrip(), "    ")
    found = {
        "host": cause.host,
        "node": cause.node,
        "rank": f"{cause.rank}{local}" if cause.rank >= 0 else "",
        "exitcode": "" if cause.status is None else _exit_code(cause.status, cause.pid),
        "error_file": cause.error_file,
        "traceback": f"\n{traceback}" if traceback else f"none; {cause.summary}",
    }
    return {name: value for name, value in found.items() if value}


def _exit_code(status: int, pid: int | None) -> str:
    process = "" if pid is None else f" (pid: {pid})"
    named = -status in list(signal.Signals)
    name = f" ({signal.Signals(-status).name})" if named else ""
    return f"{status}{process}{name}"


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
    log.error("%s", root_cause_block(job))
