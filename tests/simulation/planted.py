"""Known bugs that are planted into the product, to show that the simulation finds them.

`python -m tests.simulation.planted` plants each in turn and says which seed finds it, and how.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.simulation.cluster import end_at_interrupt
from tests.simulation.faults import HEAL, Fault, draw
from tests.simulation.simulation import Plan, Result, plan, run
from tests.simulation.standard_library import replaced
from zero_agent.loop.limits import STORE_FAILS
from zero_agent.loop.node_workers import NodeWorkers
from zero_agent.loop.store_writes import StoreWrites
from zero_agent.loop.supervise import Action, Situation
from zero_agent.loop.suspects import LeaseVerdict
from zero_agent.workers.environment import WorkerPlace
from zero_agent.workers.group import WorkerGroup
from zero_checkpoint.files import writer
from zero_checkpoint.format.manifest import MANIFEST, FileRecord, encode
from zero_checkpoint.saving import memory_commit, publish
from zero_contract.errors import CommitRefused
from zero_contract.worker import ENV_FENCE, ENV_ROUND
from zero_orchestrator.membership import moves, rounds
from zero_orchestrator.membership.job_state import State
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.rounds import Observation
from zero_orchestrator.store.kv import Compare
from zero_orchestrator.store.lease import LeaseKeeper, LeaseState
from zero_orchestrator.store.replica import Replica

SEEDS = 150
"""A bug is found within so many seeds: within a minute of one core, one bug within 90 s."""


@dataclass(frozen=True)
class Bug:
    """A bug, and the faults that lead to it soonest."""

    what: str
    parts: Mapping[str, Any]
    kinds: Sequence[str]
    breaks: str
    """Part of the message of the invariant that it breaks."""
    in_place: bool = False
    """Whether workers stay in their processes when the ranks change."""


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
        rdzv.commit(commit.fence, commit.request)
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


def _refresh_anyway(self: LeaseKeeper) -> float | None:
    self._works = lambda: True
    return _BEAT(self)


def _all_but_the_newest(candidates: Sequence[Any], **policy: Any) -> list[Any]:
    return [candidate.path for candidate in candidates[1:]]


def _write_only(disk: Any, path: Any, text: bytes) -> None:
    with disk.create(path) as file:
        disk.write(file, text)


def _publish_refused(attempt: Any, fence: Any) -> None:
    def ask(digest: str) -> None:
        with contextlib.suppress(CommitRefused):
            fence(digest)

    _PUBLISH_FILES(attempt, ask)


_PUBLISH_FILES = publish.publish


def _good_vote(path: Any, image: Any, block_bytes: int, disk: Any, **options: Any) -> Any:
    try:
        return _WRITE_FILE(path, image, block_bytes, disk, **options)
    except OSError:
        layout, hasher = image.layout, writer.BlockHasher(block_bytes)
        for chunk in image.chunks():
            hasher.update(chunk)
        digests = hasher.digests()
        return FileRecord(path.name, layout.size_bytes, len(layout.head), digests)


_WRITE_FILE = writer.write_file


def _prepare_blindly(directory: Any, manifest: Any, disk: Any) -> Any:
    text, digest = encode(manifest)
    disk.write_whole(directory / f"{MANIFEST}.tmp", text)
    return publish.Attempt(directory, manifest, digest, disk)


def _commit_in_memory_unasked(save: Any, *words: Any, **options: Any) -> Any:
    return _COMMIT_IN_MEMORY(replace(save, fence=None), *words, **options)


_COMMIT_IN_MEMORY = memory_commit.commit_in_memory


class _Blind:
    """A hash that always is as expected."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def flatnonzero(self, wrong: Any) -> Any:
        return np.flatnonzero(wrong)[:0] if wrong.dtype == bool else np.flatnonzero(wrong)


def _forget_changes(self: Any, changes: Any) -> None:
    """Every third delivery of a watch is lost."""
    self.__dict__["deliveries"] = count = self.__dict__.get("deliveries", 0) + 1
    if count % 3:
        _ON_CHANGES(self, changes)


_ON_CHANGES = Replica._apply


def _parked_at_once(self: NodeWorkers, reason: str) -> None:
    _RELEASE(self, reason)
    for rank in self._can_stay:
        self.group.park(rank, reason)


_RELEASE = NodeWorkers.release


def _told(what: str, name: str, value: Callable[[WorkerGroup, int], int], breaks: str) -> Bug:
    """Workers that wait get another value of a variable: from their former group, and rank."""

    def take_over(self: WorkerGroup, former: WorkerGroup, orders: Any) -> dict[int, Any]:
        taken = _TAKE_OVER(self, former, orders)
        return {
            rank: replace(order, env=order.env | {name: str(value(former, rank))})
            for rank, order in taken.items()
        }

    parts = {"zero_agent.workers.group:WorkerGroup.take_over": take_over}
    return Bug(f"a worker that waits {what}", parts, CHANGES, breaks, in_place=True)


_TAKE_OVER = WorkerGroup.take_over

