"""The network is cut, or an agent stands still: who goes on, who waits, and what it costs.

Machines are network namespaces, packets vanish without a word, etcd is real. One job trains: its
weights and samples are those of a run without a cut. The workers of the others are a plain script
that counts: which rounds there were, on which nodes, and how many restarts they cost. That a round
that is over publishes nothing is proved by the fence (`tests/model`,
`tests/unit/orchestrator/test_rendezvous.py`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal

import pytest

from tests.processes.test_elastic import assert_as_if_nothing_had_happened
from tests.support.cluster import COLD, LONG_S, TOGETHER, Cluster, is_alive
from tests.support.etcd_server import EtcdServer
from tests.support.etcd_server import cluster as etcd_cluster
from tests.support.partition import network
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import Member, is_healthy
from zero_agent.node.process_control import children
from zero_contract.exit_codes import AgentExit

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

PORT = 2379

GREETING_BYTES = 50
"""The ring's handshake sends the client more: a nonce, names, and a proof."""

COUNTS = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
name = ".".join(os.environ[k] for k in ("ZERO_ROUND", "RANK", "WORLD_SIZE"))
with (here / name).open("a") as file:
    while not (here / "finish").exists():
        print(file=file, flush=True)
        time.sleep(0.05)
"""
"""A line every 50 ms, in a file that is named after round, rank and world size."""


class Counting(Cluster):
    """A job of such workers."""

    def __init__(self, directory, endpoint, restarts):
        flags = ("--nnodes=1:2", f"--max-restarts={restarts}", COLD, TOGETHER)
        (directory / "counts").mkdir()
        script = directory / "count.py"
        script.write_text(COUNTS)
        words = [str(script), str(directory / "counts")]
        super().__init__(directory, endpoint, flags=flags, script=words)

    def files(self, n, world):
        """The files of a round, if all of its workers have begun."""
        found = list((self.directory / "counts").glob(f"{n}.*.{world}"))
        return found if len(found) == world else []

    def wait_for_round(self, n, world):
        """Such a wait can be in vain for many reasons; what the agents say tells which."""

        def begun():
            self.check_agents()
            return self.files(n, world)

        try:
            wait_for(begun, 150, f"round {n} with {world} workers")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def goes_on(self, n, world):
        """Wait until each worker of the round has counted on by ten."""
        before = {path: path.stat().st_size for path in self.files(n, world)}

        def counted():
            return all(path.stat().st_size >= size + 10 for path, size in before.items())

        wait_for(lambda: before and counted(), 150, f"the workers of round {n} go on")

    def finish(self):
        """Let the workers end, and the agents with them: the number of rounds that there were."""
        (self.directory / "counts" / "finish").touch()
        self.wait_for_end()
        return len(self.events("activate"))


class Machines:
    """One job on machines of its own: `store` runs etcd, each other one an agent."""

    def __init__(self, net, job, etcd):
        self.net, self.job, self.etcd = net, job, etcd

    def start(self, *names):
        for name in names:
            with self.net.inside(name):
                self.job.start(name)


@contextlib.contextmanager
def on_machines(directory, make_job, names="ab"):
    """Etcd on a machine of its own, others of those names, and the job made for its endpoint."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network("store", *names))
        everywhere = f"--listen-client-urls=http://0.0.0.0:{PORT}"
        member = Member(data=directory / "data", client_port=PORT, options=(everywhere,))
        etcd = EtcdServer(directory, member)
        with net.inside("store"):
            stack.callback(etcd.close)
            etcd.start()
        job = make_job(f"{net.address('store')}:{PORT}")
        stack.callback(job.close)
        yield Machines(net, job, etcd)


@pytest.fixture
def machines(tmp_path, tmp_path_factory):
    """With a job that counts."""
    etcd = tmp_path_factory.mktemp("etcd")
    with on_machines(etcd, lambda endpoint: Counting(tmp_path, endpoint, restarts=1)) as found:
        yield found


@pytest.fixture
def trained_on(tmp_path, tmp_path_factory):
    """With a job that trains, and has one restart to lose."""
    flags, etcd = ("--nnodes=1:2", "--max-restarts=1"), tmp_path_factory.mktemp("etcd")
    with on_machines(
        etcd, lambda endpoint: Cluster(tmp_path, endpoint, flags=flags, pause_s=0.1)
    ) as found:
        yield found


