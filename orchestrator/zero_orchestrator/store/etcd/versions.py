"""What is known against a version of etcd."""

from __future__ import annotations

import re

_UNSAFE = ((3, 5, 0), (3, 5, 5))
"""The first and the last version that may lose or invent writes when it is killed."""
_OLDEST = (3, 4, 0)
"""The first with the progress requests by which a watch sees that its member is silent."""


def complaint(version: str) -> str:
    """Why an etcd of this version should not keep a job; empty if nothing is known against it."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return ""
    number = tuple(map(int, found.groups()))
    if number < _OLDEST:
        return f"etcd {version} is older than 3.4, and not supported: use 3.5.6 or newer"
    if _UNSAFE[0] <= number <= _UNSAFE[1]:
        return (
            f"etcd {version} may become inconsistent when it is killed (etcd#13766): its authors "
            "advise against 3.5.0 to 3.5.5; use 3.5.6 or newer"
        )
    return ""
