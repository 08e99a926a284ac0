"""What the kernel shows of this machine, and of the cgroup (container) that limits this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""In a container this is its own cgroup."""
OWN = Path("/proc/self/cgroup")
_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Files of a cgroup of version 2, and of version 1: its limit, and what is used of it."""
_CACHE = ("active_file", "inactive_file", "slab_reclaimable")
"""What the kernel can drop, by its name in memory.stat; files in /dev/shm are not in it."""


def text_of(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def own_cgroups(controller: str, files: Sequence[str], cgroups: Path, own: Path) -> list[Path]:
    """The directories of this process's cgroup of a controller, and of all around it; [] for none.

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
                    return [group, *(each for each in group.parents if each.is_relative_to(top))]
    return []


def available_bytes() -> int:
    """The memory that processes can still allocate: of the machine, and of all that limits them.

    A container, a Slurm step or a systemd unit is a cgroup, and so may be what is around it.
    """
    words = text_of(Path("/proc/meminfo")).split()
    left = int(words[words.index("MemAvailable:") + 1]) * 1024
    for group in own_cgroups("memory", [used for _, used in _MEMORY], CGROUPS, OWN):
        left = min([left, *_left_in(group)])
    return left


def _left_in(group: Path) -> Iterator[int]:
    """Bytes up to the limit of a cgroup; nothing if it has none."""
    for limit, used in _MEMORY:
        with suppress(OSError, ValueError):  # of another version, or "max"
            free = int((group / limit).read_text()) - int((group / used).read_text())
            pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            # The page cache counts as used, and the kernel drops it when memory is needed: after
            # some time of reading data, it fills what the limit of a container leaves.
            yield max(free + sum(int(count) for name, count in pairs if name in _CACHE), 0)
