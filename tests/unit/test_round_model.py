"""Exhaustive search of small jobs: every order of reads, decisions, faults and late writes.

The model runs the product's own lines: `rounds.decide`, `rounds.transaction` and
`supervise.next_action`, on the database of `kv_memory`. An agent acts on the snapshot it last
read, however old; it may die between any two operations, lose its lease while it lives on, and
come back as a new process, and a user may ask for a stop at any time. Each reachable state is
visited once and must keep the invariants of `rounds.py`; states without anything left to do must
be ends that a user would accept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from zero_agent.supervise import Action, Situation, Workers, next_action
from zero_orchestrator import rounds
from zero_orchestrator.job_state import ENDED, Failure, Keys, Node, Snapshot, State, parse
from zero_orchestrator.kv import Delete, Put, Range, absent, unchanged
from zero_orchestrator.kv_memory import Database
from zero_orchestrator.rounds import Move, Observed, Timing, Transition, decide, transaction
from zero_orchestrator.spec import JobSpec

KEYS = Keys("model")
LONG_AGO = Observed(nodes_s=1e9, symptom_s=1e9)
"""Every wait of the round machine is over; not moving yet is another order of the same moves."""


@dataclass(frozen=True)
class Agent:
    """One node: its process, what it last read, and its workers."""

    id: str
    incarnation: int
    lease: int
    view: Snapshot | None = None
    """What it has read and not yet acted upon."""
    workers: Workers = Workers.NONE
    round: int = 0
    fence: int = 0
    asked: bool = False
    alive: bool = True
    gone: bool = False
    """The process ended by its own decision."""

    @property
    def node(self) -> Node:
        return Node(id=self.id, incarnation=str(self.incarnation), address="", slots=1)


@dataclass(frozen=True)
class World:
    """The whole model: the store, the agents, and how many faults may still happen."""

    spec: JobSpec
    database: Database
    agents: tuple[Agent, ...]
    faults: int
    may_stop: bool = False
    """A user may still ask for a stop."""
    commits: int = 0
    """Checkpoints that may still be published."""

    def with_agent(self, index: int, agent: Agent, **changes: object) -> World:
        agents = (*self.agents[:index], agent, *self.agents[index + 1 :])
        return replace(self, agents=agents, **changes)

    def read(self) -> Snapshot:
        items = tuple(self.database.under(KEYS.prefix))
        return parse(KEYS, Range(self.database.revision, items), self.spec)


def write(world: World, compares: list, writes: list) -> tuple[World, bool]:
    """A transaction on a copy of the store."""
    if not all(world.database.holds(compare) for compare in compares):
        return world, False
    database = world.database.clone()
    database.write(writes)
    return replace(world, database=database), True


def register(world: World, index: int) -> World:
    """A new process of a node announces itself."""
    agent, database = world.agents[index], world.database.clone()
    lease = database.grant(3, 0.0)
    node = Node(id=agent.id, incarnation=str(agent.incarnation + 1), address="", slots=1)
    database.write([Put(KEYS.node(agent.id), node.to_json(), lease)])
    fresh = Agent(agent.id, agent.incarnation + 1, lease)
    return replace(world, database=database).with_agent(index, fresh)


# ---- what an agent does ----


def look(world: World, index: int) -> World:
    """Read the job; a reading that calls for nothing leaves no trace."""
    agent = world.agents[index]
    view = world.read()
    looking = replace(agent, view=view)
    if due(view) is None and what_next(looking) is Action.WAIT:
        return world
    return world.with_agent(index, looking)


def due(view: Snapshot) -> Transition | None:
    return decide(view, LONG_AGO, Timing()).transition


def what_next(agent: Agent) -> Action:
    assert agent.view is not None
    return next_action(
        Situation(
            job=agent.view,
            node=agent.node,
            workers=agent.workers,
            round=agent.round,
            asked_to_leave=agent.asked,
            can_leave=True,
        )
    )[0]


def move(world: World, index: int) -> World:
    """Try the transition that is due in what this agent has read, however old that is."""
    view = world.agents[index].view
    transition = due(view)
    if transition is None:
        return world
    after, succeeded = write(world, *transaction(KEYS, view, transition))
    if succeeded:
        check_move(world, after, transition)
    return after.with_agent(index, replace(after.agents[index], view=None))


def act(world: World, index: int) -> World:
    """Do what the supervisor says about it."""
    agent = world.agents[index]
    action = what_next(agent)
    if action is Action.WAIT:
        return world
    after = ACT[action](world, index)
    return after.with_agent(index, replace(after.agents[index], view=None))


def note(key_of: Callable[..., str], *parts: str, value: str = "") -> Callable[[World, int], World]:
    def write_once(world: World, index: int) -> World:
        agent = world.agents[index]
        key = key_of(agent.view.n, *(part.format(id=agent.id) for part in parts))
        return write(world, [absent(key)], [Put(key, value)])[0]

    return write_once


def fail(world: World, index: int) -> World:
    agent = world.agents[index]
    symptom = agent.workers is Workers.PEER_LOST
    failure = Failure(node=agent.id, symptom=symptom, summary="a worker failed")
    kind = "symptom" if symptom else "fail"
    return note(KEYS.report, kind, agent.id, value=failure.to_json())(world, index)


def become(**changes: object) -> Callable[[World, int], World]:
    return lambda world, index: world.with_agent(index, replace(world.agents[index], **changes))


def start(world: World, index: int) -> World:
    agent = world.agents[index]
    running = replace(
        agent, workers=Workers.RUNNING, round=agent.view.n, fence=agent.view.fence, asked=False
    )
    return world.with_agent(index, running)


def leave(world: World, index: int) -> World:
    """The process exits: it revokes its lease."""
    agent, database = world.agents[index], world.database.clone()
    database.end(agent.lease)
    left = replace(agent, alive=False, gone=True, workers=Workers.NONE)
    return replace(world, database=database).with_agent(index, left)


ACT: dict[Action, Callable[[World, int], World]] = {
    Action.WAIT: lambda world, index: world,
    Action.HOST_STORE: note(KEYS.of_round, "master", value="host:1"),
    Action.START: start,
    Action.ASK_TO_LEAVE: become(asked=True),
    Action.STOP: become(workers=Workers.STOPPED),
    Action.KILL: become(workers=Workers.STOPPED),
    Action.REPORT_DONE: note(KEYS.report, "done", "{id}"),
    Action.REPORT_QUIET: note(KEYS.report, "quiet", "{id}"),
    Action.REPORT_FAILURE: fail,
    Action.EXIT: leave,
}


# ---- what happens to an agent ----


def workers_end(world: World, index: int) -> Iterator[World]:
    """Running workers finish, or leave once any agent of the round asked; that is no fault."""
    agent = world.agents[index]
    if agent.workers is not Workers.RUNNING:
        return
    yield world.with_agent(index, replace(agent, workers=Workers.SUCCEEDED))
    if any(other.asked and other.round == agent.round for other in world.agents):
        yield world.with_agent(index, replace(agent, workers=Workers.LEFT))


def commit(world: World, index: int) -> Iterator[World]:
    """Running workers publish a checkpoint of one more step, if their fence still holds."""
    agent = world.agents[index]
    if agent.workers is Workers.RUNNING and world.commits:
        latest = Put(KEYS.latest, f'{{"step": {world.read().committed + 1}}}')
        published, succeeded = write(world, [unchanged(KEYS.round, agent.fence)], [latest])
        if succeeded:
            yield replace(published, commits=world.commits - 1)


def forgive(world: World) -> Iterator[World]:
    """The lease of an exclusion runs out."""
    for exclusion in world.read().exclusions:
        yield write(world, [], [Delete(KEYS.excluded(exclusion.host))])[0]


def faults(world: World, index: int) -> Iterator[World]:
    agent = world.agents[index]
    fewer = replace(world, faults=world.faults - 1)
    if agent.workers is Workers.RUNNING:
        yield fewer.with_agent(index, replace(agent, workers=Workers.FAILED))
        yield fewer.with_agent(index, replace(agent, workers=Workers.PEER_LOST))
    database = world.database.clone()
    database.end(agent.lease)
    cut_off = replace(fewer, database=database)
    yield cut_off.with_agent(index, replace(agent, alive=False, workers=Workers.NONE))
    yield cut_off  # the lease lapsed while the process lives on, with what it last read


def stop(world: World) -> World:
    """A user asks for a stop."""
    return replace(write(world, [], [Put(KEYS.stop, '"enough"')])[0], may_stop=False)


def successors(world: World) -> Iterator[World]:
    if world.may_stop:
        yield stop(world)
    yield from forgive(world)
    for index, agent in enumerate(world.agents):
        if agent.gone:
            continue
        if not agent.alive or not still_registered(world, agent):
            # A new process of the node, or the old one coming back.
            yield register(world, index)
        if not agent.alive:
            continue
        if agent.view is None:
            yield look(world, index)
        else:
            yield move(world, index)
            yield act(world, index)
        yield from workers_end(world, index)
        yield from commit(world, index)
        if world.faults:
            yield from faults(world, index)


def still_registered(world: World, agent: Agent) -> bool:
    item = world.database.items.get(KEYS.node(agent.id))
    return item is not None and item.lease == agent.lease


# ---- what must hold ----


def check_move(before: World, after: World, transition: Transition) -> None:
    """I1, I3, I4, I5, I10, I11: of one transition that has succeeded."""
    spec, old, new = before.spec, before.read(), after.read()
    assert old.state not in ENDED, "I10: an ended job moved"
    assert new.n - old.n == (transition.move is Move.ACTIVATE), "I1: rounds are counted by one"
    assert new.state is not State.STOPPED or old.stop, "I11: nobody asked for a stop"
    if transition.move is Move.ACTIVATE:
        assert not old.stop, "I11: a round began after a stop was asked for"
        ids = [node.id for node in new.members.nodes]
        assert len(set(ids)) == len(ids), "I3: one rank, one node"
        assert spec.min_nodes <= len(ids) <= spec.max_nodes, "I4: the size is within bounds"
        assert len(ids) % spec.node_unit == 0, "I4: whole units"
        assert not any(map(old.exclusion, new.members.nodes)), "I4: nobody excluded takes part"
    else:
        assert new.members == old.members, "I1: members never change"
    charged = new.charges - old.charges
    failures = {Move.INTERRUPT, Move.FAIL, Move.GIVE_UP}
    assert charged == (transition.move in failures), "I5: failures only, once"
    refill = spec.refill_after_steps or 10**9
    spent = [c for c in old.charged if old.committed - c.committed < refill]
    over = len(spent) >= spec.max_restarts or transition.move is Move.GIVE_UP
    assert (new.state is State.FAILED) == (bool(charged) and over), "I5: fails iff it is spent"
    if charged:
        assert new.charged[-1].committed == old.committed, "I5: a charge knows what is committed"


def check_commits(world: World) -> None:
    """I2: whoever tries to commit now succeeds only as a member of the ACTIVE round."""
    job = world.read()
    for agent in world.agents:
        if agent.fence and world.database.holds(unchanged(KEYS.round, agent.fence)):
            assert job.state is State.ACTIVE, "I2: a commit outside a round"
            assert agent.round == job.n, "I2: a commit with an old fence"


def check_end(world: World) -> None:
    """Nothing is left to do, fault or no fault: the job has ended and everybody has seen it."""
    job = world.read()
    assert job.state in ENDED, f"stuck in {job}"
    assert all(agent.gone for agent in world.agents), f"an agent waits for ever: {world.agents}"


def fingerprint(world: World) -> tuple[object, ...]:
    """Equal for worlds between which no future can tell.

    Of revisions only this matters: whether a fence still is the current one (an old one never
    is again), and in which order nodes, failures and the yield were written.
    """
    items = world.database.under(KEYS.prefix)
    leases = {agent.lease: agent.id for agent in world.agents}
    ordered = [
        i
        for i in items
        if any(part in i.key for part in ("/nodes/", "/fail/", "/symptom/", "/yield"))
    ]
    ordered.sort(key=lambda item: item.create_revision)
    fence = next((item.mod_revision for item in items if item.key == KEYS.round), 0)
    latest = next((item.mod_revision for item in items if item.key == KEYS.latest), 0)
    return (
        (world.faults, world.may_stop, world.commits),
        frozenset((item.key, item.value, leases.get(item.lease)) for item in items),
        tuple(item.key for item in ordered),
        tuple(
            replace(a, lease=0, fence=a.fence == fence, view=_canonical(a.view, fence, latest))
            for a in world.agents
        ),
    )


def _canonical(view: Snapshot | None, fence: int, latest: int) -> Snapshot | None:
    if view is None:
        return None
    revisions = sorted({view.yield_revision, *(failure.revision for failure in view.failures)})
    failures = tuple(replace(f, revision=revisions.index(f.revision)) for f in view.failures)
    return replace(
        view,
        fence=view.fence == fence,
        committed_revision=view.committed_revision == latest,
        yield_revision=revisions.index(view.yield_revision),
        failures=failures,
    )


def explore(world: World, max_round: int) -> int:
    """Visit every world reachable within `max_round` rounds; returns how many there are."""
    seen = {fingerprint(world)}
    stack = [world]
    while stack:
        world = stack.pop()
        check_commits(world)
        if world.read().n > max_round:
            continue
        changed = False
        for after in successors(world):
            if after is world:
                continue
            changed = True
            mark = fingerprint(after)
            if mark not in seen:
                seen.add(mark)
                stack.append(after)
        if not changed:
            check_end(world)
    return len(seen)


def begin(
    spec: JobSpec, nodes: int, faults: int, *, may_stop: bool = False, commits: int = 0
) -> World:
    agents = tuple(Agent(name, 0, 0, alive=False) for name in "abcdefgh"[:nodes])
    return World(spec, Database(), agents, faults, may_stop, commits)


SMALL_JOBS = {
    "two nodes that come and go": (2, (1, 2), 1, 1, 2),
    "two nodes, both needed, no restarts": (2, (2, 2), 0, 1, 2),
    "one node and a spare": (2, (1, 1), 1, 1, 2),
    "three nodes, two places": (3, (1, 2), 0, 0, 2),
}
"""Nodes there are, nodes wanted, restarts allowed, faults that happen, rounds looked at."""


@pytest.mark.parametrize(
    ("nodes", "bounds", "restarts", "faults", "max_round"), SMALL_JOBS.values(), ids=SMALL_JOBS
)
def test_no_order_of_events_breaks_an_invariant(nodes, bounds, restarts, faults, max_round):
    spec = JobSpec(min_nodes=bounds[0], max_nodes=bounds[1], max_restarts=restarts)
    assert explore(begin(spec, nodes, faults), max_round) > 1000


def running(world: World) -> World:
    """The same nodes in round 1, all workers running, nothing having gone wrong."""
    nodes = range(len(world.agents))
    for index in nodes:
        world = register(world, index)
    while not all(agent.workers is Workers.RUNNING for agent in world.agents):
        for index in nodes:
            world = look(world, index)
            for step in (move, act):
                if world.agents[index].view is not None:
                    world = step(world, index)
    return world


STOPPED_JOBS = {
    "one node that comes back": (1, (1, 1), 1, 1, 2),
    "two nodes, no restarts": (2, (1, 2), 0, 0, 1),
}
"""As above."""


@pytest.mark.parametrize(
    ("nodes", "bounds", "restarts", "faults", "max_round"),
    STOPPED_JOBS.values(),
    ids=STOPPED_JOBS,
)
def test_a_stop_asked_for_at_any_time_ends_the_job_for_everybody(
    nodes, bounds, restarts, faults, max_round
):
    spec = JobSpec(min_nodes=bounds[0], max_nodes=bounds[1], max_restarts=restarts)
    assert explore(begin(spec, nodes, faults, may_stop=True), max_round) > 1000


def test_a_stop_ends_a_running_job_although_a_node_fails_meanwhile():
    spec = JobSpec(min_nodes=2, max_nodes=2)
    assert explore(stop(running(begin(spec, 2, faults=1))), max_round=1) > 1000


def test_the_search_notices_a_round_that_begins_in_spite_of_a_stop(monkeypatch):
    def careless(keys, job, move):
        compares, writes = rounds.transaction(keys, job, move)
        return [compare for compare in compares if compare.key != keys.stop], writes

    monkeypatch.setitem(globals(), "transaction", careless)
    spec = JobSpec(min_nodes=1, max_nodes=1)
    with pytest.raises(AssertionError, match="I11"):
        explore(begin(spec, 1, faults=0, may_stop=True), max_round=1)


def test_the_search_notices_a_transition_without_its_fence(monkeypatch):
    def careless(keys, job, move):
        compares, writes = rounds.transaction(keys, job, move)
        return [compare for compare in compares if compare.key != keys.round], writes

    monkeypatch.setitem(globals(), "transaction", careless)
    spec = JobSpec(min_nodes=1, max_nodes=2, max_restarts=1)
    with pytest.raises(AssertionError, match=r"I\d+"):
        explore(begin(spec, 2, faults=1), max_round=2)
