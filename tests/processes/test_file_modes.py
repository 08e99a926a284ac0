"""Who can read the files of a job, as SECURITY.md says."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment, paced, training
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]

SHARED_MEMORY = Path("/dev/shm")


def readable_by_others(paths: Iterator[Path]) -> list[str]:
    """Those of some files that others may open, or look into."""
    modes = ((path, path.lstat().st_mode) for path in paths)
    return [f"{path} {stat.filemode(mode)}" for path, mode in modes if mode & 0o077]


@pytest.mark.parametrize("umask", [0o000, 0o077], ids=["umask 000", "umask 077"])
def test_what_lies_in_shared_directories_is_private_and_what_users_name_follows_their_umask(
    tmp_path, umask
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    config = json.loads((ROOT / "examples" / "gpt.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "checkpoint": {"ram": {}}}))
    (tmp_path / "pause").write_text("0.2")
    job = f"modes-{umask:o}-{tmp_path.name}"
    flags = [f"--rdzv-id={job}", "--nnodes=1", "--nproc-per-node=2", f"--log-dir={tmp_path}/logs"]
    samples = ("--samples=330", f"--config={tmp_path}/config.json", "--save-every=5")
    command = [*flags, "--redirects=3", *paced(training(tmp_path, *samples), tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "zero_agent", "--standalone", *command],
        env={**environment(), "TMPDIR": str(temporary)},
        umask=umask,
        stderr=subprocess.PIPE,
        text=True,
    )

    def in_memory() -> list[Path]:
        return list(SHARED_MEMORY.glob(f"zero-ram.{job}.*/*/step-*"))

    try:
        wait_for(in_memory, 150, "a checkpoint in memory")
        assert sorted(path.name.split("-")[1] for path in temporary.glob("zero-*")) == [
            "agent",
            "etcd",
        ]
        shared = [*temporary.glob("zero-*"), *SHARED_MEMORY.glob(f"zero-*.{job}.*")]
        assert readable_by_others(iter(shared)) == []
        (tmp_path / "pause").write_text("0")
        _, said = process.communicate(timeout=150)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    assert list(SHARED_MEMORY.glob(f"zero-*.{job}.*")) == []
    named = [tmp_path / name for name in ("checkpoints", "ledger", "logs")]
    files = [path for each in named for path in (each, *each.rglob("*"))]
    assert {path.suffix for path in files} >= {".safetensors", ".json", ".log", ".jsonl"}
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in files}
    assert modes == {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}
