"""What failures cost a job, what comes back, and when it gives up: from its charges alone."""

from dataclasses import replace

import pytest

from tests.unit.orchestrator.test_rounds import (
    STEADY,
    TIMING,
    active,
    failed,
    forming,
    node,
    verdict,
)
from zero_orchestrator.membership.failures import (
    LONGEST_S,
    Charge,
    Exclusion,
    cooldown_s,
    due,
    fruitless,
    in_force,
)
from zero_orchestrator.membership.job_state import Members, Node, Snapshot, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.rounds import Move, decide, transaction
from zero_orchestrator.membership.spec import JobSpec

KEYS = Keys("job")


def charges(*facts: dict) -> tuple[Charge, ...]:
    return tuple(
        Charge(**{"n": n, "cause": "broke", "workers": True, **fact})
        for n, fact in enumerate(facts, start=1)
    )


def running(members: str, live: str | None = None, **facts) -> Snapshot:
    """A job in a round, with a budget of 9 and everything else as in `facts` of its spec."""
    spec = JobSpec(**{"min_nodes": 1, "max_nodes": 4, "max_restarts": 9, **facts})
    return replace(active(members, live), spec=spec, n=9, fence=90)


# ---- the budget ----


def test_a_restart_comes_back_when_enough_steps_have_been_committed_since():
    spent = charges({"committed": 10}, {"committed": 40})
    assert [in_force(spent, step, 50) for step in (40, 59, 60, 89, 90)] == [2, 2, 1, 1, 0]
    assert in_force(spent, 10**6, 0) == 2, "without --refill-after-steps never"


def test_a_job_goes_on_with_the_restart_that_came_back():
    job = replace(running("ab", max_restarts=1, refill_after_steps=50), failures=(failed("b"),))
    job = replace(job, charged=charges({"committed": 10}))
    assert verdict(replace(job, committed=59)) == (
        Move.FAIL,
        "b broke; all 1 restarts are spent; the next would come back at step 60 (--max-restarts)",
    )
    assert verdict(replace(job, committed=60)) == (Move.INTERRUPT, "b broke; restart 1 of 1")


def test_a_checkpoint_published_since_the_reading_is_not_overlooked():
    job = replace(running("ab", refill_after_steps=50), failures=(failed("b"),))
    job = replace(job, committed=10, committed_revision=44)
    compares, writes = transaction(KEYS, job, decide(job, STEADY, TIMING).transition)
    assert (KEYS.latest, 44) in [(c.key, c.revision) for c in compares]
    charge = next(w for w in writes if w.key == KEYS.charged(9))
    known = Charge(n=9, cause="b broke", committed=10, reached=10, workers=True, host="b")
    assert charge.value == known.to_json()


# ---- no progress ----


@pytest.mark.parametrize(
    ("before", "reached", "count"),
    [
        ((), 7, 0),
        (({"reached": 7}, {"reached": 7}), 7, 2),
        (({"reached": 3}, {"reached": 7}), 7, 1),
        (({"reached": 7}, {"reached": 7}), 8, 0),
        (({"reached": None}, {"reached": 0}), 0, 1),
        (({"reached": 7}, {"reached": 7, "workers": False}, {"reached": 7}), 7, 2),
        (({"reached": 7}, {"reached": 7, "workers": False, "symptom": True}), 7, 2),
        (({"reached": None}, {"reached": None}), None, 0),
    ],
)
def test_restarts_in_a_row_without_a_new_step_are_counted(before, reached, count):
    assert fruitless(charges(*before), reached) == count


def crashing(step: int | None, restarts: int) -> Snapshot:
    """A job whose worker fails once more after as many restarts, always after this step."""
    job = running("ab", max_restarts_without_progress=3)
    failure = replace(failed("b"), step=step)
    return replace(job, failures=(failure,), charged=charges(*[{"reached": step}] * restarts))


def test_a_crash_loop_ends_early_and_says_at_which_step():
    assert verdict(crashing(7, 2)) == (Move.INTERRUPT, "b broke; restart 3 of 9")
    assert verdict(crashing(7, 3)) == (
        Move.GIVE_UP,
        "b broke; no step after 7 was finished in 3 restarts in a row "
        "(--max-restarts-without-progress)",
    )


def test_a_step_that_is_new_gives_the_loop_its_patience_back():
    job = crashing(7, 3)
    further = replace(job, failures=(replace(job.failures[0], step=8),))
    assert verdict(further)[0] is Move.INTERRUPT
    assert verdict(replace(job, committed=8))[0] is Move.INTERRUPT


def test_workers_that_say_nothing_of_their_steps_are_not_judged():
    assert verdict(crashing(None, 8))[0] is Move.INTERRUPT


def test_lost_nodes_are_no_crash_loop():
    job = replace(crashing(7, 8), failures=(), nodes=(node("a"),))
    assert verdict(job)[0] is Move.INTERRUPT


