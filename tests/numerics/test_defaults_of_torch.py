"""What a script may set for all tensors: where torch makes those that name no device, and in what.

On the meta device a tensor has no values: one that the engine makes without saying where ends the
run. Under `torch.set_default_device("cuda")` it would be on the GPU, and the host could neither pin
nor read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from tests.support.training import config, make_engine
from tests.support.world import WorldPool
from zero_engine.core.engine import Engine


@contextmanager
def bf16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "device": lambda: torch.device("meta"),
    "dtype": bf16_by_default,
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.corners(stage=[3])
def test_defaults_that_a_script_has_set_change_nothing_of_the_engine(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    """From `initialize` to a checkpoint that is loaded by another engine, on two ranks."""
    plain, *others = (
        worlds.run(2, train_and_load, stage, tmp_path / default, default) for default in DEFAULTS
    )
    assert others == [plain, plain]


def train_and_load(stage: int, directory: Path, default: str) -> tuple[str, str]:
    """The weights of an engine, and those of another one that has loaded them."""
    settings = config(
        stage,
        bf16=True,
        elastic={"deterministic": "error"},
        checkpoint={"async": True},
        zero_optimization={"stage": stage, "offload_optimizer": {"device": "cpu"}},
    )
    try:
        with DEFAULTS[default]():
            first = made(settings, 7)
            micro_steps(first)
            first.save_checkpoint(directory, client_state={"note": "a default device"})
            micro_steps(first)
            first.save_checkpoint(directory)
            first.destroy()
            second = made(settings, 8)
            second.load_checkpoint(directory)
            return first.weight_hash(), second.weight_hash()
    finally:
        torch.use_deterministic_algorithms(False)


def made(settings: dict[str, object], seed: int) -> Engine:
    with torch.device("cpu"):  # the script's own model; the engine's parts are made below
        model = torch.nn.Sequential(
            torch.nn.Embedding(131, 16), torch.nn.Flatten(), torch.nn.Linear(16 * 13, 1)
        ).float()
        torch.manual_seed(seed)
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.02)
    return make_engine(settings, model=model)


def micro_steps(engine: Engine) -> None:
    """One step, with data that the script has prepared."""
    assert engine.training_dataloader is not None
    with torch.device("cpu"):
        batches = list(engine.training_dataloader)
    done = engine.global_steps
    for batch in batches:
        engine.backward(engine(batch).float().square().mean(), tokens=(batch >= 0).sum())
        engine.step()
        if engine.global_steps > done:
            return
