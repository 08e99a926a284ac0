"""What the page draws over time: bands without a step, and the timelines of nodes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.goodput import Begins, Doing, Stepped
from zero_orchestrator.observe.story import bands, recoveries
from zero_orchestrator.observe.timeline import Phase, Span, Timeline, intervals

STEP_S, USUAL_NS = 2.0, 2_000_000_000


def story(rounds, *, end_s: float):
    """The events of rounds, each `(ended by, from its start to its end, to the next start)`."""
    events, at_s = [], 0.0
    for number, (end, ran_s, formed_s, stepped) in enumerate(rounds, start=1):
        start = {"time": at_s, "node": "a", "round": number, "event": "activate", "text": ""}
        events.append(Event(len(events), start))
        at_s += ran_s
        record = {"time": at_s, "node": "a", "round": number, "event": end, "text": ""}
        if stepped:
            record["idle_s"] = ran_s / 2
        events.append(Event(len(events), record))
        at_s += formed_s
    return [event for event in events if event.record["time"] <= end_s]


ROUND = st.tuples(
    st.sampled_from(["interrupt", "form"]),
    st.floats(0.1, 50),
    st.floats(0.1, 9),
    st.booleans(),
)


def union(spans):
    """The time in any of some spans, as disjoint ones."""
    made = []
    for from_s, to_s in sorted(spans):
        if made and from_s <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], to_s))
        elif to_s > from_s:
            made.append((from_s, to_s))
    return made


@given(st.lists(ROUND, max_size=12), st.lists(st.floats(0, 400), max_size=30), st.floats(1, 400))
def test_bands_never_overlap_and_have_all_time_without_a_step_once(rounds, steps, end_s):
    steps_s = sorted(steps)
    found = recoveries(story(rounds, end_s=end_s))
    made = bands(found, steps_s, end_s)
    assert all(a.to_s <= b.from_s for a, b in pairwise(made))
    assert [one for band in made for one in band.recoveries] == list(found), "each is in one band"

    def until_s(place: int) -> float:
        """The first step after a recovery; that of the next round's, if only its end is known."""
        told_s = found[place].events[-1].record["time"]
        later = [step_s for step_s in steps_s if step_s >= told_s]
        if place + 1 < len(found) and found[place + 1].stepped:
            later.append(found[place + 1].from_s)
        return max(found[place].from_s, min([*later, end_s]))

    lost = [(one.from_s, until_s(place)) for place, one in enumerate(found)]
    assert union((band.from_s, band.to_s) for band in made) == union(lost)


def test_30_failures_in_a_row_are_one_band_that_ends_with_the_job():
    rounds = [("interrupt", 5.0, 1.0, number == 0) for number in range(30)]
    (band,) = bands(recoveries(story(rounds, end_s=500.0)), [1.0, 2.5], 179.0)
    assert (len(band.recoveries), band.from_s, band.to_s, band.over) == (30, 2.5, 179.0, False)


def test_a_failure_that_another_one_ended_is_over_with_the_first_step_after_both():
    rounds = [
        ("interrupt", 5.0, 1.0, True),
        ("interrupt", 5.0, 1.0, False),
        ("form", 9.0, 1.0, True),
    ]
    first, second = bands(recoveries(story(rounds, end_s=500.0)), [1.0, 14.0, 15.0, 25.0], 30.0)
    assert (len(first.recoveries), first.from_s, first.to_s, first.over) == (2, 2.5, 14.0, True)
    assert (len(second.recoveries), second.to_s, second.over) == (1, 25.0, True)


def test_a_round_whose_steps_are_not_known_but_told_of_ends_the_band_before_it():
    """A history of a long job has few points, and a timeline few spans."""
    rounds = [("interrupt", 5.0, 1.0, True), ("interrupt", 40.0, 1.0, True)]
    first, second = bands(recoveries(story(rounds, end_s=500.0)), [], 60.0)
    assert (first.to_s, first.over) == (26.0, True)
    assert (second.from_s, second.to_s, second.over) == (26.0, 60.0, False)


SPANS = st.lists(st.tuples(st.floats(0, 100), st.sampled_from(Phase)), max_size=12)


@given(SPANS, st.floats(0, 100))
def test_the_spans_of_a_timeline_are_in_order_without_gaps_and_none_overlaps(starts, end_s):
    drawn = intervals([Span(from_s=from_s, phase=phase) for from_s, phase in starts], end_s)
    assert all(from_s < to_s for from_s, to_s, _ in drawn)
    assert all(a[1] == b[0] for a, b in pairwise(drawn))
    assert not drawn or drawn[-1][1] == end_s


def ran(*took_s: float) -> Timeline:
    """The timeline of a node whose steps took so long."""
    timeline, now_s = Timeline(until_s=0.0).begin(Phase.STARTING, 0.0), 10.0
    timeline = timeline.add(Begins(at_ns=0, doing=Doing.RUNNING), now_s)
    for step, length_s in enumerate(took_s, start=1):
        now_s += length_s
        timeline = timeline.add(Stepped(at_ns=0, step=step, usual_ns=USUAL_NS), now_s)
    return timeline


def drawn(timeline: Timeline, end_s: float):
    return [(f, t, str(p)) for f, t, p in intervals(timeline.spans, end_s)]


def test_a_step_that_takes_unusually_long_is_stuck_after_the_usual_time():
    timeline = ran(5.0, STEP_S, STEP_S, 60.0, STEP_S)
    expected = [(0, 15, "starting"), (15, 21, "training"), (21, 79, "stuck"), (79, 90, "training")]
    assert drawn(timeline, 90.0) == expected


def test_a_step_that_has_not_ended_is_stuck_now_and_until_its_round_is():
    timeline = ran(5.0, STEP_S)
    expected = [(0, 15, "starting"), (15, 19, "training")]
    assert drawn(timeline.shown(25.0, reports=True), 25.0) == [*expected[:1], (15, 25, "training")]
    assert drawn(timeline.shown(50.0, reports=True), 50.0) == [*expected, (19, 50, "stuck")]
    ended = timeline.add(Begins(at_ns=0, doing=Doing.FORMING), 60.0)
    assert drawn(ended, 70.0) == [*expected, (19, 60, "stuck"), (60, 70, "recovering")]


def test_a_save_that_waits_is_one_save_however_often_its_worker_says_so():
    timeline, now_s = ran(5.0, STEP_S), 17.0
    for _ in range(200):
        now_s += 5.0
        timeline = timeline.add(
            Stepped(at_ns=0, step=2, saving_ns=5_000_000_000, usual_ns=USUAL_NS), now_s
        )
    assert drawn(timeline, now_s) == [
        (0, 15, "starting"),
        (15, 17, "training"),
        (17, now_s, "saving"),
    ]
