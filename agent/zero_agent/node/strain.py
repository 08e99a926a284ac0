"""What the kernel shows of a node: its accelerators, and what slows it down (quota, swap, heat).

`Strain` reads the counts from time to time; `zero_orchestrator.observe.detectors.strain` says which
of them are the cause of a slow rank. What the kernel does not count is left out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from zero_contract.clock import Clock
from zero_contract.kernel import CGROUPS, OWN, own_cgroups, text_of

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CPUS = 8
"""The number of CPUs whose clock is read: each of them is a file."""


class Strain:
    """The strain of this node since the look before."""

    def __init__(self, clock: Clock, root: Path = Path("/")) -> None:
        """Begin to measure."""
        self._clock = clock
        self._root = root
        self._before = (clock.now(), self._counts())

    def look(self) -> Mapping[str, float]:
        """Each strain that the kernel counts, by name; see `observe.detectors.strain`."""
        now_s, counts = self._clock.now(), self._counts()
        (before_s, before), self._before = self._before, (now_s, counts)
        if now_s <= before_s:  # two looks at once: there is no time to divide by
            return {}
        grown = {name: value - before[name] for name, value in counts.items() if name in before}
        cpus = self._paths("sys/devices/system/cpu/cpu[0-9]*/cpufreq")[:_CPUS]
        clocks = [
            (_number(path / "scaling_cur_freq"), _number(path / "cpuinfo_max_freq"))
            for path in cpus
        ]
        ratios = [now / highest for now, highest in clocks if now is not None and highest]
        zones = [_number(path) for path in self._paths("sys/class/thermal/thermal_zone*/temp")]
        found = {
            "throttled": _part(grown, "throttled_periods", "periods"),
            "steal": _part(grown, "steal", "cpu_time"),
            "cpu_pressure": _rate(grown, "cpu_waiting_us", now_s - before_s, 1e-6),
            "swap_bytes_per_s": _rate(grown, "swapped", now_s - before_s, _PAGE_BYTES),
            "hot_events": grown.get("hot_events"),
            "clock": sum(ratios) / len(ratios) if ratios else None,
            "temperature_c": max((zone / 1000 for zone in zones if zone is not None), default=None),
        }
        return {name: round(value, 3) for name, value in found.items() if value is not None}

    def _counts(self) -> dict[str, float]:
        """What only grows."""
        found: dict[str, float] = {}
        cgroups, own = (self._root / path.relative_to("/") for path in (CGROUPS, OWN))
        limits, *_ = own_cgroups("cpu", ("cpu.stat",), cgroups, own) or [cgroups]  # the CPU time
        quota = _pairs(text_of(limits / "cpu.stat"))
        if "nr_periods" in quota:
            found["periods"] = quota["nr_periods"]
            found["throttled_periods"] = quota.get("nr_throttled", 0.0)
        memory = _pairs(self._text("proc/vmstat"))
        if "pswpin" in memory:
            found["swapped"] = memory["pswpin"] + memory.get("pswpout", 0.0)
        # From user to steal; the time of guests, after it, is in that of user already.
        cpu = self._text("proc/stat").partition("\n")[0].split()[1:9]
        if len(cpu) == 8 and all(field.isdecimal() for field in cpu):
            found["cpu_time"], found["steal"] = float(sum(map(int, cpu))), float(cpu[7])
        pressure = self._text("proc/pressure/cpu").partition("\n")[0].rpartition("total=")[2]
        if pressure.isdecimal():
            found["cpu_waiting_us"] = float(pressure)
        hot = [
            value
            for path in self._paths("sys/devices/system/cpu/cpu*/thermal_throttle")
            if (value := _number(path / "core_throttle_count")) is not None
        ]
        if hot:
            found["hot_events"] = sum(hot)
        return found

    def _paths(self, pattern: str) -> list[Path]:
        try:
            return sorted(self._root.glob(pattern))
        except OSError:
            return []

    def _text(self, path: str) -> str:
        return text_of(self._root / path)


def _number(path: Path) -> float | None:
    text = text_of(path).strip()
    return float(text) if text.lstrip("-").isdecimal() else None


def _pairs(text: str) -> dict[str, float]:
    fields = (line.split() for line in text.splitlines())
    return {f[0]: float(f[1]) for f in fields if len(f) == 2 and f[1].isdecimal()}


def _part(grown: Mapping[str, float], some: str, of: str) -> float | None:
    # None also if the whole has not grown: no period has ended since the look before.
    return grown[some] / grown[of] if grown.get(of) else None


def _rate(grown: Mapping[str, float], name: str, time_s: float, unit: float) -> float | None:
    return grown[name] * unit / time_s if name in grown else None


def devices(root: Path = Path("/")) -> str:
    """The accelerators, such as `8 x NVIDIA H100 80GB HBM3`; empty without NVIDIA's driver."""
    models: Counter[str] = Counter()
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = text_of(path).splitlines()  # none if the GPU has just fallen off the bus
        models.update(
            line.removeprefix("Model:").strip() for line in lines if line.startswith("Model:")
        )
    return ", ".join(f"{count} x {model}" for model, count in models.items())
