"""What a Trainer under an agent goes on from, and with which batch."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_contract.errors import ConfigError
from zero_deepspeed.as_deepspeed.resuming import (
    STATE,
    BatchChoice,
    CannotGoOn,
    RunRecord,
    RunStart,
    Seen,
    check_loop,
    check_schedule,
    choose,
    engine_missing,
    look,
    others,
    place_in_stream,
    record_of,
    share,
    short_step,
)

RUN = RunRecord(run="job", samples=12, micro_batch=2, world=2, steps=6)


def start(n: int = 2, world: int = 2, job: str = "job") -> RunStart:
    return RunStart(job=job, round=n, world=world)


def seen(step: int, flaw: str = "", written_ns: int = 5, *, weights_only: bool = False) -> Seen:
    return Seen(
        path=Path(f"out/checkpoint-{step}"),
        step=step,
        written_ns=written_ns,
        flaw=flaw,
        weights_only=weights_only,
    )


# ---- which run ----


@pytest.mark.parametrize(
    ("job", "n", "finished", "goes_on"),
    [
        ("job", 1, False, True),  # all its agents were killed, and it is started again
        ("job", 1, True, False),  # another run, under the same name
        ("job", 2, True, True),  # killed after training, before the script's end
        ("other", 2, False, False),
    ],
)
def test_a_start_goes_on_with_the_run_that_it_belongs_to(
    tmp_path: Path, job: str, n: int, finished: bool, goes_on: bool
) -> None:
    record = dataclasses.replace(RUN, finished=finished)
    record.write(tmp_path / "out")
    assert record_of(tmp_path / "out", start(n, job=job)) == (record if goes_on else None)
    assert record_of(tmp_path / "none", start(n, job=job)) is None


def test_a_command_that_is_typed_again_is_the_same_run() -> None:
    assert start(job="train-0a1b2c3d.1").run == start(job="train-0a1b2c3d.2").run
    assert start(job="night.1").run != start(job="night.2").run


def test_a_record_that_cannot_be_read_is_no_reason_to_begin_again(tmp_path: Path) -> None:
    (tmp_path / "zero_run.json").write_text('{"run"')
    with pytest.raises(CannotGoOn, match=r"zero_run\.json cannot be read .* another output_dir"):
        record_of(tmp_path, start())


# ---- which checkpoint ----


def test_a_run_goes_on_from_its_newest_whole_checkpoint_whatever_the_script_says() -> None:
    found = [seen(9, "trainer_state.json is not whole", 0), seen(6), seen(3)]
    for asked in (None, False, True, "out/checkpoint-3", "out/checkpoint-9"):
        choice = choose(asked, RUN, found)
        assert choice.path == "out/checkpoint-6"
        assert choice.reason == (
            "training resumes from out/checkpoint-6; "
            "checkpoint-9 is passed over: trainer_state.json is not whole"
        )


def test_it_does_not_go_on_from_those_of_another_run_until_it_has_written_over_them() -> None:
    first_start = [seen(100), seen(3)]
    run = dataclasses.replace(RUN, others=others(first_start, goes_on_from=0))
    assert choose(None, run, first_start).path is None
    assert choose("model/checkpoint-7", run, first_start).path == "model/checkpoint-7"
    assert choose(None, run, [seen(100), seen(3, written_ns=6)]).path == "out/checkpoint-3"


def test_what_a_run_comes_from_is_its_own() -> None:
    assert others([seen(9), seen(6), seen(3)], goes_on_from=6) == {"checkpoint-9": 5}


def test_a_run_without_a_checkpoint_begins_at_step_0_and_says_so() -> None:
    reason = "this run has no complete checkpoint yet: training begins at step 0"
    assert choose(None, RUN, []) == BatchChoice(path=None, reason=reason)
    assert choose(True, RUN, []) == BatchChoice(path=None, reason=reason)


def test_a_run_with_weights_alone_ends_with_a_sentence() -> None:
    found = [seen(3, "it holds weights alone", weights_only=True)]
    with pytest.raises(CannotGoOn, match="Set save_only_model to False; to begin again"):
        choose(None, RUN, found)


def test_a_first_start_does_what_the_script_says_and_true_does_no_harm() -> None:
    assert choose("somewhere", None, [seen(3)]) == BatchChoice(path="somewhere")
    assert choose(None, None, []) == BatchChoice(path=None)
    assert choose(True, None, [seen(3)]).path == "out/checkpoint-3"
    anew = "there is no checkpoint yet: training begins at step 0"
    assert choose(True, None, []) == BatchChoice(path=None, reason=anew)
    assert "beside out/checkpoint-3 of another run" in choose(None, None, [seen(3)]).reason


def checkpoint(path: Path) -> Path:
    """As the Trainer leaves one, without its tensors."""
    (path / "step-000000003.g1.0000").mkdir(parents=True)
    (path / "step-000000003.g1.0000" / "MANIFEST.json").write_text("{}")
    (path / STATE).write_text(json.dumps({"global_step": 3}))
    for name in ("scheduler.pt", "rng_state_0.pth"):
        with zipfile.ZipFile(path / name, "w") as file:
            file.writestr("data", "x")
    return path


@pytest.mark.parametrize(
    ("break_it", "flaw"),
    [
        (lambda path: None, ""),
        (lambda path: (path / STATE).unlink(), "trainer_state.json is not whole"),
        (lambda path: (path / STATE).write_text('{"glo'), "trainer_state.json is not whole"),
        (
            lambda path: (path / "step-000000003.g1.0000" / "MANIFEST.json").unlink(),
            "it holds weights alone",
        ),
        (
            lambda path: (path / "rng_state_0.pth").write_bytes(b"PK"),
            "rng_state_0.pth: not whole",
        ),
    ],
)
def test_a_checkpoint_that_a_kill_has_left_half_written_is_known(
    tmp_path: Path, break_it: Callable[[Path], object], flaw: str
) -> None:
    path = checkpoint(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3.old").mkdir()
    break_it(path)
    assert [(one.step, one.flaw) for one in look(tmp_path)] == [(3, flaw)]
    assert look(tmp_path / "none") == []


# ---- the batch ----


@pytest.mark.parametrize(
    ("world", "micro_batch", "accumulation"),
    [(1, 2, 6), (2, 2, 3), (3, 2, 2), (4, 1, 3), (6, 2, 1), (12, 1, 1)],
)
def test_a_step_keeps_its_samples_at_every_world_that_divides_them(
    world: int, micro_batch: int, accumulation: int
) -> None:
    batch = share(RUN, start(world=world))
    assert (batch.micro_batch, batch.accumulation) == (micro_batch, accumulation)
    assert ("differ by rounding" in batch.reason) == (micro_batch != 2)


@pytest.mark.parametrize("world", [5, 24])
def test_a_world_that_cannot_share_a_step_is_refused_with_the_remedy(world: int) -> None:
    with pytest.raises(CannotGoOn, match=r"Let their number divide 12: set --nnodes, --node-unit"):
        share(RUN, start(world=world))


def test_another_schedule_is_refused() -> None:
    check_schedule(RUN, start(world=3), steps=6, samples=12)
    with pytest.raises(CannotGoOn, match="this run has 6 steps on 2 ranks and would have 4 on 3"):
        check_schedule(RUN, start(world=3), steps=4, samples=12)
    with pytest.raises(CannotGoOn, match="takes 12 samples, and would take 18 on 3 ranks"):
        check_schedule(RUN, start(world=3), steps=6, samples=18)


# ---- other loops of accelerate ----


@pytest.mark.parametrize(
    ("n", "committed", "loaded"), [(1, 5, None), (2, 0, None), (2, 5, 8), (2, 5, 0)]
)
def test_a_loop_that_goes_on_as_it_began_is_left_alone(
    n: int, committed: int, loaded: int | None
) -> None:
    check_loop(n, committed, loaded, 8)


def test_a_loop_that_begins_again_over_its_checkpoint_is_refused() -> None:
    with pytest.raises(CannotGoOn, match=r"one of step 5 .* Call accelerator\.load_state\(DIR\)"):
        check_loop(2, 5, None, 8)


def test_a_loop_whose_batch_has_changed_with_the_world_is_refused() -> None:
    with pytest.raises(CannotGoOn, match=r"a step took 8 samples .*, and takes 4 now"):
        check_loop(2, 5, 8, 4)


def test_an_accelerator_that_drops_its_plugin_is_refused_and_one_without_is_told() -> None:
    with pytest.raises(ConfigError, match=r"has dropped the deepspeed_plugin, as Accelerator\(cpu"):
        engine_missing(asked=True, made=False)
    assert engine_missing(asked=True, made=True) == ""
    assert "so as_deepspeed makes no engine for it" in engine_missing(asked=False, made=False)


# ---- streams, and the last step of an epoch ----


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_the_place_in_a_stream_is_that_of_the_state_that_the_trainer_wrote(world: int) -> None:
    """As the Trainer counts: `epoch + (micro-step + 1) / (steps * accumulation)`."""
    steps, accumulation = 1000, 42 // world
    for step in range(1, steps + 1):
        epoch, within = divmod(step - 1, 37)
        state = epoch + (within + 1) * accumulation / (steps * accumulation)
        assert place_in_stream(state, step, steps) == (epoch, within + 1)


def test_a_state_that_names_no_step_of_its_stream_is_refused() -> None:
    with pytest.raises(CannotGoOn, match=r"its epoch was 1\.0005, which is not the end of a step"):
        place_in_stream(1.0005, 50, 100)


@pytest.mark.parametrize(
    ("samples", "world", "told"),
    [
        (24, 2, ""),
        (28, 2, ""),  # two micro-batches, one for each rank
        (28, 1, ""),
        (26, 2, "the last step of each epoch has 2 samples, which are no multiple of 2 ("),
        (25, 1, "the last step of each epoch has 1 samples, which are no multiple of 2 ("),
        (28, 3, "the last step of each epoch has 4 samples, which are no multiple of 2 ("),
    ],
)
def test_a_last_step_that_accelerate_fills_is_told_with_what_prevents_it(
    samples: int, world: int, told: str
) -> None:
    text = short_step(samples, of_a_step=12, micro_batch=2, world=world)
    assert (text.startswith(told), bool(text)) == (True, bool(told))