def test_a_job_that_gives_up_has_failed_with_the_charge_written():
    job = crashing(7, 3)
    _, writes = transaction(KEYS, job, decide(job, STEADY, TIMING).transition)
    assert [write.key for write in writes] == [KEYS.round, KEYS.charged(9)]
    assert '"state": "FAILED"' in writes[0].value
    assert '"by": "give up"' in writes[0].value


# ---- exclusion ----


def test_a_host_is_excluded_when_its_workers_fail_in_a_row_and_longer_each_time():
    past = charges({"host": "b"}, {"host": "b", "excluded_s": 60}, {"host": "a"}, {"host": "b"})
    found = due(past, "b", after=2, first_s=60)
    assert found == Exclusion(host="b", why="its workers failed 2 times in a row", for_s=120)
    assert due(past[:1], "b", after=2, first_s=60).for_s == 60
    assert due(past[:3], "b", after=2, first_s=60) is None, "another host failed in between"
    assert due(past, "", after=2, first_s=60) is None, "nobody can be blamed"
    assert due(past, "b", after=0, first_s=60) is None, "it is switched off"


LOST, BROKE = {"host": "b", "workers": False}, {"host": "b"}
NOBODY = {"host": "", "workers": False}


@pytest.mark.parametrize(
    ("past", "lost", "why"),
    [
        ((), True, None),
        ((LOST,), True, "it was lost 2 times in a row"),
        ((LOST, NOBODY), True, "it was lost 2 times in a row"),
        ((BROKE,), True, "it was lost, or its workers failed, 2 times in a row"),
        ((LOST,), False, "it was lost, or its workers failed, 2 times in a row"),
        ((LOST, {"host": "a", "workers": False}), True, None),
        ((LOST, {"host": ""}), True, None),
    ],
)
def test_a_host_that_is_lost_again_is_excluded_as_one_whose_workers_fail(past, lost, why):
    found = due(charges(*past), "b", after=2, first_s=60, lost=lost)
    assert (found and found.why) == why


def test_a_machine_that_is_lost_once_is_never_excluded_for_it():
    assert due((), "b", after=1, first_s=60, lost=True) is None
    assert due((), "b", after=1, first_s=60) is not None


def on_machine(name: str, machine: str) -> Node:
    return replace(node(name), host=machine)


def test_the_next_pod_on_a_machine_that_was_lost_twice_is_excluded_with_it():
    """Kubernetes gives the replacement another name."""
    pods = (on_machine("train-0-x", "m1"), on_machine("train-1-x", "m2"))
    job = replace(running("ab", exclude_after=2), nodes=pods[:1], members=Members(pods))
    job = replace(job, charged=charges({"host": "m2", "workers": False}))
    decision = decide(job, STEADY, TIMING)
    assert decision.transition.charge.host == "m2"
    # It must not be the last machine: a job on one has nowhere else to go.
    assert decision.reason == (
        "lost node train-1-x; restart 2 of 9; m2 is excluded for 60 s: it was lost 2 times in a row"
    )
    again = on_machine("train-1-y", "m2")
    later = replace(job, nodes=(*pods[:1], again), exclusions=(decision.transition.exclusion,))
    assert [pod.id for pod in later.eligible] == ["train-0-x"]


def test_machines_that_are_lost_together_are_nobodys_fault():
    transition = decide(running("abc", "a"), STEADY, TIMING).transition
    assert (transition.move, transition.charge.host) == (Move.INTERRUPT, "")


def test_a_symptom_without_a_cause_costs_a_restart_and_is_no_crash_loop():
    job = running("ab", max_restarts_without_progress=3)
    symptom = replace(failed("b", symptom=True), step=7)
    past = charges(*[{"reached": 7, "workers": False}] * 5)
    found = decide(replace(job, failures=(symptom,), charged=past), STEADY, TIMING).transition
    assert (found.move, found.charge.workers, found.charge.host) == (Move.INTERRUPT, False, "")


def test_a_preempted_machine_is_free_even_if_it_goes_before_the_step_boundary():
    job = replace(running("abc", "a"), leaving=frozenset("bc"))
    assert verdict(job) == (
        Move.FORM,
        "b, c had to leave, and went before the step boundary; no restart is charged",
    )
    assert verdict(replace(job, leaving=frozenset("b"))) == (
        Move.INTERRUPT,
        "lost node c; restart 1 of 9",
    )


def test_no_exclusion_grows_without_limit():
    assert cooldown_s(charges(*[{"host": "b", "excluded_s": 60}] * 500), "b", 60) == LONGEST_S


def failing_twice(live: str, **facts) -> Snapshot:
    job = running("ab", live, exclude_after=2, **facts)
    return replace(job, failures=(failed("b"),), charged=charges({"host": "b"}))


def test_the_charge_and_the_exclusion_are_one_transaction():
    job = failing_twice("ab")
    decision = decide(job, STEADY, TIMING)
    assert decision.reason == (
        "b broke; restart 2 of 9; b is excluded for 60 s: its workers failed 2 times in a row"
    )
    _, writes = transaction(KEYS, job, decision.transition, lease=5)
    put = next(write for write in writes if write.key == KEYS.excluded("b"))
    assert put.lease == 5
    assert '"excluded_s": 60' in next(w for w in writes if w.key == KEYS.charged(9)).value


