"""Blocks compiled by Inductor: one result at every stage and world size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.models import make_model
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool, one_result

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="Inductor compiles C++ for the CPU, and there is neither g++ nor clang++",
)


def train_compiled(backend: str, stages: tuple[int, ...], cache: str, bf16: bool) -> list[str]:
    """The weights after two steps at each stage, with every block compiled."""
    from torch._inductor import config as inductor

    hashes = []
    with inductor.patch({"compile_threads": 1}), pytest.MonkeyPatch.context() as environ:
        environ.setenv("TORCHINDUCTOR_CACHE_DIR", cache)  # the ranks share what one has compiled
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
