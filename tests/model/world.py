"""The model of a small job: its store, its agents, and everything that may happen to them.

It runs the product's own lines: `rounds.decide`, `rounds.transaction` and
`supervise.next_action`, on the database of `kv_memory`. An agent acts on what it last read,
however old that is; it may die between any two operations, lose its lease while it lives on, come
back under the same lease-less process or as a new one, and a user may ask for a stop, or a
node to leave, at any time. A link between two nodes may break, and work again, at any time: workers
of a round with such a link lose their peers or hang, and never finish; agents that look at their
links accuse whom they do not reach, the dead as well. Workers that were asked to leave end; those
of a job that parks them may wait in their processes for the next round, and die while they wait.
In a job that warms up, workers of a node that comes, or that fails, may first run to where they can
wait; they die there, or find that they cannot.
Worlds are values: every event returns another world.

Who calls it: `search`, and the random walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from tests.support.memory_store import Database
from zero_agent.loop.supervise import Action, Situation, next_action
from zero_agent.node.state import LOST_PEER, WAITING, Workers
from zero_orchestrator.membership.dead_links import DeadLink, LinkReport, Pair
from zero_orchestrator.membership.job_state import Failure, Node, Snapshot
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.parse import parse
from zero_orchestrator.membership.rounds import Observation, Timing, Transition, decide, transaction
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import Compare, Delete, Put, Range, Write, absent, unchanged

T = TypeVar("T")


def replace(value: T, **changes: object) -> T:
    """As `dataclasses.replace`, which would look at each field: half of the time of a search."""
    copy = object.__new__(type(value))
    vars(copy).update(vars(value), **changes)
    return copy


KEYS = Keys("model")
LONG_AGO = Observation(nodes_s=1e9, symptom_s=1e9)
"""Every wait of the round machine is over; not moving yet is another order of the same moves."""


@dataclass(frozen=True)
class Plan:
    """What an agent has read, and all that it can make of it before it reads again."""

    view: Snapshot
    reader: Agent
    """As it was then; its workers may be in any state by the time it acts."""
    transition: Transition | None
    compares: tuple[Compare, ...]
    writes: tuple[Write, ...]
    _known: dict[Workers, Action] = field(default_factory=dict)

    def action(self, workers: Workers) -> Action:
        """The next action, if its workers are in that state by then."""
        if workers not in self._known:  # most states never come to be
            self._known[workers] = what_next(self.view, self.reader, workers)
        return self._known[workers]

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Those for each state."""
        return tuple(map(self.action, Workers))


@dataclass(frozen=True)
class Agent:
    """One node: its process, what it last read, and its workers."""

    id: str
    incarnation: int
    lease: int
    plan: Plan | None = None
    """What it has read and not yet acted upon."""
    workers: Workers = Workers.NONE
    round: int = 0
    fence: int = 0
    asked: bool = False
    can_stay: bool = False
    """Its workers may wait for the next round if they lose a peer, and have the time for it."""
    released: bool = False
    stays: bool = False
    """Its workers have said that they may wait for the next round."""
    starting: bool = False
    """It stands back while its workers warm up."""
    cold: bool = False
    """Its workers cannot warm up."""
    draining: bool = False
    alive: bool = True
    gone: bool = False
    """The process ended by its own decision."""
    stuck: bool = False
    """A worker of it cannot be killed: a kill is waited for, perhaps for ever."""

    @property
    def node(self) -> Node:
        return Node(
            id=self.id,
            incarnation=str(self.incarnation),
            address="",
            slots=1,
            draining=self.draining,
            stays=self.stays,
            starting=self.starting,
        )


