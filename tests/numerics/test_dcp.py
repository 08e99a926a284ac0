"""DCP writes and reads universal checkpoints at any world size, of DTensors however they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import zero_checkpoint
import zero_engine
from tests.numerics.test_stock_torch import batches, protected
from tests.support.stock import GPT, make
from tests.support.world import WorldPool
from zero_checkpoint.dcp import Reader, Writer

SHAPES = ((7, 5), (4, 3, 6), (9,))
PLACEMENTS: dict[int, list[tuple[tuple[int, ...], tuple[Placement, ...]]]] = {
    4: [
        ((2, 2), (Shard(0), Shard(1))),
        ((2, 2), (Replicate(), Shard(1))),
        ((4,), (Shard(0),)),
    ],
    3: [((3,), (Shard(1),)), ((3,), (Shard(2),)), ((3,), (Replicate(),))],
    1: [((1,), (Shard(0),))] * 3,
}
"""World size -> mesh and placements of each tensor."""


def laid_out(scale: int) -> dict[str, Any]:
    """DTensors of this world, beside one that each rank has for itself."""
    state: dict[str, Any] = {}
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for number, (shape, (mesh, placements)) in enumerate(
        zip(SHAPES, PLACEMENTS[world], strict=True)
    ):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) * scale
        state[f"w{number}"] = distribute_tensor(whole, init_device_mesh("cpu", mesh), placements)
    if scale:
        state[f"rank{rank}"] = torch.full((2,), float(rank))
    return state


def saved(directory: str) -> None:
    dcp.save(laid_out(1), storage_writer=Writer(directory, step=1))


def loaded(directory: str) -> bool:
    state = laid_out(0)
    state["rank1"] = torch.zeros(2)
    dcp.load(state, storage_reader=Reader(directory))
    expected = laid_out(1)
    return state["rank1"].tolist() == [1.0, 1.0] and all(
        torch.equal(state[f"w{number}"].to_local(), expected[f"w{number}"].to_local())
        for number in range(len(SHAPES))
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [(4, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in ((3, 4), (4, 1)))],
)
def test_dtensors_load_however_they_lie(
    worlds: WorldPool, tmp_path: Path, before: int, after: int
) -> None:
    worlds.run(before, saved, str(tmp_path))
    assert worlds.run(after, loaded, str(tmp_path)) == [True] * after


def whole(values: Any) -> Any:
    """A state_dict with whole tensors."""
    if isinstance(values, dict):
        return {key: whole(value) for key, value in values.items()}
    if isinstance(values, list):
        return [whole(value) for value in values]
    return values.full_tensor() if isinstance(values, DTensor) else values


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """All of a training's state, in a form that is equal if and only if the bits are."""
    weights, moments = get_state_dict(model, optimizer)
    for group in moments["param_groups"]:
        for kernel in (
            "foreach",
            "fused",
            "capturable",
            "differentiable",
            "decoupled_weight_decay",
        ):
            group.pop(kernel, None)
        group["betas"] = list(group["betas"])
    return repr(
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in _flat("", whole({"model": weights, "optimizer": moments}))
        }
    )


def _flat(prefix: str, value: Any) -> Any:
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _flat(f"{prefix}.{key}", value[key])
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from _flat(f"{prefix}.{number}", inner)
    else:
        yield prefix, value


