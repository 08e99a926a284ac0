"""Detects workers that the kernel's OOM killer has killed, from the kernel's own counts.

A process that the OOM killer kills logs nothing, and its exit looks like any other SIGKILL. The
kernel counts these kills for the cgroup (a container, a Slurm step, a systemd unit) and for the
machine. The machine's count is used only if there is no cgroup: other jobs run there, too.

Must always hold: reading these files raises nothing, even if one is missing or malformed.
"""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MACHINE = Path("/proc/vmstat")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_COUNTS = ("memory.events", "memory.oom_control")
"""Files of the cgroup versions 2 and 1."""


class OomKills:
    """The kernel's count of OOM kills from now on."""

    def __init__(self) -> None:
        self._group = _own_group()
        self._before = self._count()

    def blame(self) -> str:
        """What shows that the OOM killer has killed a process since then; empty: nothing does."""
        before, count = self._before, self._count()
        if count <= before:
            return ""
        where = "the machine"
        if self._group is not None:
            where = f"cgroup {self._group}"
            limit = next((t for n in _LIMITS if (t := _text(self._group / n).strip())), "")
            if limit.isdecimal():
                where += f" (limit {int(limit) / 2**20:,.0f} MiB)"
        return f"out of memory: the oom_kill count of {where} went from {before} to {count}"

    def _count(self) -> int:
        if self._group is None:
            return _count(MACHINE)
        return max(_count(self._group / name) for name in _COUNTS)


def group_note() -> str:
    """A warning if the OOM killer would kill the whole cgroup, agent included; else empty.

    The setting applies if any cgroup has it up to the one whose limit is reached. Only the owner of
    that file can change it; in a container nobody can.
    """
    group = _own_group()
    around = () if group is None else (group, *group.parents)
    whole = next((one for one in around if _text(one / "memory.oom.group").strip() == "1"), None)
    if whole is None:
        return ""
    return (
        f"cgroup {whole} is killed as a whole when one process of it runs out of memory "
        "(memory.oom.group): this node would be lost with its in-memory checkpoints. Remedy: "
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


def _count(path: Path) -> int:
    fields = (line.split() for line in _text(path).splitlines())
    return next((int(f[1]) for f in fields if len(f) == 2 and f[0] == "oom_kill"), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