@dataclass(frozen=True)
class World:
    """The whole model: the store, the agents, and what may still happen."""

    spec: JobSpec
    database: Database
    agents: tuple[Agent, ...]
    job: Snapshot
    """What somebody who reads the store now finds."""
    faults: int
    """So many may still happen."""
    may_stop: bool = False
    """A user may still ask for a stop."""
    commits: int = 0
    """So many checkpoints may still be published."""
    drains: int = 0
    """So many nodes may still be told to leave."""
    sticks: int = 0
    """So many nodes may still get a worker that cannot be killed."""
    late: bool = False
    """Only a node that has finished fails, or is told to leave."""
    breaks: int = 0
    """So many links may still break."""
    parks: bool = False
    """Workers that leave may wait for the next round, in their processes."""
    warms: bool = False
    """Those of a node that comes, or fails, may warm up before they have a round."""
    broken: frozenset[Pair] = frozenset()
    """Links that are dead now."""

    def with_agent(self, index: int, agent: Agent, **changes: object) -> World:
        agents = (*self.agents[:index], agent, *self.agents[index + 1 :])
        return replace(self, agents=agents, **changes)

    def with_database(self, database: Database, **changes: object) -> World:
        items = tuple(database.items.values())
        job = parse(KEYS, Range(database.revision, items), self.spec)
        return replace(self, database=database, job=job, **changes)


def begin(
    spec: JobSpec,
    nodes: int,
    faults: int,
    *,
    may_stop: bool = False,
    commits: int = 0,
    drains: int = 0,
    sticks: int = 0,
    late: bool = False,
    breaks: int = 0,
    parks: bool = False,
    warms: bool = False,
) -> World:
    """Nobody is there yet."""
    names = [chr(ord("a") + i) if nodes <= 26 else f"n{i:02}" for i in range(nodes)]
    agents = tuple(Agent(name, 0, 0, alive=False) for name in names)
    return World(
        spec,
        Database(),
        agents,
        Snapshot(spec=spec),
        faults,
        may_stop,
        commits,
        drains,
        sticks,
        late,
        breaks,
        parks,
        warms,
    )


# ---- the store ----


def write(world: World, compares: Sequence[Compare], writes: Sequence[Write]) -> tuple[World, bool]:
    """A transaction on a copy of the store."""
    if not all(world.database.holds(compare) for compare in compares):
        return world, False
    database = world.database.clone()
    database.write(writes)
    return world.with_database(database), True


def end_lease(world: World, index: int) -> World:
    database = world.database.clone()
    database.end(world.agents[index].lease)
    return world.with_database(database)


def register(world: World, index: int, *, anew: bool) -> World:
    """A new process of a node announces itself, or the old one does again."""
    agent, database = world.agents[index], world.database.clone()
    lease = database.grant(3, 0.0)
    again = replace(agent, lease=lease, plan=None)
    begun = world.warms and world.job.n > 0
    new = Agent(agent.id, agent.incarnation + 1, lease, starting=begun)
    fresh = new if anew else again
    database.write([Put(KEYS.node(agent.id), fresh.node.to_json(), lease)])
    return world.with_database(database).with_agent(index, fresh)


def still_registered(world: World, agent: Agent) -> bool:
    item = world.database.items.get(KEYS.node(agent.id))
    return item is not None and item.lease == agent.lease


# ---- what an agent does ----


def look(world: World, index: int) -> World:
    """Read the job; a reading that calls for nothing leaves no trace."""
    agent = world.agents[index]
    plan = plan_for(world.job, agent)
    if plan.transition is None and plan.action(agent.workers) is Action.WAIT:
        return world
    return world.with_agent(index, replace(agent, plan=plan))


def plan_for(view: Snapshot, agent: Agent) -> Plan:
    move = due(view)
    compares, writes = transaction(KEYS, view, move) if move is not None else ([], [])
    return Plan(view, agent, move, tuple(compares), tuple(writes))


def due(view: Snapshot) -> Transition | None:
    """The move that is due, without its words: they change nothing."""
    move = decide(view, LONG_AGO, Timing()).transition
    if move is None:
        return None
    charge = replace(move.charge, cause="") if move.charge is not None else None
    aside = tuple(replace(one, why="") for one in move.aside)
    return replace(move, cause="", charge=charge, aside=aside)


