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
from typing import Any, Protocol

from zero_engine.config import Config
from zero_engine.config.schema import FileMonitor, WandbMonitor

_log = logging.getLogger(__name__)

Event = tuple[str, Any, int]


class Writer(Protocol):
    """One kind of monitor."""

    def write(self, event: Event) -> None:
        """Append a point."""

    def close(self) -> None:
        """End all curves."""


class CsvCurves:
    """One CSV file per name, with a header and a point per line."""

    def __init__(self, config: FileMonitor) -> None:
        self._directory = Path(config.output_path, config.job_name)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._begun: set[Path] = set()

    def write(self, event: Event) -> None:
        """Append a point; the first of this process removes later points of an earlier process."""
        name, value, x = event
        path = self._directory / (name.replace("/", "_").replace(" ", "_") + ".csv")
        if path not in self._begun:
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
            self._begun.add(path)
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([x, value])

    def close(self) -> None:
        """Do nothing: no file is open between two points."""


class TensorBoardCurves:
    """A TensorBoard event file, by torch's writer."""

    def __init__(self, config: FileMonitor) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = lambda first: SummaryWriter(
            str(Path(config.output_path, config.job_name)), purge_step=first
        )
        self._writer: Any = None

    def write(self, event: Event) -> None:
        """Append a point; the first of this process hides later points of an earlier process."""
        name, value, x = event
        self._writer = self._writer or self._make(x)
        self._writer.add_scalar(name, value, x)

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.close()


class WandbCurves:
    """A run at Weights & Biases."""

    def __init__(self, config: WandbMonitor) -> None:
        import wandb

        self._run = wandb.init(project=config.project, group=config.group, entity=config.team)

    def write(self, event: Event) -> None:
        """Append a point."""
        name, value, x = event
        self._run.log({name: value}, step=x)

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()


_KINDS: dict[str, Callable[[Any], Writer]] = {
    "csv_monitor": CsvCurves,
    "tensorboard": TensorBoardCurves,
    "wandb": WandbCurves,
}


class Monitors:
    """The monitors that the config enables, on rank 0; none on other ranks."""

    def __init__(self, config: Config, rank: int) -> None:
        enabled = [name for name in _KINDS if getattr(config, name).enabled and rank == 0]
        self._writers = {name: made for name in enabled if (made := _make(name, config))}

    @property
    def enabled(self) -> bool:
        """Whether anything is written."""
        return bool(self._writers)

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Append points: (name, value, x). `flush` is accepted for DeepSpeed's signature."""
        del flush
        for name, writer in list(self._writers.items()):
            try:
                for event in event_list:
                    writer.write(event)
            except Exception as error:
                _log.warning("%s: no more curves: %s", name, error)
                del self._writers[name]

    def close(self) -> None:
        """End all curves."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _make(name: str, config: Config) -> Writer | None:
    try:
        return _KINDS[name](getattr(config, name))
    except ImportError as error:
        _log.warning("%s: %s; install that package, or leave the section out", name, error)
    except Exception as error:
        _log.warning("%s: no curves: %s", name, error)
    return None
