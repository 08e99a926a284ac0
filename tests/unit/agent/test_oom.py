"""A worker that the kernel killed for want of memory is told apart from any other SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.agent.test_endings import group
from zero_agent.workers import oom
from zero_agent.workers.oom import OomKills

GREEDY = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
held = [bytearray(1 << 20) for _ in range(200)]
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a process in a container with cgroup version 2."""
    monkeypatch.setattr(oom, "CGROUPS", tmp_path)
    monkeypatch.setattr(oom, "OWN", tmp_path / "own")
    monkeypatch.setattr(oom, "MACHINE", tmp_path / "vmstat")
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    return tmp_path


def test_a_kill_is_blamed_on_memory_only_if_the_kernel_has_counted_one_since(kernel):
    kills = OomKills()
    assert kills.blame() == ""
    (kernel / "memory.events").write_text("oom 4\noom_kill 3\n")
    assert kills.blame() == (
        f"out of memory: the oom_kill count of cgroup {kernel} (limit 1,024 MiB) went from 2 to 3"
    )
    assert OomKills().blame() == ""


def test_the_machines_count_says_it_where_there_is_no_cgroup(kernel):
    (kernel / "own").write_text("odd\n")
    kills = OomKills()
    (kernel / "vmstat").write_text("oom_kill 8\n")
    assert kills.blame().endswith("oom_kill count of the machine went from 7 to 8")
    (kernel / "vmstat").unlink()
    assert kills.blame() == ""


def test_a_worker_that_was_killed_so_is_said_to_have_run_out_of_memory(
    kernel, monkeypatch, tmp_path
):
    monkeypatch.setattr(OomKills, "blame", lambda self: "out of memory: it was")
    killed = group(tmp_path, [(1, -signal.SIGKILL), (0, -signal.SIGKILL)])
    assert killed.first_failure.summary == "rank 1: out of memory: it was (killed by SIGKILL)"
    assert killed.exits[1].summary == "rank 0: killed by SIGKILL", "its agent has stopped it"
    assert group(tmp_path, [(1, 1)]).first_failure.summary == "rank 1: exit code 1"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A memory cgroup of 64 MiB."""
    top = next((p for p in (oom.CGROUPS / "memory", oom.CGROUPS) if p.is_dir()), oom.CGROUPS)
    found = top / f"zero-test-{os.getpid()}"
    try:
        found.mkdir()
        limit = "memory.limit_in_bytes" if top.name == "memory" else "memory.max"
        (found / limit).write_text(str(64 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            found.rmdir()
        pytest.skip(f"no cgroup of our own: {error}")
    yield found
    found.rmdir()


def test_the_kernels_own_count_is_read(small: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(oom, "own_cgroups", lambda *_: [small])
    kills = OomKills()
    enter = f"echo $$ > {small}/cgroup.procs && exec {sys.executable} -c '{GREEDY}' {tmp_path}/pid"
    ended = subprocess.run(["/bin/sh", "-c", enter], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert kills.blame().endswith(f"/{small.name} (limit 64 MiB) went from 0 to 1")


@pytest.mark.parametrize("where", ["job", "job/step"])
@pytest.mark.parametrize(("whole", "said"), [("1", True), ("0", False), (None, False)])
def test_a_container_that_is_killed_as_a_whole_is_said_at_the_start(
    kernel: Path, whole, said, where
):
    (kernel / "own").write_text("0::/job/step\n")
    (kernel / "job" / "step").mkdir(parents=True)
    (kernel / "job" / "step" / "memory.events").write_text("oom_kill 0\n")
    if whole is not None:
        (kernel / where / "memory.oom.group").write_text(f"{whole}\n")
    note = oom.group_note()
    assert bool(note) is said
    remedies = ("singleProcessOOMKill: true", "OOMPolicy=continue")
    assert all(remedy in note for remedy in remedies) is said
    assert f"cgroup {kernel / where} is killed as a whole" in note or not said
