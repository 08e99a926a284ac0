"""Chaos: one seed is one schedule, and the judge finds each way in which a history can be wrong."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.orchestrator.test_rendezvous import Cluster
from zero_contract.worker import CommitRequest
from zero_data.ledger import Entry
from zero_orchestrator.store.kv import Change, KeyValue

TAG = "step-000000002.g2.9fd1"
HASHES = {1: "v2:1", 2: "v2:2"}
KEYS = "/zero/v1/job/"
FAULT_S = 100.0


@pytest.fixture(scope="module")
def chaos():
    """The benchmark's modules."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    try:
        names = ("schedule", "judge", "faults", "report")
        return SimpleNamespace(**{n: importlib.import_module(f"chaos_{n}") for n in names})
    finally:
        del sys.path[0]


@pytest.fixture(scope="module")
def right(chaos):
    """A job of two nodes that loses one of them, saves, and ends; as it is to be."""
    job = Cluster()
    for name in "ab":
        job.join(name)
    job.settle()
    job.kill("a")
    job.settle()
    b = job.agents["b"]
    assert b.commit(
        b.snapshot.fence, CommitRequest(request=1, step=2, tag=TAG, digest="d", samples=8)
    )
    b.report_done(2)
    job.settle()
    batches = tuple(job.store._shared.database.history)
    revisions = [batch[0].revision for batch in batches]
    entries = [
        Entry(step, n, rank, world, {rank: (4 * (step - 1) + rank,)})
        for step, n, world in ((1, 1, 2), (2, 1, 2), (2, 2, 1))
        for rank in range(world)
    ]
    entries[-1] = replace(entries[-1], microbatches={0: (4,), 1: (5,)})
    return chaos.judge.JobRecord(
        job="job",
        batches=batches,
        arrived_s=dict.fromkeys(revisions, FAULT_S),
        exits=[
            chaos.judge.Exit("engine", "a", -9, True, ""),
            chaos.judge.Exit("engine", "b", 0, False, ""),
        ],
        outlived=[],
        faults=[chaos.judge.Happened("a node is killed", False, FAULT_S, FAULT_S)],
        entries=entries,
        samples=8,
        manifests={TAG: chaos.judge.Saved(2, 2, "v2:2", "d")},
        final_hashes=frozenset({"v2:2"}),
    )


@pytest.fixture(scope="module")
def reference(chaos):
    return chaos.judge.Undisturbed(2, "v2:2", HASHES)


def test_a_right_history_is_right(chaos, right, reference):
    assert chaos.judge.judge(right, reference) == []
    assert chaos.judge.judge(right, None) == []


def test_an_interrupted_run_says_what_was_judged_and_what_was_not(chaos, right):
    nothing = replace(right, batches=(), manifests={}, exits=[])
    rest = "; not judged: the weights, the ledger of samples, the end"
    assert chaos.report.verdict(right, complete=False) == (
        f"interrupted: no promise is broken in {len(right.batches)} revisions of etcd, "
        f"1 checkpoints on disk against etcd, 2 ends of agents{rest}"
    )
    assert chaos.report.verdict(nothing, complete=False) == (
        f"interrupted: nothing was there to be judged{rest}"
    )
    assert chaos.report.verdict(right, complete=True) == "every promise has held"


def changed(record: Any, suffix: str, **facts: Any) -> Any:
    """The record, in which every value of keys with this suffix has other facts."""

    def one(change: Change) -> Change:
        if change.item is None or not change.key.endswith(suffix):
            return change
        value = json.dumps({**json.loads(change.item.value), **facts})
        return replace(change, item=replace(change.item, value=value))

    return replace(record, batches=[tuple(map(one, batch)) for batch in record.batches])


def without(record: Any, *suffixes: str) -> Any:
    """The record without the changes of some keys."""
    batches = (
        tuple(change for change in batch if not change.key.endswith(suffixes))
        for batch in record.batches
    )
    return replace(record, batches=[batch for batch in batches if batch])


