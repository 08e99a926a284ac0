"""The reports of a run about its steps: log lines, monitors, times.

Rank 0 reports for all ranks, with numbers of the whole run.
"""

from __future__ import annotations

import csv
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zero_contract.errors import ConfigError
from zero_data.global_batch import Cursor
from zero_engine.config import Config
from zero_engine.config.schema import FileMonitor, WandbMonitor
from zero_engine.observe.explain import resolved
from zero_engine.observe.flops_profiler import now_s

Event = tuple[str, Any, int]
"""A name, DeepSpeed's; a value; and the count of samples."""
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
        name, value, x = event
        path = directory / (name.replace("/", "_").replace(" ", "_") + ".csv")
        # An earlier process may have come further than the checkpoint that this one began with.
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
            # At once: a kill leaves the points that there were, or those that stay.
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
        name, value, x = event
        # The first point hides later points of an earlier process.
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
        # A copy, since a monitor that fails is removed.
        for name, (write, _) in list(self._kinds.items()):
            try:
                for event in event_list:
                    write(event)
            except Exception as error:  # whatever a library raises: training goes on
                _log.warning("%s: no more curves: %s", name, error)
                del self._kinds[name]

    def close(self) -> None:
        """End all curves."""
        for name, (_, close) in self._kinds.items():
            try:
                close()
            except Exception as error:  # such as a full disk
                _log.warning("%s: its last points may be missing: %s", name, error)
        self._kinds.clear()


def _make(name: str, config: Config) -> tuple[Write, Close] | None:
    try:
        return _KINDS[name](getattr(config, name))
    except ImportError as error:
        _log.warning("%s: %s; install that package, or leave the section out", name, error)
    except Exception as error:
        _log.warning("%s: no curves: %s", name, error)
    return None


_log = logging.getLogger(__name__)
LOGGERS = (
    "zero_comm",
    "zero_checkpoint",
    "zero_data",
    "zero_step",
    "zero_engine",
    "zero_deepspeed",
)
"""The loggers of the engine and its libraries."""


class Stopwatch:
    """Measures the time of the parts of a step; does nothing unless it is on."""

    def __init__(self, device: torch.device, *, on: bool) -> None:
        self._device, self._on = device, on
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of this context to a part."""
        if not self._on:
            yield
            return
        begin_s = now_s(self._device)
        yield
        self._spent_s[part] += now_s(self._device) - begin_s

    def take(self) -> dict[str, float]:
        """The milliseconds of each part since the last call."""
        taken = {part: 1000 * seconds for part, seconds in self._spent_s.items()}
        self._spent_s.clear()
        return taken


class Reporter:
    """Reports the steps of one engine."""

    def __init__(self, config: Config, rank: int, stopwatch: Stopwatch) -> None:
        self.monitors = Monitors(config, rank)
        self._config = config
        self._reports = rank == 0
        self._stopwatch = stopwatch
        if not self._reports:
            return
        # A script that has not configured logging gets the lines that its config asks for on
        # stderr.
        loggers = [logging.getLogger(name) for name in LOGGERS]
        if config.log_level is not None:
            levels = logging.getLevelNamesMapping()
            if config.log_level.upper() not in levels:
                known = ", ".join(level.lower() for level in levels)
                raise ConfigError(f"log_level: {config.log_level!r} is not one of {known}")
            for logger in loggers:
                logger.setLevel(config.log_level.upper())
        asks = config.steps_per_print or config.dump_state or config.wall_clock_breakdown
        # An engine before has added the handler: a second one would write each line twice.
        has_handler = any(isinstance(h, _Unconfigured) for h in loggers[0].handlers)
        if (asks or config.log_level) and not has_handler:
            add_handler(*loggers)
            for logger in loggers:
                if logger.level == logging.NOTSET and not logging.getLogger().handlers:
                    logger.setLevel(logging.INFO)
        for line in resolved(config) if config.dump_state else ():
            _log.info("config: %s", line)

    def step(
        self, cursor: Cursor, loss: float, norm: float, rates: Sequence[float], scale: float
    ) -> None:
        """Report a step that has ended."""
        times_ms = self._stopwatch.take()
        if self.monitors.enabled:
            values = {"train_loss": loss, "lr": rates[0] if rates else 0.0, "grad_norm": norm}
            if self._config.loss_scaling.enabled:
                values["loss_scale"] = scale
            values |= {f"elapsed_time_ms_{part}": spent for part, spent in times_ms.items()}
            self.monitors.write_events(
                [(f"Train/Samples/{name}", value, cursor.samples) for name, value in values.items()]
            )
        every = self._config.steps_per_print or (1 if times_ms else 0)
        if not (self._reports and every and cursor.step % every == 0):
            return
        if self._config.steps_per_print:
            lr = ", ".join(f"{rate:g}" for rate in rates)
            _log.info("step %d: loss %.6g, norm %.4g, lr %s", cursor.step, loss, norm, lr)
        if times_ms:
            parts = ", ".join(f"{part} {spent:.1f} ms" for part, spent in times_ms.items())
            _log.info("step %d: %s", cursor.step, parts)


def add_handler(*loggers: logging.Logger) -> None:
    """Let loggers write to stderr, as long as the script has not configured logging."""
    handler = _Unconfigured()
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s"))
    for logger in loggers:
        logger.addHandler(handler)


class _Unconfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes only as long as the script has not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to stderr."""
        if not logging.getLogger().handlers:
            super().emit(record)
