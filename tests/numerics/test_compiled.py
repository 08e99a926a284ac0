"""Modules that torch.compile has compiled: one result at every stage and world size."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.numerics.promises.back_ends import Recipe, hashes
from tests.support.models import make_model
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool, one_result

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="Inductor compiles C++ for the CPU, and there is neither g++ nor clang++",
)


@contextmanager
def compiling(cache: str) -> Iterator[None]:
    from torch._inductor import config as inductor

    with inductor.patch({"compile_threads": 1}), pytest.MonkeyPatch.context() as environ:
        environ.setenv("TORCHINDUCTOR_CACHE_DIR", cache)  # the ranks share what one has compiled
        yield


def train_compiled(backend: str, stages: tuple[int, ...], cache: str, bf16: bool) -> list[str]:
    """The weights after two steps at each stage, with every block compiled."""
    hashes = []
    with compiling(cache):
        for stage in stages:
            torch._dynamo.reset()
            model = make_model()
            for block in model.blocks:
                block.compile(backend=backend)
            engine = make_engine(config(stage, bf16=bf16), model=model)
            before = _compiled()
            train(engine, 2)
            assert _compiled() > before  # and not run as it is
            hashes.append(engine.weight_hash())
    return hashes


def _compiled() -> int:
    """The frames that have been compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("bf16", [False, True])
def test_compiled_blocks_have_one_result_at_every_stage_and_world_size(
    worlds: WorldPool, tmp_path: Path, bf16: bool
) -> None:
    stages = (0, 1, 2, 3)
    given = ("inductor", stages, str(tmp_path), bf16)
    results = [
        hashes
        for world in (1, 2, 3)
        for hashes in worlds.run(world, train_compiled, *given, deadline_s=600.0)
    ]
    assert len({each for hashes in results for each in hashes}) == 1


@pytest.mark.full
def test_blocks_captured_as_graphs_have_the_bits_of_the_eager_ones_at_stage_3(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert (
        one_result(worlds, train_compiled, "aot_eager", (3,), str(tmp_path), False, sizes=(2,))
        == worlds.run(1, train_eager)[0]
    )


def train_eager() -> list[str]:
    engine = make_engine(config(0))
    train(engine, 2)
    return [engine.weight_hash()]


# ---- batches of several shapes ----


class Lengths(nn.Module):
    """A model of sequences, whose kernels depend on their length."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.down, self.head = Spread(), nn.Linear(32, 1)
        self.down.compile(backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.down(x)) - 1).square().mean()


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.unsqueeze(-1)).sin().var(1)


def sequences() -> TensorDataset:
    return TensorDataset(torch.randn(29, 100, generator=torch.Generator().manual_seed(3)))


def cut(samples: list[Any]) -> tuple[torch.Tensor]:
    """A batch of one of two lengths."""
    batch = torch.stack([x for (x,) in samples])
    return (batch[:, : (37, 100)[int(batch.abs().sum()) % 2]],)


def of_lengths(backend: Any) -> Recipe:
    options = ("find_unused_parameters", True), ("bucket_cap_mb", 25)  # as torch's compiler needs
    return Recipe(model=partial(Lengths, backend), data=sequences, collate=cut, of_wrapper=options)


def graphs(back_end: str) -> list[tuple[Any, ...]]:
    """The shape of the batch of each graph that a training makes."""
    made: list[tuple[Any, ...]] = []

    def note(graph: Any, given: list[Any]) -> Any:
        shapes = (tuple(each.shape) for each in given if isinstance(each, torch.Tensor))
        made.append(next(shape for shape in shapes if len(shape) == 2 and shape[1] > 1))
        return graph.forward

    torch._dynamo.reset()
    hashes(of_lengths(note), back_end, 4)
    return made


@pytest.mark.parametrize("back_end", ["plain", "stage0"])
def test_each_shape_of_a_batch_has_a_graph_of_its_own(worlds: WorldPool, back_end: str) -> None:
    """So the kernels do not depend on what a process has met before."""
    ((*made,),) = worlds.run(1, graphs, back_end)
    assert len(made) == len(set(made)) >= 2
    assert all(type(size) is int for shape in made for size in shape)


def compiled(back_end: str, cache: str) -> list[str]:
    torch._dynamo.reset()
    with compiling(cache):
        return hashes(of_lengths("inductor"), back_end, 4)


@pytest.mark.full
@pytest.mark.timeout(1200)
@needs_compiler
def test_batches_of_several_shapes_have_one_result_wherever_they_are_compiled(
    worlds: WorldPool, tmp_path: Path
) -> None:
    cache = str(tmp_path)
    (expected,) = worlds.run(1, compiled, "plain", cache, deadline_s=600.0)
    for back_end in ("ddp", "stage3"):
        assert worlds.run(2, compiled, back_end, cache, deadline_s=600.0) == [expected] * 2
