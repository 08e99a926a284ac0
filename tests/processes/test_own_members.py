"""The store that comes with the job: whole nodes of it are killed, drained and cut off.

Each node is a network namespace with an address and a state directory of its own. Its process is a
node without workers (`tests/support/member_node.py`): what is lost, killed and cut off is real.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import AgentProcess, descendants
from tests.support.partition import Network, network
from tests.support.waiting import wait_for
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

TOKEN = "0123456789abcdef0123456789abcdef"
NAMES = "abcdef"
LONG_S = 90.0


def is_etcd(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "etcd"
    except OSError:  # it has ended
        return False


class Nodes:
    """Nodes of one job, by name."""

    def __init__(self, machines: Network, directory: Path) -> None:
        self.machines = machines
        self._directory = directory
        self._running: dict[str, AgentProcess] = {}

    def start(self, *names: str) -> None:
        """Start nodes, one after the other; each is in the job before the next."""
        for name in names:
            before = self.output(name).count(" here\n")
            self._begin(name)
            seen = lambda name=name: self.output(name).count(" here\n") > before  # noqa: B023, E731
            wait_for(seen, LONG_S, f"node {name} is here")

    def _begin(self, name: str) -> None:
        state = self._directory / f"state-{name}"
        env = {**os.environ, "XDG_STATE_HOME": str(state), ENV_JOIN_TOKEN: TOKEN}
        address = self.machines.address(name)
        command = [sys.executable, "-m", "tests.support.member_node"]
        with self.machines.inside(name), self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [*command, name, self.machines.address("a"), address],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running[name] = AgentProcess(process, self._log(name))

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def output(self, name: str) -> str:
        return self._log(name).read_text() if self._log(name).exists() else ""

    def kill(self, *names: str) -> None:
        """kill -9 whole nodes, at once."""
        for name in names:
            os.kill(self._running[name].process.pid, signal.SIGKILL)
        for name in names:
            self._running.pop(name).kill_node()

    def servers(self, name: str) -> list[int]:
        """The processes of a node's etcd."""
        pids = descendants(self._running[name].process.pid)
        return [pid for pid in pids if is_etcd(pid)]

    def serve_again(self, names: str, before: set[int]) -> None:
        """Wait until these nodes have other servers than before, which answer."""

        def answer() -> bool:
            # To some the store is silent twice, to others never: it is back in less than a call.
            silent = self.times("silent:") - self.times("heard again")
            return not silent and all(set(self.servers(name)) - before for name in names)

        wait_for(answer, LONG_S, "the store answers")

    def drain(self, name: str) -> None:
        """Tell a node to leave, and wait until it has."""
        node = self._running.pop(name)
        node.process.terminate()
        assert node.wait() == 0, node.output

    def served_by(self, names: str) -> None:
        """Wait until the members of these nodes, and no others, are announced to all."""
        wanted = ", ".join(sorted(self.machines.address(name) + ":29400" for name in names))
        wait_for(lambda: self.announced() == wanted, LONG_S, f"the store is at {wanted}")

    def announced(self) -> str:
        """What was announced last."""
        found = [
            line
            for name in NAMES
            for line in self.output(name).splitlines()
            if "the store is at" in line
        ]
        newest = max(found, key=lambda line: float(line.split()[0]), default="")
        return newest.partition(" is at ")[2].removesuffix(" now")

    def times(self, text: str, names: str = NAMES) -> int:
        """How often some nodes have said something."""
        return sum(len(re.findall(text, self.output(name))) for name in names)

    def end(self) -> None:
        """End the job; no write that etcd has acknowledged is lost, and no data are left."""
        running = dict(self._running)
        for node in running.values():
            node.process.send_signal(signal.SIGINT)
        for name, node in running.items():
            assert node.wait() == 0, node.output
            assert re.search(r"lost 0 of \d+\n", self.output(name)), node.output
            assert not list(self._directory.glob(f"state-{name}/*/store-*/data"))
        self._running.clear()

    def close(self) -> None:
        for node in self._running.values():
            node.kill_node()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with network(*NAMES) as machines:
        made = Nodes(machines, tmp_path)
        try:
            yield made
        finally:
            made.close()


def test_the_only_server_is_killed_and_serves_again_with_its_data(nodes):
    nodes.start(*"ab")
    (server,) = nodes.servers("a")
    os.kill(server, signal.SIGKILL)
    nodes.serve_again("a", {server})
    nodes.served_by("a")
    nodes.end()


@pytest.mark.full
def test_the_first_node_is_lost_and_nothing_of_what_was_written(nodes):
    nodes.start(*"abcd")
    nodes.served_by("abc")
    nodes.kill("a")
    nodes.served_by("bcd")
    nodes.end()


