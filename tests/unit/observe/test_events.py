"""The story of a job in the store: in order, bounded, and never at the expense of an agent."""

import contextlib
import dataclasses
import json
import logging
import threading
import time

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for
from zero_contract.journal import Journal, Retention
from zero_contract.worker import Progress
from zero_orchestrator.ctl.views import event_line
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.observe import events
from zero_orchestrator.observe.events import (
    KEEP,
    Paced,
    Publisher,
    events_prefix,
    goodput_prefix,
    progress_prefix,
    read_goodput,
    seen_key,
)
from zero_orchestrator.observe.goodput import Use
from zero_orchestrator.observe.story import selected


@pytest.fixture
def job(root):
    """A job's name that no other test uses."""
    return root.strip("/").replace("/", "-")


def publisher(store, job, node="a", clock=None):
    return Publisher(store, job, node, "1", clock or ManualClock())


def texts(store, job):
    return [event.record["text"] for event in events.read(store, job)]


def close_when_written(pen: Publisher, store, job, *last: str) -> None:
    """An agent that ends gives what is queued a second; a slow machine may need more for all."""
    wait_for(lambda: texts(store, job)[-len(last) :] == [*last], 60, "the last events")
    pen.close()


def test_events_of_several_agents_are_told_in_the_order_in_which_they_happened(store, job):
    pens = {node: publisher(store, job, node) for node in "ab"}
    told = []
    for number, node in enumerate("abba"):
        Journal(node, publish=pens[node].event).tell("start", f"event {number}", rank=number)
        told.append(f"event {number}")
        wait_for(lambda: texts(store, job) == told, 60, "the event")
    assert [event.record["node"] for event in events.read(store, job)] == list("abba")
    assert [event.record["rank"] for event in events.read(store, job)] == [0, 1, 2, 3]
    for pen in pens.values():
        pen.close()


def written(store: MemoryStore, job: str, *told: tuple[str, float, int | None]) -> list[str]:
    """The texts of events that were written in this order, as they are read.

    Args:
        store: Where they are written.
        job: The job's name.
        told: Text, time and the revision of the transaction, if the event is a transition.
    """
    for number, (text, time_s, revision) in enumerate(told):
        known = {} if revision is None else {"revision": revision}
        record = {"time": time_s, "event": "exit", "text": text, **known}
        store.put(f"{events_prefix(job)}a.1.{number}", json.dumps(record))
    return texts(store, job)


@pytest.mark.parametrize(
    ("told", "order"),
    [
        # The exit was written 50 ms after the transition that it led to.
        ((("forms", 5.06, 3), ("exit", 5.0, None), ("begins", 5.2, 9)), "exit forms begins"),
        ((("left", 5.01, None), ("exit", 5.0, None)), "exit left"),
        # What knows its revision comes before what followed from it, however late it was written.
        ((("starts", 5.9, None), ("begins", 5.0, 1)), "begins starts"),
        # These are the clocks of two nodes.
        ((("begins", 9.0, 3), ("starts", 5.1, None)), "begins starts"),
    ],
)
def test_events_are_told_as_they_happened_although_they_are_written_a_little_later(
    job, told, order
):
    assert written(MemoryStore(), job, *told) == order.split()


def test_an_event_that_waited_for_the_store_is_told_where_it_happened(job):
    store = MemoryStore()
    for text, time_s, late in [("ends", 60.0, {}), ("fails", 10.0, {"late_s": 52.0})]:
        store.put(
            f"{events_prefix(job)}a.1.{text}", json.dumps({"time": time_s, "text": text} | late)
        )
    assert texts(store, job) == ["fails", "ends"]
    assert "late_s" not in events.read(store, job)[0].record


