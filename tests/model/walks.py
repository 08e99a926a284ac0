"""Random walks through the worlds of a large job, whose links break and heal as well.

A seed is the same walk each time.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.model.search import check_commits, move
from tests.model.world import (
    Agent,
    World,
    act,
    begin,
    break_link,
    faults,
    heal,
    look,
    look_at_links,
    lose_peers_of,
    reach_again,
    register,
    still_registered,
    workers_end,
)
from zero_agent.node.state import WAITING, Workers
from zero_orchestrator.membership.job_state import State
from zero_orchestrator.membership.spec import JobSpec

HEALS = 0.002
"""The chance that a dead link works again, at each event."""


def walk(nodes: int, events: int, seed: int) -> int:
    """Let much happen, then nothing more: every place must be filled by a running node.

    Returns:
        The rounds that there were.

    Raises:
        AssertionError: An invariant broke, or the job did not come to rest.
    """
    chance, high = random.Random(seed), nodes * 3 // 4
    spec = JobSpec(min_nodes=2, max_nodes=high, max_restarts=10**9)
    world = begin(spec, nodes, faults=10**9, breaks=10**9, parks=True, warms=True)
    for _ in range(events):
        world = something_happens(world, chance.randrange(nodes), chance, fault_rate=0.02)
        if world.broken and chance.random() < HEALS:
            world = chance.choice(list(heal(world)))
        check_commits(world)
    world = replace(world, broken=frozenset())
    for _ in range(400):
        for index in range(nodes):
            world = something_happens(world, index, chance, fault_rate=0.0)
        if at_rest(world, high):
            return world.job.n
    raise AssertionError(f"I6: the job does not come to rest: {world.job}")


def at_rest(world: World, high: int) -> bool:
    """Whether a round of full size runs, on all of its members."""
    job = world.job
    running = {agent.id for agent in world.agents if is_running(agent, job.n)}
    full = job.state is State.ACTIVE and len(job.members.nodes) == high
    return full and running == {member.id for member in job.members.nodes}


def something_happens(world: World, index: int, chance: random.Random, fault_rate: float) -> World:
    """One event at one node: mostly its agent working, sometimes a fault."""
    agent = world.agents[index]
    if agent.gone:
        return world
    if not agent.alive or not still_registered(world, agent):
        anew = not agent.alive or chance.random() < 0.5
        return register(world, index, anew=anew) if chance.random() < 0.3 else world
    if chance.random() < fault_rate:
        return chance.choice([*faults(world, index), *break_link(world, index)])
    links = [*look_at_links(world, index), *reach_again(world, index)]
    if links and chance.random() < 0.3:
        return chance.choice(links)
    lost = list(lose_peers_of(world, index))
    if lost and chance.random() < 0.1:
        return lost[0]
    return works(world, index, chance)


def works(world: World, index: int, chance: random.Random) -> World:
    agent = world.agents[index]
    if agent.plan is not None:
        return chance.choice((move, act))(world, index)
    leaving = [after for after in workers_end(world, index) if has_left(after, index)]
    if leaving and chance.random() < 0.5:
        return chance.choice(leaving)
    return look(world, index)


def has_left(world: World, index: int) -> bool:
    return world.agents[index].workers in {Workers.LEFT, Workers.READY, *WAITING}


def is_running(agent: Agent, round: int) -> bool:
    return agent.alive and agent.workers is Workers.RUNNING and agent.round == round
