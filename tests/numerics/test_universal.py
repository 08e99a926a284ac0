"""From every world and stage to every world and stage: 320 loads, every bit, no byte in vain.

Source: the matrix of DeepSpeed's universal checkpoint tests, here without a conversion between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.inside import persistence_of
from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from tests.unit.checkpoint.support import SMALL
from zero_checkpoint import Manifest, find
from zero_checkpoint.format.dtypes import byte_view
from zero_checkpoint.format.pieces import BUFFER
from zero_checkpoint.loading import restore
from zero_checkpoint.loading.restore import Loaded
from zero_engine.core.engine import Engine
from zero_engine.sharding.segments import elementwise_keys

STAGES, SAVED_BY, LOADED_BY = (0, 1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 8)
SAVED_AT = 1
Whole = dict[tuple[str, str], Tensor]
"""(kind, name) -> all elements of a tensor, flat."""


@pytest.fixture(scope="module")
def many() -> Iterator[WorldPool]:
    """Worlds of up to eight ranks."""
    pool = WorldPool(4)
    yield pool
    pool.close()


def save_all_stages(base: str, world: int) -> None:
    for stage in STAGES:
        engine = make_engine(config(stage))
        persistence_of(engine).saver.disk = SMALL
        train(engine, SAVED_AT)
        engine.save_checkpoint(root_of(base, world, stage))


def root_of(base: str, world: int, stage: int) -> str:
    return f"{base}/world{world}-stage{stage}"


def load_all(base: str, stage: int) -> list[tuple[int, int]]:
    """This rank loads all sixteen; of each: the bytes that it read, and those that it had to."""
    engine = make_engine(config(stage), seed=8)  # other weights, buffers and frozen values
    truth: Whole = torch.load(f"{base}/truth.pt")
    results = []
    for world in SAVED_BY:
        for saved_stage in STAGES:
            spoil(engine)
            with mock.patch.object(restore, "load", wraps=restore.load) as load:
                spy = Spy(load)
                engine.load_checkpoint(root_of(base, world, saved_stage))
            check(engine, truth, f"{base}/hash")
            assert spy.loaded is not None
            results.append((spy.loaded.bytes_read, needed_bytes(engine, spy.loaded.manifest)))
    return results


class Spy:
    """Keeps what the last load has returned."""

    def __init__(self, load: mock.MagicMock) -> None:
        self.loaded: Loaded | None = None
        original = load._mock_wraps

        def remember(*args: Any, **options: Any) -> Loaded | None:
            self.loaded = original(*args, **options)
            return self.loaded

        load.side_effect = remember


def spoil(engine: Engine) -> None:
    """Nothing of the last load must be taken for the next one's."""
    with torch.no_grad():
        weights = (unit.full for unit in engine._core.units if unit.gathered)
        for data in [*weights, *engine.module.buffers()]:
            byte_view(data.reshape(-1)).fill_(0x5A)
        for _, _, data in held(engine):
            byte_view(data).fill_(0x5A)
        for piece in engine._state.capture({}, {}).pieces:
            byte_view(piece.data).fill_(0x5A)


def held(engine: Engine) -> Iterator[tuple[tuple[str, str], int, Tensor]]:
    """All optimizer state of this rank, replicas too: of which tensor, from where, the data."""
    zero = engine._core.zero
    assert zero is not None
    for segment in zero.segments:
        state = zero.optimizer.state.get(segment.param, {})
        for key in elementwise_keys(segment, state):
            for slot in segment.unit.layout.slots:
                low, high = max(slot.start, segment.start), min(slot.stop, segment.stop)
                if slot.group == segment.group and low < high:
                    part = state[key][low - segment.start : high - segment.start]
                    yield (key, slot.fqn), low - slot.start, part


def check(engine: Engine, truth: Whole, hash_file: str) -> None:
    """Every bit that this rank holds, and all weights as they are gathered from all ranks."""
    pieces = engine._state.capture({}, {}).pieces
    own = [((p.id.kind, p.id.fqn), p.start, p.data) for p in pieces]
    for tensor, start, data in [*own, *held(engine)]:
        assert torch.equal(data, truth[tensor][start : start + data.numel()]), tensor
    for name, buffer in engine.module.named_buffers():
        if (BUFFER, name) in truth:
            assert torch.equal(buffer.reshape(-1), truth[BUFFER, name])
    assert engine.weight_hash() == Path(hash_file).read_text()
    assert engine.global_steps == SAVED_AT
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    assert rates == [1e-2, 5e-3]


def needed_bytes(engine: Engine, manifest: Manifest) -> int:
    """What the blocks weigh in which any element lies that this rank owns, element by element."""
    index = {tensor: position for position, tensor in enumerate(manifest.tensors)}
    unit, blocks = manifest.block_bytes, set()
    for piece in engine._state.capture({}, {}).pieces:
        places = element_places(manifest, index[piece.id])
        wanted = places[piece.start : piece.start + piece.data.numel()]
        blocks |= set((np.unique(wanted // unit) * unit).tolist())
    sizes = [file.size_bytes for file in manifest.files]
    places_in_files = [divmod(block, FILE_SPACING) for block in blocks]
    return sum(min(unit, sizes[file] - begin) for file, begin in places_in_files)


FILE_SPACING = 1 << 40
"""File n is thought to begin at n times this position."""


def element_places(manifest: Manifest, tensor: int) -> Any:
    """The position of each element of a tensor: int64 [numel]."""
    rows = manifest.fragments.take(np.flatnonzero(manifest.fragments.tensor == tensor))
    width = list(manifest.tensors.values())[tensor].dtype.itemsize
    return np.concatenate(
        [
            file * FILE_SPACING + offset + width * np.arange(length)
            for file, offset, length in zip(rows.file, rows.offset, rows.length, strict=True)
        ]
    )


def keep_truth(base: str) -> None:
    """The state of one rank that has seen no checkpoint."""
    engine = make_engine(config(0))
    train(engine, SAVED_AT)
    pieces = engine._state.capture({}, {}).pieces
    torch.save({(p.id.kind, p.id.fqn): p.data.clone() for p in pieces}, f"{base}/truth.pt")
    Path(base, "hash").write_text(engine.weight_hash())


@pytest.fixture(scope="module")
def saved(many: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    base = str(tmp_path_factory.mktemp("universal"))
    many.run(1, keep_truth, base)
    for world in SAVED_BY:
        many.run(world, save_all_stages, base, world)
    return base


@pytest.mark.parametrize("world", LOADED_BY)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(stage=[3], world=[3])
def test_all_sixteen_load_to_the_same_bits_and_only_the_blocks_that_hold_them_are_read(
    many: WorldPool, saved: str, stage: int, world: int
) -> None:
    for rank in many.run(world, load_all, saved, stage):
        assert len(rank) == len(SAVED_BY) * len(STAGES)
        for read, needed in rank:
            assert read == needed


def test_the_stage_leaves_no_trace_in_the_files(saved: str) -> None:
    for world in SAVED_BY:
        found = [find(Path(root_of(saved, world, stage))).candidates for stage in STAGES]
        assert [len(candidates) for candidates in found] == [1] * len(STAGES)
        first, *others = [candidates[0].manifest for candidates in found]
        assert first.world == world
        for other in others:
            assert json.loads(other.text)["files"] == json.loads(first.text)["files"]
            assert list(other.tensors.items()) == list(first.tensors.items())
