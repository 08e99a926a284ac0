"""A real recovery, as the report and its file for Perfetto show it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import LONG_S, ROOT, TOGETHER, Cluster, environment, paced, training
from tests.support.trace_format import Slice, slices

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]


def reported(job: Cluster, directory: Path) -> tuple[list[dict[str, Any]], dict[Any, list[Slice]]]:
    """The recoveries of the page, and the slices of the file beside it."""
    path = directory / "report.html"
    command = [sys.executable, "-m", "zero_orchestrator", "report", job.job, f"--output={path}"]
    env = {**environment(), "PET_RDZV_ENDPOINT": job.endpoint}
    subprocess.run(command, env=env, check=True, timeout=120, capture_output=True)
    page = json.loads(path.read_text().partition('id="picture">')[2].partition("</script>")[0])
    return page["recoveries"], slices(json.loads((directory / "report.trace.json").read_text()))


@pytest.mark.parametrize("victim", ["worker", "node"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_recovery_is_one_file_whose_phases_are_together_as_long_as_the_report_says(
    cluster, tmp_path, in_place, victim
):
    settings = json.loads((ROOT / "examples" / "gpt.json").read_text())
    settings |= {"elastic": {"in_place": in_place}, "checkpoint": {"ram": {}}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    script = paced(training(tmp_path, f"--config={tmp_path}/config.json"), tmp_path)
    flags = ("--nnodes=2:3", "--max-restarts=1", TOGETHER)
    job = cluster(flags=flags, script=script)
    job.start("a", "b", "c")
    job.wait_for_step(10, world=3)
    *others, last = job.events("activate")[-1]["nodes"]
    job.pace(LONG_S)
    if victim == "worker":
        os.kill(job.worker_of(last), signal.SIGKILL)
    else:
        job.agents.pop(last).kill_node()
    job.wait_for_step(12, world=3 if victim == "worker" else 2)
    job.wait_for_end()

    page, file = reported(job, tmp_path)
    wholes = [one for one in file["job", "recoveries"] if one[0].startswith("recovery: ")]
    assert len(page) == len(wholes)
    for shown, (_, from_us, to_us) in zip(page, wholes, strict=True):
        assert shown["over"]
        assert (to_us - from_us) / 1e6 == pytest.approx(shown["to_s"] - shown["from_s"], abs=1e-5)
        assert sum(part[1] for part in shown["phases"]) == pytest.approx(
            shown["to_s"] - shown["from_s"], abs=0.01
        )
        inside = [
            one
            for one in file["job", "recoveries"]
            if one not in wholes and from_us <= one[1] and one[2] <= to_us
        ]
        assert (inside[0][1], inside[-1][2]) == (from_us, to_us)
        assert [one[1] for one in inside[1:]] == [one[2] for one in inside[:-1]]
    names = [name for name, _, _ in file["job", "recoveries"]]
    assert names[:4] == [wholes[0][0], "detection", "meeting", "starting"]
    if page[0]["rounds"] == [1]:  # a worker that has warmed up may join before the first step
        assert names[4:6] == ["loading", "first step"]

    formed_us = next(to_us for name, _, to_us in file["job", "recoveries"] if name == "meeting")
    for node in others:
        by_agent = [name for name, _, _ in file[node, "agent"]]
        assert set(by_agent) | {"stopping the workers"} == {
            "stopping the workers",  # unless they have ended before the round has
            "forming the round",
        }
        (ranks,) = {thread for of, thread in file if of == node and thread != "agent"}
        did = file[node, ranks]
        assert did[0][0] == "starting"
        assert did[0][1] >= formed_us
        assert "meeting the other ranks" in [name for name, _, _ in did]