@pytest.mark.parametrize("at", ['"soon"', "null", "[]", "1e300", "-1e300"])
def test_an_event_whose_time_is_no_time_is_shown_as_it_is_and_hides_no_other(job, at):
    store, odd = MemoryStore(), f'{{"time": {at}, "event": "exit", "text": "odd"}}'
    store.put(f"{events_prefix(job)}a.1.1", odd)
    store.put(f"{events_prefix(job)}a.1.2", '{"time": 5.0, "event": "exit", "text": "next"}')
    found = events.read(store, job)
    assert [event_line(event).plain.endswith(event.record["text"]) for event in found] == [True] * 2
    assert (texts(store, job), list(selected(found, since_s=1.0))) == ([odd, "next"], [found[1]])


def test_an_event_belongs_to_the_round_of_its_agent_or_to_the_one_it_names(job):
    store = MemoryStore()
    pen = publisher(store, job)
    journal = Journal("a", publish=pen.event)
    journal.round = 3
    journal.tell("start", "here")
    journal.tell("activate", "next", round=4)
    close_when_written(pen, store, job, "here", "next")
    assert [event.record["round"] for event in events.read(store, job)] == [3, 4]


def test_only_the_last_events_of_a_job_are_kept(job):
    store = MemoryStore()
    pen = publisher(store, job)
    for number in range(500):
        pen.event(json.dumps({"text": str(number)}))
    close_when_written(pen, store, job, "499")
    events.trim(store, events_prefix(job), keep=120)
    assert texts(store, job) == [str(number) for number in range(380, 500)]


def test_whoever_writes_trims_now_and_then_however_much_is_written(job, monkeypatch):
    monkeypatch.setattr(events, "KEEP", 50)
    store = MemoryStore()
    pen = publisher(store, job)
    for number in range(900):
        pen.event(json.dumps({"text": str(number)}))
    close_when_written(pen, store, job, "899")
    kept = texts(store, job)
    assert len(kept) < 50 + 2 * events.TRIM_EVERY
    assert kept[-1] == "899"


def test_no_detail_takes_the_place_of_a_cause(job, monkeypatch):
    monkeypatch.setattr(events, "KEEP", 20)
    monkeypatch.setattr(events, "KEEP_DETAILS", 30)
    store = MemoryStore()
    pen = publisher(store, job)
    journal = Journal("a", publish=pen.event)
    journal.tell("exit", "rank 3: ValueError: no", rank=3)
    for number in range(400):
        journal.tell("left", f"rank {number} left")
    journal.tell("activate", "the next round")
    close_when_written(pen, store, job, "the next round")
    kept = texts(store, job)
    assert (kept[0], kept[-1]) == ("rank 3: ValueError: no", "the next round")
    assert len(kept) < 20 + 30 + 2 * events.TRIM_EVERY


RECOVERY = [
    *(("exit", logging.INFO, {"symptom": True}) for _ in range(8)),
    ("stop", logging.INFO, {}),
    ("left", logging.INFO, {}),
    ("start", logging.INFO, {}),
    *(("worker", logging.DEBUG, {}) for _ in range(8)),
]
"""What each agent with eight workers tells when another one is lost."""


@pytest.mark.parametrize(("nodes", "told"), [(4, 11), (1000, 0)])
def test_what_every_node_tells_of_a_recovery_is_for_the_store_in_small_jobs_alone(nodes, told):
    published = []
    journal = Journal("a", publish=lambda line, kept: published.append(kept))
    journal.nodes = nodes
    for event, level, facts in RECOVERY:
        journal.tell(event, "", level=level, **facts)
    assert published == [Retention.DETAIL] * told
    journal.tell("interrupt", "lost node b; restart 1 of 2", level=logging.WARNING)
    journal.tell("exit", "rank 3: ValueError: no", rank=3)
    cause = Retention.STORY if nodes == 4 else Retention.DETAIL
    assert published[told:] == [Retention.STORY, cause]


def test_a_reader_that_follows_gets_the_past_then_the_present_and_a_sign_in_silence(store, job):
    pen = publisher(store, job)
    pen.event(json.dumps({"text": "before"}))
    wait_for(lambda: texts(store, job), 60, "the first event")
    news = events.follow(store, job)
    assert next(news).record["text"] == "before"
    assert next(news) is None
    pen.event(json.dumps({"text": "after"}))
    assert next(event for event in news if event).record["text"] == "after"
    pen.close()
    news.close()


