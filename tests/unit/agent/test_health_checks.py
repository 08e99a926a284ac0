"""What a node is found to be: healthy, or not, with the reason and what to do about it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.waiting import wait_for
from zero_agent.command import resolve
from zero_agent.errors import AgentFailed
from zero_agent.etcd.etcd_access import Access, clock_complaint
from zero_agent.node import health_checks
from zero_agent.node.health_checks import (
    CHECKS,
    Check,
    HealthCheckFailed,
    HealthChecks,
    Surroundings,
    complaint,
    examine,
)
from zero_contract import kernel
from zero_contract.exit_codes import AgentExit
from zero_contract.journal import Journal

NODE = Surroundings(slots=1, gpus=False, address="127.0.0.1")


def found(node: Surroundings) -> dict[str, health_checks.HealthProblem]:
    return {finding.check: finding for finding in examine(node)}


def test_this_machine_is_fit_and_only_what_applies_is_looked_at():
    node = found(NODE)
    assert [*node] == [
        *("shared memory", "memory", "temporary files", "open files", "clock", "address"),
    ]
    assert complaint(tuple(node.values())) == ""


def test_more_workers_than_there_is_memory_or_shared_memory_for_are_too_many():
    node = found(replace(NODE, slots=10**6))
    assert node["memory"].remedy.endswith("start fewer workers with --nproc-per-node")
    assert "needed" in node["shared memory"].found
    assert "ulimit -n 64000000" in node["open files"].remedy
    assert node["clock"].passed


@pytest.mark.parametrize("hard", [1 << 14, 512])
def test_an_agent_may_open_as_many_files_as_it_needs_where_the_hard_limit_allows_it(hard):
    program = f"""
        import resource
        from zero_agent.node import health_checks
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
        health_checks.allow_files(20)
        print(resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout == {1 << 14: "(1280, 16384)\n", 512: "(256, 512)\n"}[hard]


def test_the_page_cache_of_a_container_is_memory_that_workers_can_have(tmp_path, monkeypatch):
    """What a job has read stays there until the limit is reached, and is dropped when needed."""
    monkeypatch.setattr(kernel, "CGROUPS", tmp_path)
    gib = 1 << 30
    (tmp_path / "memory.max").write_text(f"{16 * gib}\n")
    (tmp_path / "memory.current").write_text(f"{16 * gib - 4096}\n")

    def free_when(**facts: int) -> str:
        lines = [f"{name} {size}\n" for name, size in facts.items()]
        (tmp_path / "memory.stat").write_text("".join(lines))
        return found(NODE)["memory"].found

    read = {"active_file": gib // 4, "inactive_file": gib // 8, "slab_reclaimable": gib // 8}
    assert free_when(anon=15 * gib, file=gib // 2, **read) == "512 MiB available"
    in_dev_shm = {"file": 12 * gib, "shmem": 12 * gib}
    full = free_when(anon=4 * gib, **in_dev_shm, active_file=0, inactive_file=0)
    assert full == "0 MiB available, 256 MiB needed for 1 workers"


def test_a_directory_that_cannot_be_written_is_named_with_its_flag(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    logs = found(replace(NODE, log_dir=file / "logs"))["logs"]
    assert not logs.passed
    assert logs.found == f"{file}/logs: Not a directory"
    assert "--log-dir" in logs.remedy
    assert found(replace(NODE, log_dir=tmp_path / "new"))["logs"].passed


def test_an_address_of_another_machine_is_found_out():
    address = found(replace(NODE, address="192.0.2.1"))["address"]
    assert not address.passed
    assert "--local-addr" in address.remedy


def test_gpus_that_are_hidden_do_not_count(monkeypatch):
    monkeypatch.setattr(health_checks, "_count_gpus", lambda: 4)
    node = replace(NODE, slots=2, gpus=True)
    assert found(replace(node, environ={}))["GPUs"].found == "4 of 4 for 2 workers"
    hidden = found(replace(node, environ={"CUDA_VISIBLE_DEVICES": "3"}))["GPUs"]
    assert hidden.found == "4 work, CUDA_VISIBLE_DEVICES=3; 2 needed"


def test_gpus_are_counted_by_the_drivers_own_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool.write_text("#!/bin/sh\nprintf 'GPU 0: H200 (UUID: GPU-1)\\nGPU 1: H200 (UUID: GPU-2)\\n'")
    tool.chmod(0o755)
    node = replace(NODE, slots=2, gpus=True, environ={})
    assert found(node)["GPUs"].found == "2 of 2 for 2 workers"
    tool.write_text("#!/bin/sh\necho 'GPU 0 is lost. Reboot the system.'; exit 15")
    broken = found(node)["GPUs"]
    assert str(broken) == "GPUs: nvidia-smi: GPU 0 is lost. Reboot the system.; look at dmesg"


def test_gpus_that_cannot_be_counted_are_a_fault_of_the_machine(tmp_path, monkeypatch):
    """A GPU that hangs keeps whoever asks for it, and no bare traceback tells that."""
    (tmp_path / "nvidia0").touch()
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(resolve, "DEVICES", tmp_path)
    monkeypatch.setattr(resolve, "COUNT_S", 0.1)
    monkeypatch.setattr(sys, "executable", str(hangs))
    with pytest.raises(AgentFailed, match="has not counted the GPUs") as failed:
        resolve.count_slots("gpu")
    assert failed.value.code == AgentExit.UNHEALTHY


def test_an_etcd_that_does_not_let_this_node_in_is_a_finding():
    def refuse() -> str:
        raise HealthCheckFailed("permission denied")

    assert str(found(replace(NODE, ask_etcd=refuse))["etcd"]) == "etcd: permission denied"


class Etcd(BaseHTTPRequestHandler):
    """The HTTP side of an etcd whose clock is 74 minutes ahead."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + 74 * 60)

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_clock_that_is_far_from_etcds_is_a_finding():
    with HTTPServer(("127.0.0.1", 0), Etcd) as server:
        threading.Thread(target=server.handle_request).start()
        access = Access(endpoints=f"127.0.0.1:{server.server_port}")
        offset_s = access.clock_offset_s()
    wrong = clock_complaint(offset_s)
    assert wrong.startswith("this machine's clock is 74 min behind etcd's; set the wrong one")
    clock = found(replace(NODE, ask_clock=lambda: wrong))["clock"]
    assert (clock.passed, clock.found.endswith(wrong)) == (False, True)
    assert access.clock_offset_s() is None, "nobody tells the time there"
    assert [clock_complaint(s) for s in (None, 299.0, -299.0)] == [""] * 3


@pytest.mark.parametrize(
    ("command", "fit", "text"),
    [
        ("echo all is well", True, "all is well"),
        ("true", True, "nothing"),
        ("seq 9; exit 3", False, "`seq 9; exit 3` ended with 3 and printed: 5 | 6 | 7 | 8 | 9"),
        ("no-such-command-here", False, "ended with 127 and printed: "),
    ],
)
def test_a_users_command_decides_by_its_exit_code_and_its_last_lines_are_shown(command, fit, text):
    finding = found(replace(NODE, command=command))["health check"]
    assert finding.passed is fit
    assert text in finding.found


def test_a_users_command_has_a_deadline_and_leaves_nothing_behind(tmp_path):
    pids = tmp_path / "pids"
    command = f"sleep 60 & echo $! > {pids}; echo waiting; sleep 60"
    finding = found(replace(NODE, command=command, command_timeout_s=3.0))["health check"]
    assert not finding.passed
    assert finding.found.endswith("did not end within 3 s; it printed: waiting")
    assert finding.remedy == "raise --health-check-timeout if it needs longer"
    wait_for(lambda: not _runs(int(pids.read_text())), 60, "the end of what it started")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_check_that_never_returns_is_a_finding_and_no_hang(monkeypatch):
    never = threading.Event()
    stuck = Check(look=lambda node: str(never.wait()), limit_s=lambda node: 0.05)
    monkeypatch.setattr(health_checks, "CHECKS", {**CHECKS, "disk": stuck})
    disk = found(NODE)["disk"]
    never.set()
    assert str(disk) == "disk: no answer within 0.05 s; the machine or a disk of it hangs"


def test_a_check_that_breaks_is_a_finding_of_its_own(monkeypatch):
    monkeypatch.setattr(health_checks, "CHECKS", {"odd": Check(look=lambda node: os.fspath(1))})
    assert str(found(NODE)["odd"]).startswith("odd: expected str")


@pytest.mark.parametrize("started", [0, 1, 3])
def test_a_node_that_can_start_no_thread_is_unhealthy_until_it_can(monkeypatch, started):
    """As at `ulimit -u`, of which the dataset of a neighbour may have taken the rest."""
    clock, start, left = ManualClock(), threading.Thread.start, iter(range(started))
    inbox = queue.SimpleQueue()

    def start_some(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    checks = HealthChecks(
        NODE,
        600.0,
        max_nodes=4,
        clock=clock,
        journal=Journal("a"),
        post=lambda handler: lambda *found: inbox.put(lambda: handler(*found)),
    )
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start_some)
        checks.examine()
        inbox.get(timeout=60)()
    assert checks.complaint.startswith("can't start new thread")
    clock.advance(health_checks.FIRST_PAUSE_S + 1)
    checks.check_limit(needed=True)
    inbox.get(timeout=60)()
    assert (checks.checking, checks.complaint) == (False, "")


def test_a_node_that_runs_is_healthy_without_the_directory_of_its_logs(tmp_path):
    node = replace(NODE, log_dir=tmp_path / "file" / "logs")
    (tmp_path / "file").touch()
    inbox = queue.SimpleQueue()
    checks = HealthChecks(
        node,
        600.0,
        max_nodes=4,
        clock=ManualClock(),
        journal=Journal("a"),
        post=lambda handler: lambda *found: inbox.put(lambda: handler(*found)),
    )
    checks.examine()
    inbox.get(timeout=60)()
    assert checks.complaint == ""
    assert complaint(examine(node)).startswith("logs: "), "before it joins it is not"


def test_a_sick_node_waits_until_it_is_fit(monkeypatch):
    tries = iter(["no", "no", ""])
    monkeypatch.setattr(health_checks, "complaint", lambda findings: next(tries))
    monkeypatch.setattr(health_checks, "FIRST_PAUSE_S", 0.01)
    health_checks.await_fit(NODE, timeout_s=30.0, max_nodes=4, others=lambda: True)
    assert next(tries, None) is None, "it was looked at three times"


def test_a_node_that_does_not_become_fit_gives_up_with_its_reason_and_a_code_of_its_own():
    node = replace(NODE, command="echo broken; false")
    with pytest.raises(AgentFailed, match=r"--join-timeout.*printed: broken") as failed:
        health_checks.await_fit(node, timeout_s=0.0, max_nodes=4, others=lambda: True)
    assert failed.value.code == AgentExit.UNHEALTHY


def test_a_node_without_which_nothing_runs_says_at_once_that_it_is_not_healthy(monkeypatch):
    monkeypatch.setattr(health_checks, "SINGLE_S", 0.01)
    node = replace(NODE, command="echo broken; false")
    with pytest.raises(AgentFailed, match=r"there is no other node .*printed: broken") as failed:
        health_checks.await_fit(node, timeout_s=3600.0, max_nodes=1, others=lambda: False)
    assert failed.value.code == AgentExit.UNHEALTHY


@pytest.mark.parametrize(
    ("max_nodes", "others", "limit_s"),
    [(1, False, 5.0), (4, False, 30.0), (4, True, 600.0), (1, True, 600.0)],
)
def test_how_long_an_unhealthy_node_waits_depends_on_who_else_is_there(max_nodes, others, limit_s):
    assert health_checks.patience(600.0, max_nodes=max_nodes, others=others)[0] == limit_s
    assert health_checks.patience(0.1, max_nodes=max_nodes, others=others) == (
        0.1,
        "--join-timeout",
    )
