"""The quorum of the store that comes with the job is lost for good, and the job goes on.

Each node is a network namespace with an address and a state directory of its own, and one agent
with a worker that trains; the directory of the checkpoints is shared, as the product demands.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.test_elastic import assert_as_if_nothing_had_happened
from tests.support.cluster import Cluster, descendants, final_hash, kill_all, paced, training
from tests.support.partition import Network, network
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]

NAMES = "abc"
TOKEN = "0123456789abcdef0123456789abcdef"
LONG_S = 120.0
SLOW_S = 3.0
"""A pause with which a job outlasts the start of other nodes."""


class Nodes:
    """Nodes of one job that trains, by name."""

    def __init__(self, machines: Network, directory: Path) -> None:
        self.machines, self.directory = machines, directory
        self.job = Cluster(
            directory,
            machines.address("a"),
            flags=(
                *("--nnodes=1:3", "--max-restarts=3", "--rdzv-backend=c10d", "--etcd-grace=8"),
                *("--join-timeout=60", "--rdzv-conf=last_call_timeout=30"),
            ),
            script=paced(training(directory, "--save-every=5"), directory),
        )

    def start(self, *names: str) -> None:
        for name in names:
            state = str(self.directory / f"state-{name}")
            with self.machines.inside(name):
                self.job.start(name, XDG_STATE_HOME=state, **{ENV_JOIN_TOKEN: TOKEN})

    def run(self, *names: str) -> None:
        """Start nodes; returns when they have published twice, and all have a member.

        From then on the steps are so slow that the job outlasts what is to happen.
        """
        self.start(*names)
        self.job.wait_for_step(12, world=len(names))
        self.job.pace(SLOW_S)
        self.served_by("".join(names))

    def served_by(self, names: str) -> None:
        """Wait until the members of these nodes are announced."""
        wanted = ", ".join(f"{self.machines.address(name)}:29400" for name in names)
        wait_for(
            lambda: f"the store is at {wanted} now" in self.job.output,
            LONG_S,
            f"the store is at {wanted}",
        )

    def kill(self, *names: str) -> None:
        """kill -9 whole nodes, at once."""
        everyone = map(self.pid, names)
        kill_all([each for pid in everyone for each in (pid, *descendants(pid))])
        for name in names:
            self.job.agents[name].process.wait()

    def pid(self, name: str) -> int:
        return self.job.agents[name].process.pid

    def signal(self, number: int, *names: str) -> None:
        """To every process of some nodes."""
        for name in names:
            for pid in (self.pid(name), *descendants(self.pid(name))):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)

    def said(self, text: str, names: str = NAMES) -> bool:
        return any(text in self.job.agents[name].output for name in names)

    def heirs(self) -> list[Path]:
        return sorted((self.directory / "checkpoints").glob(".store-*.heir"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with network(*NAMES, "d") as machines:
        made = Nodes(machines, tmp_path)
        try:
            yield made
        except AssertionError as error:
            error.add_note(made.job.output[-20000:])
            raise
        finally:
            made.job.close()


def test_the_only_member_is_lost_and_the_other_node_goes_on(nodes, undisturbed_hash):
    nodes.start(*"ab")
    nodes.job.wait_for_step(12, world=2)
    nodes.kill("a")
    nodes.job.wait_for_step(20, world=1)
    assert nodes.said("node b has begun a new store", "b")
    nodes.job.wait_for_end()
    assert_as_if_nothing_had_happened(nodes.job, undisturbed_hash)
    assert len(nodes.heirs()) == 1


def test_two_of_three_are_lost_and_one_that_is_started_again_with_its_old_data_joins_the_third(
    nodes, undisturbed_hash
):
    nodes.run(*NAMES)
    nodes.kill("a", "b")
    nodes.job.wait_for_step(14, world=1)
    nodes.start("b")
    nodes.job.wait_for_step(16, world=2)
    nodes.job.wait_for_end()
    assert_as_if_nothing_had_happened(nodes.job, undisturbed_hash)


def test_a_job_without_a_name_goes_on_as_the_same_run_on_all_nodes_that_are_left(
    nodes, undisturbed_hash
):
    nodes.job.job, nodes.job.flags = "", ("--nnodes=1:4", *nodes.job.flags[1:])
    nodes.start(*NAMES)
    nodes.served_by("abc")
    nodes.start("d")
    nodes.job.wait_for_step(12, world=4)
    nodes.job.pace(SLOW_S)
    nodes.kill("a", "b")
    nodes.job.wait_for_step(14, world=2)
    nodes.job.wait_for_end()
    assert final_hash(nodes.job.output) == undisturbed_hash
    logs = (nodes.directory / "logs").glob("*/events-*.jsonl")
    (run,) = {path.parent.name for path in logs}
    assert run.endswith(".1")


def test_of_two_halves_that_both_want_to_begin_one_does_and_the_other_says_why_not(
    nodes, undisturbed_hash
):
    nodes.run(*NAMES)
    nodes.machines.cut("b", "c")
    nodes.kill("a")
    ended = lambda: [name for name in "bc" if nodes.job.agents[name].process.poll() is not None]  # noqa: E731
    (loses,) = wait_for(ended, LONG_S, "one of the halves has ended")
    lost = nodes.job.agents.pop(loses)
    assert lost.wait() == AgentExit.NO_STORE
    assert "this node is cut off from them" in lost.output
    nodes.job.wait_for_step(14, world=1)
    nodes.job.wait_for_end()
    assert_as_if_nothing_had_happened(nodes.job, undisturbed_hash)
    assert len(nodes.heirs()) == 1


def test_the_old_majority_that_comes_back_publishes_nothing_and_joins(nodes, undisturbed_hash):
    nodes.run(*NAMES)
    nodes.signal(signal.SIGSTOP, "a", "b")
    nodes.job.wait_for_step(14, world=1)
    nodes.signal(signal.SIGCONT, "a", "b")
    nodes.job.wait_for_step(16, world=3)
    assert nodes.said("node c has begun a new store", "a")
    nodes.job.wait_for_end()
    assert_as_if_nothing_had_happened(nodes.job, undisturbed_hash)
    assert len(nodes.heirs()) == 1


def test_a_node_that_is_cut_off_from_a_store_that_lives_begins_none(nodes, undisturbed_hash):
    nodes.run(*NAMES)
    nodes.machines.cut("c", *"ab")
    assert nodes.job.agents["c"].wait() == AgentExit.NO_STORE
    assert nodes.said("this node is cut off from them", "c")
    del nodes.job.agents["c"]
    nodes.job.wait_for_end()
    assert_as_if_nothing_had_happened(nodes.job, undisturbed_hash)
    assert nodes.heirs() == []
