"""What the kernel shows of this machine, and of the cgroup (container) that limits this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""In a container this is its own cgroup."""
OWN = Path("/proc/self/cgroup")
_CACHE = ("active_file", "inactive_file", "slab_reclaimable")
"""What the kernel can drop, by its name in memory.stat; files in /dev/shm are not in it."""


def text_of(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def own_cgroup(controller: str, files: Sequence[str], cgroups: Path, own: Path) -> Path | None:
    """The directory of this process's cgroup of a controller, if one of its files is there.

    A controller, such as "memory", has a directory of its own in version 1 of cgroups; `files` are
    what its cgroup has, in version 2 and in version 1.
    """
    for line in text_of(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "?", "?")[:3]
        if controllers == "" or controller in controllers.split(","):
            top = cgroups / (controllers and controller)
            # In a container the path may be the host's, and the mount begins at the own cgroup.
            for group in (top / path.lstrip("/"), top):
                if any((group / name).exists() for name in files):
                    return group
    return None


def available_bytes() -> int:
    """The memory that processes can still allocate: of the machine, and of their container."""
    words = text_of(Path("/proc/meminfo")).split()
    left = int(words[words.index("MemAvailable:") + 1]) * 1024
    with suppress(OSError, ValueError):  # no cgroup of version 2, or no limit in it
        limit = int((CGROUPS / "memory.max").read_text())
        used = int((CGROUPS / "memory.current").read_text())
        pairs = (line.split() for line in (CGROUPS / "memory.stat").read_text().splitlines())
        # The page cache counts as used, and the kernel drops it when memory is needed: after some
        # time of reading data, it fills what the limit of a container leaves.
        cache = sum(int(count) for name, count in pairs if name in _CACHE)
        left = min(left, max(limit - used + cache, 0))
    return left
