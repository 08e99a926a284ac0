"""Workers that the kernel kills for want of memory: known by the counts that it keeps of that.

A process that is killed so says nothing, and its exit looks like any other SIGKILL. The kernel
counts such kills, of the cgroup (a container, a Slurm step, a systemd unit) and of the machine,
which is asked only where there is no cgroup: others run there, too.

Must always hold: whatever of these files is missing or odd, reading them raises nothing.
"""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MACHINE = Path("/proc/vmstat")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_COUNTS = ("memory.events", "memory.oom_control")
"""Of the cgroup versions 2 and 1."""


class OomKills:
    """The kernel's count from now on."""

    def __init__(self) -> None:
        self._group = _own_group()
        self._before = self._count()

    def blame(self) -> str:
        """What the kernel has killed for want of memory since the beginning; empty: nothing."""
        before, count = self._before, self._count()
        if count <= before:
            return ""
        where = "the machine" if self._group is None else f"cgroup {self._group}"
        limit = "" if self._group is None else _limit(self._group)
        return f"out of memory: the oom_kill count of {where}{limit} went from {before} to {count}"

    def _count(self) -> int:
        if self._group is None:
            return _count(MACHINE)
        return max(_count(self._group / name) for name in _COUNTS)


def group_note() -> str:
    """What to say where the kernel kills the whole cgroup, agent included, for one worker.

    The setting counts of every cgroup up to the one whose limit is reached. Only whoever may write
    there can undo it; in a container that is nobody.
    """
    group = _own_group()
    around = () if group is None else (group, *group.parents)
    whole = next((one for one in around if _text(one / "memory.oom.group").strip() == "1"), None)
    if whole is None:
        return ""
    return (
        f"cgroup {whole} is killed as a whole when one process of it runs out of memory "
        "(memory.oom.group): this node would be lost with its checkpoints in memory. Remedy: "
        "singleProcessOOMKill: true in the kubelet's configuration (Kubernetes 1.32), "
        "OOMPolicy=continue in a systemd unit, elsewhere 0 in that file"
    )


def _own_group() -> Path | None:
    """The directory of the cgroup that limits this process's memory, if there is one."""
    for line in _text(OWN).splitlines():
        _, controllers, path = (*line.split(":", 2), "?", "?")[:3]
        if controllers in ("", "memory"):
            top = CGROUPS / controllers
            # In a container the path may be the host's, and the mount begins at the own cgroup.
            for group in (top / path.lstrip("/"), top):
                if any((group / name).exists() for name in _COUNTS):
                    return group
    return None


def _limit(group: Path) -> str:
    text = next((text for name in _LIMITS if (text := _text(group / name).strip())), "")
    return f" (limit {int(text) / 2**20:,.0f} MiB)" if text.isdecimal() else ""


def _count(path: Path) -> int:
    fields = (line.split() for line in _text(path).splitlines())
    return next((int(f[1]) for f in fields if len(f) == 2 and f[0] == "oom_kill"), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