def by_zero_torch(wrapper: str, directory: str, until: int, *, by_dcp: bool) -> Any:
    """Train from the newest checkpoint on, and save."""
    model, optimizer, run = protected(wrapper)
    run.load(directory)
    begun = digest(run._wrapped.module, optimizer)
    for tokens in batches(run, until):
        run.backward(model(tokens))
        run.step()
    ended = digest(run._wrapped.module, optimizer)
    if by_dcp:
        weights, moments = get_state_dict(run._wrapped.module, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.save(state, storage_writer=Writer(directory, step=run.global_step))
    else:
        run.save(directory)
    run.close()
    return begun, ended


def by_dcp(wrapper: str, directory: str, *, flattened: bool) -> str:
    """Load as a script does that knows nothing of zero_torch."""
    module = make(wrapper, seed=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    weights, moments = get_state_dict(module, optimizer, options=options)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=Reader(directory))
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    return digest(module, optimizer)


@pytest.mark.full
def test_what_dcp_saves_under_fsdp2_zero_torch_loads_anywhere_and_back(
    worlds: WorldPool, tmp_path: Path
) -> None:
    directory = str(tmp_path)
    (_, saved_by_dcp), *_ = worlds.run(4, by_zero_torch_and_dcp, "fsdp2", directory, 1)
    (begun, ended), *_ = worlds.run(1, by_zero_torch_alone, "plain", directory, 2)
    assert begun == saved_by_dcp
    assert set(worlds.run(3, by_dcp_flattened, "fsdp2", directory)) == {ended}
    assert set(worlds.run(2, by_dcp_nested, "ddp", directory)) == {ended}


def by_zero_torch_and_dcp(wrapper: str, directory: str, until: int) -> Any:
    return by_zero_torch(wrapper, directory, until, by_dcp=True)


def by_zero_torch_alone(wrapper: str, directory: str, until: int) -> Any:
    return by_zero_torch(wrapper, directory, until, by_dcp=False)


def by_dcp_flattened(wrapper: str, directory: str) -> str:
    return by_dcp(wrapper, directory, flattened=True)


def by_dcp_nested(wrapper: str, directory: str) -> str:
    return by_dcp(wrapper, directory, flattened=False)


def saved_in_the_background(directory: str) -> bool:
    saving = dcp.async_save(laid_out(1), storage_writer=Writer(directory, step=1))
    assert not isinstance(saving, dcp.state_dict_saver.AsyncSaveResponse)
    saving.result(timeout=60)
    return len(zero_checkpoint.find(Path(directory)).candidates) == 1


@pytest.mark.full
def test_dcp_saves_in_the_background(worlds: WorldPool, tmp_path: Path) -> None:
    assert worlds.run(4, saved_in_the_background, str(tmp_path)) == [True] * 4
    assert worlds.run(3, loaded, str(tmp_path)) == [True] * 3


def by_the_engine(directory: str) -> str:
    """Load what DCP has saved, and save it."""
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
    }
    torch.manual_seed(5)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    engine = zero_engine.initialize(model, optimizer=optimizer, config=config)
    assert engine.load_checkpoint(directory) is not None
    weights = engine.weight_hash()
    engine.save_checkpoint(directory)
    engine.destroy()
    return weights


@pytest.mark.full
def test_the_engine_loads_what_dcp_has_saved_and_back(worlds: WorldPool, tmp_path: Path) -> None:
    directory = str(tmp_path)
    (_, ended), *_ = worlds.run(4, by_zero_torch_and_dcp, "fsdp2", directory, 2)
    hashes = set(worlds.run(2, by_the_engine, directory))
    newest = zero_checkpoint.find(Path(directory)).candidates[0]
    assert hashes == {newest.manifest.meta["engine"]["weight_hash"]}
    assert set(worlds.run(3, by_dcp_nested, "fsdp2", directory)) == {ended}


def structure(seed: int) -> dict[str, Any]:
    """What a plain script saves, and each rank has alike."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs": [seed, {"last": torch.full((2,), float(seed))}],
    }


def saved_plainly(directory: str) -> None:
    extra = {"pair": (torch.zeros(1), 2)}  # DCP does not look into a tuple
    zero_checkpoint.save(directory, {**structure(1), **extra}, step=1)


def loaded_by_dcp(directory: str) -> str:
    state = structure(2)
    dcp.load(state, storage_reader=Reader(directory))
    return repr(state)


def test_dcp_loads_what_a_plain_script_has_saved(worlds: WorldPool, tmp_path: Path) -> None:
    worlds.run(2, saved_plainly, str(tmp_path))
    assert worlds.run(3, loaded_by_dcp, str(tmp_path)) == [repr(structure(1))] * 3


def saved_by_some(directory: str) -> list[float]:
    """Ranks 1 and 2 save and load together, rank 0 by itself."""
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    whose: Any
    how: Any
    root, whose, how = f"{directory}/together", {"process_group": group}, {"process_group": group}
    if rank == 0:
        root = f"{directory}/alone"
        whose, how = {"consensus": zero_checkpoint.StoreConsensus.alone()}, {"no_dist": True}
    state, blank = {"w": torch.full((3,), float(rank > 0))}, {"w": torch.full((3,), 9.0)}
    dcp.save(state, storage_writer=Writer(root, step=1, **whose), **how)
    dcp.load(blank, storage_reader=Reader(root, **whose), **how)
    found: list[float] = blank["w"].tolist()
    return found


@pytest.mark.full
def test_some_of_the_ranks_save_and_load_together(worlds: WorldPool, tmp_path: Path) -> None:
    found = worlds.run(3, saved_by_some, str(tmp_path))
    assert found == [[0.0] * 3, [1.0] * 3, [1.0] * 3]
