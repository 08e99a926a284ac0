"""Detects workers that the kernel's OOM killer has killed, from the kernel's own counts.

A process that the OOM killer kills logs nothing, and its exit looks like any other SIGKILL. The
kernel counts these kills for the cgroup (a container, a Slurm step, a systemd unit) and for the
machine.
"""

from __future__ import annotations

from pathlib import Path

from zero_contract.kernel import CGROUPS, OWN, own_cgroups, text_of

MACHINE = Path("/proc/vmstat")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_COUNTS = ("memory.events", "memory.oom_control")
"""Files of the cgroup versions 2 and 1."""


class OomKills:
    """The kernel's count of OOM kills from now on."""

    def __init__(self) -> None:
        self._group = next(iter(own_cgroups("memory", _COUNTS, CGROUPS, OWN)), None)
        self._before = self._count()

    def blame(self) -> str:
        """Evidence that the OOM killer has killed a process since then; empty: there is none."""
        before, count = self._before, self._count()
        if count <= before:
            return ""
        where = "the machine"
        if self._group is not None:
            where = f"cgroup {self._group}"
            limit = next((t for n in _LIMITS if (t := text_of(self._group / n).strip())), "")
            if limit.isdecimal():
                where += f" (limit {int(limit) / 2**20:,.0f} MiB)"
        return f"out of memory: the oom_kill count of {where} went from {before} to {count}"

    def _count(self) -> int:
        if self._group is None:  # else other jobs of the machine would count as well
            return _count(MACHINE)
        return max(_count(self._group / name) for name in _COUNTS)


def group_note() -> str:
    """A warning if the OOM killer would kill the whole cgroup, agent included; else empty."""
    # The setting applies if any cgroup has it up to the one whose limit is reached.
    around = own_cgroups("memory", _COUNTS, CGROUPS, OWN)
    whole = next((one for one in around if text_of(one / "memory.oom.group").strip() == "1"), None)
    if whole is None:
        return ""
    return (
        f"cgroup {whole} is killed as a whole when one process of it runs out of memory "
        "(memory.oom.group): this node would be lost with its in-memory checkpoints. Remedy: "
        "singleProcessOOMKill: true in the kubelet's configuration (Kubernetes 1.32), "
        "OOMPolicy=continue in a systemd unit, elsewhere 0 in that file"
    )


def _count(path: Path) -> int:
    fields = (line.split() for line in text_of(path).splitlines())
    return next((int(f[1]) for f in fields if len(f) == 2 and f[0] == "oom_kill"), 0)
