"""One seed, one whole run: draw a job and its faults, let them happen, and look at everything."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial

from tests.simulation.cluster import AgentRun, Cluster, Line, Setting, cluster
from tests.simulation.faults import APPLY, FREE, HEAL, OF_WAITING, Fault, draw
from tests.simulation.invariants import Invariants
from zero_agent.workers.progress import FLOOR_S
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.membership.job_state import ENDED, Snapshot, State
from zero_orchestrator.membership.moves import Move

MANY = 0.03
"""The part of the seeds whose jobs live through tens of rounds."""
AGAIN_S = 3.0
"""Whoever runs an agent that has ended with an error starts it again after this time."""
LIVE_S = 300.0
"""A job ends within this time, and that of all its steps, after the last fault (I6)."""
OVER = {AgentExit.OK, AgentExit.STOPPED, AgentExit.JOB_FAILED, AgentExit.DRAINED, 128 + 15}


@dataclass(frozen=True)
class Plan:
    """What a simulation is made of."""

    seed: int
    setting: Setting
    faults: tuple[Fault, ...]

    @property
    def free(self) -> bool:
        """Whether nothing happens that may cost a restart.

        A node that has to go while etcd is away cannot say so, and counts as lost.
        """
        kinds = {fault.kind for fault in self.faults}
        unheard = kinds & {"outage", "no-leader"} and kinds & {"drain", "sigterm"}
        return kinds <= {*FREE, HEAL} and not unheard


@dataclass
class Result:
    """What came of it."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    history: list[Line] = field(default_factory=list)
    simulated_s: float = 0.0
    rounds: int = 0
    taken_over: int = 0
    """How often a worker that waited was told to join a round."""

    @property
    def text(self) -> str:
        """The history, a line for each event."""
        return "".join(f"{line}\n" for line in self.history)


def plan(seed: int, *, free: bool | None = None) -> Plan:
    """The simulation of a seed."""
    source = random.Random(f"{seed} plan")
    free = source.random() < 0.15 if free is None else free
    nodes = source.choice([2, 3, 4, 4, 4, 5])
    setting = Setting(
        nodes=nodes,
        min_nodes=source.randint(1, max(1, nodes - 1)),
        slots=source.choice([1, 1, 2]),
        steps=source.choice([10, 20, 40]),
        save_every=source.choice([2, 5, 10]),
        step_s=source.choice([0.2, 0.5, 1.0]),
        memory_every=random.Random(f"{seed} memory").choice([0, 0, 1, 3]),
        versions="".join(random.Random(f"{seed} versions").choices("-on", [8, 1, 1], k=nodes)),
        evaluation_s=random.Random(f"{seed} evaluation").choice([0.0] * 7 + [50.0]),
    )
    own = random.Random(f"{seed} in place")
    if own.random() < 0.5:
        start_up_s, forbidden = own.choice([0.5, 3.0, 10.0]), own.choice([0.0, 0.0, 0.3])
        setting = replace(setting, in_place=True, start_up_s=start_up_s, forbidden=forbidden)
    many = not free and random.Random(f"{seed} many rounds").random() < MANY
    if many:
        setting = replace(setting, steps=200, step_s=1.0, max_restarts=1000)
    names = [chr(ord("a") + number) for number in range(nodes)]
    left_out = {"stop", "stuck-loop", HEAL, *([] if setting.in_place else OF_WAITING)}
    kinds = list(FREE) if free else [kind for kind in APPLY if kind not in left_out]
    if not free and source.random() < 0.6:  # a storm of few kinds finds more than one of all
        kinds = source.sample(kinds, source.randint(1, 4))
    until_s = 0.8 * setting.steps * setting.step_s + 5.0
    late = source.random() < 0.3
    begin = [Fault(round(late * source.uniform(0, until_s), 2), "start", name) for name in names]
    count = 60 if many else min(round(source.expovariate(1 / 9)), 40)
    faults = draw(source, names, count=count, until_s=until_s, kinds=kinds)
    if source.random() < 0.1:
        faults.append(Fault(round(source.uniform(0, 1.5 * until_s), 2), "stop"))
    heal_s = max((fault.at_s + fault.for_s for fault in faults), default=until_s)
    return Plan(seed, setting, (*begin, *sorted(faults), Fault(round(heal_s + 0.01, 2), HEAL)))


def run(plan: Plan) -> Result:
    """Let everything happen; the first broken invariant ends it."""
    with cluster(plan.seed, plan.setting) as made:
        invariants = Invariants(made, free=plan.free)
        looked_at = made.on_agent_end

        def over() -> bool:
            job = invariants.job
            return job is not None and job.state in ENDED

        def ended(run: AgentRun) -> None:
            looked_at(run)
            stays = run.code in OVER and made.kernel.now <= plan.faults[-1].at_s
            if not (stays or over()):
                made.kernel.after(AGAIN_S, partial(made.start, run.machine))

        made.on_agent_end = ended
        for fault in plan.faults:
            made.kernel.after(fault.at_s, partial(_happen, made, fault))
        last_s = max(fault.at_s + fault.for_s for fault in plan.faults)
        setting = plan.setting
        limit_s = last_s + LIVE_S + 2 * setting.steps * setting.step_s
        limit_s += FLOOR_S if setting.in_place else 0.0  # a hang in a first step is found then
        while made.kernel.now < limit_s and not made.problems:
            made.kernel.run(min(made.kernel.now + 10.0, limit_s))
            if over() and made.kernel.now > last_s and not made.alive:
                break
        if not made.problems:
            invariants.at_the_end(partial(_expected, plan))
        return Result(
            plan,
            made.problems,
            made.history,
            made.kernel.now,
            invariants.job.n if invariants.job is not None else 0,
            made.training.taken_over,
        )


def _happen(cluster: Cluster, fault: Fault) -> None:
    if fault.kind != "start":
        cluster.say("fault", str(fault).partition(" ")[2])
    APPLY[fault.kind](cluster, fault)


def _expected(plan: Plan, job: Snapshot) -> bool:
    """Whether this end is one that the faults may lead to."""
    if job.state is State.FAILED:
        return job.by in {Move.FAIL, None, ""} and job.spent >= plan.setting.max_restarts
    return job.state is State.DONE or any(fault.kind == "stop" for fault in plan.faults)


__all__ = ["Plan", "Result", "plan", "run"]
