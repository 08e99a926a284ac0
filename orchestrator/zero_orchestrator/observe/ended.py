"""How a job ended whose store ended with it: its last status, in a file on the store's machines."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from zero_contract.decoding import decode
from zero_orchestrator.errors import SpecMismatch
from zero_orchestrator.observe import status
from zero_orchestrator.observe.status import JobStatus
from zero_orchestrator.store.kv import KeyValueStore
from zero_orchestrator.store.private_etcd import state_directory

KEPT_S = 30 * 24 * 3600.0
"""How long the file stays; then the end of another job removes it."""


def keep(store: KeyValueStore, job: str) -> None:
    """Write the status of a job that has ended. Raises StoreError."""
    last = status.read(store, job)
    # A file that cannot be written costs no job its end.
    with contextlib.suppress(OSError):
        directory = _directory()
        # For this user alone: the status has the command line, in which there may be a secret.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in directory.iterdir():
            with contextlib.suppress(OSError):  # another agent removes it
                if time.time() - old.stat().st_mtime > KEPT_S:
                    old.unlink()
        # Several agents of a machine may write it: each its own file, and the last one counts.
        new = directory / f".{job}.{os.getpid()}"
        new.write_text(last.to_json(), encoding="utf-8")
        new.replace(_file(job))


def find(job: str) -> JobStatus | None:
    """The last status of a job that this machine had, or None."""
    with contextlib.suppress(OSError, SpecMismatch):
        return decode(JobStatus, _file(job).read_bytes(), f"{_file(job)} is damaged", SpecMismatch)
    return None


def _directory() -> Path:
    return state_directory() / "ended"


def _file(job: str) -> Path:
    return _directory() / f"{job}.json"
