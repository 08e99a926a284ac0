"""What an operator sees of a job in a real etcd: on a terminal, and in a report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import environment
from tests.support.etcd_server import EtcdServer, server
from tests.support.staged import staged
from tests.support.terminal import Terminal
from tests.support.waiting import wait_for
from zero_orchestrator.store.etcd.client import EtcdStore

pytestmark = [pytest.mark.processes, pytest.mark.etcd]
ZERO_CTL = [sys.executable, "-m", "zero_orchestrator"]
CTRL_C, PAGE_DOWN, END = b"\x03", b"\x1b[6~", b"\x1b[F"


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server whose jobs no other test finds."""
    with server(tmp_path) as running:
        yield running


def write(etcd: EtcdServer, name: str) -> None:
    store = EtcdStore(etcd.endpoint)
    staged(name).write(store)
    store.close()


def test_top_scrolls_to_what_does_not_fit_and_gives_the_terminal_back(own_etcd):
    write(own_etcd, "recovered")
    size = {"LINES": "24", "COLUMNS": "80", "TERM": "xterm-256color"}
    env = {**environment(), **size, "PET_RDZV_ENDPOINT": own_etcd.endpoint}
    terminal = Terminal([*ZERO_CTL, "top", "--every=0.2"], env)
    try:
        wait_for(lambda: "1-23 of 5" in terminal.text, 60, "the first lines")
        assert "the 8 slowest of 32 ranks" not in terminal.text
        terminal.type(PAGE_DOWN)
        wait_for(lambda: "23-45 of 5" in terminal.text, 60, "the next page")
        terminal.type(END)
        wait_for(lambda: "the job begins" in terminal.text, 60, "the last line")
        shown = len(terminal.text)
        terminal.type(b"q")
        assert terminal.process.wait(60) == 0
        wait_for(lambda: "\x1b[?1049l" in terminal.text[shown:], 60, "the screen of before")
        left = terminal.text.partition("\x1b[?1049l")[2]
        assert "round 2 is full; spare: gpu-02" in left, "its status stays on the terminal"
    finally:
        terminal.process.kill()
        terminal.process.wait(60)
        terminal.close()


def test_the_report_of_62_nodes_has_all_of_them(own_etcd, tmp_path):
    write(own_etcd, "large")
    path = tmp_path / "large.html"
    command = [*ZERO_CTL, "report", "large", f"--output={path}"]
    env = {**environment(), "PET_RDZV_ENDPOINT": own_etcd.endpoint}
    subprocess.run(command, env=env, check=True, timeout=120)
    found = json.loads(path.read_text().partition('id="picture">')[2].partition("</script>")[0])
    assert [timeline["condition"] for timeline in found["timelines"]] == ["running"] * 60 + [
        "spare"
    ] * 2
    assert {timeline["host"].partition("-")[0] for timeline in found["timelines"]} == {
        f"rack{number}" for number in range(1, 9)
    }
    assert [one["failures"] for one in found["recoveries"]] == [1, 0]
