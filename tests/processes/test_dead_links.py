"""A link between two of four nodes breaks: one of the two is set aside, and comes back with it.

Machines are network namespaces, the firewall that breaks a link is nft's, and every node reaches
etcd. The weights at the end are those of a run that nothing has disturbed.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

import pytest

from tests.processes.test_partitions import on_machines
from tests.support.cluster import (
    COLD,
    TOGETHER,
    Cluster,
    final_hash,
    paced,
    run_alone,
    training,
    whole_lines,
)
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.netns]

NAMES = "abcd"
LIMIT_S = 30.0
"""From the break to the next finished step."""
RESTARTS = 2
MANY = ("--samples=9600",)
"""300 steps."""
RESET, DROP = "reject with tcp reset", "drop"
HOWS = {
    "reset": (RESET, False),
    "reset one way": (RESET, True),
    "dropped": (DROP, False),
    "dropped one way": (DROP, True),
}
WHENS = ("training", "a round begins")


@pytest.fixture(scope="module")
def long_hash(tmp_path_factory):
    """The weights that the training has in the end if nothing disturbs it."""
    return run_alone(tmp_path_factory.mktemp("alone"), *MANY)


def make(tmp_path, flags):
    def job(endpoint):
        script = paced(training(tmp_path, *MANY), tmp_path)
        return Cluster(tmp_path, endpoint, flags=flags, script=script, pause_s=1.5)

    return job


@pytest.fixture
def machines(tmp_path, tmp_path_factory):
    """Four nodes that train; three are enough."""
    flags = (
        "--nnodes=3:4",
        "--max-restarts=100",
        "--exclude-after=0",
        "--rdzv-conf=last_call_timeout=30",
    )
    etcd = tmp_path_factory.mktemp("etcd")
    with on_machines(etcd, make(tmp_path, flags), NAMES) as found:
        yield found


class Broken:
    """One break of a link, and what came of it."""

    def __init__(self, machines, pair, how, when):
        self.job, self.net = machines.job, machines.net
        self.pair, self.how, self.when = pair, how, when

    def ranks(self):
        """The nodes of the newest round, in rank order."""
        return self.job.events("activate")[-1]["nodes"]

    def steps_of(self, world):
        """The number of steps that rounds of this size have finished."""
        files = (self.job.directory / "ledger").glob("round*-rank0.jsonl")
        lines = (line for path in files for line in whole_lines(path))
        return sum(f'"world": {world}' in line or f'"world":{world}' in line for line in lines)

    def wait_for_steps(self, world, limit_s=120):
        before = self.steps_of(world)
        seen = self.job.check_agents
        wait_for(lambda: seen() or self.steps_of(world) > before, limit_s, f"a step of {world}")

    def run(self):
        """Break it, go on without it, mend it: a row of the table."""
        self.wait_for_steps(4)
        order, before = self.ranks(), len(self.job.events("interrupt"))
        verdict, one_way = HOWS[self.how]
        self.net.break_link(*self.pair, verdict, one_way=one_way)
        began_s, killed = time.monotonic(), 0
        if self.when != "training":
            third = next(name for name in order if name not in self.pair)
            os.kill(self.job.worker_of(third), signal.SIGKILL)
            killed = 1
        self.wait_for_steps(3)
        took_s = time.monotonic() - began_s
        restarts = len(self.job.events("interrupt")) - before - killed
        (went,) = set(order) - set(self.ranks())
        self.net.mend_link(*self.pair)
        self.wait_for_steps(4)
        return {
            "pair": "-".join(self.pair),
            "how": self.how,
            "when": self.when,
            "ranks": "".join(order),
            "restarts": restarts,
            "seconds": round(took_s, 1),
            "went": went,
            "back": went in self.ranks(),
        }


def later(row):
    """Of the two nodes, the one that has the later rank."""
    return max(row["pair"].split("-"), key=row["ranks"].index)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pair", list(itertools.combinations(NAMES, 2)), ids="-".join)
def test_a_broken_link_costs_one_node_as_long_as_it_is_broken(machines, pair, long_hash):
    job = machines.job
    machines.start(*NAMES)
    rows = []
    for when, how in itertools.product(WHENS, HOWS):
        rows.append(Broken(machines, pair, how, when).run())
        print(rows[-1], file=sys.stderr, flush=True)  # with -s: the table, while it is made
    job.wait_for_end()
    assert final_hash(job.output) == long_hash
    assert [row["went"] for row in rows] == [later(row) for row in rows]
    assert all(row["back"] and row["restarts"] <= RESTARTS for row in rows), rows
    assert max(row["seconds"] for row in rows) <= LIMIT_S, rows


LOSES_A_PEER = """
import os, pathlib, sys, time
import zero_agent
from zero_contract.worker import ExitCode
here, step = pathlib.Path(sys.argv[1]), 0
begun = here / ".".join(os.environ[k] for k in ("ZERO_ROUND", "RANK", "WORLD_SIZE"))
while not (here / "finish").exists():
    zero_agent.heartbeat(step := step + 1)
    begun.touch()
    if os.environ["ZERO_ROUND"] == "1" and (here / "broken").exists():
        sys.exit(ExitCode.PEER_LOST)
    time.sleep(0.05)
"""
"""As the engine ends when it loses a peer, without the seconds that its imports take."""


@pytest.mark.parametrize("least", [2, 3])
@pytest.mark.corners(least=[2])
def test_three_nodes_go_on_as_two_or_wait_for_the_link_if_all_are_needed(
    tmp_path, tmp_path_factory, least
):
    def job(endpoint):
        (tmp_path / "loses.py").write_text(LOSES_A_PEER)
        flags = (f"--nnodes={least}:3", "--max-restarts=1", COLD, TOGETHER)
        return Cluster(tmp_path, endpoint, flags=flags, script=[str(script), str(tmp_path)])

    script = tmp_path / "loses.py"
    with on_machines(tmp_path_factory.mktemp("etcd"), job, "abc") as machines:
        job = machines.job

        def begun(n, world):
            job.check_agents()
            return len(list(tmp_path.glob(f"{n}.*.{world}"))) == world

        machines.start(*"abc")
        wait_for(lambda: begun(1, 3), 60, "the first round")
        (first,) = (event["nodes"] for event in job.events("activate"))
        machines.net.break_link(*first[1:], RESET)
        (tmp_path / "broken").touch()
        wait_for(lambda: job.events("aside") or job.check_agents(), 60, "who goes")
        if least == 2:
            wait_for(lambda: begun(2, 2), 60, "a round of two")
        machines.net.mend_link(*first[1:])
        back = 3 if least == 2 else 2
        wait_for(lambda: begun(back, 3), 60, "a round of three")
        (tmp_path / "finish").touch()
        job.wait_for_end()
        ends = [*job.events("interrupt"), *job.events("form")]
        rounds = [len(event["nodes"]) for event in job.events("activate")]
    (dead,) = (event["text"] for event in ends if "is dead" in event["text"])
    assert all(f"{name} ({machines.net.address(name)})" in dead for name in first[1:])
    assert {event["node"] for event in job.events("aside")} == {first[2]}
    assert rounds == ([3, 2, 3] if least == 2 else [3, 3])
    assert len(job.events("interrupt")) == (1 if least == 2 else 0)
