"""The goodput ledger: every nanosecond of a node has one use, and the uses say the truth."""

from collections.abc import Mapping
from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from zero_orchestrator.observe.goodput import (
    Begins,
    Doing,
    Ledger,
    Mark,
    Stepped,
    Use,
    add_up,
    from_record,
    goodput,
    in_parts,
    to_record,
    total_ns,
)

TIMES = st.integers(0, 10**15)
MARKS = st.one_of(
    st.builds(
        Begins,
        at_ns=TIMES,
        doing=st.sampled_from(Doing),
        reached=st.integers(0, 5),
        reports=st.booleans(),
    ),
    st.builds(
        Stepped,
        at_ns=TIMES,
        step=st.integers(0, 5),
        saving_ns=st.sampled_from([0, 1, 10**12, 10**16]),
        usual_ns=st.sampled_from([0, 10**9, 10**11]),
    ),
)


def after(*marks: Mark) -> Mapping[Use, int]:
    """The settled time of a node that has just run through these marks, from 0 ns on."""
    return reduce(Ledger.add, marks, Ledger(at_ns=0)).used_ns


def at(at_ns: int, doing: Doing, reached: int = 0, *, reports: bool = True) -> Begins:
    return Begins(at_ns=at_ns, doing=doing, reached=reached, reports=reports)


def step(at_ns: int, number: int, saving_ns: int = 0) -> Stepped:
    return Stepped(at_ns=at_ns, step=number, saving_ns=saving_ns)


def test_a_stall_inside_of_a_step_is_stuck_time_and_no_useful_step_while_it_lasts_and_after():
    """A step takes a second; one takes 113 s and ends by itself."""
    seconds, usual_ns = 10**9, 10**9
    steps = [
        Stepped(at_ns=at_s * seconds, step=number, usual_ns=usual_ns)
        for number, at_s in enumerate((10, 11, 12), start=1)
    ]
    ledger = reduce(Ledger.add, [at(0, Doing.RUNNING), *steps], Ledger(at_ns=0))
    meanwhile = ledger.shown(100 * seconds, usual_ns=usual_ns)
    assert (meanwhile[Use.USEFUL], meanwhile[Use.STUCK]) == (3 * seconds, 87 * seconds)
    ended = ledger.add(Stepped(at_ns=125 * seconds, step=4, usual_ns=usual_ns)).used_ns
    assert (ended[Use.USEFUL], ended[Use.STUCK]) == (3 * seconds, 112 * seconds)
    assert total_ns(ended) == 125 * seconds
    long = ledger.add(Stepped(at_ns=27 * seconds, step=4, usual_ns=usual_ns)).used_ns
    assert Use.STUCK not in long, "15 s are no stall"


@given(nodes=st.lists(st.tuples(TIMES, st.lists(MARKS)), max_size=4), later_ns=TIMES)
def test_the_uses_add_up_to_the_wall_time_whatever_happens(nodes, later_ns):
    shown, wall_ns = [], 0
    for began_ns, marks in nodes:
        ledger = Ledger(at_ns=began_ns)
        for mark in marks:
            before_ns = ledger.at_ns
            ledger = ledger.add(mark)
            assert ledger.at_ns == max(before_ns, mark.at_ns)
            assert ledger.total_ns == ledger.at_ns - began_ns
        end_ns = max(ledger.at_ns, later_ns)
        shown.append(ledger.shown(later_ns))
        assert total_ns(shown[-1]) == end_ns - began_ns
        assert all(time_ns > 0 for time_ns in shown[-1].values())
        wall_ns += end_ns - began_ns
    assert total_ns(add_up(shown)) == wall_ns


def test_an_undisturbed_run_is_useful_steps_between_its_start_and_its_end():
    assert after(
        at(10, Doing.WAITING),
        at(30, Doing.FORMING),
        at(31, Doing.RUNNING),
        step(40, 1),
        step(45, 2),
        step(57, 3, saving_ns=5),
        at(60, Doing.ENDING),
        at(61, Doing.ENDING),
    ) == {
        Use.WAITING: 20,
        Use.STARTING: 10 + 1 + 9 + 3 + 1,
        Use.USEFUL: 5 + 7,
        Use.SAVING: 5,
    }


def test_a_failure_costs_the_re_forming_up_to_the_next_step_and_the_steps_that_were_lost():
    assert after(
        at(0, Doing.RUNNING),
        step(1, 1),
        step(11, 2),
        step(21, 3),
        at(25, Doing.FORMING, 3),  # 4 ns of step 4 are lost with it
        at(26, Doing.RUNNING, 3),  # from the checkpoint of step 1
        step(30, 2),
        step(40, 3),
        step(50, 4),
    ) == {
        Use.STARTING: 1,
        Use.USEFUL: 20 + 10,
        Use.REFORMING: 4 + 1 + 4,
        Use.REPEATED: 10,
    }


def test_a_node_that_joins_later_repeats_steps_that_only_others_had_finished():
    used_ns = after(
        at(5, Doing.IDLE),
        at(9, Doing.RUNNING, 7),
        step(10, 6),
        step(20, 7),
        step(30, 8),
    )
    assert used_ns == {Use.STARTING: 5 + 1, Use.IDLE: 4, Use.REPEATED: 10, Use.USEFUL: 10}


def test_a_save_after_the_last_step_is_a_save_stall():
    used_ns = after(
        at(0, Doing.RUNNING),
        step(1, 1),
        step(3, 2),
        step(9, 2),  # it waits for a slow peer, and says so
        step(13, 2, saving_ns=8),
        at(14, Doing.ENDING),
    )
    assert used_ns == {Use.STARTING: 1 + 3, Use.USEFUL: 2, Use.SAVING: 8}


def test_workers_that_report_no_steps_are_not_taken_for_useful_ones():
    used_ns = after(at(0, Doing.RUNNING), at(50, Doing.ENDING, reports=False))
    assert used_ns == {Use.UNREPORTED: 50}
    assert goodput(used_ns) == 0


def test_the_step_that_runs_counts_as_what_it_will_be():
    ledger = reduce(Ledger.add, [at(0, Doing.RUNNING, 2), step(1, 1)], Ledger(at_ns=0))
    assert ledger.shown(5) == {Use.STARTING: 1, Use.REPEATED: 4}
    assert ledger.add(step(5, 2)).shown(8) == {Use.STARTING: 1, Use.REPEATED: 4, Use.USEFUL: 3}


def test_a_ledger_is_told_with_its_largest_part_first_and_kept_as_nanoseconds():
    used_ns = {Use.IDLE: 100, Use.USEFUL: 700, Use.REFORMING: 200}
    assert in_parts(used_ns) == "70.0 % useful steps, 20.0 % re-forming, 10.0 % idle"
    assert in_parts({}) == "no time yet"
    silent = {Use.STARTING: 1, Use.UNREPORTED: 3}
    assert in_parts(silent) == "75.0 % unreported, 25.0 % starting and ending"
    assert to_record(used_ns) == {"idle": 100, "useful_steps": 700, "re_forming": 200}
    assert from_record(to_record(used_ns)) == used_ns
    assert from_record({"warming_up": 3}) == {Use.UNREPORTED: 3}
