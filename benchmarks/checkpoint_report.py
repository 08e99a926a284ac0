"""The tables of `checkpoint.py`, and how ours stands beside the targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

Took = dict[str, float]
Trials = Mapping[str, Sequence[Took]]
"""What was done -> of each counted trial, what it took all ranks together."""
CEILINGS = ("disk, cached", "disk, direct")


def saving(title: str, trials: Trials) -> Table:
    """A ceiling has its time where it belongs, a system all of it."""
    table = _table(title, "stall s", "/ memcpy", "durable s", "GB/s", "files", "peak")
    for operation, rounds in trials.items():
        kind, _, name = operation.partition(" ")
        if kind == "save":
            cells = _ceiling(name, rounds) if "s" in rounds[0] else _save(rounds, trials)
            table.add_row(name, *cells)
    return table


def _ceiling(name: str, rounds: Sequence[Took]) -> Iterator[str]:
    times = [took["s"] for took in rounds]
    yield from (spread(times), "", "") if name == "memcpy" else ("", "", spread(times))
    yield f"{rounds[0]['own'] / statistics.median(times) / 1e9:.2f}"


def _save(rounds: Sequence[Took], trials: Trials) -> Iterator[str]:
    durable = [took["durable_s"] for took in rounds]
    yield spread([took["stall_s"] for took in rounds])
    yield spread(_ratios(rounds, "stall_s", trials["save memcpy"], "s"))
    yield spread(durable)
    yield f"{rounds[0]['own'] / statistics.median(durable) / 1e9:.2f}"
    yield f"{rounds[0]['files']:.0f}"
    yield _peak(rounds)


def loading(title: str, worlds: Mapping[int, Trials], sizes: Mapping[str, float]) -> Table:
    """One row for each system and world size."""
    table = _table(title, "ranks", "load s", "read", "peak")
    for world, trials in worlds.items():
        for operation, rounds in trials.items():
            kind, _, name = operation.partition(" ")
            if kind == "load":
                times = spread([took["load_s"] for took in rounds])
                read = f"{rounds[0]['read'] / sizes[name]:.3f}x"
                table.add_row(name, str(world), times, read, _peak(rounds))
    return table


def standing(worlds: Mapping[int, Trials], save_world: int) -> Iterator[str]:
    """Ours beside the targets: ratios within each trial."""
    saves = worlds[save_world]
    ceiling = _ceilings(saves, "save", "s")
    for name in ("ours", "ours, async"):
        ours = saves[f"save {name}"]
        rate = _ratios(ceiling, "s", ours, "durable_s")
        yield f"{name}: written at {spread(rate)} of the faster disk ceiling; target 0.90"
    speedup = _ratios(saves["save DCP"], "durable_s", saves["save ours"], "durable_s")
    yield f"ours: written {spread(speedup)} times as fast as DCP; target 1.20"
    for world, trials in worlds.items():
        ceiling = _ceilings(trials, "load", "load_s")
        rate = _ratios(ceiling, "load_s", trials["load ours"], "load_s")
        yield f"ours: loaded by {world} at {spread(rate)} of the faster disk ceiling; target 0.85"


def _ceilings(trials: Trials, kind: str, key: str) -> list[Took]:
    """The faster way to the disk in each trial."""
    ways = [trials[f"{kind} {name}"] for name in CEILINGS]
    return [{key: min(took[key] for took in both)} for both in zip(*ways, strict=True)]


def _ratios(
    above: Sequence[Took], above_key: str, below: Sequence[Took], below_key: str
) -> list[float]:
    pairs = zip(above, below, strict=True)
    return [one[above_key] / other[below_key] for one, other in pairs]


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in ("", *headings):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    return table


def _peak(rounds: Sequence[Took]) -> str:
    """The most memory above what was held before, as a part of what one rank owns."""
    return f"{statistics.median(took['peak'] / took['largest'] for took in rounds):.2f}x"


def spread(values: Sequence[float]) -> str:
    """Median, and the range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
