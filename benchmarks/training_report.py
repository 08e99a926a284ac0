"""From what the ranks of `training.py` measured to its tables."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from training_systems import SYSTEMS
from training_traffic import MODELS, Job, Sent

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
    nodes: Sequence[int]
    rate: str
    accumulation: int
    dtype: str
    ranks: Sequence[Mapping[str, Any]]
    counted: bool

    @property
    def case(self) -> tuple[Any, ...]:
        """What it is compared with others in."""
        return tuple(self.nodes), self.rate, self.accumulation, self.dtype

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
    def sent(self) -> Sent | None:
        """Per step, all nodes together."""
        if not self.counted:
            return None
        firsts = itertools.accumulate(self.nodes[:-1], initial=0)
        counts = [self.ranks[first]["sent_bytes"] for first in firsts]
        steps = len(self.ranks[0]["steps"])
        return Sent(
            between=sum(count["between"] for count in counts) / steps,
            inside=sum(count["inside"] for count in counts) / steps,
        )


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
    sent: Sent | None
    model: Sent | None
    """What it should be, as `training_traffic` knows it."""
    loss: float
    parameters: int
    largest_unit: int
    root: int


def show(runs: Sequence[Run]) -> None:
    by_case: defaultdict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        by_case[run.case].append(run)
    for (nodes, rate, accumulation, dtype), members in by_case.items():
        rows = summarize(members)
        parameters = next(iter(rows.values())).parameters
        ranks = " + ".join(map(str, nodes))
        title = f"{parameters / 1e6:.1f} M parameters, {dtype}, nodes of {ranks} ranks, gloo"
        title += f", {rate}" * bool(rate) + f", {accumulation} micro-batches" * (accumulation > 1)
        console = Console(width=165)
        console.print(_table(rows, dtype, sum(nodes), title))
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
        sent=runs[0].sent,
        model=_model(runs[0]),
        loss=statistics.mean(rank["steps"][-1]["loss"] for rank in runs[0].ranks),
        parameters=runs[0].ranks[0]["parameters"],
        largest_unit=runs[0].ranks[0]["largest_unit"],
        root=runs[0].ranks[0]["root"],
    )


def _model(run: Run) -> Sent | None:
    if run.system not in MODELS or len(run.nodes) < 2:
        return None
    told = run.ranks[0]
    job = Job(
        nodes=tuple(run.nodes),
        elements=told["parameters"],
        regathered=told["parameters"] - told["root"],
        dtype=run.dtype,
        accumulation=run.accumulation,
    )
    return MODELS[run.system](job)


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


def _table(rows: Mapping[str, Row], dtype: str, world: int, title: str) -> Table:
    table = Table(title=title)
    columns = ("system", "ms per step", "quartiles", "% of floor", "x ddp", "CPU ms", "steps")
    sent = ("MB between", "model", "MB inside", "model")
    for column in (*columns, "peak MB", "of formula", *sent, "loss"):
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
            _or_dash(_of_formula(system, rows, dtype, world), "{:.0%}"),
            *(
                _or_dash(sent and getattr(sent, place) / 1e6, "{:.1f}")
                for place in ("between", "inside")
                for sent in (row.sent, row.model)
            ),
            f"{row.loss:.5f}",
        )
    return table


def _of_formula(system: str, rows: Mapping[str, Row], dtype: str, world: int) -> float | None:
    """The peak over what the formula adds to the activations, which "passes" shows."""
    stage, passes = SYSTEMS[system].stage, rows.get("passes")
    if not system.startswith("zero") or stage is None or passes is None:
        return None
    from zero_engine.config.schema import Bf16, Config, ZeroOptimization
    from zero_engine.observe.memory import estimate

    activations = passes.peak_bytes - _WEIGHT_BYTES[dtype] * passes.parameters
    config = Config(
        bf16=Bf16(enabled=dtype == "bf16"), zero_optimization=ZeroOptimization(stage=stage)
    )
    units = passes.parameters, world, passes.largest_unit
    formula = estimate(config, *units, root=passes.root, device="cpu")
    return rows[system].peak_bytes / (activations + formula.total + formula.in_flight)


def ratios(rows: Mapping[str, Row]) -> Iterable[str]:
    """Ours beside the peers of each stage."""
    for system, row in rows.items():
        for peer in SYSTEMS[system].peers:
            if peer in rows:
                against, bytes_ratio = rows[peer], ""
                if row.sent is not None and against.sent is not None and against.sent.between:
                    ratio = row.sent.between / against.sent.between
                    bytes_ratio = f", {ratio:.2f} x its bytes between nodes"
                yield (
                    f"{system}: {row.wall_ms / against.wall_ms:.2f} x the step time of {peer} "
                    f"(CPU {row.cpu_ms / against.cpu_ms:.2f}), "
                    f"{row.peak_bytes / against.peak_bytes:.2f} x its memory"
                    f"{bytes_ratio}"
                )


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
