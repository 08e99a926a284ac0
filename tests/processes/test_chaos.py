"""All faults at random on real agents, etcd, networks and disks, by `benchmarks/chaos.py`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment
from tests.support.waiting import wait_for

sys.path.append(str(ROOT / "benchmarks"))
from chaos_cluster import needs

pytestmark = [
    pytest.mark.processes,
    pytest.mark.etcd,
    pytest.mark.netns,
    pytest.mark.full,
    pytest.mark.skipif(bool(needs()), reason=f"chaos: {needs()}"),
]

CHAOS = [sys.executable, str(ROOT / "benchmarks" / "chaos.py")]
JOBS = ("engine", "fsdp2")


@pytest.mark.timeout(1200)
def test_two_minutes_of_all_faults_break_no_promise() -> None:
    """The weights, every sample, every invariant; how long it takes is not judged."""
    done = subprocess.run(
        [*CHAOS, "--minutes=2", "--seed=1"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert [job for job in JOBS if f"{job}: every promise has held" in done.stdout] == [*JOBS]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted_chaos_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*CHAOS, "--minutes=2", "--seed=1", "--every-s=5", "--only=disk"],
            env={**environment(), "TMPDIR": str(tmp_path)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "the disk " in log.read_text().partition("logs")[2], 300, "a fault")
        process.send_signal(number)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
    said = log.read_text()
    found = re.search(r"namespaces: (\S+)\*", said)
    assert found is not None, said
    spaces = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    assert found[1] not in spaces.stdout
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert list(Path("/sys/fs/cgroup").glob(f"**/zero-chaos-{process.pid}-*")) == []
    assert list(Path("/dev/shm").glob(f"zero-ram.chaos-*-{process.pid}.*")) == []
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if mentions(path, tmp_path)] == []
    assert all(f"{job}: what always holds has held" in said for job in JOBS)


def mentions(path: Path, word: Path) -> bool:
    """Whether a process has a word in its command."""
    try:
        return str(word).encode() in path.read_bytes()
    except OSError:
        return False