def test_an_exclusion_that_would_leave_too_few_nodes_is_not_made_and_that_is_said():
    decision = decide(failing_twice("ab", min_nodes=2), STEADY, TIMING)
    assert decision.transition.exclusion is None
    assert decision.reason == (
        "b broke; restart 2 of 9; b stays although its workers failed 2 times in a row: "
        "1 of 2:4 nodes would be left without it"
    )
    assert decide(failing_twice("abc", min_nodes=2), STEADY, TIMING).transition.exclusion
    alone = decide(replace(failing_twice("ab"), nodes=(node("b"),)), STEADY, TIMING)
    assert alone.transition.exclusion is None


def test_failures_on_several_hosts_are_nobodys():
    job = failing_twice("ab")
    job = replace(job, failures=(*job.failures, failed("a", revision=11)))
    assert decide(job, STEADY, TIMING).transition.exclusion is None


def test_a_spare_takes_the_place_of_an_excluded_node_at_once():
    job = replace(
        forming("abc", former="ab", quiet="ab", high=2),
        exclusions=(Exclusion(host="b", why="why", for_s=60),),
    )
    members = decide(job, STEADY, TIMING).transition.members.nodes
    assert [member.id for member in members] == ["a", "c"]


def test_a_node_may_come_back_when_its_exclusion_has_ended():
    job = replace(active("a", live="ab"), exclusions=(Exclusion(host="b", why="why"),))
    assert verdict(job) == (None, "round 1 runs on 1 node")
    assert verdict(replace(job, exclusions=())) == (Move.YIELD, "b joins")


def test_a_member_that_a_user_excludes_lets_the_workers_stop_at_a_boundary():
    exclusion = Exclusion(host="b", why="by me", for_s=60, by_user=True)
    job = replace(active("ab"), exclusions=(exclusion,))
    assert verdict(job) == (Move.YIELD, "b is excluded for 60 s: by me")


def test_a_host_that_the_job_has_excluded_is_better_than_none():
    excluded = (Exclusion(host="b", why="why", for_s=60),)
    alone = replace(forming("ab", former="ac", quiet="ac", low=2), exclusions=excluded)
    members = decide(alone, STEADY, TIMING).transition.members.nodes
    assert [member.id for member in members] == ["a", "b"]
    spec = JobSpec(min_nodes=2, max_nodes=4)
    running = replace(active("ab"), spec=spec, exclusions=excluded)
    assert verdict(running) == (None, "round 1 runs on 2 nodes")
    with_another = replace(running, nodes=tuple(map(node, "abc")))
    assert verdict(with_another) == (Move.YIELD, "b is excluded for 60 s: why")


def test_who_is_waited_for_in_vain_is_said():
    excluded = (Exclusion(host="b", why="by me", by_user=True),)
    job = replace(forming("ab", low=2), exclusions=excluded)
    assert verdict(job) == (
        None,
        "1 of 2:4 nodes are here; waiting for 1; b is excluded: by me",
    )
    unhealthy = replace(
        forming("ab", low=2), nodes=(node("a"), replace(node("b"), unhealthy="no disk"))
    )
    assert verdict(unhealthy)[1].endswith("; waiting for 1; b is unhealthy: no disk")


def test_an_exclusion_is_of_a_host_and_so_of_every_agent_on_it():
    nodes = (*(replace(node(name), host="h1") for name in "ab"), node("c"))
    job = Snapshot(
        JobSpec(min_nodes=1, max_nodes=4),
        state=State.FORMING,
        nodes=nodes,
        members=Members(),
        exclusions=(Exclusion(host="h1", why="why"),),
    )
    assert [n.id for n in decide(job, STEADY, TIMING).transition.members.nodes] == ["c"]


# ---- node units ----


def united(live: str, former: str = "", low: int = 2) -> Snapshot:
    job = forming(live, former, quiet=former, low=low, high=7)
    return replace(job, spec=replace(job.spec, node_unit=2))


@pytest.mark.parametrize(
    ("live", "former", "members"),
    [
        ("abc", "", "ab"),
        ("abcdefgh", "", "abcdef"),
        ("acd", "abcd", "ac"),
        ("acde", "abcd", "aecd"),
    ],
)
def test_rounds_have_a_multiple_of_the_node_unit_and_the_rest_are_spares(live, former, members):
    found = decide(united(live, former), STEADY, TIMING).transition.members.nodes
    assert "".join(member.id for member in found) == members


def test_the_minimum_is_met_in_whole_units():
    assert verdict(united("abc", low=3)) == (None, "3 of 3:7 nodes are here; waiting for 1")


def test_a_round_grows_by_whole_units():
    job = replace(running("ab", "abc", node_unit=2))
    assert verdict(job) == (None, "rounds have multiples of 2 nodes; spare: c")
    assert verdict(running("ab", "abcd", node_unit=2)) == (Move.YIELD, "c, d join")
    assert verdict(running("abcd", "abcde", max_nodes=5, node_unit=2)) == (
        None,
        "round 9 is full; spare: e",
    )
