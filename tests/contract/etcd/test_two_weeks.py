"""Two weeks of a job in a minute: what etcd holds does not grow with the steps."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from pathlib import Path

import pytest

from tests.support.etcd_server import EtcdServer
from tests.support.manual_clock import ManualClock
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import Member
from zero_contract.clock import SystemClock
from zero_contract.journal import Journal
from zero_contract.worker import CommitRequest, Progress
from zero_orchestrator.membership.job_state import Failure, Node, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import events
from zero_orchestrator.observe.events import Publisher
from zero_orchestrator.store.etcd.client import EtcdStore

pytestmark = [pytest.mark.etcd, pytest.mark.full]

HOURS, STEPS_PER_HOUR, DETAILS_PER_HOUR = 14 * 24, 150, 20
"""A step each 24 s, and as many values of one key as etcd keeps until it compacts."""
STEADY_AFTER_H = 48


class Job:
    """One node whose imaginary workers save in memory at every step, and fail once a day."""

    def __init__(self, store: EtcdStore) -> None:
        self._store, self._clock = store, ManualClock()
        self._telemetry = store.sibling()
        self._pen = Publisher(self._telemetry, "weeks", "a", "1", self._clock)
        self._journal = Journal("a", publish=self._pen.event)
        spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=100)
        node = Node(id="a", incarnation="1", address="a", slots=8)
        self._rdzv = Rendezvous(
            store, "weeks", spec, node, clock=SystemClock(), journal=self._journal
        )
        self._rdzv.register()
        self._steps = itertools.count(1)

    def hour(self) -> None:
        fence = self._state(State.ACTIVE).fence
        for _ in range(STEPS_PER_HOUR):
            step = next(self._steps)
            tag = f"step-{step:09}.g7.3fa9"
            assert self._rdzv.commit(
                fence,
                CommitRequest(
                    request=1, step=step, tag=tag, digest="0" * 32, samples=8 * step, in_memory=True
                ),
            )
        assert self._rdzv.commit(
            fence, CommitRequest(request=1, step=step, tag=tag, digest="0" * 32, samples=8 * step)
        )
        for number in range(DETAILS_PER_HOUR):
            self._journal.tell("left", f"rank {number} left at step {step}")
            self._clock.advance(10.0)
            self._pen.progress(Progress(step=step + number), lease=self._rdzv.lease, nodes=1)

    def fail(self) -> None:
        n = self._state(State.ACTIVE).n
        self._journal.tell("exit", "rank 3: killed by SIGKILL", rank=3)
        self._rdzv.report_failure(n, Failure(node="a", symptom=False, summary="rank 3 is gone"))
        self._state(State.FORMING)
        self._rdzv.report_quiet(n)
        assert self._state(State.ACTIVE).n == n + 1

    def close(self) -> None:
        self._pen.close()
        self._telemetry.close()
        self._rdzv.close()

    def _state(self, state: State):
        wait_for(lambda: self._rdzv.poll().state is state, 60, f"the job to be {state}")
        return self._rdzv.snapshot


def _all_told(store: EtcdStore, event: str) -> bool:
    told = [told.record["event"] for told in events.read(store, "weeks")]
    return told.count(event) == HOURS // 24


def size_bytes(etcd: EtcdServer) -> int:
    """What etcd counts against its quota; space that it has given back to itself included."""
    return int(str(etcd.call("maintenance/status")["dbSize"]))


def test_an_etcd_that_compacts_does_not_grow_in_two_weeks_of_commits_at_every_step(tmp_path: Path):
    member = Member(data=tmp_path / "data", client_port=free_port(), options=("--unsafe-no-fsync",))
    with (
        contextlib.closing(EtcdServer(tmp_path, member).start()) as etcd,
        contextlib.closing(EtcdStore(etcd.endpoint)) as store,
        contextlib.closing(Job(store)) as job,
    ):
        sizes = []
        before = 0
        for hour in range(HOURS):
            job.hour()
            if hour % 24 == 23:
                job.fail()
            if before:  # what is older than an hour, as --auto-compaction-retention=1h
                etcd.call("kv/compaction", revision=before)
            before = store.range(Keys("weeks").prefix).revision
            sizes.append(size_bytes(etcd))
        for event in ("interrupt", "exit"):  # none is trimmed; another thread writes the causes
            wait_for(partial(_all_told, store, event), 60, f"each event {event}")
        kept = len(store.range("/zero/").items)
    assert max(sizes) <= 1.5 * max(sizes[:STEADY_AFTER_H]), f"{sizes[::24]}"
    assert max(sizes) < 16 << 20
    assert kept < events.KEEP + events.KEEP_DETAILS + 3 * events.TRIM_EVERY
