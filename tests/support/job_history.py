"""What must hold in the history of a job's keys, revision by revision, simulated or real.

ARCHITECTURE.md has the table of I1 to I12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.mvcc import Batch, Database
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.membership.job_state import ENDED, Snapshot, State
from zero_orchestrator.membership.keys import ROUND, Keys
from zero_orchestrator.membership.moves import LEGAL, Move
from zero_orchestrator.membership.parse import parse
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import Range

WORKERS_END_S = 1.0
"""No worker outlives its agent by more (I8)."""
COMMON = {
    AgentExit.OK,
    AgentExit.DRAINED,
    AgentExit.STOPPED,
    AgentExit.NO_STORE,
    AgentExit.JOB_FAILED,
    128 + 15,
}
"""Exit codes of agents that have done their part."""
CHARGED = (Move.INTERRUPT, Move.FAIL, Move.GIVE_UP)
_ROUND = re.compile(r"\.g(\d+)")


def explained(code: int | None, error: str) -> bool:
    """Whether an agent may end by itself with an exit code, and such an error."""
    words = ("another agent has registered", "no round began", "not become healthy")
    return code in COMMON or any(word in error for word in words)


def replayed(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Database]]:
    """Each revision of a recorded history, and the keys as of it."""
    database = Database()
    for batch in batches:
        for change in batch:
            if change.item is None:
                database.items.pop(change.key, None)
            else:
                database.items[change.key] = change.item
            database.revision = change.revision
        yield batch, database


def round_in(tag: str) -> int | None:
    """The round in the name of a checkpoint, `step-000000012.g3`."""
    found = _ROUND.search(tag)
    return int(found[1]) if found is not None else None


def _move(before: Snapshot | None, job: Snapshot) -> Move | None:
    """The move between two states; an agent of an older version does not say which it was."""
    ends = (before.state if before is not None else None), job.state
    charged = job.charges > (before.charges if before is not None else 0)
    fit = (m for m, legal in LEGAL.items() if legal == ends and (m in CHARGED) == charged)
    return Move(job.by) if job.by else next(fit, None)


@dataclass
class JobHistory:
    """Judges one revision after the other."""

    keys: Keys
    broken: Callable[[str], None]
    """Is told what does not hold."""
    free: bool = False
    """Nothing happens that costs a restart."""
    on_begin: Callable[[int, set[str]], None] = lambda n, names: None
    """A round begins, with these nodes of the round before."""
    transitions: dict[int, Move] = field(default_factory=dict)
    """By revision."""
    job: Snapshot | None = None
    """The job as of its last transition."""
    round_of: Callable[[dict[str, Any]], int | None] = lambda record: round_in(record["tag"])
    """From the record of a checkpoint to the round that has saved it; None: not known."""
    granted: dict[str, int] = field(default_factory=dict)
    """The digests of the manifests that may be published, and the round of each."""
    _charges: set[str] = field(default_factory=set)
    _members: set[str] = field(default_factory=set)
    _quiet: set[str] = field(default_factory=set)
    """The nodes that have told that their workers of this round have stopped."""

    def changed(self, batch: Batch, database: Database) -> None:
        """Judge a revision, whose keys are those of the database."""
        keys = {change.key: change for change in batch}
        for key, change in keys.items():
            if change.item is None:
                continue
            if key.startswith(f"{self.keys.prefix}charged/"):
                self._once(self._charges, key, f"I5: {key} is charged twice")
            elif key.startswith(f"{self.keys.prefix}rounds/") and key.endswith("/members"):
                self._once(self._members, key, f"I1: {key} is written again")
            elif self.job and key.startswith(self.keys.report(self.job.n, "quiet/")):
                self._quiet.add(key)
            elif key == self.keys.latest:
                self._commit(json.loads(change.item.value), database)
        if (head := keys.get(self.keys.round)) is not None:
            if head.item is None:
                self.broken("I10: the round is deleted")
            else:
                self._transition(database, keys)
        elif self.job and self.keys.of_round(self.job.n, "yield") in keys:
            self._told(Move.YIELD, keys)
            self._yield(database)

    def restored(self, database: Database) -> None:
        """The store has gone back in time, to these keys: what came after them never was."""
        before = self.job
        self.job = self._snapshot(database) if self.keys.round in database.items else None
        if before is None or self.job is None or self.job.fence != before.fence:
            self._quiet.clear()  # of a round that never was; else an agent may have read it
        self._charges &= database.items.keys()
        self._members &= database.items.keys()

    def _told(self, move: Move, keys: Iterable[str]) -> None:
        """A transition has an event, of the same revision."""
        if not any(key.startswith(f"{self.keys.events}{ROUND}") for key in keys):
            self.broken(f"no event tells of {move}")

    def _once(self, known: set[str], key: str, problem: str) -> None:
        if key in known:
            self.broken(problem)
        known.add(key)

    def _snapshot(self, database: Database) -> Snapshot:
        items = tuple(database.under(self.keys.prefix))
        spec = JobSpec.from_json(database.items[self.keys.spec].value)
        return parse(self.keys, Range(database.revision, items), spec)

    def _transition(self, database: Database, keys: Iterable[str]) -> None:
        if self.keys.spec not in database.items:
            self.broken("I1: the job moves on in an etcd that has no specification of it")
            return
        before, job = self.job, self._snapshot(database)
        self.job = job
        move = _move(before, job)
        if move is None:
            self.broken(f"I1: nothing leads from {before} to {job}")
            return
        self._told(move, keys)
        self.transitions[database.revision] = move
        source, target = LEGAL[move]
        state = before.state if before is not None else None
        n = before.n if before is not None else 0
        if (state, job.state) != (source, target):
            self.broken(f"I1: {move} leads from {state} to {job.state}")
        if job.n != n + (move is Move.ACTIVATE):
            self.broken(f"I1: {move} leads from round {n} to round {job.n}")
        if state in ENDED:
            self.broken(f"I10: {move} after {state}")
        if move is Move.ACTIVATE:
            self._begins(before, job, database)
        if job.state is State.STOPPED and job.stop is None:
            self.broken("I11: stopped, and nobody has asked for it")
        if (move in CHARGED) != (job.charges > (before.charges if before else 0)):
            self.broken(f"I5: {move} with {job.charges} charges")
        if move in CHARGED and self.free:
            self.broken(f"budget: {job.cause}, and nothing has failed")

    def _begins(self, before: Snapshot | None, job: Snapshot, database: Database) -> None:
        ids = [node.id for node in job.members.nodes]
        if len(set(ids)) < len(ids):
            self.broken(f"I3: round {job.n} has the nodes {ids}")
        if not job.spec.min_nodes <= len(ids) <= job.spec.max_nodes:
            self.broken(f"I4: round {job.n} has {len(ids)} nodes")
        if job.stop is not None:
            self.broken(f"I11: round {job.n} begins after a stop")
        live = {(node.id, node.incarnation) for node in job.nodes}
        # One that has come back too late for this round is not in it, and its workers are fenced.
        former = [m for m in before.members.nodes if job.has_member(m)] if before else []
        prefix = self.keys.report(job.n - 1, "quiet/")
        quiet = self._quiet | database.items.keys()
        busy = [
            member.id
            for member in former
            if (member.id, member.incarnation) in live and prefix + member.id not in quiet
        ]
        if busy:
            self.broken(f"round {job.n} begins, and the workers of {busy} have not stopped")
        stays = live & {(member.id, member.incarnation) for member in former}
        self.on_begin(job.n, {name for name, _ in stays})

    def _yield(self, database: Database) -> None:
        job = self._snapshot(database)
        if job.yielding is None or job.state is not State.ACTIVE:
            return
        draining = {n.id for n in job.nodes if n.draining and job.has_member(n)}
        if "leaving" in job.yielding and draining and draining <= job.done:
            self.broken(f"I12: round {job.n} is left for {draining}, which have finished")

    def _commit(self, record: dict[str, Any], database: Database) -> None:
        """A checkpoint may be published."""
        head = database.items.get(self.keys.round)
        job = json.loads(head.value) if head else {"n": 0, "state": None}
        if job["state"] != State.ACTIVE or self.round_of(record) not in {job["n"], None}:
            where = f"round {job['n']} ({job['state']})"
            self.broken(f"I2: {record['tag']} is published in {where}")
        self.granted[record["digest"]] = job["n"]
