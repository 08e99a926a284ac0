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
from tests.support.cluster import Cluster, final_hash, paced, run_alone, training, whole_lines
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.netns, pytest.mark.full]

NAMES = "abcd"
LIMIT_S = 30.0
"""From the break to the next finished step."""
RESTARTS = 2
MANY = ("--samples=19200",)
"""600 steps."""
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
        return Cluster(tmp_path, endpoint, flags=flags, script=script, pause_s=0.8)

    return job


@pytest.fixture
def machines(tmp_path, tmp_path_factory):
    """Four nodes that train; three are enough."""
    flags = ("--nnodes=3:4", "--max-restarts=100", "--rdzv-conf=last_call_timeout=30")
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
