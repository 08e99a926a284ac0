"""A script that asks whether it should leave, and what the agent sees of it."""

import os
import shutil
import subprocess
import sys

import pytest

import zero_agent
from zero_agent.node import leave_request
from zero_agent.node.leave_request import ENV_FILE, LEFT, LeaveRequests
from zero_contract.worker import ENV_LAUNCHER, ENV_LEAVE, ENV_SOCKET, ExitCode


@pytest.fixture(autouse=True)
def under_an_agent(monkeypatch):
    monkeypatch.setenv(ENV_SOCKET, "/run/agent")


def test_a_script_that_asks_is_heard_and_told_once_the_agent_asks_it(tmp_path, monkeypatch):
    file = tmp_path / "leave"
    askings = LeaveRequests({3: file, 4: tmp_path / "silent"})
    monkeypatch.setenv(ENV_FILE, str(file))
    assert not askings.listens(3)
    assert not zero_agent.should_leave()
    assert askings.listens(3)
    assert not askings.listens(4)
    assert not askings.listens(5)
    assert not zero_agent.should_leave()
    assert askings.ask() == 1
    assert zero_agent.should_leave()
    assert not (tmp_path / "silent").exists()


def test_a_shell_may_ask(tmp_path):
    file = tmp_path / "leave"
    askings = LeaveRequests({0: file})
    subprocess.run(["touch", str(file)], check=True)
    asks = ["test", "-s", str(file)]
    assert subprocess.run(asks, check=False).returncode == 1
    askings.ask()
    assert subprocess.run(asks, check=False).returncode == 0


def test_without_a_file_and_where_there_is_no_directory_nobody_leaves(tmp_path, monkeypatch):
    monkeypatch.delenv(ENV_FILE, raising=False)
    assert not zero_agent.should_leave()
    monkeypatch.setenv(ENV_FILE, str(tmp_path / "gone" / "leave"))
    assert not zero_agent.should_leave()
    monkeypatch.setenv(ENV_FILE, os.devnull + "/leave")
    assert not zero_agent.should_leave()


def test_the_names_are_those_of_the_contract():
    ours = ENV_FILE, LEFT, leave_request._ENV_SOCKET, leave_request._ENV_LAUNCHER
    assert ours == (ENV_LEAVE, ExitCode.LEFT, ENV_SOCKET, ENV_LAUNCHER)
    with pytest.raises(SystemExit) as left:
        zero_agent.leave()
    assert left.value.code == ExitCode.LEFT


ON_A_FULL_DISK = """
import sys
from pathlib import Path
from zero_agent.node.leave_request import LeaveRequests
file, rest = Path(sys.argv[1], "leave"), Path(sys.argv[1], "rest")
file.touch()
try:
    with rest.open("wb", buffering=0) as full:
        while full.write(bytes(4096)):
            pass
except OSError as error:
    print(error.strerror)
LeaveRequests({0: file}).ask()
print(file.stat().st_size)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a small disk")
def test_a_worker_is_asked_on_a_disk_without_room_for_another_byte(tmp_path):
    """Where it keeps its temporary files: else it would be killed with what it has not saved."""
    small = 'mount -t tmpfs -o size=64k none "$4" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", small, "sh", sys.executable, "-c", ON_A_FULL_DISK]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("No space left on device\n1\n", "")