class ForgetfulStore(MemoryStore):
    """Its history is compacted just before a watch begins."""

    def __init__(self, late_event):
        super().__init__()
        self._late_event = late_event

    def watch(self, prefix, on_changes, **how):
        self.put(prefix + "late", self._late_event)
        self.compact(self.put("other", ""))
        return super().watch(prefix, on_changes, **how)


def test_a_reader_whose_history_was_compacted_misses_nothing_and_gets_nothing_twice(job):
    store = ForgetfulStore(json.dumps({"text": "late"}))
    store.put(events_prefix(job) + "early", json.dumps({"text": "early"}))
    news = events.follow(store, job)
    assert [next(news).record["text"] for _ in range(2)] == ["early", "late"]
    assert next(news) is None
    news.close()


class ReplacedStore(MemoryStore):
    """From `be` on, another cluster answers in its place: the watch begins anew."""

    of = (1, None)

    def range(self, prefix, *, limit=0):
        cluster, other = self.of
        found = other.range(prefix) if other else super().range(prefix)
        return dataclasses.replace(found, cluster=cluster)

    def watch(self, prefix, on_changes, *, on_compacted, **how):
        self.begin_anew = on_compacted
        return super().watch(prefix, on_changes, on_compacted=on_compacted, **how)

    def be(self, cluster, other):
        self.of = (cluster, other)
        self.begin_anew(other.range("").revision)


@pytest.mark.parametrize("cluster", [2, 1], ids=["another one", "an older state of the same"])
def test_a_reader_goes_on_with_the_etcd_that_takes_the_place_of_another(job, cluster):
    store = ReplacedStore()
    store.put(events_prefix(job) + "first", json.dumps({"text": "first"}))
    copy = store.clone()
    for number in range(3):
        store.put(f"{events_prefix(job)}{number}", json.dumps({"text": number}))
    news = events.follow(store, job)
    assert [next(news).record["text"] for _ in range(4)] == ["first", 0, 1, 2]
    copy.put(events_prefix(job) + "third", json.dumps({"text": "third"}))
    store.be(cluster, copy)
    assert next(news).record["text"] == "third"
    assert next(news) is None
    news.close()


class SilentStore(MemoryStore):
    """Answers nothing until it is told to."""

    def __init__(self):
        super().__init__()
        self.answers = threading.Event()

    def put(self, key, value, *, lease=0):
        if not self.answers.wait(30):
            raise StoreUnavailable("silence")
        return super().put(key, value, lease=lease)


def test_an_agent_goes_on_while_the_store_is_silent_and_the_story_stays_bounded(job):
    store = SilentStore()
    pen = publisher(store, job)
    for number in range(3000):
        pen.event(json.dumps({"text": str(number)}))  # returns, or this test would take for ever
    store.answers.set()
    wait_for(lambda: len(texts(store, job)) >= KEEP, 60, "what was queued")
    assert texts(store, job)[:3] == ["0", "1", "2"], "in order; what did not fit is dropped"
    assert len(texts(store, job)) <= KEEP + 1
    pen.close()


class AwayStore(MemoryStore):
    """Cannot be reached from here while it is away."""

    away = False

    def put(self, key, value, *, lease=0):
        if self.away:
            raise StoreUnavailable("away")
        return super().put(key, value, lease=lease)


def test_what_is_told_while_the_store_is_away_is_written_when_it_answers_again(job):
    """However long that takes, and although much else is to be written meanwhile."""
    store, clock = AwayStore(), ManualClock()
    pen, lease = publisher(store, job, clock=clock), store.grant(3600)
    store.away = True
    for step in range(2000):
        clock.advance(2.0)
        pen.progress(Progress(step=step, samples=0, loss=0.0), lease=lease, nodes=1)
    Journal("a", publish=pen.event).tell("exit", "rank 3: ValueError: no", rank=3)
    begins = json.dumps({"time": time.time(), "text": "another node tells of the next round"})
    MemoryStore.put(store, f"{events_prefix(job)}b.1.1", begins)
    store.away = False
    wait_for(lambda: len(texts(store, job)) == 2, 60, "the event")
    assert texts(store, job) == ["rank 3: ValueError: no", json.loads(begins)["text"]]
    (shown,) = [i for i in store.range(progress_prefix(job)).items if i.key.endswith("/a")]
    assert json.loads(shown.value)["step"] == 1999
    pen.close()