def what_next(view: Snapshot, agent: Agent, workers: Workers) -> Action:
    return next_action(
        Situation(
            job=view,
            node=agent.node,
            workers=workers,
            round=agent.round,
            asked_to_leave=agent.asked,
            can_leave=True,
            can_stay=agent.can_stay,
            released=agent.released,
            cold=agent.cold,
            unkillable="for ever" if agent.stuck and workers is Workers.STOPPING else "",
        )
    )[0]


def act(world: World, index: int) -> World:
    """Do what the supervisor says about what was read."""
    agent = world.agents[index]
    assert agent.plan is not None
    after = ACT[agent.plan.action(agent.workers)](world, index)
    return after.with_agent(index, replace(after.agents[index], plan=None))


def note(key_of: Callable[..., str], *parts: str, value: str = "") -> Callable[[World, int], World]:
    def write_once(world: World, index: int) -> World:
        agent = world.agents[index]
        key = key_of(agent.plan.view.n, *(part.format(id=agent.id) for part in parts))
        return write(world, [absent(key)], [Put(key, value)])[0]

    return write_once


def fail(world: World, index: int) -> World:
    agent = world.agents[index]
    symptom = agent.workers in LOST_PEER
    failure = Failure(node=agent.id, symptom=symptom, summary="a worker failed")
    kind = "symptom" if symptom else "fail"
    return note(KEYS.report, kind, agent.id, value=failure.to_json())(world, index)


def become(**changes: object) -> Callable[[World, int], World]:
    return lambda world, index: world.with_agent(index, replace(world.agents[index], **changes))


def start(world: World, index: int) -> World:
    agent = world.agents[index]
    view = agent.plan.view
    changes = {"round": view.n, "fence": view.fence, "asked": False}
    changes |= {"can_stay": world.parks, "released": False}
    assert agent.workers is not Workers.STARTING, "what warms up is no worker of a round"
    after = become(workers=Workers.RUNNING, **changes)(world, index)
    return describe(stays=world.warms)(after, index) if world.warms else after


def describe(**facts: bool) -> Callable[[World, int], World]:
    """The agent says something else of its node; one that is out says it when it comes back."""

    def say(world: World, index: int) -> World:
        agent = replace(world.agents[index], **facts)
        says = Put(KEYS.node(agent.id), agent.node.to_json(), agent.lease)
        if not still_registered(world, agent):
            return world
        return write(world, [], [says])[0].with_agent(index, agent)

    return say


def end_workers(world: World, index: int) -> World:
    agent = world.agents[index]
    ended = Workers.STOPPED if agent.round else Workers.NONE
    return become(workers=Workers.STOPPING if agent.stuck else ended)(world, index)


def leave(world: World, index: int) -> World:
    """The process exits: it revokes its lease. A worker that is stuck still knows its fence."""
    assert world.agents[index].workers not in WAITING, "a worker that waits is left alone"
    left = replace(world.agents[index], alive=False, gone=True, workers=Workers.NONE)
    return end_lease(world, index).with_agent(index, left)


ACT: dict[Action, Callable[[World, int], World]] = {
    Action.WAIT: lambda world, index: world,
    Action.HOST_STORE: note(KEYS.of_round, "master", value="host:1"),
    Action.START: start,
    Action.STAND_BACK: describe(starting=True),
    Action.STAND_BY: describe(starting=False),
    Action.WARM_UP: become(workers=Workers.STARTING, round=0, fence=0),
    Action.ASK_TO_LEAVE: become(asked=True),
    Action.RELEASE: become(released=True),
    Action.STOP: end_workers,
    Action.KILL: end_workers,
    Action.REPORT_DONE: note(KEYS.report, "done", "{id}"),
    Action.REPORT_QUIET: note(KEYS.report, "quiet", "{id}"),
    Action.REPORT_FAILURE: fail,
    Action.EXIT: leave,
    Action.ABANDON: leave,
}


