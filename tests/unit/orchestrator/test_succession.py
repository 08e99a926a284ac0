"""Which node begins a new store when that of the job is lost for good, and which does not."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

import pytest

from zero_orchestrator.store.succession import Act, Checkpoint, Heir, Seen, decide, next_round

LOST = Seen(root="/shared", round=3, step=20, newest=Checkpoint(round=3, step=20))
HEIR = Heir(store="b", endpoint="10.0.0.2:29400", node="n2")


@pytest.mark.parametrize(
    ("seen", "act", "says"),
    [
        (LOST, Act.BEGIN, "from the checkpoint of step 20 in /shared"),
        (dataclasses.replace(LOST, heir=HEIR), Act.JOIN, "node n2 has begun a new store at 10.0."),
        (dataclasses.replace(LOST, heir=HEIR, lives=True), Act.JOIN, "node n2"),
        (Seen(root="", heir=HEIR), Act.JOIN, "node n2"),
        (dataclasses.replace(LOST, lives=True), Act.END, "this node is cut off"),
        (dataclasses.replace(LOST, newest=None), Act.END, "storage that all nodes share"),
        (dataclasses.replace(LOST, newest=Checkpoint(round=3, step=15)), Act.END, "share"),
        (dataclasses.replace(LOST, newest=Checkpoint(round=4, step=15)), Act.BEGIN, "step 15"),
        (Seen(root=""), Act.END, "this node knows of no checkpoint"),
        (Seen(root="s3://bucket/gpt"), Act.END, "in a directory"),
    ],
)
def test_what_a_node_without_a_store_does(seen, act, says):
    found, why = decide(seen)
    assert found is act
    assert says in why


def test_the_new_rounds_are_newer_than_all_that_the_old_store_may_have_published():
    behind = dataclasses.replace(LOST, newest=Checkpoint(round=7, step=40))
    assert next_round(behind) == 7
    assert next_round(dataclasses.replace(LOST, round=9)) == 9
    assert next_round(Seen(root="/shared", round=2)) == 2


# ---- every order of losses, cuts and heals, of nodes that look and claim one after the other ----

NODES = "abc"


@dataclasses.dataclass(frozen=True)
class World:
    """Three members of a store, the files beside the checkpoints, and what each node is doing."""

    up: frozenset[str] = frozenset(NODES)
    cut: frozenset[str] = frozenset()
    """Cut off from the others, not from the checkpoints."""
    frozen: frozenset[str] = frozenset()
    heir: str = ""
    """Who was the first to create the file."""
    plans: tuple[tuple[str, str], ...] = ()
    """Node -> what it decided before, on what it saw then: it may be late to do it."""
    went: frozenset[str] = frozenset()
    """The nodes that are in the new store."""
    published: tuple[str, ...] = ()
    """The stores through which checkpoints were published, in order, without repetitions."""
    faults: int = 0
    looks: bool = True
    """Whether rank 0 looks for an heir before it publishes."""

    def quorum(self) -> frozenset[str]:
        """The nodes that have a quorum of the old store."""
        able = self.up - self.frozen - self.went
        sides = (able & self.cut, able - self.cut)
        return next((side for side in sides if len(side) >= 2), frozenset())

    def after(self) -> Iterator[World]:
        yield from self._faults()
        quorum = self.quorum()
        for node in sorted(self.up - self.frozen - self.went):
            plan = dict(self.plans).get(node)
            seen = dataclasses.replace(
                LOST,
                lives=bool(quorum) and not self.heir,
                heir=dataclasses.replace(HEIR, node=self.heir) if self.heir else None,
            )
            if plan is not None:
                rest = tuple(each for each in self.plans if each[0] != node)
                done = dataclasses.replace(self, plans=rest)
                if plan is Act.BEGIN and not self.heir:  # the exclusive create
                    done = dataclasses.replace(done, heir=node)
                if done.heir:
                    done = dataclasses.replace(done, went=self.went | {node})
                yield done
            elif node not in quorum or self.heir:
                act, _ = decide(seen)
                yield dataclasses.replace(self, plans=(*self.plans, (node, act)))
        if quorum and not (self.looks and self.heir):
            yield self._publishes("old")
        if self.went - self.frozen and self.heir in self.up:
            yield self._publishes("new")

    def _publishes(self, store: str) -> World:
        if self.published[-1:] == (store,):
            return self
        return dataclasses.replace(self, published=(*self.published, store))

    def _faults(self) -> Iterator[World]:
        if self.faults < 2:
            more = {"faults": self.faults + 1}
            for node in sorted(self.up):
                yield dataclasses.replace(self, up=self.up - {node}, **more)
                yield dataclasses.replace(self, frozen=self.frozen | {node}, **more)
                yield dataclasses.replace(self, cut=frozenset({node}), **more)
        if self.frozen:
            yield dataclasses.replace(self, frozen=frozenset())
        if self.cut:
            yield dataclasses.replace(self, cut=frozenset())


def reached(begin: World = World()) -> Iterator[World]:
    known, waiting = {begin}, deque([begin])
    while waiting:
        here = waiting.popleft()
        yield here
        for each in here.after():
            if each not in known:
                known.add(each)
                waiting.append(each)


def test_no_order_of_losses_and_heals_lets_two_halves_publish():
    """A claim that is late, a majority that thaws, a cut that heals: the old store has its end."""
    worlds = list(reached())
    assert len(worlds) > 2000
    assert {world.published for world in worlds} == {(), ("old",), ("new",), ("old", "new")}
    assert {world.heir for world in worlds} == {"", *NODES}


def test_without_the_sign_of_life_a_store_that_lives_may_end_but_no_second_one_publishes(
    monkeypatch,
):
    """The sign is patience: what is safe does not depend on it."""
    real = decide
    blind = lambda seen: real(dataclasses.replace(seen, lives=False))  # noqa: E731
    monkeypatch.setitem(globals(), "decide", blind)
    worlds = list(reached())
    assert {world.published for world in worlds} == {(), ("old",), ("new",), ("old", "new")}
    ended = [world for world in worlds if world.heir and len(world.quorum()) == 2]
    assert ended


def test_without_the_look_before_it_a_majority_that_thaws_would_publish():
    worlds = reached(World(looks=False))
    assert any(world.published == ("old", "new", "old") for world in worlds)