DISRUPTIONS = ("kill-agent", "kill-worker", "fail-worker", "cut", "alone", "freeze-all")
OUTAGES = ("no-leader", "loss", "slow-etcd", "full-etcd")
CHANGES = ("kill-agent", "drain", "sigterm", "kill-worker")
"""Of the ranks, for workers that stay."""
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
        {"zero_agent.workers.progress:Steps.too_slow": lambda steps, **_: None},
        ("hang-worker",),
        "I6",
    ),
    Bug(
        "what a watch delivers is lost now and then",
        {"zero_orchestrator.store.replica:Replica._apply": _forget_changes},
        (*DISRUPTIONS, "drain"),
        "",
    ),
    Bug(
        "a lease is refreshed although the loop is stuck",
        {"zero_orchestrator.store.lease:LeaseKeeper._beat": _refresh_anyway},
        ("stuck-loop",),
        "I6",
    ),
    Bug(
        "a checkpoint is deleted as soon as there is a newer one",
        {"zero_checkpoint.saving.housekeeping:expired": _all_but_the_newest},
        ("compact",),
        "is removed",
    ),
    Bug(
        "a manifest is renamed before it is synced",
        {"zero_checkpoint.files.storage:Disk.write_whole": _write_only},
        ("power-off",),
        "",
    ),
    Bug(
        "the fence's refusal of a checkpoint is ignored",
        {"zero_checkpoint.saving.commit:publish": _publish_refused},
        (*DISRUPTIONS, "no-leader", "full-etcd"),
        "I2",
    ),
    Bug(
        "the vote of a rank whose write has failed is ignored",
        {
            "zero_checkpoint.saving.commit:write_file": _good_vote,
            "zero_checkpoint.saving.commit:prepare": _prepare_blindly,
        },
        ("failing-disk", "kill-worker"),
        "is not whole",
    ),
    Bug(
        "a checkpoint in memory does not ask the fence",
        {"zero_checkpoint.saving.in_memory:commit_in_memory": _commit_in_memory_unasked},
        ("compact",),
        "I2",
    ),
    Bug(
        "blocks are not verified when they are loaded",
        {"zero_checkpoint.loading.reader:np": _Blind()},
        ("corrupt", "corrupt-memory", "kill-worker"),
        "I7",
    ),
    Bug(
        "a worker that stays counts as stopped before it has left its group",
        {"zero_agent.loop.node_workers:NodeWorkers.release": _parked_at_once},
        CHANGES,
        "still runs",
        in_place=True,
    ),
    Bug(
        "a worker that stays says so before it has left its group",
        {"zero_comm.worker.agent_link:leave_group": lambda: True},
        CHANGES,
        "is in a group",
        in_place=True,
    ),
    _told("is told the wrong round", ENV_ROUND, lambda former, _: former.round, "was told to join"),
    _told("keeps its rank", "RANK", lambda _, rank: rank, "has no place"),
    _told("keeps its fence", ENV_FENCE, lambda former, _: former.fence, "has no place"),
    Bug(
        "a worker that waits is forgotten",
        {"zero_agent.workers.group:WorkerGroup.take_over": lambda *_: {}},
        ("freeze-waiting", *CHANGES),  # one that is not frozen ends by itself
        "has forgotten",
        in_place=True,
    ),
    Bug(
        "a process that stays has no limit for its first step",
        {"zero_agent.workers.progress:Steps.prepares": lambda *_: None},
        ("hang-worker", "kill-agent"),
        "I6",
        in_place=True,
    ),
)


def planned(seed: int, kinds: Sequence[str], *, in_place: bool) -> Plan:
    """The simulation of a seed, with faults of these kinds alone."""
    usual = plan(seed, free=True)
    source = random.Random(f"{seed} planted")
    steps_s = usual.setting.steps * usual.setting.step_s
    names = [fault.node for fault in usual.faults if fault.kind == "start" and not fault.for_s]
    names = sorted({*names, "a", "b"})
    faults = draw(source, names, count=10, until_s=1.2 * steps_s + 4.0, kinds=kinds)
    begin = [Fault(0.0, "start", name) for name in names]
    heal_s = max(fault.at_s + fault.for_s for fault in faults)
    patient = replace(
        usual.setting,
        hang_s=200.0,  # lest the end of a wait hides what waits
        in_place=in_place,
        start_up_s=0.5 * in_place,
        forbidden=0.0,
        memory_every=1 if in_place else usual.setting.memory_every,
    )
    return Plan(seed, patient, (*begin, *faults, Fault(round(heal_s + 0.01, 2), HEAL)))


def found(bug: Bug, seeds: int = SEEDS) -> Result | None:
    """The first simulation that breaks an invariant with this bug; None if none does."""
    with replaced(dict(bug.parts)):
        for seed in range(seeds):
            result = run(planned(seed, bug.kinds, in_place=bug.in_place))
            if result.problems:
                return result
    return None


def main() -> int:
    """Plant each bug; the exit code is 1 if one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted")
    parser.add_argument("names", nargs="*", help="parts of the names of bugs; without, all")
    names, missed = parser.parse_args().names, 0
    if unknown := [name for name in names if not any(name in bug.what for bug in BUGS)]:
        parser.error(f"no bug is called {unknown}; there are: {'; '.join(b.what for b in BUGS)}")
    end_at_interrupt()
    for bug in [bug for bug in BUGS if not names or any(name in bug.what for name in names)]:
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
