"""A Trainer that is started again, by the plug-in: it does what is left, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.support.world import WorldPool
from zero_contract import worker as contract

STEPS = 3
"""Of 5 in an epoch."""


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((2,), index / 20), "labels": torch.ones(1)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(x) - labels).square().mean()}


def trained(
    directory: str, steps: int, stop: int = 0, round: int = 1
) -> tuple[int, str, list[int]]:
    """The steps of a start, its weights, and what two callbacks of one class have counted.

    The second counts each step twice. Last, the steps in an average of the weights.
    """
    import transformers
    from transformers.trainer_callback import ExportableState

    import zero_libraries.transformers

    class Counts(transformers.TrainerCallback, ExportableState):
        def __init__(self, by: int) -> None:
            self.by, self.steps = by, 0

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            self.steps += self.by
            if self.by == 1:
                average.update_parameters(model)
            if state.global_step == stop:
                control.should_training_stop = True

        def state(self) -> dict[str, Any]:
            return {"args": {"by": self.by}, "attributes": {"steps": self.steps}}

    arguments = transformers.TrainingArguments(
        output_dir=directory, max_steps=steps, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], disable_tqdm=True, save_steps=1, lr_scheduler_type="constant",
    )  # fmt: skip
    model = Model()
    average = AveragedModel(model)
    trainer: Any = transformers.Trainer(
        model, arguments, train_dataset=Rows(), callbacks=[Counts(1), Counts(2)]
    )
    zero_libraries.transformers.protect(trainer, microbatches=2, stateful={"average": average})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(contract.ENV_ROUND, str(round))
        trainer.train()
    counts = [c for c in trainer.callback_handler.callbacks if type(c).__name__ == "Counts"]
    counted = [*(each.steps for each in counts), int(average.n_averaged)]
    return trainer.state.global_step, trainer.run.weight_hash(), counted


def test_a_trainer_that_is_started_again_behind_its_last_step_trains_no_further(
    worlds: WorldPool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    first = worlds.run(1, trained, str(tmp_path), STEPS)
    assert worlds.run(1, trained, str(tmp_path), STEPS) == first


def test_a_callback_of_a_trainer_goes_on_from_its_state(worlds: WorldPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    worlds.run(1, trained, str(tmp_path), STEPS)
    ((steps, _, counted),) = worlds.run(1, trained, str(tmp_path), STEPS + 2)
    assert (steps, counted) == (STEPS + 2, [STEPS + 2, 2 * (STEPS + 2), STEPS + 2])


def test_a_trainer_that_was_stopped_early_trains_further_in_another_job_alone(
    worlds: WorldPool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    first = worlds.run(1, trained, str(tmp_path), STEPS + 2, STEPS - 1)
    assert first[0][0] == STEPS - 1
    assert worlds.run(1, trained, str(tmp_path), STEPS + 2, STEPS - 1, 2) == first
    ((steps, *_),) = worlds.run(1, trained, str(tmp_path), STEPS + 2)
    assert steps == STEPS + 2


class Killed(Exception):
    pass


def in_hooks(directory: str, at: int = -1) -> tuple[int, str, list[str]]:
    """A start whose every hook changes the weights, killed in the hook number `at`."""
    import transformers

    import zero_libraries.transformers

    called: list[str] = []

    def hook(name: str) -> None:
        if len(called) == at:
            raise Killed(name)
        called.append(name)
        with torch.no_grad():
            model.scale.mul_(1 + (sum(map(ord, name)) % 7 + 1) / 100).add_(0.001)

    class Hooks(transformers.TrainerCallback):
        pass

    for each in ("step_begin", "step_end", "log", "evaluate", "save", "epoch_end"):
        setattr(Hooks, f"on_{each}", lambda *_, name=each, **__: hook(name))

    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return super().forward(x * self.scale, labels)

    arguments = transformers.TrainingArguments(
        output_dir=directory, num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, save_steps=2, logging_steps=1, eval_strategy="epoch",
        lr_scheduler_type="constant",
    )  # fmt: skip
    model, rows = Scaled(), Rows()
    trainer: Any = transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[Hooks()]
    )
    zero_libraries.transformers.protect(
        trainer, microbatches=2, config={"checkpoint": {"every_steps": 1}}
    )
    try:
        trainer.train()
    except Killed as error:
        trainer.run.close()
        return trainer.state.global_step, str(error), called
    return trainer.state.global_step, trainer.run.weight_hash(), called


@pytest.mark.parametrize("every", [5, 1])
@pytest.mark.corners(every=[5])
def test_what_callbacks_do_is_done_once_wherever_a_trainer_is_killed(
    worlds: WorldPool, tmp_path: Path, every: int
) -> None:
    pytest.importorskip("transformers")
    ((steps, expected, called),) = worlds.run(1, in_hooks, str(tmp_path / "whole"))
    found = {}
    for at, name in [*enumerate(called)][::every]:
        directory = str(tmp_path / str(at))
        ((step, killed, _),) = worlds.run(1, in_hooks, directory, at)
        assert killed == name
        ((last, hash_, _),) = worlds.run(1, in_hooks, directory)
        if (last, hash_) != (steps, expected):
            found[at, name, step] = last, hash_
    assert found == {}


def on_ranks(directory: str) -> tuple[int, str, list[str]]:
    from accelerate.state import AcceleratorState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    AcceleratorState._reset_state(True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ("RANK", rank), ("WORLD_SIZE", world):
            patch.setenv(name, value)
            patch.setenv(f"LOCAL_{name}", value)
        found = in_hooks(directory)
    AcceleratorState._reset_state(True)
    return found


def test_what_callbacks_write_is_the_same_at_any_number_of_ranks(
    worlds: WorldPool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    ((steps, expected, _),) = worlds.run(1, in_hooks, str(tmp_path / "one"))
    for found in worlds.run(2, on_ranks, str(tmp_path / "two")):
        assert found[:2] == (steps, expected)
