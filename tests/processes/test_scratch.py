"""An agent's temporary directory goes with it or, if it is killed, with the next one."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import AgentProcess, environment
from tests.support.waiting import wait_for
from zero_agent.node.scratch import Scratch

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

Start = Callable[[], tuple[AgentProcess, set[Path]]]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this process and of those that it starts.

    Not in tmp_path, whose length depends on the runs before: sockets in it would be elsewhere.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(directory)


@pytest.fixture
def start(temporary: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts an agent with an etcd of its own; returns when its worker runs, with what it made."""
    begun: list[AgentProcess] = []
    waits = f"echo works; until [ -e {tmp_path}/enough ]; do sleep 0.05; done"

    def start() -> tuple[AgentProcess, set[Path]]:
        before = set(temporary.iterdir())
        flags = ("--standalone", "--no-python", "sh", "-c", waits)
        log = tmp_path / f"{len(begun)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "zero_agent", *flags],
                stdout=file,
                stderr=file,
                env=environment(),
                start_new_session=True,
            )
        agent = AgentProcess(process, log)
        begun.append(agent)

        def works() -> bool:
            assert process.poll() is None, agent.output
            return "works\n" in agent.output

        wait_for(works, 150, "its worker")
        return agent, set(temporary.iterdir()) - before

    yield start
    for agent in begun:
        if agent.process.poll() is None:
            agent.kill_node()


@pytest.mark.full
def test_what_a_killed_agent_has_left_goes_with_the_next_and_the_living_keep_theirs(
    start, temporary, tmp_path
):
    dead, left = start()
    living, kept = start()
    dead.kill_node()
    assert len(left) == len(kept) == 2, "its own, and its etcd's"
    assert set(temporary.iterdir()) == left | kept
    third, own = start()
    assert set(temporary.iterdir()) == kept | own
    (tmp_path / "enough").touch()
    assert (living.wait(), third.wait()) == (0, 0)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("owner", "swept"),
    [
        (Path("/proc/sys/kernel/random/boot_id").read_bytes(), True),
        (b"of another machine, which may know of a lock that this one does not", False),
        (None, False),
    ],
    ids=["of this machine", "of another machine", "of nobody"],
)
def test_only_what_surely_belonged_to_a_process_of_this_machine_is_removed(temporary, owner, swept):
    left = temporary / "zero-agent-left"
    left.mkdir()
    if owner is not None:
        (left / ".owner").write_bytes(owner)
    scratch = Scratch("zero-agent-")
    assert left.exists() != swept
    scratch.close()
    assert not scratch.path.exists()


def test_a_directory_without_rights_is_no_reason_to_fail(temporary):
    (temporary / "zero-agent-closed").mkdir(mode=0o000)
    (temporary / "zero-agent-file").touch()
    (temporary / "zero-agent-link").symlink_to("/")
    Scratch("zero-agent-").close()
    assert len(list(temporary.iterdir())) == 3


@pytest.mark.parametrize("length", [30, 68, 69, 200])
def test_a_temporary_directory_with_a_long_path_still_has_room_for_a_socket(temporary, length):
    long = temporary / ("l" * (length - len(str(temporary)) - 1))
    long.mkdir()
    tempfile.tempdir = str(long)
    scratch = Scratch("zero-agent-", socket="agent.sock")
    with contextlib.closing(scratch), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(scratch.path / "agent.sock"))
        assert (scratch.path.parent == long) == (length <= 107 - 1 - 27 - 1 - 10)


def test_an_agent_that_is_ended_while_its_etcd_starts_leaves_nothing(temporary):
    command = [sys.executable, "-m", "zero_agent", "--standalone", "--no-python", "true"]
    agent = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(temporary.glob("zero-etcd-*/.owner")), 150, "the directory of its etcd")
    agent.send_signal(signal.SIGTERM)
    _, said = agent.communicate(timeout=150)
    assert (agent.returncode, list(temporary.iterdir())) == (128 + signal.SIGTERM, [])
    assert said.splitlines()[-1].endswith("SIGTERM: this node ends; no worker runs here")
