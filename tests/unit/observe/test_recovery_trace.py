"""The file of a job's recoveries for Perfetto: of a known job, and of any history."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.pictured import disturbed
from tests.support.trace_format import slices
from zero_contract.journal import EVENTS
from zero_orchestrator.ctl.page import picture as pictures
from zero_orchestrator.observe.events import Event
from zero_orchestrator.observe.recovery_trace import shift_s, trace
from zero_orchestrator.observe.story import bands, phases, recoveries

T0 = 1_795_446_000.0
WAY_A = [["starting", 0.5], ["meeting the other ranks", 0.25], ["first step", 0.5]]
WAY_B = [["starting", 0.25], ["meeting the other ranks", 0.25], ["first step", 0.5]]
TOLD = [
    (0.0, "c", 1, "exit", {}),
    (0.25, "a", 1, "interrupt", {"idle_s": 0.5, "text": "rank 2 failed"}),
    (0.75, "a", 2, "activate", {}),
    (0.75, "a", 2, "start", {"stopped_s": T0 + 0.5}),
    (1.0, "b", 2, "start", {"stopped_s": T0 + 0.5}),
    (1.5, "a", 2, "restore", {"load_s": 0.25, "text": "the workers resume from step 3"}),
    (2.0, "a", 2, "first step", {"ranks": {"0": WAY_A}}),
    (2.0, "b", 2, "first step", {"ranks": {"1": WAY_B}}),
]


def told(*, b_ahead_s: float = 0.0) -> list[Event]:
    """Node c loses its worker; the clock of b is ahead."""
    found = []
    for n, (at_s, node, of, kind, facts) in enumerate(TOLD, 1):
        ahead_s = b_ahead_s if node == "b" else 0.0
        record = {"time": T0 + at_s + ahead_s, "node": node, "round": of, "event": kind, **facts}
        if "stopped_s" in facts:
            record["stopped_s"] += ahead_s
        found.append(Event(n, record))
    return found


def shown(events: list[Event], first_step_s: float = 2.0) -> dict:
    """Process and thread -> what it did from when to when, in seconds since T0."""
    lost = bands(recoveries(events), [T0 + first_step_s], T0 + 100)
    return {
        thread: [
            (name, round(from_us / 1e6 - T0, 3), round(to_us / 1e6 - T0, 3))
            for name, from_us, to_us in of
        ]
        for thread, of in slices(trace(events, lost)).items()
    }


def test_a_recovery_shows_its_phases_and_what_each_agent_and_each_rank_did():
    found = shown(told())
    assert found["job", "recoveries"] == [
        ("recovery: exit", -0.25, 2.0),
        ("detection", -0.25, 0.25),
        ("meeting", 0.25, 0.75),
        ("starting", 0.75, 1.25),
        ("loading", 1.25, 1.5),
        ("first step", 1.5, 2.0),
    ]
    assert found["b", "agent"] == [
        ("stopping the workers", 0.25, 0.5),
        ("forming the round", 0.5, 1.0),
    ]
    assert found["a", "rank 0"] == [
        ("starting", 0.75, 1.25),
        ("meeting the other ranks", 1.25, 1.5),
        ("first step", 1.5, 2.0),
    ]
    assert [to_s for _, _, to_s in found["b", "rank 1"]] == [1.25, 1.5, 2.0]


def test_the_first_sign_of_the_failure_is_an_instant_over_all_nodes():
    events = told()
    file = trace(events, bands(recoveries(events), [T0 + 2], T0 + 100))
    instants = [(e["name"], e["s"]) for e in file["traceEvents"] if e["ph"] == "i"]
    assert instants[:2] == [("exit", "g"), ("interrupt", "t")]


@pytest.mark.parametrize("ahead_s", [-3600.0, -1.0, 1.0, 3600.0])
def test_a_clock_that_is_wrong_is_shifted_until_the_round_begins_between_stop_and_start(ahead_s):
    found = shown(told(b_ahead_s=ahead_s))
    (_, _, stopped_s), (_, _, start_s) = [("", 0, 0.25), *found["b", "agent"]][-2:]
    assert stopped_s <= 0.75 <= start_s
    assert found["a", "agent"] == shown(told())["a", "agent"]


def test_clocks_that_agree_are_not_shifted():
    begins, start = told()[2].record, told()[4].record
    assert shift_s(begins, start) == 0.0
    assert shift_s({}, start) == 0.0


def test_the_phases_of_a_page_and_of_its_file_are_together_as_long_as_the_recovery():
    records = disturbed()
    now_s = records.status.members[0].step_time_s
    page = pictures.picture(records, now_s=now_s)["recoveries"]
    file = slices(trace(records.events, pictures.without_steps(records, now_s=now_s)))
    mine = file["job", "recoveries"]
    wholes = [one for one in mine if one[0].startswith("recovery")]
    assert len(page) == len(wholes) == 2
    for one, (_, from_us, to_us) in zip(page, wholes, strict=True):
        whole_s = one["to_s"] - one["from_s"]
        assert (to_us - from_us) / 1e6 == pytest.approx(whole_s, abs=1e-5)
        assert sum(took_s for _, took_s, _ in one["phases"]) == pytest.approx(whole_s, abs=1e-2)


_KINDS = st.sampled_from([*EVENTS, "?"])
_SECONDS = st.floats(-100, 100)
_ODD = [
    (1.0, "a", 1, "interrupt", {}),
    (2.0, "a", 2, "start", {}),
    (3.0, "a", 2, "first step", {"ranks": {"0": [("imports", 1e308), ("load", float("nan"))]}}),
]
_FACTS = st.fixed_dictionaries(
    {},
    optional={
        "idle_s": _SECONDS | st.none(),
        "stopped_s": _SECONDS | st.text(max_size=2),
        "load_s": _SECONDS,
        "text": st.text(max_size=3),
        "ranks": st.dictionaries(
            st.integers(0, 3).map(str) | st.just("x"),
            st.lists(st.tuples(st.text(max_size=2), _SECONDS), max_size=3),
            max_size=3,
        )
        | st.none(),
    },
)
_HISTORIES = st.lists(
    st.tuples(_SECONDS, st.sampled_from("abc"), st.integers(0, 4), _KINDS, _FACTS), max_size=30
)


@given(_HISTORIES, st.lists(_SECONDS, max_size=5), _SECONDS)
@example(_ODD, [], 5.0)
def test_any_history_gives_a_valid_file_whose_phases_fill_each_recovery(history, steps_s, end_s):
    events = [
        Event(n, {"time": at_s, "node": node, "round": of, "event": kind, **facts})
        for n, (at_s, node, of, kind, facts) in enumerate(history)
    ]
    lost = bands(recoveries(events), sorted(steps_s), end_s)
    file = json.loads(json.dumps(trace(events, lost)))
    found = slices(file)
    mine = found.get(("job", "recoveries"), [])
    assert sum(name.startswith("recovery: ") for name, _, _ in mine) == len(lost)
    for band in lost:
        parts = phases(band)
        assert (parts[0].from_s, parts[-1].to_s) == (band.from_s, band.to_s)
        assert all(a.to_s == b.from_s for a, b in pairwise(parts))
        assert all(part.from_s <= part.to_s for part in parts)