def then(record: Any, suffix: str, value: str | None = None, after: str | None = None) -> Any:
    """The record, in which a key is written once more: at the end, or after the first of a key."""
    key = KEYS + suffix
    items = [c.item for batch in record.batches for c in batch if c.key == key and c.item]
    at = next(
        (
            n
            for n, batch in enumerate(record.batches)
            if after and any(c.key == KEYS + after for c in batch)
        ),
        len(record.batches) - 1,
    )
    revision = record.batches[at][0].revision
    item = KeyValue(key, items[0].value if value is None else value, revision, revision)
    batches = [*record.batches]
    batches.insert(at + 1, (Change(key, revision, item),))
    return replace(record, batches=batches)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a round is written twice": (lambda r: then(r, "rounds/1/members"), "I1: .* written again"),
    "a move is lost": (
        lambda r: replace(r, batches=skip(r, "interrupt")),
        "I1: activate leads from",
    ),
    "a move after the end": (lambda r: then(r, "round"), "I10: "),
    "a node twice": (
        lambda r: changed(r, "rounds/1/members", nodes=2 * [node_of(r, "rounds/1/members")]),
        "I3: round 1",
    ),
    "too many nodes": (lambda r: changed(r, "spec", max_nodes=1), "I4: round 1 has 2"),
    "a late commit": (lambda r: then(r, "ckpt/latest"), "I2: .* is published in round 2 .DONE"),
    "a commit of an earlier round": (
        lambda r: changed(r, "ckpt/latest", tag="step-000000002.g1.9fd1"),
        "I2: .*g1.* is published in round 2",
    ),
    "a second charge": (lambda r: then(r, "charged/1"), "I5: .* charged twice"),
    "no charge": (lambda r: without(r, "charged/1"), "I5: interrupt with 0 charges"),
    "workers that run": (lambda r: without(r, "quiet/b"), "round 2 begins, and the workers of"),
    "a stop": (
        lambda r: then(r, "cmd/stop", '"by u@h"', after="reports/1/quiet/b"),
        "I11: round 2 begins after a stop",
    ),
    "no event": (lambda r: without(r, ".interrupt"), "no event tells of interrupt"),
    "a charge for nothing": (lambda r: replace(r, faults=[]), "budget: interrupt"),
    "a charge for what is free": (
        lambda r: replace(r, faults=[replace(r.faults[0], free=True)]),
        "budget: interrupt",
    ),
    "a charge long after": (
        lambda r: replace(r, faults=[replace(r.faults[0], at_s=0.0, until_s=10.0)]),
        "budget: interrupt",
    ),
    "an agent that fails": (
        lambda r: replace(r, exits=[replace(r.exits[1], code=9)]),
        "the agent of b ends with 9",
    ),
    "an agent that crashes, asked to leave": (
        lambda r: replace(r, exits=[replace(r.exits[0], code=70)]),
        "the agent of a ends with 70",
    ),
    "workers without an agent": (lambda r: replace(r, outlived=[("a", 1.2)]), "I8: "),
    "a checkpoint unasked": (
        lambda r: saved(r, digest="e"),
        "I2: .* is published unasked",
    ),
    "a checkpoint of a round that is over": (
        lambda r: saved(r, round=1),
        "I2: .* is published in round 2",
    ),
    "a lost sample": (lambda r: replace(r, entries=r.entries[1:]), "I7: step 1: 1 of 2 ranks"),
    "a step too few": (
        lambda r: replace(r, entries=r.entries[:2]),
        "I7: 1 steps are in the ledger",
    ),
    "other weights": (
        lambda r: replace(r, final_hashes=frozenset({"v2:3"})),
        "the weights are .'v2:3'., and not v2:2",
    ),
    "two hashes": (
        lambda r: replace(r, final_hashes=frozenset({"v2:2", "v2:3"})),
        "the weights are .'v2:2', 'v2:3'.",
    ),
    "a checkpoint of other weights": (
        lambda r: saved(r, weight_hash="v2:1"),
        "has the weights v2:1, and not v2:2",
    ),
    "no last checkpoint": (lambda r: replace(r, manifests={}), "the newest checkpoint"),
    "no end": (lambda r: replace(r, batches=r.batches[:-1]), "I6: .*not done"),
}


def saved(record: Any, **facts: Any) -> Any:
    """The record, in which the checkpoint on disk has other facts."""
    return replace(record, manifests={TAG: replace(record.manifests[TAG], **facts)})


def skip(record: Any, move: str) -> list[Any]:
    """The batches without those of a move."""
    return [
        batch
        for batch in record.batches
        if not any(c.key == KEYS + "round" and f'"{move}"' in c.item.value for c in batch)
    ]


def node_of(record: Any, suffix: str) -> Any:
    """The first node in a record of members."""
    values = (c.item.value for batch in record.batches for c in batch if c.key.endswith(suffix))
    return json.loads(next(values))["nodes"][0]


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_history_is_found(chaos, right, reference, name):
    change, problem = WRONG[name]
    found = chaos.judge.judge(change(right), reference)
    assert any(re.search(problem, one) for one in found), found


def test_a_seed_has_one_schedule_and_each_kind_is_in_a_long_one(chaos):
    kinds = {name: row.kind for name, row in chaos.faults.FAULTS.items()}

    def of(seed: int) -> Any:
        return chaos.schedule.schedule(kinds, seed=seed, minutes=30, every_s=15)

    assert of(1) == of(1) != of(2)
    assert {fault.kind for fault in of(1)} == set(kinds)
    assert len(of(1)) == 120


@pytest.mark.parametrize("seed", range(20))
def test_two_nodes_are_always_left_alone(chaos, seed):
    kinds = {name: row.kind for name, row in chaos.faults.FAULTS.items()}
    faults = chaos.schedule.schedule(kinds, seed=seed, minutes=10, every_s=5)
    for fault in faults:
        at_once = [one for one in faults if one.at_s <= fault.at_s <= one.at_s + one.for_s]
        hit = [name for one in at_once for name in (one.node, one.other) if name]
        assert len(set(hit)) <= 2
        assert len(set(hit)) == len(hit), "nothing is hit twice at a time"


def test_each_fault_has_its_own_standstill_and_no_fault_has_none(chaos):
    faults = [
        chaos.judge.Happened(what=what, free=True, at_s=at_s, until_s=at_s)
        for what, at_s in (("kill", 10.0), ("cut", 20.0))
    ]
    steps = [(at_s, number, 0) for number, at_s in enumerate((9.5, 10.5, 13.5, 21.0, 26.0))]
    assert list(chaos.report.standstills(faults, steps)) == [("kill", 7.5, 9.5), ("cut", 5.0, 4.5)]
    assert list(chaos.report.standstills([], steps)) == []


def test_what_limits_alone_cost_a_job_is_that_of_the_faults_that_hit_it(chaos):
    kinds = {name: row.kind for name, row in chaos.faults.FAULTS.items()}
    faults = [
        chaos.judge.Happened(what, kinds[what].free, 0.0, 0.0, job, kinds[what].unknown_s)
        for what, job in (
            ("a worker hangs", "engine"),
            ("a node loses power", ""),
            ("a worker is killed", "engine"),
        )
    ]
    assert chaos.report.unknown_s(faults, "engine") == 20 + 3
    assert chaos.report.unknown_s(faults, "fsdp2") == 3
