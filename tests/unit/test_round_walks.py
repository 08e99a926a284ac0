"""Long random walks of larger jobs, through the same lines as the exhaustive search.

What a search cannot reach, a walk may stumble over: many nodes, many rounds, faults upon faults.
A seed that fails is a test case; the walk is the same each time.
"""

from __future__ import annotations

import random

import pytest

from tests.unit.test_round_model import (
    Agent,
    World,
    act,
    begin,
    check_commits,
    faults,
    look,
    move,
    register,
    still_registered,
    workers_end,
)
from zero_agent.supervise import Workers
from zero_orchestrator.job_state import State
from zero_orchestrator.spec import JobSpec

EVENTS = 3000


def something_happens(world: World, index: int, chance: random.Random, fault_rate: float) -> World:
    """One event at one node: mostly its agent working, sometimes a fault."""
    agent = world.agents[index]
    if agent.gone:
        return world
    if not agent.alive or not still_registered(world, agent):
        return register(world, index) if chance.random() < 0.3 else world
    if chance.random() < fault_rate:
        return chance.choice(list(faults(world, index)))
    return works(world, index, chance)


def works(world: World, index: int, chance: random.Random) -> World:
    agent = world.agents[index]
    if agent.view is not None:
        return chance.choice((move, act))(world, index)
    leaving = [after for after in workers_end(world, index) if has_left(after, index)]
    if leaving and chance.random() < 0.5:
        return leaving[0]
    return look(world, index)


def has_left(world: World, index: int) -> bool:
    return world.agents[index].workers is Workers.LEFT


def is_running(agent: Agent, round: int) -> bool:
    return agent.alive and agent.workers is Workers.RUNNING and agent.round == round


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_a_round_runs_again_once_the_faults_have_stopped(seed):
    chance = random.Random(seed)
    spec = JobSpec(min_nodes=2, max_nodes=6, max_restarts=10_000)
    world = begin(spec, 8, faults=10**9)
    for _ in range(EVENTS):
        world = something_happens(world, chance.randrange(8), chance, fault_rate=0.02)
        check_commits(world)
    for _ in range(400):
        for index in range(8):
            world = something_happens(world, index, chance, fault_rate=0.0)
    job = world.read()
    assert job.n > 10, "the walk went through many rounds"
    assert job.state is State.ACTIVE
    assert len(job.members.nodes) == 6
    running = {agent.id for agent in world.agents if is_running(agent, job.n)}
    assert running == {member.id for member in job.members.nodes}
