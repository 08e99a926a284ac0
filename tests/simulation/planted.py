"""Known bugs that are planted into the product, to show that the simulation finds them.

`python -m tests.simulation.planted` plants each in turn and says which seed finds it, and how.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.faults import HEAL, Fault, draw
from tests.simulation.simulation import Plan, Result, plan, run
from tests.simulation.standard_library import replaced
from zero_agent.loop.limits import STORE_FAILS
from zero_agent.loop.store_writes import StoreWrites
from zero_agent.loop.supervise import Action, Situation
from zero_agent.loop.suspects import LeaseVerdict
from zero_agent.workers.environment import WorkerPlace
from zero_orchestrator.membership import moves, rounds
from zero_orchestrator.membership.job_state import State
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.rounds import Observation
from zero_orchestrator.store.kv import Compare
from zero_orchestrator.store.lease import LeaseKeeper, LeaseState

SEEDS = 150
"""A bug is found within so many seeds: within a minute of one core."""


@dataclass(frozen=True)
class Bug:
    """A bug, and the faults that lead to it soonest."""

    what: str
    parts: Mapping[str, Any]
    kinds: Sequence[str]
    breaks: str
    """Part of the message of the invariant that it breaks."""


def _without(compares: Callable[[Compare], bool]) -> Mapping[str, Any]:
    """Transactions of the round machine that lack some comparisons."""

    def transaction(*args: Any, **options: Any) -> Any:
        found, writes = moves.transaction(*args, **options)
        return [one for one in found if not compares(one)], writes

    return {"zero_orchestrator.membership.rendezvous:transaction": transaction}


def _rule(name: str, instead: Callable[..., Any]) -> Mapping[str, Any]:
    """A round machine in which a rule decides something else."""
    rules = [instead if rule.__name__ == name else rule for rule in rounds._WATCH_RULES]
    return {"zero_orchestrator.membership.rounds:_WATCH_RULES": rules}


def _at_once(job: Any, seen: Observation, timing: Any) -> Any:
    return rounds._a_node_is_lost(job, replace(seen, heard_s=1e9), timing)


def _form_with_busy(job: Any, seen: Any, timing: Any) -> Any:
    quiet = frozenset(member.id for member in job.members.nodes)
    return rounds._form(replace(job, quiet=quiet), seen, timing)


def _commit_unfenced(self: Rendezvous, fence: int, **facts: Any) -> bool:
    head = self._store.get(self.keys.round)
    return _COMMIT(self, head.mod_revision if head else fence, **facts)


_COMMIT = Rendezvous.commit
_PUBLISH = StoreWrites._publish
_RUN = StoreWrites.run


def _publish_and_forget(self: StoreWrites, rdzv: Any, commit: Any) -> None:
    before = list(self._commits)
    _PUBLISH(self, rdzv, commit)
    self._commits = before


def _publish_anyway(self: StoreWrites, rdzv: Any, commit: Any) -> None:
    with contextlib.suppress(*STORE_FAILS):
        rdzv.commit(
            commit.fence,
            step=commit.request.step,
            tag=commit.request.tag,
            digest=commit.request.digest,
            samples=commit.request.samples,
        )
    commit.reply(True, "", False)


def _quiet_too_soon(now: Situation) -> tuple[Action, str]:
    if now.job.has_member(now.node) and now.node.id not in now.job.quiet:
        return Action.REPORT_QUIET, "planted"
    return _FORMING(now)


def _forming() -> Callable[[Situation], tuple[Action, str]]:
    from zero_agent.loop import supervise

    return supervise._BY_STATE[State.FORMING]


_FORMING = _forming()


def _supervised() -> Mapping[str, Any]:
    from zero_agent.loop import supervise

    table = {**supervise._BY_STATE, State.FORMING: _quiet_too_soon}
    return {"zero_agent.loop.supervise:_BY_STATE": table}


def _places(job: Any, node: Any) -> list[WorkerPlace]:
    return [replace(place, rank=place.local_rank) for place in _PLACES(job, node)]


def _real_places() -> Callable[[Any, Any], list[WorkerPlace]]:
    from zero_agent.workers import environment

    return environment.places


_PLACES = _real_places()


def _drain_at_once(self: Rendezvous) -> int:
    revision = self._announce(draining=True)
    if self._snapshot.has_member(self.node):
        self._report(self._snapshot.n, "leaving")
    return revision


def _one_refresh(self: LeaseKeeper) -> float | None:
    again_s = _BEAT(self)
    return None if self._state is LeaseState.SILENT else again_s


_BEAT = LeaseKeeper._beat

DISRUPTIONS = ("kill-agent", "kill-worker", "fail-worker", "cut", "alone", "freeze-all")
OUTAGES = ("no-leader", "loss", "slow-etcd", "full-etcd")
BUGS: Sequence[Bug] = (
    Bug(
        "transitions do not compare the round",
        _without(lambda one: one.key.endswith("/round")),
        ("slow-etcd", "kill-agent", "fail-worker", "drain"),
        "",
    ),
    Bug(
        "a commit does not compare the fence",
        {"zero_orchestrator.membership.rendezvous:Rendezvous.commit": _commit_unfenced},
        ("slow-etcd", "kill-agent", "fail-worker", "drain", "alone", "cut", "no-leader"),
        "I2",
    ),
    Bug(
        "a commit that etcd did not take is forgotten",
        {"zero_agent.loop.store_writes:StoreWrites._publish": _publish_and_forget},
        ("full-etcd",),
        "no answer",
    ),
    Bug(
        "a commit is granted without an answer of etcd",
        {"zero_agent.loop.store_writes:StoreWrites._publish": _publish_anyway},
        ("full-etcd", "loss", "no-leader", "cut"),
        "I2",
    ),
    Bug(
        "a node reports that its workers have stopped before they have",
        _supervised(),
        DISRUPTIONS,
        "still runs",
    ),
    Bug(
        "a round begins before all have stopped",
        {
            "zero_orchestrator.membership.rounds:_DECIDE": {
                **rounds._DECIDE,
                State.FORMING: _form_with_busy,
            }
        },
        DISRUPTIONS,
        "",
    ),
    Bug(
        "two workers have one rank",
        {"zero_agent.workers.environment:places": _places},
        ("compact",),
        "I3",
    ),
    Bug(
        "a micro-batch runs twice, another one never",
        {
            "tests.simulation.training:_microbatches": lambda rank, world: tuple(
                min(rank + 1, 11) if n == rank else n for n in range(rank, 12, world)
            )
        },
        ("compact",),
        "I7",
    ),
    Bug(
        "a round begins after a stop",
        {
            **_without(lambda one: one.key.endswith("/stop")),
            "zero_orchestrator.membership.rounds:_DECIDE": {
                **rounds._DECIDE,
                State.FORMING: lambda job, *seen: rounds._form(replace(job, stop=None), *seen),
            },
        },
        ("kill-agent", "fail-worker", "stop"),
        "I11",
    ),
    Bug(
        "leases that lapsed in an outage count as lost nodes at once",
        _rule("_a_node_is_lost", _at_once),
        ("outage",),
        "budget",
    ),
    Bug(
        "who leaves while a round begins is charged",
        {"zero_orchestrator.membership.rendezvous:Rendezvous.drain": _drain_at_once},
        ("drain", "sigterm"),
        "budget",
    ),
    Bug(
        "a refused connection is taken for a death",
        {"zero_agent.loop.suspects:Suspicion.judge": lambda *_: LeaseVerdict.DEAD},
        ("suspect",),
        "budget",
    ),
    Bug(
        "a lease is not refreshed any more after one failure",
        {"zero_orchestrator.store.lease:LeaseKeeper._beat": _one_refresh},
        ("no-leader",),
        "",
    ),
    Bug(
        "a hang is not noticed",
        {"zero_agent.workers.progress:Steps.too_slow": lambda steps: None},
        ("hang-worker",),
        "I6",
    ),
)


def planned(seed: int, kinds: Sequence[str]) -> Plan:
    """The simulation of a seed, with faults of these kinds alone."""
    usual = plan(seed, free=True)
    source = random.Random(f"{seed} planted")
    steps_s = usual.setting.steps * usual.setting.step_s
    names = [fault.node for fault in usual.faults if fault.kind == "start" and not fault.for_s]
    names = sorted({*names, "a", "b"})
    faults = draw(source, names, count=10, until_s=1.2 * steps_s + 4.0, kinds=kinds)
    begin = [Fault(0.0, "start", name) for name in names]
    heal_s = max(fault.at_s + fault.for_s for fault in faults)
    patient = replace(usual.setting, hang_s=200.0)  # lest the end of a wait hides what waits
    return Plan(seed, patient, (*begin, *faults, Fault(round(heal_s + 0.01, 2), HEAL)))


def found(bug: Bug, seeds: int = SEEDS) -> Result | None:
    """The first simulation that breaks an invariant with this bug; None if none does."""
    with replaced(dict(bug.parts)):
        for seed in range(seeds):
            result = run(planned(seed, bug.kinds))
            if result.problems:
                return result
    return None


def main() -> int:
    """Plant each bug; the exit code is 1 if one is not found."""
    missed = 0
    for bug in BUGS:
        begin_s = time.process_time()
        result = found(bug)
        took_s = time.process_time() - begin_s
        how = "NOT FOUND"
        if result is not None:
            how = f"seed {result.plan.seed}: {result.problems[0]}"
        right = result is not None and bug.breaks in result.problems[0]
        missed += not right
        print(f"{'ok ' if right else '!!!'} {took_s:5.1f} s  {bug.what}: {how}", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
