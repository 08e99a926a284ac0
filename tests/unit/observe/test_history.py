"""The history of a job and the timelines of its nodes: bounded, and nothing of weight is lost."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_for
from zero_agent.loop.observed.telemetry import JobHistory
from zero_contract import worker
from zero_contract.decoding import decode
from zero_contract.worker import CommitRequest, Progress
from zero_orchestrator.membership.job_state import Members, Node, Snapshot
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import history as histories
from zero_orchestrator.observe import timeline as timelines
from zero_orchestrator.observe.events import (
    GOODPUT,
    Publisher,
    goodput_prefix,
    history_key,
    read_goodput,
    read_history,
    read_timeline,
)
from zero_orchestrator.observe.goodput import Begins, Doing, Stepped, Use
from zero_orchestrator.observe.history import CHECKPOINTS, POINTS, History, Saved
from zero_orchestrator.observe.pace import Quantiles, quantiles
from zero_orchestrator.observe.timeline import SPANS, Phase, Timeline


def trained(steps: range, history: History | None = None) -> History:
    history = history or History()
    for step in steps:
        history = history.stepped(step, time_s=float(step), samples=8 * step, workers=2, loss=step)
    return history


@pytest.mark.parametrize("steps", [0, 1, POINTS, POINTS + 1, 10_000])
def test_a_history_of_any_length_is_bounded_and_has_each_step_once(steps):
    history = trained(range(1, steps + 1))
    assert len(history.points) <= POINTS
    assert sum(point.losses for point in history.points) == steps
    assert [point.step for point in history.points[-1:]] == [steps][: min(steps, 1)]
    assert all(point.low <= point.loss <= point.high for point in history.points)
    mean = sum(point.loss * point.losses for point in history.points) / max(steps, 1)
    assert mean == pytest.approx((steps + 1) / 2 if steps else 0)
    record = json.loads(json.dumps(histories.to_record(history)))
    assert histories.to_record(decode(History, record, "a history")) == record


def test_a_spike_of_one_step_among_thousands_is_kept():
    history = History()
    for step in range(1, 5000):
        loss = 99.0 if step == 2345 else 1.0
        history = history.stepped(step, time_s=step, samples=0, workers=1, loss=loss)
    assert max(point.high for point in history.points) == 99.0


def test_a_repeated_step_counts_once_and_a_loss_that_is_not_finite_is_a_gap():
    history = trained(range(1, 5))
    assert trained(range(3, 5), history) == history
    history = history.stepped(5, time_s=5.0, samples=0, workers=1, loss=math.nan)
    assert (history.points[-1].loss, history.points[-1].losses) == (None, 0)
    json.dumps(histories.to_record(history), allow_nan=False)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 1500), min_size=2, max_size=2).map(sorted), st.integers(1, 700))
def test_the_next_agent_of_rank_0_continues_the_curve(bounds, back):
    middle, end = bounds
    before = trained(range(1, middle + 1))
    mine = trained(range(max(1, middle - back), end + 1))  # some steps are repeated
    whole = mine.after(before)
    steps = [point.step for point in whole.points]
    assert len(steps) <= POINTS
    assert steps == sorted(set(steps))
    assert steps[-1] == end


def test_the_newest_checkpoints_are_kept_and_all_are_counted():
    history = History()
    for step in range(CHECKPOINTS + 5):
        saved = Saved(step=step, tag="t", time_s=1.0, samples=1, digest="d")
        history = history.with_checkpoint(saved)
    assert (len(history.checkpoints), history.saved) == (CHECKPOINTS, CHECKPOINTS + 5)
    assert history.checkpoints[-1].step == CHECKPOINTS + 4


ME = Node(id="me", incarnation="1", address="me", slots=2)
OTHER = replace(ME, id="other")


def job(n: int, *nodes: Node) -> Snapshot:
    return Snapshot(JobSpec(min_nodes=1, max_nodes=2), n=n, members=Members(nodes))


def test_an_agent_knows_the_steps_of_one_worker_and_the_checkpoints_while_it_has_rank_0():
    mine = JobHistory()
    mine.look(job(1, ME), ME)
    mine.report(0, Progress(step=2, loss=2.0, samples=16))
    mine.report(1, Progress(step=2, loss=9.0))
    mine.saved(CommitRequest(request=1, step=2, tag="a", digest="d", samples=16, in_memory=True))
    mine.saved(CommitRequest(request=2, step=2, tag="b", digest="d", samples=16))
    (point,) = mine.history.points
    assert (point.step, point.loss, point.samples, point.workers) == (2, 2.0, 16, 2)
    assert [saved.tag for saved in mine.history.checkpoints] == ["b"]
    mine.look(job(2, OTHER, ME), ME)
    mine.report(3, Progress(step=3, loss=1.5))
    mine.look(job(3, ME), ME)
    assert (mine.reign, mine.leads) == (2, True)
    assert [point.step for point in mine.history.points] == [2, 3]
    assert mine.history.checkpoints == ()  # the record has them


def test_what_is_new_about_saves_that_fail_is_told_once():
    mine = JobHistory()
    mine.look(job(1, ME), ME)
    failed = worker.Saved(step=4, committed=False, problem="no space left")
    told = []
    for what in (
        structs.replace(failed, in_memory=True),
        failed,
        structs.replace(failed, step=8),
        worker.SaveWaits(step=8, what="room", left_s=3600.0),
        worker.SaveWaits(step=8, what="room", left_s=3595.0),
    ):
        (mine.waits if isinstance(what, worker.SaveWaits) else mine.written)(what)
        told.append(mine.news())
    mine.saved(CommitRequest(request=1, step=8, tag="b", digest="d", samples=16))
    mine.written(worker.Saved(step=8, committed=True))
    assert [*told, mine.news(), mine.news()] == [
        "",
        "saves: the last one failed: no space left",
        "",
        "saves: the last 2 failed: no space left; waiting for room, 60 min left",
        "",
        "checkpoints are saved again, after 2 that failed",
        "",
    ]


def test_a_checkpoint_has_the_times_and_the_size_of_its_save_on_disk_and_in_memory():
    mine = JobHistory()
    mine.look(job(1, ME), ME)
    mine.report(0, Progress(step=2, tokens=900))
    for number in range(3):
        request = CommitRequest(request=number, step=2, tag=f"m{number}", digest="d", samples=1)
        mine.saved(structs.replace(request, in_memory=number > 0))
    ended = worker.Saved(
        step=2, committed=True, whole_bytes=64, stall_s=0.5, write_s=2, publish_s=1
    )
    mine.written(structs.replace(ended, step=1))  # of a round before
    mine.written(structs.replace(ended, step=1, in_memory=True))
    mine.written(structs.replace(ended, committed=False, in_memory=True))
    assert (mine.history.written, mine.history.in_memory) == (None, None)
    mine.written(ended)
    mine.written(structs.replace(ended, in_memory=True, stall_s=0.125))
    (saved,) = mine.history.checkpoints
    assert (saved.size_bytes, saved.stall_s, saved.write_s, saved.publish_s) == (64, 0.5, 2, 1)
    assert mine.history.in_memory == replace(
        saved, tag="m2", stall_s=0.125, time_s=mine.history.in_memory.time_s
    )
    newer = mine.history.with_checkpoint(replace(saved, step=3, size_bytes=0))  # not ended
    assert newer.written == saved
    assert (mine.history.saved, mine.history.kept, mine.published) == (1, 2, {False: 1, True: 2})
    record = json.loads(json.dumps(histories.to_record(mine.history)))
    again = decode(History, record, "a history")
    assert (again.kept, again.points[-1].tokens) == (2, 900)
    assert again.checkpoints[0].size_bytes == 64
    assert (again.in_memory.stall_s, again.in_memory.tag) == (0.125, "m2")
    assert again.after(again).kept == 4
    mine.look(job(2, OTHER, ME), ME)
    mine.look(job(3, ME), ME)  # rank 0 is here again: the record has what came before
    assert mine.history.in_memory is None
    assert mine.history.after(again).in_memory == again.in_memory


def test_how_long_steps_take_is_known_of_the_whole_run_though_the_node_of_rank_0_is_lost():
    lost, mine = JobHistory(), JobHistory()
    for agent, node, took_s in ((lost, OTHER, 1.0), (mine, ME, 9.0)):
        agent.look(job(1, OTHER, ME), node)
        agent.report(0, Progress(step=1))
        for _ in range(3):  # the agent that does not lead leaves them to the other one
            agent.report(0, Progress(step=2), took_s)
            agent.report(1, Progress(step=2), 7.0)  # one rank counts
    written = decode(History, json.dumps(histories.to_record(lost.history)), "a history")
    mine.look(job(2, ME), ME)
    mine.report(0, Progress(step=3), 4.0)
    assert quantiles(mine.history.after(written).durations) == Quantiles(
        count=4, p50_s=1.0, p90_s=4.0, p99_s=4.0
    )


def test_a_history_of_an_older_version_is_read():
    history = trained(range(1, 4)).with_checkpoint(
        Saved(step=3, tag="t", time_s=1.0, samples=1, digest="d")
    )
    record = histories.to_record(history)
    del record["kept"], record["in_memory"], record["durations"]
    record["points"] = [one[:8] for one in record["points"]]
    del record["checkpoints"][0]["size_bytes"]
    assert decode(History, record, "a history") == history


def test_when_the_node_of_rank_0_is_lost_the_next_one_continues_its_curve_without_a_gap():
    lost, mine = JobHistory(), JobHistory()
    for agent, node, rank in ((lost, OTHER, 0), (mine, ME, 2)):
        agent.look(job(1, OTHER, ME), node)
        for step in range(1, 6):
            agent.report(rank, Progress(step=step, loss=1.0 / step))
            if agent is lost and step == 3:
                written = agent.history
    mine.look(job(2, ME), ME)
    for step in range(4, 8):  # 4 and 5 are repeated
        mine.report(0, Progress(step=step, loss=1.0 / step))
    whole = mine.history.after(written)
    assert [(p.step, p.loss) for p in whole.points] == [(n, 1.0 / n) for n in range(1, 8)]


def test_a_history_is_written_as_rarely_as_its_points_allow():
    store, clock = MemoryStore(), ManualClock()
    pen = Publisher(store, "gpt", "a", "1", clock)

    def kept(history):
        pen.history(history, reign=1, last=False)
        pen.event(json.dumps({"text": "written"}))
        wait_for(lambda: len(store.range("/zero/events/gpt/").items) == kept.count, 60, "the write")
        kept.count += 1
        return len(read_history(store.get(history_key("gpt"))).points)

    kept.count = 1
    hundreds = History()
    for step in range(1, 4):
        hundreds = hundreds.stepped(step, time_s=100.0 * step, samples=0, workers=1, loss=None)
    assert kept(hundreds) == 0  # the agent of the last rank 0 may still write
    clock.advance(GOODPUT.every_s)
    assert kept(hundreds) == 3
    clock.advance(GOODPUT.every_s)
    more = hundreds.stepped(4, time_s=400.0, samples=0, workers=1, loss=None)
    assert kept(more) == 4  # decided before the first write was done
    clock.advance(99.0)
    more = more.stepped(5, time_s=500.0, samples=0, workers=1, loss=None)
    assert kept(more) == 4
    clock.advance(1.0)
    assert kept(more) == 5
    pen.close()


# ---- timelines ----


def timeline_of(*marks: tuple[float, Doing | int | tuple[int, float]], reports=True) -> Timeline:
    timeline = Timeline(until_s=0.0).begin(Phase.STARTING, 0.0)
    for at_s, what in marks:
        if isinstance(what, Doing):
            mark = Begins(at_ns=0, doing=what, reports=reports)
        else:
            step, saving_s = what if isinstance(what, tuple) else (what, 0.0)
            mark = Stepped(at_ns=0, step=step, saving_ns=round(saving_s * 1e9))
        timeline = timeline.add(mark, at_s)
    return timeline


def phases(timeline: Timeline) -> list[tuple[float, str]]:
    return [(span.from_s, str(span.phase)) for span in timeline.spans]


def test_a_timeline_shows_a_start_training_a_save_and_a_recovery():
    timeline = timeline_of(
        (1, Doing.RUNNING),
        (3, 1),
        (4, 2),
        (6, (2, 1.5)),
        (7, 3),
        (8, Doing.FORMING),
        (8.5, Doing.RUNNING),
        (9, 4),
        (10, Doing.ENDING),
    )
    assert phases(timeline) == [
        (0.0, "starting"),
        (3, "training"),
        (4.5, "saving"),
        (6, "training"),
        (8, "recovering"),
        (9, "training"),
        (10, "starting"),
    ]
    kept = decode(timelines.KeptTimeline, timelines.to_record(timeline), "a timeline")
    assert timelines.from_record(kept).spans == timeline.spans


def test_steps_that_were_lost_are_repeated_until_the_first_new_one_begins():
    timeline = timeline_of((1, Doing.RUNNING), (2, 5), (3, 6), (4, 7), (5, Doing.RUNNING))
    for at_s, step in ((6.0, 5), (7.0, 6), (8.0, 7), (9.0, 8)):
        timeline = timeline.add(Stepped(at_ns=0, step=step), at_s)
    assert phases(timeline)[1:] == [
        (2, "training"),
        (5, "recovering"),
        (6, "repeating"),
        (8, "training"),
    ]


def test_workers_that_report_no_steps_train_as_long_as_they_run():
    timeline = timeline_of(
        (1, Doing.RUNNING), (5, Doing.FORMING), (6, Doing.RUNNING), reports=False
    )
    assert phases(timeline.shown(9, reports=False)) == [
        (0.0, "starting"),
        (1, "training"),
        (5, "starting"),
        (6, "training"),
    ]


def test_between_two_agents_a_node_was_gone():
    before = replace(timeline_of((1, Doing.RUNNING), (2, 1)), until_s=5.0)
    now = Timeline(until_s=9.0).begin(Phase.STARTING, 9.0)
    assert phases(now.after(before))[-2:] == [(5.0, "gone"), (9.0, "starting")]


def test_a_timeline_is_bounded_and_loses_saves_first():
    timeline = timeline_of((0.5, Doing.RUNNING), (1, 1))
    for hour in range(1, 500):
        at_s = 3600.0 * hour
        timeline = timeline.add(Stepped(at_ns=0, step=hour, saving_ns=20 * 10**9), at_s)
        if hour in (10, 100, 400):
            timeline = timeline.add(Begins(at_ns=0, doing=Doing.FORMING), at_s + 60)
            timeline = timeline.add(Stepped(at_ns=0, step=hour), at_s + 61)
    assert len(timeline.spans) <= SPANS
    found = [span.phase for span in timeline.spans]
    assert found.count(Phase.RECOVERING) == 3
    assert found.count(Phase.SAVING) > 20


def test_the_timeline_is_written_with_the_ledger_and_continued_by_the_next_agent():
    store, clock = MemoryStore(), ManualClock()
    for incarnation in "12":
        pen = Publisher(store, "gpt", "a", incarnation, clock)
        timeline = timeline_of((1, Doing.RUNNING), (2, 1))
        if incarnation == "2":
            timeline = Timeline(until_s=30.0).begin(Phase.STARTING, 30.0)
        pen.goodput(
            lambda: {Use.USEFUL: 7}, nodes=1, last=True, timeline=lambda timeline=timeline: timeline
        )
        pen.event(json.dumps({"text": incarnation}))
        count = int(incarnation)
        wait_for(
            lambda count=count: len(store.range("/zero/events/gpt/").items) == count, 60, "write"
        )
        pen.close()
    kept = store.get(goodput_prefix("gpt") + "a")
    assert read_goodput(kept) == {Use.USEFUL: 14}
    assert [str(span.phase) for span in read_timeline(kept).spans] == [
        "starting",
        "training",
        "gone",
        "starting",
    ]