# ---- what happens to an agent ----


def has_finished(world: World, agent: Agent) -> bool:
    """Whether a node has reported that its workers of the round are done, or the round is over."""
    return agent.round != world.job.n or agent.id in world.job.done


def in_time(world: World, agent: Agent) -> bool:
    """Whether something may happen to this node now."""
    return not world.late or agent.id in world.job.done


def workers_end(world: World, index: int) -> Iterator[World]:
    """Running workers finish, or leave once any agent of the round asked; that is no fault."""
    agent = world.agents[index]
    if agent.workers is Workers.STARTING:
        yield world.with_agent(index, replace(agent, workers=Workers.READY))
        yield world.with_agent(index, replace(agent, workers=Workers.FAILED, cold=True))
    if agent.workers is not Workers.RUNNING:
        return
    if agent.stuck:  # taken for hung, and killed
        yield world.with_agent(index, replace(agent, workers=Workers.STOPPING))
        return
    if not dead_within(world, agent):
        yield world.with_agent(index, replace(agent, workers=Workers.SUCCEEDED))
    if any(other.asked and other.round == agent.round for other in world.agents):
        yield world.with_agent(index, replace(agent, workers=Workers.LEFT))
        if world.parks:
            yield world.with_agent(index, replace(agent, workers=Workers.PARKED))
    if agent.released and agent.can_stay:
        yield from loses_peers(world, index)
        yield world.with_agent(index, replace(agent, can_stay=False))  # its time is over


def stick(world: World, index: int) -> Iterator[World]:
    """A running worker gets where no signal reaches it."""
    agent = world.agents[index]
    if world.sticks and agent.workers is Workers.RUNNING and not agent.stuck:
        yield world.with_agent(index, replace(agent, stuck=True), sticks=world.sticks - 1)


def come_back(world: World) -> Iterator[World]:
    """A killed worker that was stuck ends after all: it may, and nobody must wait for that."""
    for index, agent in enumerate(world.agents):
        if agent.stuck and agent.workers is Workers.STOPPING:
            for end in (Workers.STOPPED, Workers.FAILED):
                yield world.with_agent(index, replace(agent, workers=end, stuck=False))


def commit(world: World, index: int) -> Iterator[World]:
    """Running workers publish a checkpoint of one more step, if their fence still holds."""
    agent = world.agents[index]
    if agent.workers is Workers.RUNNING and world.commits:
        latest = Put(KEYS.latest, f'{{"step": {world.job.committed + 1}}}')
        published, succeeded = write(world, [unchanged(KEYS.round, agent.fence)], [latest])
        if succeeded:
            yield replace(published, commits=world.commits - 1)


def dead_within(world: World, agent: Agent) -> frozenset[Pair]:
    """The dead links of the round that this agent's workers run in, if that is the current one.

    Who has finished is waited for by nobody.
    """
    if not world.broken or agent.round != world.job.n:
        return frozenset()
    members = {member.id for member in world.job.members.nodes} - world.job.done
    return frozenset(pair for pair in world.broken if pair <= members)


def break_link(world: World, index: int) -> Iterator[World]:
    """A link of this node to a later one breaks."""
    if world.breaks:
        for other in world.agents[index + 1 :]:
            pair = frozenset((world.agents[index].id, other.id))
            if pair not in world.broken:
                yield replace(world, broken=world.broken | {pair}, breaks=world.breaks - 1)


def heal(world: World) -> Iterator[World]:
    """A link works again."""
    for pair in sorted(world.broken, key=sorted):
        yield replace(world, broken=world.broken - {pair})


