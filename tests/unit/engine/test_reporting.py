"""What a run says: curves that survive restarts, lines that need no set-up, times on request."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_contract.errors import ConfigError
from zero_data.global_batch import Cursor
from zero_engine.config import load_config
from zero_engine.observe import reporting
from zero_engine.observe.reporting import Monitors, Reporter, Stopwatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_logger() -> Iterator[None]:
    """What a config does to the package's logger is undone."""
    logger = logging.getLogger("zero_engine")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


def curves(root: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in sorted(root.glob("job/*"))}


def csv_config(root: Path, **more: Any) -> Any:
    section = {"enabled": True, "output_path": str(root), "job_name": "job"}
    return load_config({"csv_monitor": section, **more})


def report(config: Any, steps: range, rank: int = 0) -> None:
    reporter = Reporter(config, rank, Stopwatch(CPU, on=False))
    for step in steps:
        cursor = Cursor(step=step, samples=10 * step)
        reporter.step(cursor, loss=1 / step, norm=2.0, rates=[0.5, 0.1], scale=8.0)
    reporter.monitors.close()


def test_csv_curves_have_deepspeeds_files_and_go_on_after_a_restart(tmp_path: Path) -> None:
    config = csv_config(tmp_path)
    report(config, range(1, 5))
    report(config, range(3, 6))  # from the checkpoint of step 2
    report(config, range(1, 9), rank=1)
    assert curves(tmp_path) == {
        "Train_Samples_grad_norm.csv": ["step,grad_norm", *(f"{10 * n},2.0" for n in range(1, 6))],
        "Train_Samples_lr.csv": ["step,lr", *(f"{10 * n},0.5" for n in range(1, 6))],
        "Train_Samples_train_loss.csv": [
            "step,train_loss",
            *(f"{10 * n},{1 / n}" for n in range(1, 6)),
        ],
    }


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    config = csv_config(tmp_path, fp16={"enabled": True})
    report(config, range(1, 3))
    path = tmp_path / "job" / "Train_Samples_loss_scale.csv"
    path.write_text(path.read_text() + "30")
    report(config, range(3, 4))
    assert path.read_text().splitlines() == ["step,loss_scale", "10,8.0", "20,8.0", "30,8.0"]


def test_a_scripts_own_points_are_written_too(tmp_path: Path) -> None:
    monitors = Monitors(csv_config(tmp_path), rank=0)
    assert monitors.enabled
    monitors.write_events([("Eval/accuracy", 0.5, 10), ("Eval/accuracy", 0.75, 20)])
    assert curves(tmp_path) == {"Eval_accuracy.csv": ["step,accuracy", "10,0.5", "20,0.75"]}
    assert not Monitors(csv_config(tmp_path), rank=1).enabled
    assert not Monitors(load_config({}), rank=0).enabled


def test_curves_that_cannot_be_written_cost_one_line_and_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    report(csv_config(tmp_path / "file"), range(1, 3))
    monitors = Monitors(csv_config(tmp_path), rank=0)
    (tmp_path / "job" / "a.csv").mkdir()
    monitors.write_events([("a", 1, 1)])
    monitors.write_events([("b", 1, 1)])
    assert not monitors.enabled
    before, during = caplog.messages
    assert before.startswith("csv_monitor: no curves: [Errno 20] Not a directory")
    assert during.startswith("csv_monitor: no more curves: [Errno 21] Is a directory")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_not_there_is_named_in_one_line(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    report(load_config({name: {"enabled": True}}), range(1, 3))
    (line,) = caplog.messages
    assert line.startswith(f"{name}: ")
    assert line.endswith("; install that package, or leave the section out")


def test_curves_that_cannot_be_ended_cost_one_line_and_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish() -> None:
        raise OSError(28, "No space left on device")

    run = SimpleNamespace(log=lambda *_, **__: None, finish=finish)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    report(csv_config(tmp_path, wandb={"enabled": True}), range(1, 3))
    assert caplog.messages == [
        "wandb: its last points may be missing: [Errno 28] No space left on device"
    ]


# ---- lines ----


def lines(caplog: pytest.LogCaptureFixture, steps: int = 4, **keys: Any) -> list[str]:
    caplog.set_level(logging.INFO, "zero_engine")
    caplog.clear()
    config = load_config(keys)
    stopwatch = Stopwatch(CPU, on=config.wall_clock_breakdown)
    reporter = Reporter(config, 0, stopwatch)
    for step in range(1, steps + 1):
        with stopwatch.measure("forward"):
            pass
        reporter.step(Cursor(step=step, samples=step), 0.5, 2.0, [0.1], 1.0)
    return caplog.messages


def test_steps_are_printed_as_often_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog) == []
    printed = lines(caplog, steps_per_print=2)
    assert printed == [f"step {step}: loss 0.5, norm 2, lr 0.1" for step in (2, 4)]


def test_times_and_the_config_are_printed_on_request(caplog: pytest.LogCaptureFixture) -> None:
    timed = lines(caplog, wall_clock_breakdown=True)
    assert [line.partition(":")[0] for line in timed] == [f"step {n}" for n in range(1, 5)]
    assert all(re.fullmatch(r"step \d: forward \d+\.\d ms", line) for line in timed)
    dumped = lines(caplog, dump_state=True, gradient_clipping=0.5)
    assert "config: gradient_clipping = 0.5" in dumped
    assert "config: zero_optimization.stage = 0" in dumped


def test_who_has_not_configured_logging_sees_the_lines_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for keys in ({}, {"steps_per_print": 1}, {"steps_per_print": 1}):
        Reporter(load_config(keys), 0, Stopwatch(CPU, on=False))
        reporting._log.info("a line")
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    reporting._log.info("for the script's own handlers")
    assert capsys.readouterr().err.count("INFO zero_engine.observe.reporting: a line\n") == 2


def test_the_level_of_the_lines_is_the_configs() -> None:
    Reporter(load_config({"log_level": "error"}), 0, Stopwatch(CPU, on=False))
    assert logging.getLogger("zero_engine").level == logging.ERROR
    with pytest.raises(ConfigError, match="log_level: 'loud' is not one of critical, "):
        Reporter(load_config({"log_level": "loud"}), 0, Stopwatch(CPU, on=False))