@pytest.mark.full
def test_another_node_is_lost_after_the_replacement_of_the_first(nodes):
    nodes.start(*"abcde")
    nodes.served_by("abcde")
    nodes.kill("a")
    nodes.served_by("bcd")
    nodes.kill("b")
    nodes.served_by("cde")
    nodes.kill("c")
    nodes.served_by("d")  # two machines: of two members the loss of either would stop the store
    nodes.end()


@pytest.mark.full
def test_a_node_that_drains_hands_its_member_over_first(nodes):
    nodes.start(*"abcd")
    nodes.served_by("abc")
    nodes.drain("a")
    nodes.served_by("bcd")
    assert "runs no member of the store any more" in nodes.output("a")
    assert nodes.times("is lost") == 0, "it was there until it was needed no more"
    nodes.drain("b")
    nodes.drain("c")
    nodes.served_by("d")
    nodes.end()


@pytest.mark.full
def test_of_two_nodes_the_one_with_the_only_member_drains(nodes):
    nodes.start(*"ab")
    nodes.served_by("a")
    nodes.drain("a")
    nodes.served_by("b")
    nodes.end()


@pytest.mark.full
def test_nodes_are_lost_one_after_the_other_down_to_one(nodes):
    nodes.start(*"abcdef")
    nodes.served_by("abcde")
    for lost, left in (("a", "bcdef"), ("c", "bde"), ("b", "def"), ("d", "e")):
        nodes.kill(lost)
        nodes.served_by(left)
    nodes.kill("f")
    nodes.start("f")
    nodes.end()


@pytest.mark.full
def test_five_members_survive_the_loss_of_two_at_once(nodes):
    nodes.start(*"abcdef")
    nodes.served_by("abcde")
    nodes.kill("a", "b")
    nodes.served_by("cde")
    nodes.end()


@pytest.mark.full
def test_of_three_members_two_are_lost_at_once_and_the_store_goes_on_when_one_is_back(nodes):
    nodes.start(*"abc")
    nodes.served_by("abc")
    nodes.kill("a", "b")
    wait_for(lambda: nodes.times("silent", "c"), LONG_S, "node c is without a store")
    nodes.start("b")  # with its data
    wait_for(lambda: nodes.times("heard again", "c"), LONG_S, "the store answers")
    nodes.served_by("b")
    nodes.end()


@pytest.mark.full
def test_a_first_node_that_is_started_again_finds_the_store_at_the_others(nodes):
    nodes.start(*"abcd")
    nodes.served_by("abc")
    nodes.kill("a")
    nodes.served_by("bcd")
    nodes.start("a")
    wait_for(
        lambda: nodes.times("no member of the store any more", "a"),
        LONG_S,
        "node a forgets its member",
    )
    nodes.drain("b")
    nodes.served_by("acd")
    nodes.end()


@pytest.mark.full
def test_the_smaller_half_of_a_cut_network_writes_nothing_and_returns_when_it_heals(nodes):
    nodes.start(*"abcd")
    nodes.served_by("abc")
    nodes.machines.cut("a", *"bcd")
    nodes.served_by("bcd")
    assert nodes.times("silent", "a") == 1
    nodes.machines.heal("a", *"bcd")
    wait_for(lambda: nodes.times("heard again", "a"), LONG_S, "node a finds the others")
    wait_for(
        lambda: nodes.times("no member of the store any more", "a"),
        LONG_S,
        "node a forgets its member",
    )
    nodes.kill("b")
    nodes.served_by("acd")
    nodes.end()


@pytest.mark.full
def test_a_member_that_is_cut_off_for_a_moment_stays_one(nodes):
    nodes.start(*"abc")
    nodes.served_by("abc")
    nodes.machines.cut("c", *"ab")
    wait_for(lambda: nodes.times("silent", "c"), LONG_S, "node c is cut off")
    nodes.machines.heal("c", *"ab")
    wait_for(lambda: nodes.times("heard again", "c"), LONG_S, "node c is back")
    nodes.served_by("abc")
    assert nodes.times("removed") == 0
    nodes.end()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_all_servers_end_at_once_they_are_started_again_with_their_data(nodes, number):
    """As Slurm and systemd signal every process of a job, which then publishes its last save."""
    nodes.start(*"abc")
    nodes.served_by("abc")
    servers = {pid for name in "abc" for pid in nodes.servers(name)}
    assert len(servers) == 3
    for pid in servers:
        os.kill(pid, number)
    nodes.serve_again("abc", servers)
    nodes.served_by("abc")
    nodes.end()
