"""Lightning's Trainer, by the plug-in: wherever it is interrupted, it ends as if it were not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.support.world import WorldPool
from zero_contract import worker as contract

EPOCHS, SIZE = 3, 10
"""Each epoch has 3 steps, the last one of 2 samples."""
Ended = tuple[int, str, list[str]]
"""Steps, weights, and the hooks that were called since the start."""


class Killed(Exception):
    pass


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(TensorDataset(torch.arange(SIZE)[:, None] / SIZE))


def as_torchrun() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    return {"RANK": rank, "WORLD_SIZE": world, **local, "TORCHELASTIC_RUN_ID": "hooks"}


class Hooked:
    """The hooks that were called, each of which changes the weights; number `at` is the end."""

    def __init__(self, at: int | None, stop: int) -> None:
        self.called: list[str] = []
        self._at, self._stop = at, stop

    def may_end(self, name: str) -> None:
        if len(self.called) == self._at:
            raise Killed(name)

    def __call__(self, module: Any, name: str) -> None:
        self.may_end(name)
        self.called.append(name)
        if name == "on_validation_end" and module.global_step == self._stop:
            module.trainer.should_stop = True
        with torch.no_grad():
            module.scale.mul_(1 + (sum(map(ord, name)) % 7 + 1) / 100).add_(0.001)


def fitted(directory: str, kind: str, at: int | None = None, round: int = 1) -> Ended:
    """A fit whose every hook changes the weights, killed in the hook number `at`."""
    import lightning
    from lightning.pytorch.callbacks import Callback

    from zero_libraries.lightning import ZeroDDP

    given = {**KINDS[kind]}
    data, stop = given.pop("data", "rows"), given.pop("stop", -1)
    hook = Hooked(at, stop)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(1, 1)
            self.register_buffer("scale", torch.ones(1))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return (self.layer(batch[0]) * self.scale - 1).square().mean()

        def validation_step(self, *_: Any) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Hooks(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            hook.may_end("at the end")

    for name in (
        "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end",
        "on_validation_start", "on_validation_end", "on_train_epoch_end",
    ):  # fmt: skip
        setattr(Module, name, lambda module, *_, name=name: hook(module, name))
        setattr(Hooks, name, lambda _, __, module, *___, name=f"its {name}": hook(module, name))

    warnings.simplefilter("ignore")
    strategy: Any = ZeroDDP(directory, microbatches=2, config={"checkpoint": {"every_steps": 1}})
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=directory, callbacks=[Hooks()], **{"max_epochs": EPOCHS, **given},
    )  # fmt: skip
    rows: Any = TensorDataset(torch.arange(SIZE)[:, None] / SIZE)
    sampler = WeightedRandomSampler([1.0] * SIZE, SIZE) if data == "drawn" else None
    loader = DataLoader(Rows() if data == "stream" else rows, 2, sampler=sampler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**as_torchrun(), contract.ENV_ROUND: round}.items():
                patch.setenv(name, str(value))
            trainer.fit(Module(), loader, DataLoader(TensorDataset(torch.ones(2, 1))))
    except Killed as error:
        return strategy.run.global_step if hasattr(strategy, "run") else 0, str(error), hook.called
    return strategy.run.global_step, strategy.run.weight_hash(), hook.called


KINDS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps": {"max_epochs": -1, "max_steps": 8},
    "validated by steps": {"val_check_interval": 2},
    "a stream": {"data": "stream"},
    "stopped early": {"stop": 6},
    "drawn by a sampler": {"data": "drawn"},
}


@pytest.mark.parametrize("every", [7, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.corners(kind=["epochs"], every=[7])
def test_whatever_a_script_does_in_hooks_is_done_once_wherever_the_fit_is_killed(
    worlds: WorldPool, tmp_path: Path, kind: str, every: int
) -> None:
    pytest.importorskip("lightning")
    ((steps, expected, called),) = worlds.run(1, fitted, str(tmp_path / "whole"), kind)
    found = {}
    for at, name in [*enumerate([*called, "at the end"])][::every]:
        directory = str(tmp_path / str(at))
        ((step, killed, _),) = worlds.run(1, fitted, directory, kind, at)
        assert killed == name
        ((last, hash_, _),) = worlds.run(1, fitted, directory, kind, None, 2)
        if (last, hash_) != (steps, expected):
            found[at, name, step] = last, hash_
    assert found == {}


def test_what_hooks_write_is_the_same_at_any_number_of_ranks(
    worlds: WorldPool, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    ((steps, expected, _),) = worlds.run(1, fitted, str(tmp_path / "one"), "epochs")
    for found in worlds.run(2, fitted, str(tmp_path / "two"), "epochs"):
        assert found[:2] == (steps, expected)
