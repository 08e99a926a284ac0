"""`--advertise-addr`: what others are told, and where this node listens."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest

from tests.support.flags import parse
from zero_agent.command.resolve import resolve
from zero_agent.etcd.etcd_choice import Static
from zero_agent.etcd.rdzv_conf import RdzvConf
from zero_agent.loop.config import AgentConfig
from zero_agent.node.memory import NodeMemory
from zero_agent.workers.environment import Orders
from zero_contract.worker import PeerMemoryRequest
from zero_orchestrator.membership.job_state import Members, Snapshot, State


@pytest.fixture
def configured(tmp_path):
    """The configuration that such flags and variables make."""

    def configure(line: str, **environ: str) -> AgentConfig:
        (tmp_path / "s.py").touch()
        return resolve(parse([*line.split(), f"{tmp_path}/s.py"], environ), RdzvConf(), {})

    return configure


@pytest.mark.parametrize(
    ("advertised", "told"), [("203.0.113.7", "203.0.113.7"), ("[fd00::7]", "[fd00::7]")]
)
def test_others_are_told_the_advertised_address_and_this_node_listens_on_its_own(
    advertised, told, configured
):
    config = configured("--local-addr=127.0.0.1", PET_ADVERTISE_ADDR=advertised)
    node = config.node("1", 29600)
    assert (node.address, node.ring) == (told.strip("[]"), f"{told}:29600")
    assert config.where_store_is(29601) == f"{told}:29601"
    assert (config.address, config.store_listens_on) == ("127.0.0.1", "127.0.0.1")


def test_without_it_others_are_told_the_own_address(configured):
    config = configured("--local-addr=127.0.0.1")
    assert config.node("1", 29600).ring == config.where_store_is(29600) == "127.0.0.1:29600"


def test_the_memory_for_checkpoints_is_found_at_the_advertised_address(tmp_path):
    with closing(NodeMemory("job", "a", "127.0.0.1", tmp_path, advertised="203.0.113.7")) as ram:
        reply = ram.open(PeerMemoryRequest(request=1), "secret")
    assert reply.address.startswith("203.0.113.7:")


def test_workers_beside_the_rounds_store_use_the_own_address_and_all_others_the_advertised_one(
    configured, tmp_path
):
    config = configured("--local-addr=127.0.0.1", PET_ADVERTISE_ADDR="203.0.113.7")
    here = config.node("1", 29600)
    there = dataclasses.replace(here, id="z", address="203.0.113.7")  # behind the same NAT
    for members, seen in (((here, there), "127.0.0.1"), ((there, here), "203.0.113.7")):
        job = Snapshot(
            spec=config.spec,
            n=1,
            state=State.ACTIVE,
            nodes=members,
            members=Members(members, restarts=0),
            master="203.0.113.7:29601",
        )
        orders = Orders(
            "job",
            tmp_path,
            {},
            f"{tmp_path}/socket",
            streams=config.streams,
            store_host=config.address,
        )
        [order] = orders.of(job, here, "secret")
        assert (order.env["MASTER_ADDR"], order.env["MASTER_PORT"]) == (seen, "29601")


@pytest.mark.parametrize(
    ("line", "listens_on"),
    [
        ("--node-rank=0 --advertise-addr=203.0.113.7 --local-addr=127.0.0.2", "127.0.0.2"),
        ("--node-rank=0", "203.0.113.7"),
        ("--node-rank=1 --advertise-addr=203.0.113.8", "203.0.113.7"),
    ],
)
def test_node_0_of_a_fixed_world_need_not_have_the_address_that_leads_to_it(line, listens_on):
    args = parse(["--nnodes=2", "--master-addr=203.0.113.7", *line.split(), "s.py"], {})
    world = Static.of(args, 60.0)
    assert (world.endpoint, world.listens_on) == ("203.0.113.7:29500", listens_on)