def loses_peers(world: World, index: int) -> Iterator[World]:
    """Workers see that a connection has ended: they exit, or wait for the next round."""
    agent = world.agents[index]
    yield world.with_agent(index, replace(agent, workers=Workers.PEER_LOST))
    if agent.can_stay:
        yield world.with_agent(index, replace(agent, workers=Workers.STRANDED))


def lose_peers(world: World) -> Iterator[World]:
    """Workers lose their peers by a dead link; perhaps they never see it, and hang instead."""
    for index in range(len(world.agents)):
        yield from lose_peers_of(world, index)


def lose_peers_of(world: World, index: int) -> Iterator[World]:
    """The same of one node."""
    agent = world.agents[index]
    if agent.workers is Workers.RUNNING and dead_within(world, agent):
        yield from loses_peers(world, index)


def look_at_links(world: World, index: int) -> Iterator[World]:
    """Workers make no progress: their agent says which members it does not reach, none perhaps."""
    agent = world.agents[index]
    slow = agent.workers in LOST_PEER or dead_within(world, agent)
    if not slow or agent.round != world.job.n or agent.workers is Workers.STOPPING:
        return
    dead = tuple(
        DeadLink(to=other.id)
        for other in world.agents
        if not other.alive or frozenset((agent.id, other.id)) in world.broken
        if other.id != agent.id and world.job.node(other.id) in world.job.members.nodes
    )
    says = LinkReport(node=agent.id, dead=dead).to_json()
    key = KEYS.report(agent.round, "links", agent.id)
    held = world.database.items.get(key)
    if held is None or held.value != says:
        yield write(world, [], [Put(key, says)])[0]


def reach_again(world: World, index: int) -> Iterator[World]:
    """A node that is set aside reaches the others again, or they are not there any more."""
    agent = world.agents[index]
    for one in world.job.aside:
        if one.node != agent.id or not agent.alive:
            continue
        here = [other.id for other in world.agents if other.alive and other.id in one.others]
        if not any(frozenset((agent.id, other)) in world.broken for other in here):
            yield write(world, [], [Delete(KEYS.aside(agent.id))])[0]


def forgive(world: World) -> Iterator[World]:
    """The lease of an exclusion runs out."""
    for exclusion in world.job.exclusions:
        yield write(world, [], [Delete(KEYS.excluded(exclusion.host))])[0]


def faults(world: World, index: int) -> Iterator[World]:
    """Whatever may go wrong with a node once."""
    agent = world.agents[index]
    if not in_time(world, agent):
        return
    fewer = replace(world, faults=world.faults - 1)
    if agent.workers in {Workers.RUNNING, Workers.STARTING, Workers.READY, *WAITING}:
        yield fewer.with_agent(index, replace(agent, workers=Workers.FAILED))
    if agent.workers is Workers.RUNNING:
        yield from loses_peers(fewer, index)
    cut_off = end_lease(fewer, index)
    yield cut_off.with_agent(index, replace(agent, alive=False, plan=None, workers=Workers.NONE))
    if still_registered(world, agent):
        yield cut_off  # the lease lapsed while the process lives on, with what it last read


def drain(world: World, index: int) -> Iterator[World]:
    """A node is told to leave, and tells the others that it wants to.

    One whose workers have finished says that first.
    """
    agent = world.agents[index]
    if agent.workers is Workers.SUCCEEDED and not has_finished(world, agent):
        return
    may = world.drains and not agent.draining and in_time(world, agent)
    if may and still_registered(world, agent):
        told = replace(agent, draining=True, plan=None)
        says = Put(KEYS.node(agent.id), told.node.to_json(), agent.lease)
        notes = KEYS.report(world.job.n, "leaving", agent.id)
        requests = write(world, [], [says, Put(notes, agent.node.incarnation)])[0]
        yield requests.with_agent(index, told, drains=world.drains - 1)


def stop(world: World) -> World:
    """A user asks for a stop."""
    return replace(write(world, [], [Put(KEYS.stop, '"enough"')])[0], may_stop=False)
