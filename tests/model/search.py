"""Exhaustive search: every world that can be reached, each once, and what must hold in it.

Two worlds count as one if no future can tell them apart (`fingerprint`), nor names of nodes alone;
nodes that have not come yet come in the order of their names; and what an agent has read is
forgotten as soon as nothing can come of it (`forget`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

from tests.model.world import (
    KEYS,
    Agent,
    Plan,
    World,
    act,
    break_link,
    come_back,
    commit,
    drain,
    faults,
    forgive,
    heal,
    look,
    look_at_links,
    lose_peers,
    reach_again,
    register,
    replace,
    stick,
    still_registered,
    stop,
    workers_end,
    write,
)
from zero_agent.loop.supervise import Action
from zero_agent.node.state import WAITING, Workers
from zero_orchestrator.membership.job_state import ENDED, Snapshot, State
from zero_orchestrator.membership.moves import LEGAL
from zero_orchestrator.membership.rounds import Move
from zero_orchestrator.store.kv import KeyValue, Put, Write, unchanged

ABOUT_A_ROUND = {
    *(Action.START, Action.HOST_STORE),
    *(Action.REPORT_DONE, Action.REPORT_QUIET, Action.REPORT_FAILURE),
}
"""For these it matters which round was read."""


def explore(world: World, max_round: int) -> int:
    """Visit every world reachable within `max_round` rounds; returns how many there are."""
    seen = {hash(fingerprint(world))}
    stack = [world]
    while stack:
        world = stack.pop()
        check_commits(world)
        if world.job.n > max_round:
            continue
        after_all = [forget(after) for after in (*come_back(world), *lose_peers(world))]
        others = [after for after in successors(world) if after is not world]
        (others if may_wait_for_links(world) else after_all).extend(heal(world))
        for after in (*others, *after_all):
            mark = hash(fingerprint(after))
            if mark not in seen:
                seen.add(mark)
                stack.append(after)
        if not others:
            check_end(world)
    return len(seen)


def may_wait_for_links(world: World) -> bool:
    """Whether a round begins only when a link works again: too few nodes are left without."""
    aside = {one.node for one in world.job.aside}
    here = [agent for agent in world.agents if not agent.gone and agent.id not in aside]
    return world.job.state is State.FORMING and world.spec.usable(len(here)) < world.spec.min_nodes


def successors(world: World) -> Iterator[World]:
    """Every next event."""
    for after in _successors(world):
        yield after if after is world else forget(after)


def _successors(world: World) -> Iterator[World]:
    if world.may_stop:
        yield stop(world)
    yield from forgive(world)
    for index, agent in enumerate(world.agents):
        if not agent.gone and may_come(world, index):
            yield from events(world, index)


def may_come(world: World, index: int) -> bool:
    """Not before a node that differs from it in nothing but its name."""
    return all(earlier.incarnation for earlier in world.agents[:index])


def events(world: World, index: int) -> Iterator[World]:
    """What one node may do next, or what may happen to it."""
    agent = world.agents[index]
    if not agent.alive:
        yield register(world, index, anew=True)
        return
    if not still_registered(world, agent):
        yield register(world, index, anew=False)
    if agent.plan is None:
        yield look(world, index)
    else:
        yield move(world, index)
        yield act(world, index)
    yield from workers_end(world, index)
    yield from commit(world, index)
    yield from drain(world, index)
    yield from stick(world, index)
    yield from break_link(world, index)
    yield from look_at_links(world, index)
    yield from reach_again(world, index)
    if world.faults:
        yield from faults(world, index)


def forget(world: World) -> World:
    """Without the plans of which nothing can come any more: each is dropped, sooner or later."""
    for index, agent in enumerate(world.agents):
        plan = agent.plan
        if plan is None or may_be_done(agent) != {Action.WAIT}:
            continue
        if plan.transition is None or not still_holds(world, plan):
            world = world.with_agent(index, replace(agent, plan=None))
    return world


def still_holds(world: World, plan: Plan) -> bool:
    """Whether what was read for a transition is true; what is not never will be again."""
    return all(world.database.holds(compare) for compare in plan.compares)


def may_be_done(agent: Agent) -> set[Action]:
    """What may come of a plan, beside its transition: some workers change by themselves."""
    assert agent.plan is not None
    if agent.workers in {Workers.RUNNING, Workers.STARTING, Workers.READY, *WAITING} or agent.stuck:
        return set(agent.plan.actions)
    return {agent.plan.action(agent.workers)}


def move(world: World, index: int) -> World:
    """Try the transition that was due in what this agent has read, however old that is."""
    agent = world.agents[index]
    assert agent.plan is not None
    if agent.plan.transition is None:
        return world
    after, succeeded = write(world, agent.plan.compares, agent.plan.writes)
    if succeeded:
        check_move(world, after, agent.plan)
    return after.with_agent(index, replace(after.agents[index], plan=None))


def running(world: World) -> World:
    """The same nodes in round 1, all workers running, nothing having gone wrong."""
    nodes = range(len(world.agents))
    for index in nodes:
        world = register(world, index, anew=True)
    while not all(agent.workers is Workers.RUNNING for agent in world.agents):
        for index in nodes:
            world = look(world, index)
            for step in (move, act):
                if world.agents[index].plan is not None:
                    world = step(world, index)
    return world


# ---- what must hold ----


def check_move(before: World, after: World, plan: Plan) -> None:
    """I1, I3, I4, I5, I10, I11, I12: of one transition that has succeeded."""
    spec, old, new = before.spec, before.job, after.job
    transition = plan.transition
    assert transition is not None
    assert old.state not in ENDED, "I10: an ended job moved"
    source, target = LEGAL[transition.move]
    assert (old.state, new.state) == (source, target), "I1: a move from where it is not legal"
    assert plan.view.n == old.n, "I1: a move that was due in another round"
    assert new.n - old.n == (transition.move is Move.ACTIVATE), "I1: rounds are counted by one"
    assert not write(after, plan.compares, plan.writes)[1], "I1: the same move twice"
    assert new.state is not State.STOPPED or old.stop, "I11: nobody asked for a stop"
    if transition.move is Move.ACTIVATE:
        assert not old.stop, "I11: a round began after a stop was asked for"
        ids = [node.id for node in new.members.nodes]
        assert len(set(ids)) == len(ids), "I3: one rank, one node"
        assert spec.min_nodes <= len(ids) <= spec.max_nodes, "I4: the size is within bounds"
        assert len(ids) % spec.node_unit == 0, "I4: whole units"
        free = [node for node in new.members.nodes if old.exclusion(node) is None]
        needed = spec.usable(len(free)) < spec.min_nodes
        assert needed or len(free) == len(ids), "I4: excluded, and could be done without"
        assert not {one.node for one in old.aside} & set(ids), "I4: one that is set aside"
        ready = [node for node in free if not node.starting]
        needed = spec.usable(len(ready)) < spec.min_nodes
        assert needed or len(ready) == len(free), "I4: one that warms up, and is not needed"
    else:
        assert new.members == old.members, "I1: members never change"
    if transition.move is Move.YIELD:
        check_yield(plan.view)
    check_aside(plan)
    check_charge(before, after, transition.move)


def check_yield(view: Snapshot) -> None:
    """I12: no worker is asked to leave for the sake of a node that has finished, nor at the end."""
    running = [m for m in view.members.nodes if m.id not in view.done]
    wish = {node.id for node in view.nodes if node.draining or view.barred(node)}
    grows = bool(view.joiners) and len(running) == len(view.members.nodes)
    assert view.stop or grows or any(m.id in wish for m in running), "I12: nobody who runs leaves"


def check_charge(before: World, after: World, move: Move) -> None:
    """I5."""
    spec, old, new = before.spec, before.job, after.job
    charged = new.charges - old.charges
    failures = {Move.INTERRUPT, Move.FAIL, Move.GIVE_UP}
    assert charged == (move in failures), "I5: failures only, once"
    refill = spec.refill_after_steps or 10**9
    spent = [c for c in old.charged if old.committed - c.committed < refill]
    over = len(spent) >= spec.max_restarts or move is Move.GIVE_UP
    assert (new.state is State.FAILED) == (bool(charged) and over), "I5: fails iff it is spent"
    if charged:
        assert new.charged[-1].committed == old.committed, "I5: a charge knows what is committed"


def check_aside(plan: Plan) -> None:
    """I4, I5: who is set aside has a dead link, and it costs a restart iff the job can go on."""
    job, transition = plan.view, plan.transition
    assert transition is not None
    aside = {one.node for one in transition.aside}
    if not aside:
        return
    assert aside <= {node for pair in job.dead_links for node in pair}, "I4: without a dead link"
    assert all(pair & aside for pair in job.dead_links), "I4: a dead link is left"
    assert transition.move in {Move.FORM, Move.INTERRUPT}, "I4: set aside in a round that goes on"
    enough = job.spec.usable(sum(node.id not in aside for node in job.eligible))
    if transition.move is Move.INTERRUPT:
        assert enough >= job.spec.min_nodes, "I5: a restart that cannot help"


def check_commits(world: World) -> None:
    """I2: whoever tries to commit now succeeds only as a member of the ACTIVE round."""
    fences = {agent.fence for agent in world.agents if agent.fence}
    holds = {fence for fence in fences if world.database.holds(unchanged(KEYS.round, fence))}
    for agent in world.agents:
        if agent.fence in holds:
            assert world.job.state is State.ACTIVE, "I2: a commit outside a round"
            assert agent.round == world.job.n, "I2: a commit with an old fence"


def check_end(world: World) -> None:
    """I6: nothing is left to do, fault or no fault; the job has ended and all have seen it."""
    assert world.job.state in ENDED, f"I6: stuck in {world.job}"
    assert all(agent.gone for agent in world.agents), f"I6: one waits for ever: {world.agents}"


# ---- which worlds are the same ----


def fingerprint(world: World) -> tuple[Any, ...]:
    """Equal for worlds between which no future can tell.

    Of revisions only this matters: whether what an agent compares still is true (what is not
    never will be again), and in which order nodes, failures and the yield were written. Keys of
    rounds before the current one are read by nobody. What nodes are called matters to nobody
    either: they are numbered in the order of what distinguishes them.
    """
    n, fence = world.job.n, world.job.fence
    items = [item for item in world.database.items.values() if _matters(n, item.key)]
    alike = tuple(sorted(world.agents, key=lambda agent: _place(world, agent)))
    order = tuple(agent.id for agent in alike)
    leases = {agent.lease: number for number, agent in enumerate(alike)}
    values = ((_key(i.key, order), _value(i.value, order), leases.get(i.lease)) for i in items)
    return (
        (world.faults, world.may_stop, world.commits, world.drains, world.sticks, world.late),
        world.warms,
        (world.breaks, frozenset(frozenset(map(order.index, pair)) for pair in world.broken)),
        frozenset(values),
        _written(items, order, "/nodes/"),
        _written(items, order, "/fail/", "/symptom/", "/yield"),
        tuple(_agent(world, agent, fence, order) for agent in alike),
    )


def _place(world: World, agent: Agent) -> tuple[Any, ...]:
    """Of a node among the others, by anything but its name."""
    registered = world.database.items.get(KEYS.node(agent.id))
    members = [member.id for member in world.job.members.nodes]
    member = members.index(agent.id) if agent.id in members else -1
    arrived = registered.create_revision if registered is not None else 0
    state = (
        agent.incarnation,
        agent.workers,
        agent.round,
        agent.alive,
        agent.draining,
        agent.starting,
        agent.stuck,
        sum(agent.id in pair for pair in world.broken),
    )
    return (member, arrived, *state)


@cache
def _matters(n: int, key: str) -> bool:
    if key.startswith(KEYS.aside("")):
        return True
    of_a_round = (KEYS.of_round(0)[:-1], KEYS.report(0)[:-1])
    if key.startswith(of_a_round):
        return key.startswith((KEYS.of_round(n, ""), KEYS.report(n, "")))
    return True


@cache
def _key(key: str, order: tuple[str, ...]) -> str:
    """A key with the number of the node in place of its name."""
    path, _, last = key.rpartition("/")
    return f"{path}/{order.index(last)}" if last in order else key


@lru_cache(maxsize=100_000)
def _value(value: str, order: tuple[str, ...]) -> str:
    """The same for a value: JSON, in which a name is a string."""
    names = "|".join(map(re.escape, order))
    return re.sub(f'"({names})"', lambda found: f'"{order.index(found[1])}"', value)


def _written(items: list[KeyValue], order: tuple[str, ...], *parts: str) -> tuple[str, ...]:
    """Which keys of these kinds there are, in the order in which they came."""
    of_them = [item for item in items if _is_one_of(item.key, parts)]
    of_them.sort(key=lambda item: item.create_revision)
    return tuple(_key(item.key, order) for item in of_them)


@cache
def _is_one_of(key: str, parts: tuple[str, ...]) -> bool:
    return any(part in key for part in parts)


def _agent(world: World, agent: Agent, fence: int, order: tuple[str, ...]) -> tuple[Any, ...]:
    state = (agent.incarnation, agent.workers, agent.round, agent.asked, agent.alive, agent.gone)
    state += (agent.draining, agent.stuck, agent.can_stay, agent.released)
    state += (agent.stays, agent.starting, agent.cold)
    plan = _plan(world, agent, fence, order) if agent.plan is not None else None
    return (*state, agent.fence == fence, still_registered(world, agent), plan)


def _plan(world: World, agent: Agent, fence: int, order: tuple[str, ...]) -> tuple[Any, ...]:
    plan = agent.plan
    assert plan is not None
    step: Any = None
    if plan.transition is not None:
        writes = (_write(write, order) for write in plan.writes)
        step = tuple(writes) if still_holds(world, plan) else "in vain"
    actions = may_be_done(agent)
    about = (plan.view.n, plan.view.fence == fence) if actions & ABOUT_A_ROUND else ()
    return (step, tuple(plan.actions) if len(actions) > 1 else tuple(actions), about)


def _write(write: Write, order: tuple[str, ...]) -> tuple[str, str]:
    value = _value(write.value, order) if isinstance(write, Put) else ""
    return (_key(write.key, order), value)
