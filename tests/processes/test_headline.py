"""The command of the README, typed in up to three terminals of one machine."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.cluster import (
    COLD,
    LONG_S,
    SAMPLES,
    STEPS,
    Cluster,
    environment,
    final_hash,
    paced,
    training,
)
from tests.support.network import kill_all_with, own_loopback
from tests.support.terminal import Terminal
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.netns]


@pytest.fixture
def terminal(tmp_path):
    """Opens terminals that have etcd's own port, and the user's state, to themselves."""
    env = {**environment(), "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONFAULTHANDLER": "1"}
    opened: list[Terminal] = []
    with own_loopback(2379) as prefix:

        def open_terminal(*arguments: str) -> Terminal:
            command = [*prefix, sys.executable, "-m", "zero_agent", *arguments]
            opened.append(Terminal(command, env))
            return opened[-1]

        yield open_terminal
        for window in opened:
            window.process.kill()
            window.process.wait()
            window.close()
        kill_all_with("XDG_STATE_HOME", str(tmp_path / "state"))


def ended(window: Terminal) -> int:
    """The exit code; an agent that does not end shows where its threads are."""
    try:
        return window.process.wait(150)
    except subprocess.TimeoutExpired as error:
        window.process.send_signal(signal.SIGABRT)
        window.process.wait(60)
        raise AssertionError(window.text) from error


def test_three_terminals_one_closed_one_more_opened(terminal, tmp_path, undisturbed_hash):
    # For what its ledger shows. A round that took long to begin runs long before it grows: with
    # such a pace all three are in before the samples are consumed.
    job = Cluster(tmp_path, endpoint="", pause_s=3.0)
    command = ("--nnodes=1:4", "--max-restarts=3", *paced(training(tmp_path), tmp_path))
    windows = [terminal(*command) for _ in range(3)]
    job.wait_for_step(1, world=3)
    job.pace(0.2)
    job.wait_for_step(10, world=3)
    job.pace(1.0)
    windows[0].close()
    job.wait_for_step(11, world=2)
    assert windows[0].process.wait(150) == 128 + signal.SIGHUP
    windows[0] = terminal(*command)
    job.wait_for_step(12, world=3)
    job.pace(0)
    assert [ended(window) for window in windows] == [0, 0, 0]
    report = job.report()
    assert (report.problems, report.steps, report.samples) == ((), STEPS, SAMPLES)
    assert report.repeated_steps == 0
    assert final_hash("".join(window.text for window in windows)) == undisturbed_hash


@pytest.mark.full
def test_the_server_belongs_to_no_agent(terminal, tmp_path):
    """The first agent starts it; killing that agent leaves it to the others."""
    job = Cluster(tmp_path, endpoint="", pause_s=LONG_S)
    command = ("--nnodes=1:2", "--max-restarts=1", *paced(training(tmp_path), tmp_path))
    first = terminal(*command)
    job.wait_for_step(1, world=1)
    second = terminal(*command)
    job.wait_for_step(2, world=2)
    first.process.kill()
    job.pace(0)
    assert second.process.wait(150) == 0, second.text
    assert (job.report().problems, job.report().steps) == ((), STEPS)


def test_a_finished_job_stays_finished_and_the_bare_command_runs_again(terminal, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('it runs')")
    named = ("--nnodes=1:2", "--rdzv-id=once", COLD, str(script))
    for shown in (1, 0):
        window = terminal(*named)
        assert window.process.wait(150) == 0
        wait_for(lambda w=window: "is done" in w.text, 150, "the last line")
        assert window.text.count("it runs") == shown
    for _ in range(2):
        window = terminal("--nnodes=1:2", COLD, str(script))
        assert window.process.wait(150) == 0
        wait_for(lambda w=window: w.text.count("it runs") == 1, 150, "the script's output")


def test_ctrl_c_leaves_after_a_save_and_twice_leaves_at_once(terminal, tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('it runs', flush=True)\ntime.sleep(600)"
    )
    window = terminal("--nnodes=1:2", COLD, str(script))
    wait_for(lambda: "it runs" in window.text, 150, "the worker")
    window.type(b"\x03")
    wait_for(lambda: "once more to leave at once" in window.text, 150, "the answer to Ctrl-C")
    window.type(b"\x03")
    assert window.process.wait(150) == 128 + signal.SIGINT
    found = ["pgrep", "-f", str(script)]
    wait_for(
        lambda: subprocess.run(found, check=False, capture_output=True).returncode == 1,
        30,
        "the end of the worker",
    )
