"""From what the ranks of `training.py` measured to its tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from training_systems import SYSTEMS

_QUIET_CORES = 0.15
"""A step is quiet if everybody else used less than this of one core meanwhile."""
_ENOUGH = 5
"""Quiet steps; with fewer, all steps count, and the row is marked."""
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
"""Per parameter, all that "passes" holds besides activations."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One system in one round, as the workers and the interfaces tell it."""

    system: str
    dtype: str
    ranks: Sequence[Mapping[str, Any]]
    counted: bool
    one_host: bool

    def steps(self) -> list[tuple[float, float, float]]:
        """Of each step: seconds of the slowest rank, CPU seconds per rank, cores of others."""
        found = []
        for step in zip(*(rank["steps"] for rank in self.ranks), strict=True):
            wall = max(part["wall_s"] for part in step)
            own = sum(part["cpu_s"] for part in step)
            machine = min(part["machine_s"] for part in step)
            found.append((wall, own / len(step), max(0.0, machine - own) / wall))
        return found

    @property
    def wire_bytes(self) -> float | None:
        """Per step, all ranks together."""
        if not self.counted:
            return None
        shared = self.ranks[:1] if self.one_host else self.ranks
        return sum(rank["sent_bytes"] for rank in shared) / len(self.ranks[0]["steps"])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system in all rounds."""

    wall_ms: float
    spread_ms: tuple[float, float]
    """The quartiles."""
    cpu_ms: float
    of_floor: float | None
    """The median over rounds of floor / system, each within one round."""
    steps: str
    peak_bytes: int
    wire_bytes: float | None
    loss: float
    parameters: int
    largest_unit: int
    root: int


def show(runs: Sequence[Run], title: str) -> None:
    by_dtype: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_dtype[run.dtype].append(run)
    for dtype, members in by_dtype.items():
        rows = summarize(members)
        parameters = next(iter(rows.values())).parameters
        console = Console(width=150)
        console.print(_table(rows, dtype, f"{parameters / 1e6:.1f} M parameters, {dtype}, {title}"))
        for sentence in ratios(rows):
            console.print(sentence)


def summarize(runs: Sequence[Run]) -> dict[str, Row]:
    rounds: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        rounds[run.system].append(run)
    floors = [_middle(run) for run in rounds.get("floor", [])]
    return {system: _row(members, floors) for system, members in rounds.items()}


def _row(runs: Sequence[Run], floors: Sequence[float]) -> Row:
    steps, note = _counted([step for run in runs for step in run.steps()])
    walls = [wall * 1e3 for wall, _, _ in steps]
    shares = [floor / _middle(run) for floor, run in zip(floors, runs, strict=False)]
    return Row(
        wall_ms=statistics.median(walls),
        spread_ms=tuple(statistics.quantiles(walls, n=4)[::2]) if len(walls) > 1 else (0.0, 0.0),
        cpu_ms=statistics.median(cpu for _, cpu, _ in steps) * 1e3,
        of_floor=statistics.median(shares) if shares else None,
        steps=note,
        peak_bytes=max(rank["peak_bytes"] for run in runs for rank in run.ranks),
        wire_bytes=runs[0].wire_bytes,
        loss=statistics.mean(rank["steps"][-1]["loss"] for rank in runs[0].ranks),
        parameters=runs[0].ranks[0]["parameters"],
        largest_unit=runs[0].ranks[0]["largest_unit"],
        root=runs[0].ranks[0]["root"],
    )


def _middle(run: Run) -> float:
    """The median step of one round, in seconds."""
    return statistics.median(wall for wall, _, _ in _counted(run.steps())[0])


def _counted(
    steps: list[tuple[float, float, float]],
) -> tuple[list[tuple[float, float, float]], str]:
    quiet = [step for step in steps if step[2] < _QUIET_CORES]
    if len(quiet) >= _ENOUGH:
        return quiet, f"{len(quiet)}/{len(steps)}"
    return steps, f"*{len(steps)}"


def _table(rows: Mapping[str, Row], dtype: str, title: str) -> Table:
    table = Table(title=title)
    columns = ("system", "ms per step", "quartiles", "% of floor", "x ddp", "CPU ms", "steps")
    for column in (*columns, "peak MB", "of formula", "wire MB", "loss"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, row in rows.items():
        table.add_row(
            system,
            f"{row.wall_ms:.0f}",
            "{:.0f}-{:.0f}".format(*row.spread_ms),
            _or_dash(row.of_floor, "{:.0%}"),
            f"{row.wall_ms / rows['ddp'].wall_ms:.2f}" if "ddp" in rows else "-",
            f"{row.cpu_ms:.0f}",
            row.steps,
            f"{row.peak_bytes / 1e6:.0f}",
            _or_dash(_of_formula(system, rows, dtype), "{:.0%}"),
            _or_dash(row.wire_bytes and row.wire_bytes / 1e6, "{:.0f}"),
            f"{row.loss:.5f}",
        )
    return table


def _of_formula(system: str, rows: Mapping[str, Row], dtype: str) -> float | None:
    """The peak over what the formula adds to the activations, which "passes" shows."""
    stage, passes = SYSTEMS[system].stage, rows.get("passes")
    if not system.startswith("zero") or stage is None or passes is None:
        return None
    from zero_engine.observe.memory import estimate

    activations = passes.peak_bytes - _WEIGHT_BYTES[dtype] * passes.parameters
    formula = estimate(
        passes.parameters,
        stage=stage,
        compute=dtype,
        states=2,
        world=2,
        largest=passes.largest_unit,
        root=passes.root,
        gpu=False,
    )
    return rows[system].peak_bytes / (activations + formula.total + formula.in_flight)


def ratios(rows: Mapping[str, Row]) -> Iterable[str]:
    """Ours beside the peers of each stage."""
    for system, row in rows.items():
        for peer in SYSTEMS[system].peers:
            if peer in rows:
                against = rows[peer]
                yield (
                    f"{system}: {row.wall_ms / against.wall_ms:.2f} x the step time of {peer} "
                    f"(CPU {row.cpu_ms / against.cpu_ms:.2f}), "
                    f"{row.peak_bytes / against.peak_bytes:.2f} x its memory"
                )


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
