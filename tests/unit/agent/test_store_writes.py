"""Checkpoints that workers ask to publish while etcd takes no writes: granted late, or never."""

from __future__ import annotations

import pytest

from tests.unit.orchestrator.test_rendezvous import Cluster
from zero_agent.loop.store_writes import StoreWrites
from zero_contract.journal import Journal
from zero_contract.worker import CommitRequest
from zero_orchestrator.errors import StoreFull, StoreUnavailable
from zero_orchestrator.membership.job_state import Failure

PATIENCE_S = 30.0
REQUEST = CommitRequest(request=1, step=3, tag="t", digest="d", samples=8, patience_s=PATIENCE_S)


class Job:
    """A job in round 1, whose worker asks to publish a checkpoint."""

    def __init__(self):
        self.cluster = Cluster()
        self.rdzv = self.cluster.join("a")
        self.cluster.settle()
        self.answers: list[tuple[bool, str, bool]] = []
        self._writes = StoreWrites(Journal("a"), self.cluster.clock, lambda error: None)
        fence = self.rdzv.snapshot.fence
        self._writes.commit(1, fence, REQUEST, lambda *answer: self.answers.append(answer))

    def turn(self) -> None:
        """A turn of the agent's loop."""
        self._writes.run(self.rdzv, self.rdzv.snapshot.fence)

    def turn_without_etcd(self, monkeypatch, error) -> None:
        def fail(*args):
            raise error("no writes")

        with monkeypatch.context() as patched:
            patched.setattr(self.rdzv._store, "txn", fail)
            self.turn()

    @property
    def published(self) -> bool:
        return self.cluster.store.get(self.rdzv.keys.latest) is not None


@pytest.fixture(params=[StoreFull, StoreUnavailable])
def waiting(request, monkeypatch):
    """The same, after a turn in which etcd has not taken it."""
    job = Job()
    job.turn_without_etcd(monkeypatch, request.param)
    assert (job.answers, job.published) == ([], False)
    return job


def test_a_checkpoint_is_granted_when_etcd_takes_writes_again(waiting):
    waiting.cluster.clock.advance(PATIENCE_S - 1.0)
    waiting.turn()
    waiting.turn()
    assert (waiting.answers, waiting.published) == ([(True, "", False)], True)


def test_a_checkpoint_that_etcd_never_takes_is_refused_when_its_worker_waits_no_longer(
    waiting, monkeypatch
):
    waiting.cluster.clock.advance(PATIENCE_S)
    waiting.turn_without_etcd(monkeypatch, StoreUnavailable)
    waiting.turn()
    refused = (False, "etcd did not take it: no writes", True)
    assert (waiting.answers, waiting.published) == ([refused], False)


def test_a_checkpoint_of_workers_that_are_gone_is_not_published(waiting):
    waiting.rdzv.report_failure(1, Failure(node="a", symptom=False, summary="broke"))
    waiting.cluster.settle()
    assert waiting.rdzv.snapshot.n == 2
    waiting.turn()
    assert (waiting.answers, waiting.published) == ([], False)


def test_a_checkpoint_of_a_round_that_is_over_is_refused():
    job = Job()
    job.cluster.join("b")
    before = job.rdzv.snapshot.fence
    job.cluster.settle()
    assert job.rdzv.snapshot.n == 2
    job._writes.run(job.rdzv, before)  # the agent has not seen the new round yet
    assert (job.answers, job.published) == ([(False, "round 1 is over", False)], False)
