"""Monitors: curves of a run as CSV files, for TensorBoard, and at Weights & Biases.

Owns the writers, on rank 0. Must always hold: a monitor never stops training, whatever happens to
its disk or its package; after a restart a CSV curve resumes at the step of the run, and the points
of steps that are repeated are replaced.

An event is (name, value, x), with DeepSpeed's names; x counts samples. Scripts add events through
`engine.monitor.write_events`.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zero_engine.config import Config
from zero_engine.config.schema import FileMonitor, WandbMonitor

_log = logging.getLogger(__name__)

Event = tuple[str, Any, int]


Write = Callable[[Event], None]
"""Appends a point."""
Close = Callable[[], None]
"""Ends all curves."""


def _csv_curves(config: FileMonitor) -> tuple[Write, Close]:
    """One CSV file per name, with a header and a point per line."""
    directory = Path(config.output_path, config.job_name)
    directory.mkdir(parents=True, exist_ok=True)
    begun: set[Path] = set()

    def write(event: Event) -> None:
        """The first point of this process removes later points of an earlier process."""
        name, value, x = event
        path = directory / (name.replace("/", "_").replace(" ", "_") + ".csv")
        if path not in begun:
            rows = [["step", name.rpartition("/")[2]]]
            if path.exists():
                with path.open(newline="", encoding="utf-8") as file:
                    # Whole points of earlier steps; a line cut short by a kill is none.
                    points = (row for row in csv.reader(file) if len(row) == 2)
                    rows += [row for row in points if row[0].isdecimal() and int(row[0]) < x]
            partial = path.with_suffix(".partial")
            with partial.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
            os.replace(partial, path)
            begun.add(path)
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([x, value])

    return write, lambda: None  # no file is open between two points


def _tensorboard(config: FileMonitor) -> tuple[Write, Close]:
    """A TensorBoard event file, by torch's writer."""
    from torch.utils.tensorboard import SummaryWriter

    made: list[Any] = []

    def write(event: Event) -> None:
        """The first point of this process hides later points of an earlier process."""
        name, value, x = event
        if not made:
            made.append(SummaryWriter(str(Path(config.output_path, config.job_name)), purge_step=x))
        made[0].add_scalar(name, value, x)

    def close() -> None:
        for each in made:
            each.close()

    return write, close


def _wandb(config: WandbMonitor) -> tuple[Write, Close]:
    """A run at Weights & Biases."""
    import wandb

    run = wandb.init(project=config.project, group=config.group, entity=config.team)
    return lambda event: run.log({event[0]: event[1]}, step=event[2]), run.finish


_KINDS: dict[str, Callable[[Any], tuple[Write, Close]]] = {
    "csv_monitor": _csv_curves,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


class Monitors:
    """The monitors that the config enables, on rank 0; none on other ranks."""

    def __init__(self, config: Config, rank: int) -> None:
        enabled = [name for name in _KINDS if getattr(config, name).enabled and rank == 0]
        self._kinds = {name: made for name in enabled if (made := _make(name, config))}

    @property
    def enabled(self) -> bool:
        """Whether anything is written."""
        return bool(self._kinds)

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Append points: (name, value, x). `flush` is accepted for DeepSpeed's signature."""
        del flush
        for name, (write, _) in list(self._kinds.items()):
            try:
                for event in event_list:
                    write(event)
            except Exception as error:
                _log.warning("%s: no more curves: %s", name, error)
                del self._kinds[name]

    def close(self) -> None:
        """End all curves."""
        for _, close in self._kinds.values():
            close()
        self._kinds.clear()


def _make(name: str, config: Config) -> tuple[Write, Close] | None:
    try:
        return _KINDS[name](getattr(config, name))
    except ImportError as error:
        _log.warning("%s: %s; install that package, or leave the section out", name, error)
    except Exception as error:
        _log.warning("%s: no curves: %s", name, error)
    return None
