"""The goodput ledger of a job with a failure: all of its time, and what each part was used for."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.cluster import COLD, agent
from zero_orchestrator.ctl import status
from zero_orchestrator.ctl.goodput import Use, from_record, total_ns

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SCRIPT = """
import os, time
import zero_agent
fails = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(1, 5 if fails else 7):
    time.sleep(0.3)
    zero_agent.heartbeat(step)
time.sleep(0.3)
os._exit(3 if fails else 0)
"""


def test_the_time_of_a_job_with_a_failure_is_accounted_for(etcd, etcd_store, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    logs, endpoint = tmp_path / "logs", f"--rdzv-endpoint={etcd.endpoint}"
    name = ("--rdzv-id=goodput", "--node-id=a", f"--log-dir={logs}")
    began_s = time.monotonic()
    done = agent(endpoint, *name, "--nnodes=1", "--max-restarts=1", COLD, str(script))
    wall_s = time.monotonic() - began_s
    assert done.returncode == 0, done.stderr

    now = status.read(etcd_store, "goodput")
    used_ns = from_record(now.time_ns)
    assert {Use.STARTING, Use.USEFUL, Use.REPEATED, Use.REFORMING} <= used_ns.keys()
    assert Use.UNREPORTED not in used_ns
    sleeps_s = (5 + 7) * 0.3
    assert sleeps_s < total_ns(used_ns) / 1e9 < wall_s
    lines = (logs / "goodput" / "events-a.jsonl").read_text().splitlines()
    (told,) = [event for event in map(json.loads, lines) if event["event"] == "time"]
    assert told["ns"].keys() <= now.time_ns.keys()
    assert told["ns"]["repeated_steps"] == now.time_ns["repeated_steps"]
    assert told["text"] in done.stderr + done.stdout
