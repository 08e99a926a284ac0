"""One training has one hash at every step: in every back end, at every world size, clipped.

The model has a tied head and dropout, a step has several micro-batches, and the norm is clipped at
almost every step: one that differs in its last bits shows after a hundred of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero_engine
import zero_torch
from tests.support.stock import GPT, LENGTH, VOCABULARY, wrap
from tests.support.world import WorldPool

SAMPLES, MICROBATCHES, MOST = 29, 5, 0.05
"""Steps of 10, 10 and 9 samples, in micro-batches of 2, the last one of 1."""
SHORT, LONG = 5, 300
SCALE = 1000.0
"""Of the loss in fp16: no power of two, so taking it out again rounds."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

PRECISIONS = ["fp32", "autocast", "bf16", "fp16"]
"""bf16 and fp16 are the engine's, and those of a `MixedPrecisionPolicy` of FSDP2."""

Place = tuple[str, int]
"""A back end, and a world size."""
EVERYWHERE: list[Place] = [
    ("plain", 1),
    *(("ddp", world) for world in (1, 2, 3, 4)),
    *(("fsdp2", world) for world in (1, 2, 3, 4)),
    ("columns", 2),
    ("columns", 4),
    ("hsdp", 4),
    *((f"stage{stage}", world) for stage in range(4) for world in (1, 2, 3, 4)),
]
CORNERS: list[Place] = [
    ("plain", 1),
    ("ddp", 3),
    ("fsdp2", 2),
    ("columns", 4),
    ("hsdp", 4),
    ("stage0", 2),
    ("stage1", 4),
    ("stage2", 1),
    ("stage3", 3),
]
PHASES: list[Place] = [("stage2", 3), ("ddp", 2), ("stage3", 4), ("fsdp2", 3), ("plain", 1)]


def places_of(places: Sequence[Place], precision: str) -> list[Place]:
    """Those that have a precision: DDP and one process have no policy of mixed precision."""
    without = ("plain", "ddp") if precision in DTYPES else ()
    return [place for place in places if place[0] not in without]


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator))


class Tied(GPT):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Tied()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def in_stock_torch(
    wrapper: str, precision: str, until: int, directory: str | None, seed: int
) -> Iterator[str]:
    options = {"param_dtype": DTYPES[precision]} if precision in DTYPES else {}
    model = wrap(model_of(seed), wrapper, **options)
    run = zero_torch.protect(
        model,
        optimizer_of(model),
        DataLoader(dataset(), batch_size=2, shuffle=True),
        microbatches=MICROBATCHES,
        scaler=torch.amp.GradScaler("cpu", SCALE) if precision == "fp16" else None,
    )
    if directory is not None:
        run.load(directory)
    while run.global_step < until:
        for (tokens,) in run.loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                loss = model(tokens)
            run.backward(loss)
            if run.step(MOST):
                yield run.weight_hash()
            if run.global_step == until:
                break
    if directory is not None:
        run.save(directory)
    run.close()


def in_the_engine(
    stage: str, precision: str, until: int, directory: str | None, seed: int
) -> Iterator[str]:
    model = model_of(seed)
    config = {
        "train_batch_size": 2 * MICROBATCHES,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": MOST,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "loss_scale": SCALE},
        "torch_autocast": {"enabled": precision == "autocast"},
    }
    engine = zero_engine.initialize(
        model, training_data=dataset(), optimizer=optimizer_of(model), config=config
    )
    if directory is not None:
        engine.load_checkpoint(directory)
    loader: Any = engine.training_dataloader
    while engine.global_steps < until:
        for (tokens,) in loader:
            before = engine.global_steps
            engine.backward(engine(tokens))
            engine.step()
            if engine.global_steps > before:
                yield engine.weight_hash()
            if engine.global_steps == until:
                break
    if directory is not None:
        engine.save_checkpoint(directory)
    engine.destroy()


def hashes(
    back_end: str, precision: str, until: int, directory: str | None = None, seed: int = 0
) -> list[str]:
    """The weight hash after each step."""
    train: Callable[..., Iterator[str]] = in_stock_torch
    if back_end.startswith("stage"):
        train, back_end = in_the_engine, back_end.removeprefix("stage")
    return list(train(back_end, precision, until, directory, seed))


def first_difference(found: Sequence[str], expected: Sequence[str]) -> int | None:
    """The first step whose hash is not the expected one."""
    steps = zip(found, expected, strict=True)
    return next((step for step, (one, other) in enumerate(steps, 1) if one != other), None)


def differing(
    worlds: WorldPool, places: Sequence[Place], precision: str, steps: int
) -> dict[Place, int]:
    """Of each place that differs from the first one, the step in which it begins to."""
    expected: list[str] = []
    found = {}
    for back_end, world in places:
        for rank in worlds.run(world, hashes, back_end, precision, steps):
            expected = expected or rank
            found[back_end, world] = first_difference(rank, expected)
    assert len(set(expected)) == steps
    return {place: step for place, step in found.items() if step is not None}


@pytest.mark.corners(precision=["fp32"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_clipped_training_has_one_hash_at_every_step(worlds: WorldPool, precision: str) -> None:
    assert differing(worlds, places_of(CORNERS, precision), precision, SHORT) == {}


def test_each_precision_has_a_result_of_its_own(worlds: WorldPool) -> None:
    found = [worlds.run(1, hashes, "fsdp2", precision, 2)[0][-1] for precision in PRECISIONS]
    assert len(set(found)) == len(PRECISIONS)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_long_clipped_training_has_one_hash_at_every_step(
    worlds: WorldPool, precision: str
) -> None:
    places = EVERYWHERE if precision == "fp32" else CORNERS[1:5] + CORNERS[-1:]
    assert differing(worlds, places_of(places, precision), precision, LONG) == {}


@pytest.mark.parametrize(
    ("precision", "steps"),
    [
        ("fp32", SHORT),
        *(
            pytest.param(precision, LONG, marks=[pytest.mark.full, pytest.mark.timeout(1200)])
            for precision in PRECISIONS
        ),
    ],
)
def test_each_phase_of_a_training_may_run_in_another_back_end(
    worlds: WorldPool, tmp_path: Path, precision: str, steps: int
) -> None:
    phases = places_of(PHASES, precision)
    back_end, world = phases[0]
    (expected, *_) = worlds.run(world, hashes, back_end, precision, steps)
    found: list[str] = []
    for number, (back_end, world) in enumerate(phases):
        until = (number + 1) * steps // len(phases)
        (part, *others) = worlds.run(
            world, hashes, back_end, precision, until, str(tmp_path), number
        )
        assert all(other == part for other in others)
        found += part
    assert first_difference(found, expected) is None
