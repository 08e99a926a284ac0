"""Who has a member of the job's own store: the decision, and a search over orders of events."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from zero_orchestrator.store.members import (
    PATIENCE_S,
    START_S,
    Change,
    Member,
    Place,
    Step,
    View,
    decide,
    quorum,
    wanted,
)

LATE_S = PATIENCE_S + 1.0


def voter(node: str, **facts: object) -> Member:
    return Member(id=ord(node), node=node, endpoint=f"{node}:1", **facts)


def learner(node: str) -> Member:
    return voter(node, is_learner=True)


def view(members: str, nodes: str, gone: str = "", *more: Member, **facts: object) -> View:
    """Voters and live nodes by their letters; an upper-case node is leaving."""
    voters = tuple(map(voter, members))
    made = {
        "members": (*voters, *more),
        "nodes": tuple(
            Place(node=each.lower(), machine=each.lower(), leaving=each.isupper()) for each in nodes
        ),
        "gone_s": {ord(each): LATE_S for each in gone},
        "announced": tuple(sorted(one.endpoint for one in voters)),
    }
    return View(**{**made, **facts})


def says(seen: View) -> str:
    """The change that is due, as `remove a`; empty: none."""
    change, reason = decide(seen)
    assert reason
    if change is None:
        return ""
    return f"{change.step} {change.node or (change.member.node if change.member else '')}".strip()


@pytest.mark.parametrize(
    ("machines", "voters"), [(0, 0), (1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (9, 5)]
)
def test_a_job_has_one_three_or_five_voters(machines, voters):
    assert wanted(machines) == voters


@pytest.mark.parametrize(
    ("seen", "due"),
    [
        (view("a", "a"), ""),
        (view("a", "ab"), ""),
        (view("a", "abc"), "invite b"),
        (view("a", "abc", invited="b"), ""),
        (view("a", "abc", "", learner("b")), "promote b"),
        (view("ab", "abc"), "invite c"),
        (view("abc", "abcd"), ""),
        (view("abc", "abcde"), "invite d"),
        # lost
        (view("abc", "bcd", "a"), "remove a"),
        (view("bc", "bcd"), "invite d"),
        (view("abc", "bc", "a"), "remove a"),
        (view("bc", "bc"), "remove c"),
        (view("abcde", "cdef", "ab"), "remove a"),
        (view("abc", "c", "ab"), ""),
        (view("abc", "abcd", "", learner("d")), "remove d"),
        # drained
        (view("abc", "Abcd"), "invite d"),
        (view("abc", "Abcd", "", learner("d")), "promote d"),
        (view("abcd", "Abcd"), "remove a"),
        (view("a", "Ab"), "invite b"),
        (view("ab", "Ab"), "remove a"),
        (view("abc", "ABC"), ""),
        (view("abc", "Abc"), "remove a"),
        # shrunk
        (view("abcde", "abcd", "e"), "remove e"),
        (view("abcd", "abcd"), "remove d"),
        # told
        (view("abc", "abc", announced=("a:1",)), "announce"),
    ],
)
def test_what_is_due(seen, due):
    assert says(seen) == due


def test_a_member_whose_agent_is_started_again_at_once_stays():
    seen = dataclasses.replace(view("abc", "bcd"), gone_s={ord("a"): PATIENCE_S - 1})
    assert decide(seen) == (None, "node a may come back")


def test_a_learner_that_never_starts_is_removed_and_one_that_has_started_gets_time():
    idle = Member(id=9, node="", is_learner=True)
    young = dataclasses.replace(view("ab", "abc", "", idle), gone_s={9: START_S - 1})
    assert decide(young) == (None, "a learner is starting")
    old = dataclasses.replace(young, gone_s={9: START_S + 1})
    assert decide(old)[0] == Change(step=Step.REMOVE, member=idle)


def test_two_nodes_of_one_machine_have_one_member_between_them():
    places = [("a", "one"), ("b", "one"), ("c", "two"), ("d", "three")]
    nodes = tuple(Place(node=node, machine=machine) for node, machine in places)
    assert says(dataclasses.replace(view("a", ""), nodes=nodes)) == "invite c"
    assert says(dataclasses.replace(view("b", ""), nodes=nodes)) == "invite c"


def test_a_node_that_can_run_none_is_passed_over_and_hands_its_member_on():
    places = (("a", True), ("b", True), ("c", False), ("d", False), ("e", False))
    nodes = tuple(Place(node=node, machine=node, unable=unable) for node, unable in places)
    assert says(dataclasses.replace(view("acd", ""), nodes=nodes)) == "invite e"
    assert says(dataclasses.replace(view("acde", ""), nodes=nodes)) == "remove a"


# ---- every order of events ----


@dataclass(frozen=True)
class World:
    """A store of members as it is, and what the agents know of the nodes."""

    voters: frozenset[str]
    learners: frozenset[str] = frozenset()
    up: frozenset[str] = frozenset("abcd")
    """The nodes that run; a member lives as long as its node."""
    leaving: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset("abcd")
    """The nodes whose lease has not run out."""
    cut: frozenset[str] = frozenset()
    """The nodes that reach each other and none of the rest."""
    losses: int = 0

    @property
    def alive(self) -> frozenset[str]:
        """The voters on the side that may have a quorum: the larger one."""
        inside = self.voters & self.up & self.cut
        outside = (self.voters & self.up) - self.cut
        return max(inside, outside, key=len)

    @property
    def works(self) -> bool:
        return len(self.alive) >= quorum(len(self.voters))

    @property
    def side(self) -> frozenset[str]:
        """The nodes that reach a quorum."""
        return self.cut if self.alive <= self.cut and self.cut else self.up - self.cut

    def view(self) -> View:
        live = sorted(self.seen)
        gone = {ord(each): LATE_S for each in (self.voters | self.learners) - self.seen}
        members = tuple(map(voter, sorted(self.voters))) + tuple(
            map(learner, sorted(self.learners))
        )
        return View(
            members=members,
            nodes=tuple(
                Place(node=each, machine=each, leaving=each in self.leaving) for each in live
            ),
            gone_s=gone,
            announced=tuple(f"{each}:1" for each in sorted(self.voters)),
        )

    def change(self, *, checked: bool = True) -> World | None:
        """After the change that is due; None: there is none, or etcd does not make it."""
        change, _ = decide(self.view())
        if change is None or not self.works:
            return None
        if change.step is Step.INVITE:
            came = {change.node} & self.up
            return dataclasses.replace(self, learners=self.learners | came) if came else None
        node = change.member.node
        learners = self.learners - {node}
        if change.step is Step.PROMOTE:  # etcd refuses if it is not in sync
            promoted = dataclasses.replace(self, voters=self.voters | {node}, learners=learners)
            return promoted if node in self.side else None
        needed = quorum(len(self.voters) - 1)
        if checked and node in self.alive and len(self.alive) - 1 < needed:
            return None  # etcd refuses (--strict-reconfig-check): the vote of a live member counts
        return dataclasses.replace(self, voters=self.voters - {node}, learners=learners)

    def events(self) -> Iterator[World]:
        """What may happen from outside: one more fault, or what the agents notice of one."""
        if self.losses < 2:
            more = {"losses": self.losses + 1}
            for each in sorted(self.up):
                yield dataclasses.replace(self, up=self.up - {each}, **more)
                yield dataclasses.replace(self, leaving=self.leaving | {each}, **more)
                if not self.cut:
                    yield dataclasses.replace(self, cut=frozenset({each}), **more)
        if self.cut:
            yield dataclasses.replace(self, cut=frozenset())
        if self.works and self.seen != self.side:  # leases run out, or are taken again
            yield dataclasses.replace(self, seen=self.side)


def reached(begin: World) -> Iterator[tuple[World, World | None]]:
    """Every world that any order of events leads to, and what the due change makes of it."""
    known, waiting = {begin}, deque([begin])
    while waiting:
        here = waiting.popleft()
        after = here.change()
        yield here, after
        for each in (*here.events(), *((after,) if after else ())):
            if each not in known:
                known.add(each)
                waiting.append(each)


@pytest.mark.parametrize("voters", ["a", "abc"])
def test_no_change_of_ours_ever_costs_the_quorum(voters):
    """In every order of two losses, drains or cuts of four nodes, and of what is noticed when."""
    count = 0
    for before, after in reached(World(voters=frozenset(voters))):
        count += 1
        if after is not None:
            assert after.works, (before, after)
            assert len(after.voters ^ before.voters) <= 1, "one vote at a time"
            assert after.voters, before
    assert count > 1000


def test_without_the_check_of_etcd_a_member_that_has_just_come_back_could_be_missed():
    """Our lease tells us late; etcd looks at its connections. One of the two is not enough."""
    worlds = (here for here, _ in reached(World(voters=frozenset("abc"))))
    lost = [(here, after) for here in worlds if (after := here.change(checked=False))]
    assert any(not after.works for _, after in lost)


def test_two_halves_never_both_go_on():
    """Each quorum of the old voters has a member in common with each quorum of the new ones."""
    for before, after in reached(World(voters=frozenset("abc"))):
        if after is None:
            continue
        apart = len(before.voters | after.voters)
        assert quorum(len(before.voters)) + quorum(len(after.voters)) > apart, (before, after)


def test_once_the_faults_have_stopped_the_members_are_as_they_should_be():
    for begin, _ in reached(World(voters=frozenset("abc"))):
        now = dataclasses.replace(begin, cut=frozenset(), losses=2)
        if not now.works:
            continue
        now = dataclasses.replace(now, seen=now.up)
        for _ in range(12):
            now = now.change() or now
        staying = now.up - now.leaving
        if staying:
            assert now.voters <= staying
            assert len(now.voters) == wanted(len(staying)), now
            assert not now.learners
