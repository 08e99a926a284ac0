"""The names of what is beside a job's checkpoints, for those who read no checkpoint.

Agents read names only: which checkpoint is the newest, and whether the job's own store has been
followed by a new one (`zero_orchestrator.store.succession`).
"""

from __future__ import annotations

import re

MANIFEST = "MANIFEST.json"
NAME = re.compile(r"step-(?P<step>\d{9,})\.g(?P<round>\d+)\.[0-9a-f]{4}")
"""The name of a checkpoint's directory."""


def age(name: str) -> tuple[int, int]:
    """(round, step) of a checkpoint's name, the newer the larger; (-1, -1) for any other name."""
    found = NAME.fullmatch(name)
    return (int(found["round"]), int(found["step"])) if found else (-1, -1)


def sign_of(store: str) -> str:
    """The file that the members of a store replace while they have a quorum."""
    return f".store-{store}"


def heir_of(store: str) -> str:
    """The file that names the store which has followed this one; created once."""
    # By the store that is followed alone: two who create it exclude each other.
    return f".store-{store}.heir"
