"""A TAB in a shell: commands, flags, and the names of what runs; never an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.support.cluster import environment
from tests.support.written_job import Job, node


def completed(line: str, start: str = "-m zero_orchestrator", **variables: str) -> list[str]:
    """What a shell is told at the end of a line: argcomplete's protocol, on descriptor 8."""
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
    command = f'exec "{sys.executable}" {start} 8>&1 9>&2 1>/dev/null'
    done = subprocess.run(
        ["sh", "-c", command],
        env={**environment(), **asked, "_ARGCOMPLETE_IFS": "\n", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return [word.strip() for word in done.stdout.splitlines()]


@pytest.mark.etcd
def test_commands_flags_and_the_names_of_jobs_and_nodes_are_completed(etcd, etcd_store, root):
    job = Job(etcd_store, root.strip("/").replace("/", "-"))
    lease = etcd_store.grant(60)
    for name in "ab":
        etcd_store.put(job.keys.node(name), node(name).to_json(), lease=lease)
    here = {"PET_RDZV_ENDPOINT": etcd.endpoint}
    assert completed("zero-ctl st") == ["status", "stack", "stop"]
    assert job.keys.job in completed("zero-ctl status ", **here)
    assert {"a", "b"} <= set(completed("zero-ctl drain ", **here))
    assert completed("zero-agent --log-f", "-m zero_agent") == ["--log-format"]


def test_an_etcd_that_is_away_costs_a_second_and_prints_nothing():
    begun_s = time.monotonic()
    assert completed("zero-ctl status x", PET_RDZV_ENDPOINT="127.0.0.1:1") == []
    assert time.monotonic() - begun_s < 20


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_takes_what_is_printed():
    ctl = f'"{sys.executable}" -m zero_orchestrator completion bash'
    script = f'eval "$({ctl})"; complete -p zero-ctl zero-agent zero-ckpt'
    done = subprocess.run(
        ["bash", "-c", script], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in done.stdout.splitlines()] == [
        "zero-ctl",
        "zero-agent",
        "zero-ckpt",
    ]


CKPT = '-c "from zero_orchestrator.start import ckpt; ckpt()"'
NO_TORCH = 'raise AssertionError("a TAB imports torch")\n'


def test_zero_ckpt_is_completed_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text(NO_TORCH)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    assert completed("zero-ckpt p", CKPT, **path) == ["prune"]
    assert completed("zero-ckpt export x y --to ", CKPT, **path) == ["torch", "hf", "dcp"]
    assert completed("zero-ckpt import x y --compute-d", CKPT, **path) == ["--compute-dtype"]
