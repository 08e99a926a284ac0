"""What the round machine decides, and the sentence it gives for it."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_orchestrator.membership.dead_links import DeadLink, LinkReport, SetAside, who_goes
from zero_orchestrator.membership.failures import Charge
from zero_orchestrator.membership.job_state import (
    ENDED,
    NOBODY,
    Failure,
    Members,
    Node,
    Snapshot,
    State,
)
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.rounds import (
    LEGAL,
    Move,
    Observation,
    Timing,
    Transition,
    decide,
    transaction,
)
from zero_orchestrator.membership.spec import JobSpec

STEADY = Observation(nodes_s=60.0, symptom_s=60.0)
JUST_NOW = Observation(nodes_s=0.0, symptom_s=0.0)
TIMING = Timing()
CHARGE = Charge(n=0, cause="something broke", workers=True)


def node(name: str, *, incarnation: str = "1", draining: bool = False) -> Node:
    return Node(id=name, incarnation=incarnation, address=name, slots=1, draining=draining)


def forming(live: str, former: str = "", *, quiet: str = "", low: int = 1, high: int = 4):
    return Snapshot(
        JobSpec(min_nodes=low, max_nodes=high, max_restarts=1),
        n=1 if former else 0,
        state=State.FORMING,
        cause="because",
        nodes=tuple(map(node, live)),
        members=Members(tuple(map(node, former))),
        quiet=frozenset(quiet),
    )


def active(members: str, live: str | None = None, *, high: int = 4) -> Snapshot:
    return Snapshot(
        JobSpec(min_nodes=1, max_nodes=high, max_restarts=1),
        n=1,
        state=State.ACTIVE,
        nodes=tuple(map(node, members if live is None else live)),
        members=Members(tuple(map(node, members))),
    )


def failed(name: str, *, symptom: bool = False, revision: int = 10) -> Failure:
    return Failure(node=name, symptom=symptom, summary=f"{name} broke", revision=revision)


def verdict(job: Snapshot, seen: Observation = STEADY) -> tuple[Move | None, str]:
    decision = decide(job, seen, TIMING)
    return decision.transition and decision.transition.move, decision.reason


def test_a_job_begins_with_its_first_node():
    job = Snapshot(JobSpec(min_nodes=1, max_nodes=4), nodes=(node("a"),))
    assert verdict(job) == (Move.OPEN, "the job begins")


@pytest.mark.parametrize(("low", "members"), [(1, "a"), (2, "ab")])
def test_a_round_begins_without_a_node_that_warms_up_unless_it_is_needed(low, members):
    job = forming("ab", former="ab", quiet="ab", low=low)
    job = replace(job, nodes=(node("a"), replace(node("b"), starting=True)))
    transition = decide(job, STEADY, TIMING).transition
    assert transition is not None
    assert [member.id for member in transition.members.nodes] == list(members)


def test_a_round_waits_for_the_minimum():
    assert verdict(forming("a", low=2)) == (None, "1 of 2:4 nodes are here; waiting for 1")


def test_a_round_that_waits_says_who_is_missing_and_why():
    job = forming("ab", former="abcd", quiet="abcd", low=4)
    job = replace(job, nodes=(node("a"), replace(node("b"), draining=True)))
    assert verdict(job) == (
        None,
        "1 of 4:4 nodes are here; waiting for 3; gone since round 1: c, d; leaving: b",
    )


def test_a_first_round_below_the_maximum_waits_until_nobody_comes():
    assert verdict(forming("ab"), JUST_NOW) == (None, "2 of 1:4 nodes are here; more may be coming")
    assert verdict(forming("ab"))[0] is Move.ACTIVATE


def test_a_full_round_begins_at_once():
    assert verdict(forming("abcd"), JUST_NOW) == (
        Move.ACTIVATE,
        "round 1 begins with 4 of 1:4 nodes, world size 4",
    )


def test_survivors_go_on_at_once_without_waiting_for_newcomers():
    assert verdict(forming("abd", former="abcd", quiet="abd"), JUST_NOW) == (
        Move.ACTIVATE,
        "round 2 begins with 3 of 1:4 nodes, world size 3",
    )


def test_a_round_does_not_begin_before_the_workers_of_the_last_one_are_gone():
    assert verdict(forming("ab", former="abc", quiet="a")) == (
        None,
        "waiting for the workers of b to stop",
    )


def test_a_draining_node_is_in_no_further_round():
    job = replace(
        forming("a", former="ab", quiet="ab"), nodes=(node("a"), node("b", draining=True))
    )
    decision = decide(job, STEADY, TIMING)
    assert [member.id for member in decision.transition.members.nodes] == ["a"]


def test_more_nodes_than_the_maximum_leave_spares():
    decision = decide(forming("abcdef"), JUST_NOW, TIMING)
    assert [member.id for member in decision.transition.members.nodes] == list("abcd")


def test_a_lost_node_costs_one_restart():
    assert verdict(active("abc", live="ab")) == (Move.INTERRUPT, "lost node c; restart 1 of 1")


def test_a_lease_that_lapsed_while_etcd_was_silent_is_no_loss_yet():
    job = active("abc", live="ab")
    after_silence = replace(STEADY, heard_s=1.0)
    assert verdict(job, after_silence) == (
        None,
        "etcd may have been silent; waiting for node c to register again",
    )
    assert verdict(job, replace(STEADY, heard_s=8.0))[0] is Move.INTERRUPT


def test_a_node_that_came_back_as_another_process_was_lost():
    job = replace(active("ab"), nodes=(node("a"), node("b", incarnation="2")))
    assert verdict(job) == (Move.INTERRUPT, "lost node b; restart 1 of 1")


def test_a_failed_worker_costs_one_restart_however_many_report():
    job = replace(active("ab"), failures=(failed("b"), failed("a", revision=11)))
    assert verdict(job) == (Move.INTERRUPT, "b broke; restart 1 of 1")


def test_an_error_that_a_restart_would_meet_again_ends_the_job_before_its_first_step():
    job = replace(active("ab"), failures=(replace(failed("b"), permanent=True),))
    assert verdict(job) == (Move.FAIL, "b broke; a restart would meet the same error")
    assert verdict(replace(job, n=2)) == (Move.INTERRUPT, "b broke; restart 1 of 1")


def test_a_failure_with_the_budget_spent_ends_the_job():
    job = replace(active("ab"), failures=(failed("b"),), charged=(CHARGE,))
    assert verdict(job) == (
        Move.FAIL,
        "b broke; all 1 restarts are spent (--max-restarts)",
    )


def test_a_lost_peer_waits_for_its_cause_and_then_counts_itself():
    job = replace(active("ab"), failures=(failed("a", symptom=True),))
    assert verdict(job, JUST_NOW) == (None, "a broke; waiting for the cause")
    assert verdict(job)[0] is Move.INTERRUPT


def test_the_cause_of_a_lost_peer_is_named_instead_of_it():
    job = replace(active("ab"), failures=(failed("a", symptom=True), failed("b", revision=11)))
    assert verdict(job, JUST_NOW) == (Move.INTERRUPT, "b broke; restart 1 of 1")


def test_a_lost_peer_without_a_cause_waits_until_its_node_has_looked_at_its_links():
    job = replace(active("ab"), failures=(failed("a", symptom=True),))
    seven_s = replace(STEADY, symptom_s=7.0)
    assert verdict(job, seven_s) == (None, "a broke; waiting for what a can reach")
    looked = replace(job, links=(LinkReport(node="a"),))
    assert verdict(looked, seven_s) == (
        Move.INTERRUPT,
        "a broke, and no cause appeared; restart 1 of 1",
    )


def test_the_peer_of_a_lost_peer_may_have_ended_its_script():
    job = replace(active("ab"), failures=(failed("a", symptom=True),), done=frozenset("b"))
    job = replace(job, links=(LinkReport(node="a"),))
    told = "a broke, and the workers of b have ended with exit code 0; restart 1 of 1"
    assert verdict(job) == (Move.INTERRUPT, told)


@pytest.mark.parametrize("yielding", [None, "c is leaving"])
def test_a_lost_peer_whose_node_has_left_by_itself_costs_no_restart(yielding):
    job = replace(active("abc", live="ab"), quiet=frozenset("c"), yielding=yielding)
    job = replace(job, failures=(failed("a", symptom=True),), yield_revision=11 if yielding else 0)
    assert verdict(job, JUST_NOW) == (Move.FORM, "the workers of c left")
    assert verdict(job) == (Move.FORM, "the workers of c left")


# ---- dead links ----


def reaching(members: str, dead: dict[str, str], *, low: int = 1) -> Snapshot:
    """A round in which these nodes have looked, and do not reach those."""
    job = active(members)
    reports = [
        LinkReport(node=one, dead=tuple(DeadLink(to=other, why="no answer") for other in others))
        for one, others in dead.items()
    ]
    spec = replace(job.spec, min_nodes=low)
    return replace(job, spec=spec, links=tuple(reports), failures=(failed("a", symptom=True),))


def test_a_dead_link_sets_the_later_of_its_nodes_aside_for_one_restart_and_is_named():
    job = reaching("abcd", {"a": "", "b": "c", "c": "b", "d": ""})
    found = decide(job, STEADY, TIMING)
    assert found.reason == (
        "the link between b (b) and c (c) is dead: no answer; the job goes on without c (it has 1 "
        "dead link, and the last rank of those); restart 1 of 1"
    )
    (one,) = found.transition.aside
    assert str(one) == "c is set aside: it does not reach b (b)"


def test_the_node_that_most_links_accuse_is_set_aside_rank_0_as_well():
    found = decide(reaching("abcd", {"a": "bc", "b": "a", "c": "a", "d": ""}), STEADY, TIMING)
    assert [one.node for one in found.transition.aside] == ["a"]


def test_a_dead_link_waits_for_what_the_others_find_and_no_longer_than_for_a_cause():
    job = reaching("abc", {"b": "c"})
    just_now = replace(STEADY, links_s=1.0)
    said = "the link between b (b) and c (c) is dead: no answer; waiting for what a, c can reach"
    assert verdict(job, just_now) == (None, said)
    assert verdict(job, replace(STEADY, links_s=6.0))[0] is Move.INTERRUPT


def test_at_the_minimum_a_dead_link_is_waited_for_and_costs_nothing():
    job = reaching("abc", {"a": "", "b": "c", "c": "b"}, low=3)
    found = decide(job, STEADY, TIMING)
    assert (found.transition.move, found.transition.charge) == (Move.FORM, None)
    assert found.reason.endswith(
        "; the job needs 3 nodes, and waits for the link; no restart is charged"
    )
    waits = replace(forming("abc", former="abc", quiet="abc", low=3), aside=found.transition.aside)
    assert verdict(waits) == (
        None,
        "2 of 3:4 nodes are here; waiting for 1; c is set aside: it does not reach b (b)",
    )
    assert verdict(replace(waits, aside=()))[0] is Move.ACTIVATE


def test_a_dead_link_costs_nothing_where_the_workers_leave_anyway():
    job = reaching("abc", {"a": "", "b": "c", "c": "b"})
    found = decide(replace(job, yielding="d joins"), STEADY, TIMING)
    assert (found.transition.move, found.transition.charge) == (Move.FORM, None)
    assert found.reason == "the link between b (b) and c (c) is dead: no answer; d joins"


def test_a_node_that_reaches_the_others_again_joins():
    job = replace(active("ab", live="abc"), aside=(SetAside(node="c", why="", others=("b",)),))
    assert verdict(job) == (None, "round 1 runs on 2 nodes")
    assert verdict(replace(job, aside=())) == (Move.YIELD, "c joins")


def test_a_node_that_is_gone_is_lost_and_no_link_to_it_is_dead():
    job = reaching("abc", {"a": "c", "b": "c"})
    assert verdict(replace(job, nodes=tuple(map(node, "ab")))) == (
        Move.INTERRUPT,
        "lost node c; restart 1 of 1",
    )


LINKS = st.sets(st.sampled_from([frozenset(pair) for pair in combinations("abcdef", 2)]))


@given(dead=LINKS)
def test_no_dead_link_is_left_and_nobody_goes_for_nothing(dead):
    goes = list(who_goes("abcdef", dead))
    assert all(pair & set(goes) for pair in dead)
    left = set(dead)
    for gone in goes:
        counts = {one: sum(one in pair for pair in left) for one in "abcdef"}
        assert gone == max(counts, key=lambda one: (counts[one], one)), "the most, then the later"
        assert counts[gone] > 0
        left = {pair for pair in left if gone not in pair}


@pytest.mark.parametrize("node", "abcdef")
def test_a_node_that_reaches_nobody_goes_alone_whichever_rank_it_has(node):
    dead = [frozenset((node, other)) for other in "abcdef" if other != node]
    assert list(who_goes("abcdef", dead)) == [node]


def test_joiners_are_let_in_when_the_nodes_are_steady():
    job = active("ab", live="abc")
    assert verdict(job, JUST_NOW) == (None, "c will join when the set of nodes is steady")
    assert verdict(job) == (Move.YIELD, "c joins")


def test_a_full_round_keeps_spares_waiting():
    assert verdict(active("ab", live="abc", high=2)) == (None, "round 1 is full; spare: c")


def test_a_yielding_round_is_left_free_of_charge_when_all_have_stopped():
    job = replace(active("ab", live="abc"), yielding="c joins", yield_revision=5)
    assert verdict(replace(job, quiet=frozenset("a"))) == (None, "c joins; waiting for b to stop")
    assert verdict(replace(job, quiet=frozenset("ab"))) == (Move.FORM, "c joins")


def test_what_breaks_while_others_already_leave_is_free():
    job = replace(active("ab", live="abc"), yielding="c joins", yield_revision=5)
    assert verdict(replace(job, failures=(failed("a", revision=6),))) == (Move.FORM, "c joins")


@pytest.mark.parametrize("live", ["abc", "bc"], ids=["that stays", "that has left"])
def test_a_node_that_lost_its_peers_to_their_leaving_is_no_failure_and_not_lost(live):
    job = replace(active("ab", live=live), yielding="a is leaving", yield_revision=5)
    job = replace(job, failures=(failed("a", symptom=True, revision=6),))
    assert verdict(job, JUST_NOW) == (None, "a is leaving; waiting for b to stop")
    assert verdict(replace(job, quiet=frozenset("b")), JUST_NOW) == (Move.FORM, "a is leaving")
    assert verdict(job) == (Move.FORM, "a is leaving")  # b cannot reach a boundary, either


def test_who_lost_its_peers_before_anybody_was_asked_to_leave_waits_for_the_cause():
    job = replace(active("ab"), yielding="a is leaving", yield_revision=5)
    job = replace(job, failures=(failed("a", symptom=True, revision=4),))
    assert verdict(job, JUST_NOW) == (None, "a broke; waiting for the cause")


def test_what_broke_before_anybody_was_asked_to_leave_is_charged():
    job = replace(active("ab", live="abc"), yielding="c joins", yield_revision=5)
    broken = replace(job, failures=(failed("a", revision=4),))
    assert verdict(broken) == (Move.INTERRUPT, "a broke; restart 1 of 1")


def test_a_member_that_drains_lets_the_workers_stop_at_a_boundary():
    job = replace(active("ab"), nodes=(node("a"), node("b", draining=True)))
    assert verdict(job) == (Move.YIELD, "b is leaving")


def test_a_member_that_has_finished_drains_without_the_others():
    job = replace(active("ab"), nodes=(node("a"), node("b", draining=True)), done=frozenset("b"))
    assert verdict(job) == (None, "round 1 runs on 2 nodes")


def test_nobody_joins_a_round_in_which_a_member_has_finished():
    job = replace(active("ab", live="abc"), done=frozenset("b"))
    assert verdict(job) == (None, "the workers of b are done; spare: c")


def test_a_drained_node_that_is_gone_was_not_lost():
    job = replace(active("ab", live="a"), yielding="b is leaving", quiet=frozenset("ab"))
    assert verdict(job) == (Move.FORM, "b is leaving")


def test_the_job_is_done_when_all_are_even_if_one_has_gone_since():
    job = replace(active("ab", live="a"), done=frozenset("ab"))
    assert verdict(job) == (Move.FINISH, "every worker has exited with 0")


def test_a_round_whose_members_somebody_has_deleted_is_not_done_and_the_nodes_form_the_next():
    job = replace(active("ab"), members=NOBODY)
    assert verdict(job) == (Move.YIELD, "a, b join")
    assert verdict(replace(job, yielding="a, b join")) == (Move.FORM, "a, b join")


def test_a_job_that_is_to_stop_lets_its_workers_leave_at_a_boundary():
    job = replace(active("ab"), stop="enough")
    assert verdict(job) == (Move.YIELD, "enough")
    leaving = replace(job, yielding="enough", yield_revision=5, quiet=frozenset("a"))
    assert verdict(leaving) == (None, "enough; waiting for b to stop")
    assert verdict(replace(leaving, quiet=frozenset("ab"))) == (Move.FORM, "enough")


def test_a_job_that_is_to_stop_begins_no_round_and_ends_when_all_workers_have():
    job = replace(forming("ab", former="ab", quiet="a"), stop="enough")
    assert verdict(job) == (None, "waiting for the workers of b to stop")
    job = replace(job, quiet=frozenset("ab"))
    assert verdict(job) == (Move.HALT, "the job ends here: enough")
    assert verdict(replace(forming("a", low=2), stop="enough"))[0] is Move.HALT


def test_a_round_grows_at_once_where_no_re_forming_was_needed_to_begin_it():
    assert verdict(active("ab", live="abc"), replace(STEADY, round_s=0.0)) == (
        Move.YIELD,
        "c joins",
    )


def test_a_round_grows_again_when_the_additional_nodes_are_worth_the_last_re_forming():
    job = replace(active("abc", live="abcd", high=9), took_s=20.0)
    waits = (
        None,
        "d will join when round 1 has run for 60 s: a re-forming takes 3 nodes 20.0 s "
        "(--grow-every)",
    )
    assert verdict(job, replace(STEADY, round_s=59.0)) == waits
    assert verdict(job, replace(STEADY, round_s=60.0)) == (Move.YIELD, "d joins")
    three = replace(job, nodes=tuple(map(node, "abcdef")))
    assert verdict(three, replace(STEADY, round_s=20.0)) == (Move.YIELD, "d, e, f join")
    measured = replace(STEADY, round_s=100.0, reform_s=40.0)  # up to the first step: it is more
    assert "a re-forming takes 3 nodes 40.0 s" in verdict(job, measured)[1]


def test_a_node_that_could_take_part_waits_for_ten_minutes_at_most():
    many = tuple(node(f"n{i:04}") for i in range(1000))
    job = replace(active("a", high=2000), nodes=(*many, node("z")), members=Members(many))
    late = replace(job, took_s=60.0)
    assert "has run for 600 s" in verdict(late, replace(STEADY, round_s=599.0))[1]
    assert verdict(late, replace(STEADY, round_s=600.0))[0] is Move.YIELD


@pytest.mark.parametrize(("round_s", "grows"), [(29.0, False), (30.0, True)])
def test_how_often_a_job_grows_can_be_said(round_s, grows):
    seen, timing = replace(STEADY, round_s=round_s), Timing(grow_every_s=30.0)
    decision = decide(replace(active("ab", live="abc"), took_s=1000.0), seen, timing)
    assert (decision.transition is not None) is grows


def test_what_is_lost_while_the_job_stops_is_named_and_costs_nothing():
    job = replace(active("abc", live="ab"), stop="enough", charged=(CHARGE,))
    assert verdict(job) == (Move.FORM, "lost node c; nothing restarts, enough")


def test_a_job_whose_last_worker_finishes_before_the_stop_is_done():
    job = replace(active("ab"), stop="enough", done=frozenset("ab"))
    assert verdict(job)[0] is Move.FINISH


def test_a_round_is_refused_by_the_store_once_a_stop_was_asked_for():
    job = replace(forming("a"), fence=7)
    compares, _ = transaction(Keys("job"), job, Transition(Move.ACTIVATE, "why"))
    assert ("/zero/v1/job/cmd/stop", 0) in [(c.key, c.revision) for c in compares]


@pytest.mark.parametrize("state", sorted(ENDED))
def test_an_ended_job_never_moves(state):
    job = replace(active("ab", live="abc"), state=state, failures=(failed("a"),))
    assert verdict(job)[0] is None


@pytest.mark.parametrize("state", [None, *State])
@pytest.mark.parametrize("move", list(Move))
def test_an_illegal_move_is_refused_and_a_legal_one_compares_the_fence(state, move):
    job = replace(active("ab"), state=state, fence=7)
    if LEGAL[move][0] is not state:
        with pytest.raises(ValueError, match=move):
            transaction(Keys("job"), job, Transition(move, "why"))
        return
    compares, _ = transaction(Keys("job"), job, Transition(move, "why"))
    assert ("/zero/v1/job/round", 7) in [(c.key, c.revision) for c in compares]
