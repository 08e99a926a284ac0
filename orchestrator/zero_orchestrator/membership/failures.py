"""What a failure costs a job: a restart, an exclusion, or its end.

Pure, as `rounds`, which calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zero_orchestrator.membership.budget import Charge, fruitless, next_refill
from zero_orchestrator.membership.exclusion import Exclusion, due
from zero_orchestrator.membership.job_state import Failure, Snapshot
from zero_orchestrator.membership.moves import Decision, Move, go


def culprit(job: Snapshot, causes: Sequence[Failure]) -> str:
    """The one host whose workers failed; empty if those of several did."""
    failed = {cause.node for cause in causes}
    machines = {member.machine for member in job.members.nodes if member.id in failed}
    return machines.pop() if len(machines) == 1 else ""


def interrupt(job: Snapshot, cause: str, *, workers: bool = False, host: str = "") -> Decision:
    """A failure: one restart of the budget, or the end of the job when none is left."""
    if job.stop is not None:
        return go(Move.FORM, f"{cause}; nothing restarts, {job.stop}")
    charge = Charge(
        n=job.n,
        cause=cause,
        committed=job.committed,
        reached=job.reached,
        workers=workers,
        host=host,
    )
    if ending := _no_more(job, charge):
        move, why = ending
        return go(move, f"{cause}; {why}", charge=charge)
    exclusion, remark = _excluded_by(job, host, lost=not workers)
    if exclusion is not None:
        charge = replace(charge, excluded_s=exclusion.for_s)
    restart = f"restart {job.spent + 1} of {job.spec.max_restarts}"
    said = f"{cause}; {restart}{remark}"
    return go(Move.INTERRUPT, said, charge=charge, exclusion=exclusion)


def _no_more(job: Snapshot, charge: Charge) -> tuple[Move, str] | None:
    """How this failure ends the job, and why; None if it does not."""
    budget, patience = job.spec.max_restarts, job.spec.max_restarts_without_progress
    if job.spent >= budget:
        return Move.FAIL, f"{_spent(job)} (--max-restarts)"
    if charge.workers and 0 < patience <= fruitless(job.charged, charge.reached):
        return Move.GIVE_UP, (
            f"no step after {charge.reached} was finished in {patience} restarts in a row "
            "(--max-restarts-without-progress)"
        )
    return None


def _spent(job: Snapshot) -> str:
    budget, refill = job.spec.max_restarts, job.spec.refill_after_steps
    if budget == 0:
        return "no restarts are allowed"
    if refill == 0:
        return f"all {budget} restarts are spent"
    step = next_refill(job.charged, job.committed, refill)
    return f"all {budget} restarts are spent; the next would come back at step {step}"


def _excluded_by(job: Snapshot, host: str, *, lost: bool) -> tuple[Exclusion | None, str]:
    """The exclusion that a failure of this host brings about, and what to say of it."""
    spec = job.spec
    after, first_s = spec.exclude_after, spec.exclude_for_s
    found = due(job.charged, host, after=after, first_s=first_s, lost=lost)
    others = sum(1 for node in job.eligible if node.machine != host)
    if found is None or not others:  # a job on one host has nowhere else to go
        return None, ""
    if spec.usable(others) < spec.min_nodes:
        left = f"{others} of {spec.min_nodes}:{spec.max_nodes} nodes would be left without it"
        return None, f"; {host} stays although {found.why}: {left}"
    return found, f"; {found}"
