"""Agents of two versions in one job: each reads what the other writes, or says why it does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.versions import OLD, in_words_of, newer, older, written_by
from tests.unit.orchestrator.test_rendezvous import Cluster
from zero_agent.node.installed import Installed
from zero_contract.journal import Journal
from zero_orchestrator.errors import SpecMismatch
from zero_orchestrator.membership.job_state import (
    Failure,
    Members,
    Node,
    State,
)
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.parse import parse
from zero_orchestrator.membership.records import PROTOCOL, read
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.spec import JobSpec


class OtherVersion(MemoryStore):
    """The store as an agent of another version writes to it."""

    def __init__(self, store: Any, change: Any) -> None:
        self._other, self._change = store, change

    def __getattribute__(self, name: str) -> Any:
        if name in ("_other", "_change", "put", "txn"):
            return object.__getattribute__(self, name)
        return getattr(self._other, name)

    def put(self, key: str, value: str, **more: Any) -> int:
        return self._other.put(key, in_words_of(self._change, value), **more)

    def txn(self, compares: Sequence[Any], writes: Sequence[Any]) -> Any:
        told = [written_by(self._change, write) for write in writes]
        return self._other.txn(compares, told)


class Mixed(Cluster):
    """Agents whose names say of which version they are: o(ld), n(ew), or this one."""

    changes: Mapping[str, Any] = {"o": older, "n": newer}

    def agent(self, name: str, incarnation: str, spec: JobSpec | None = None) -> Rendezvous:
        store = self.store.client()
        change = self.changes.get(name[0])
        return Rendezvous(
            OtherVersion(store, change) if change is not None else store,
            self.job,
            spec or self.spec,
            Node(id=name, incarnation=incarnation, address=name, slots=1),
            clock=self.clock,
            journal=Journal(name),
        )


@pytest.mark.parametrize("order", [("o1", "a", "n1"), ("n1", "a", "o1"), ("a", "n1", "o1")])
def test_a_job_goes_on_while_its_agents_are_replaced_by_those_of_another_version(order):
    """A rolling upgrade: joins, failures, a lost node and a drain on the way."""
    job = Mixed(max_restarts=9)
    for name in order:
        job.join(name)
    job.settle()
    assert (job.view.n, job.view.members.world_size) == (1, 3)
    for number, name in enumerate(order, start=1):
        before = job.view
        failure = Failure(node=name, symptom=False, summary=f"{name} broke", step=number)
        job.agents[name].report_failure(before.n, failure)
        job.settle(100.0)
        assert job.view.n > before.n
        assert job.view.charged[-1].cause.startswith(f"{name} broke")
    leaver, lost, last = order
    job.agents[leaver].drain()
    job.settle()
    job.agents.pop(leaver).close()
    job.kill(lost)
    job.settle()
    assert [node.id for node in job.view.members.nodes] == [last]
    assert job.view.state is State.ACTIVE


def test_the_fields_that_every_version_writes_are_those_without_a_default():
    for kind, first in OLD.items():
        needed = {
            field.name
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        assert needed <= first, f"{kind.__name__}: {needed - first} must have a default"


@pytest.mark.parametrize("kind", OLD)
def test_a_record_of_no_version_is_refused_in_one_sentence(kind):
    with pytest.raises(SpecMismatch, match=r"install the version of zero-elastic with which the"):
        read(kind, {"later": "new"})


def test_what_an_agent_does_not_know_of_the_others_is_dropped():
    members = Members((Node(id="a", incarnation="1", address="a", slots=1),))
    keys = Keys("j")
    store = MemoryStore(ManualClock())
    store.put(keys.round, json.dumps({"n": 1, "state": "ACTIVE", "cause": "", "later": 1}))
    store.put(keys.of_round(1, "members"), json.dumps(newer(json.loads(members.to_json()))))
    found = parse(keys, store.range(keys.prefix), JobSpec(min_nodes=1, max_nodes=1))
    assert found.members == members


def test_agents_of_another_protocol_are_told_what_to_install():
    job = Mixed()
    job.join("a", spec=dataclasses.replace(job.spec, protocol=PROTOCOL + 1))
    with pytest.raises(SpecMismatch) as refused:
        job.join("b")
    assert str(refused.value) == (
        f"the agents of job job speak version {PROTOCOL + 1} of the protocol, and this agent "
        f"version {PROTOCOL}: install the zero-elastic with which the job was started, or stop "
        "the job and start it again with this one; it goes on from its newest checkpoint"
    )


def test_an_upgrade_under_a_running_agent_is_seen(tmp_path):
    (tmp_path / "below").mkdir()
    old, new = tmp_path / "below" / "code.py", tmp_path / "new.py"
    old.write_text("version = 1")
    installed = Installed(tmp_path)
    assert installed.changed is None
    old.write_text("version = 10")
    assert installed.changed == old
    old.write_text("version = 1")
    installed = Installed(tmp_path)
    new.touch()
    assert installed.changed == new
    assert Installed().changed is None