def test_a_store_that_refuses_costs_the_event_and_not_the_next_one(job):
    store = MemoryStore()
    pen = publisher(store, job)
    pen.progress(Progress(step=1, samples=8, loss=1.0), lease=999, nodes=1)  # no such lease
    pen.event(json.dumps({"text": "goes on"}))
    close_when_written(pen, store, job, "goes on")
    assert texts(store, job) == ["goes on"]
    assert store.range(progress_prefix(job)).items == ()


def test_progress_is_written_every_two_seconds_and_rarer_the_more_nodes_there_are(job):
    store, clock = MemoryStore(), ManualClock()
    pen = publisher(store, job, clock=clock)
    key, lease = progress_prefix(job) + "a", store.grant(60)

    def shown(step: int) -> int:
        pen.progress(Progress(step=step, samples=0, loss=0.0), lease=lease, nodes=5)
        pen.event(json.dumps({"text": str(step)}))
        wait_for(lambda: texts(store, job)[-1:] == [str(step)], 60, "the queue to be empty")
        return json.loads(store.get(key).value)["step"]

    assert shown(1) == 1
    clock.advance(4.9)
    assert shown(2) == 1
    clock.advance(0.1)
    assert shown(3) == 3
    pen.close()


def test_progress_is_written_again_when_its_agent_has_a_new_lease(job):
    """A job that is stuck takes no step, and its processes are shown all the same."""
    store, clock = MemoryStore(), ManualClock()
    pen, before = publisher(store, job, clock=clock), store.grant(60)
    key = progress_prefix(job) + "a"
    pen.progress(None, lease=before, nodes=1, pids={3: 77})
    wait_for(lambda: store.get(key), 60, "the progress")
    store.revoke(before)
    clock.advance(2.0)
    after = store.grant(60)
    pen.progress(None, lease=after, nodes=1, pids={3: 77})
    wait_for(lambda: store.get(key), 60, "the progress under the new lease")
    assert store.get(key).lease == after
    pen.close()


def test_a_sign_of_life_stays_when_its_agent_goes_and_is_rare(job):
    store, clock = MemoryStore(), ManualClock()
    pen = publisher(store, job, clock=clock)
    for nodes in (0, 1, 1):
        pen.alive(nodes=nodes)
    wait_for(lambda: store.get(seen_key(job)), 60, "a sign of life")
    clock.advance(30)
    pen.alive(nodes=1)
    wait_for(lambda: store.get(seen_key(job)).mod_revision == 2, 60, "the second")
    pen.close()
    assert store.get(seen_key(job)).lease == 0


def test_a_node_has_one_goodput_ledger_that_its_next_agent_continues(job):
    store, clock = MemoryStore(), ManualClock()
    key = goodput_prefix(job) + "a"
    for _ in range(2):
        pen = publisher(store, job, clock=clock)
        pen.goodput(lambda: {Use.USEFUL: 10}, nodes=1, last=False)
        pen.goodput(lambda: {Use.USEFUL: 99}, nodes=1, last=False)  # too soon
        pen.goodput(lambda: {Use.USEFUL: 20, Use.IDLE: 1}, nodes=1, last=True)
        pen.close()
    assert read_goodput(store.get(key)) == {Use.USEFUL: 40, Use.IDLE: 2}
    assert read_goodput(None) == {}


def test_two_keys_of_one_pace_are_due_each_at_its_own_time(store, job):
    paces = [Paced(every_s=5.0), Paced(every_s=5.0)]
    with contextlib.closing(publisher(store, job)) as pen:
        assert [pen._is_due(pace) for pace in (*paces, *paces)] == [True, True, False, False]