@pytest.fixture
def own(tmp_path, tmp_path_factory):
    """A job with three members of etcd of its own, which has no restart to lose."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as members:
        endpoints = ",".join(member.endpoint for member in members)
        job = Counting(tmp_path, endpoints, restarts=0)
        yield job, members
        job.close()


def nodes(machines):
    """The registered agents, as etcd's own gateway tells."""
    prefix = f"/zero/v1/{machines.job.job}/nodes/"
    key, end = (base64.b64encode(text.encode()).decode() for text in (prefix, prefix[:-1] + "0"))
    with machines.net.inside("store"):
        return machines.etcd.call("kv/range", key=key, range_end=end).get("kvs", [])


def wait_for_ring(machines):
    """Until a and b have met in the ring: a node that was never met is under no suspicion."""

    def met(here, there):
        port = rings.get(there, "").rpartition(":")[2]
        return port and machines.net.received_bytes(here, there, port) > GREETING_BYTES

    def both():
        records = (json.loads(base64.b64decode(item["value"])) for item in nodes(machines))
        rings.update((record["id"], record["ring"]) for record in records)
        return met("a", "b") and met("b", "a")

    rings: dict[str, str] = {}
    wait_for(both, 150, "a and b have met in the ring")


@pytest.mark.full
def test_an_agent_alone_goes_on_without_etcd_and_registers_again(machines):
    """Its lease lapses meanwhile: nobody else is there to take it for lost."""
    job = machines.job
    job.flags = (*job.flags, "--nnodes=1")
    machines.start("a")
    job.wait_for_round(1, world=1)
    machines.net.cut("a", "store")
    wait_for(lambda: "etcd cannot be reached" in job.output, 150, "a word about it")
    wait_for(lambda: not nodes(machines), 150, "the lease has lapsed")
    job.goes_on(1, world=1)
    machines.net.heal("a", "store")
    wait_for(lambda: nodes(machines), 150, "it has registered again")
    assert (job.finish(), job.events("interrupt")) == (1, [])


@pytest.mark.parametrize("cut_off_from", [("store",), ("store", "b")], ids=["etcd", "everybody"])
@pytest.mark.corners(cut_off_from=[("store", "b")])
def test_the_others_go_on_without_a_node_that_is_cut_off_and_it_comes_back(machines, cut_off_from):
    """Longer than its lease: the round ends for one restart, and coming back is free."""
    job = machines.job
    machines.start("a", "b")
    job.wait_for_round(1, world=2)
    machines.net.cut("a", *cut_off_from)
    job.wait_for_round(2, world=1)
    job.goes_on(2, world=1)
    machines.net.heal("a", *cut_off_from)
    job.wait_for_round(3, world=2)
    assert job.finish() == 3
    assert [(e["node"], e["text"]) for e in job.events("interrupt")] == [
        ("b", "lost node a; restart 1 of 1")
    ]


@pytest.mark.full
def test_a_node_that_is_cut_off_and_comes_back_leaves_no_mark_on_what_is_trained(
    trained_on, undisturbed_hash
):
    """It computes on in a round that is over, beside the others: what it does counts nowhere."""
    job, net = trained_on.job, trained_on.net
    trained_on.start("a", "b")
    job.wait_for_step(25, world=2)
    net.cut("a", "store", "b")
    job.pace(LONG_S)
    job.wait_for_step(26, world=1)
    net.heal("a", "store", "b")
    step = max(step for step, _ in job.last_steps().values())
    job.wait_for_step(step + 1, world=2)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert [(e["node"], e["text"]) for e in job.events("interrupt")] == [
        ("b", "lost node a; restart 1 of 1")
    ]


@pytest.mark.full
def test_an_agent_that_stood_still_past_its_lease_comes_back_for_free(machines):
    job = machines.job
    machines.start("a", "b")
    job.wait_for_round(1, world=2)
    suspend(job.agents["a"].process.pid)
    job.wait_for_round(2, world=1)
    job.agents["a"].process.send_signal(signal.SIGCONT)
    job.wait_for_round(3, world=2)
    assert job.finish() == 3
    assert len(job.events("interrupt")) == 1


def leads(member: EtcdServer) -> bool:
    status = member.call("maintenance/status")
    return status["leader"] == status["header"]["member_id"]


APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""As on another machine: one agent does not see the process of the other."""


@pytest.mark.full  # a real REJECT rule, below, stands for it
def test_a_port_that_refuses_costs_no_restart_while_the_other_node_keeps_its_lease(machines):
    """The ring is cut as well, by a middle box that restarts: only the lease says who lives."""
    machines.job.prefix = APART
    machines.start("a", "b")
    machines.job.wait_for_round(1, world=2)
    wait_for_ring(machines)
    for here, there in (("a", "b"), ("b", "a")):
        machines.net.refuse(here, there)
        machines.net.drop_connections(here, there)
    wait_for(lambda: len(machines.job.events("ring")) == 2, 60, "both to be found alive")
    machines.job.goes_on(1, world=2)
    assert machines.job.finish() == 1
    assert machines.job.events("interrupt") == []
    assert "keeps its lease alive although" in machines.job.output


def test_a_firewall_that_rejects_one_way_evicts_nobody_whose_agent_is_alive(machines):
    """A real REJECT rule: the one finds a port that refuses, to the other packets are lost."""
    machines.job.prefix = APART
    machines.start("a", "b")
    machines.job.wait_for_round(1, world=2)
    wait_for_ring(machines)
    machines.net.reject("a", by="b")
    machines.net.drop_connections("a", "b")
    wait_for(lambda: machines.job.events("ring"), 60, "b to be found alive")
    machines.job.goes_on(1, world=2)
    assert machines.job.finish() == 1
    (found,) = machines.job.events("ring")
    assert (found["node"], "node b keeps its lease alive" in found["text"]) == ("a", True)
    assert machines.job.events("dead") == machines.job.events("interrupt") == []


IN_THE_BACKGROUND = (*APART, "sh", "-c", '"$@" & exec sleep 1000', "sh")
"""The agent is not the first process there, with which all others would end."""


def test_the_death_of_an_agent_is_certain_elsewhere_because_its_forkserver_says_so(machines):
    """Its host lives. A port that refuses would have been a suspicion: the lease would decide."""
    job = machines.job
    machines.start("a")
    job.prefix = IN_THE_BACKGROUND
    machines.start("b")
    job.wait_for_round(1, world=2)
    (first,) = children(job.agents["b"].process.pid)
    (agent,) = children(first)
    machine = job.agents.pop("b")
    os.kill(agent, signal.SIGKILL)
    job.wait_for_round(2, world=1)
    assert (job.finish(), len(job.events("interrupt"))) == (2, 1)
    assert [(event["node"], event["text"]) for event in job.events("dead")] == [
        ("a", "the agent of node b is gone: its process has ended")
    ]
    wait_for(
        lambda: not any(map(is_alive, children(first))),
        60,
        "its forkserver ends, with all its workers",
    )
    machine.kill_node()


def test_the_death_of_etcds_leader_and_a_compaction_cost_nothing(own):
    job, members = own
    job.start("a", "b")
    job.wait_for_round(1, world=2)
    leader = next(member for member in members if leads(member))
    leader.kill()
    left = next(m for m in members if m is not leader)
    wait_for(lambda: is_healthy(left.endpoint), 150, "a new leader")
    revision = left.call("maintenance/status")["header"]["revision"]
    left.call("kv/compaction", revision=revision)
    job.goes_on(1, world=2)
    job.agents["a"].process.send_signal(signal.SIGTERM)
    assert job.agents.pop("a").wait() == 128 + signal.SIGTERM
    job.wait_for_round(2, world=1)
    assert (job.finish(), job.events("interrupt")) == (2, [])


def test_when_etcd_has_lost_everything_the_agents_stop_and_the_job_can_be_started_again(machines):
    job, etcd = machines.job, machines.etcd
    machines.start("a", "b")
    job.wait_for_round(1, world=2)
    etcd.kill()
    shutil.rmtree(etcd.member.data)
    with machines.net.inside("store"):
        etcd.start()
    assert [job.agents.pop(node).wait() for node in "ab"] == [AgentExit.NO_STORE] * 2
    assert job.output.count("etcd has lost the data of job job") == 2
    for path in job.files(1, world=2):
        path.unlink()
    machines.start("a", "b")
    job.wait_for_round(1, world=2)
    job.finish()
