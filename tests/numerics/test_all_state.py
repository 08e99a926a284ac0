"""Everything a training has comes back: extra state of modules, objects of the script, averages."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import zero_deepspeed
import zero_torch
from tests.support.structures import SCALARS, TENSORS, bits, nested
from tests.support.world import WorldPool
from zero_checkpoint.errors import CheckpointError

# ---- extra state of modules ----


class Scaled(nn.Linear):
    """Keeps what FP8 layers do: a history of largest values, and the scale that follows."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(x.detach().abs().max())
        return super().forward(x) / (1 + len(self.history))

    def get_extra_state(self) -> Any:
        raw = io.BytesIO(b"as older releases of such libraries")
        return {"history": self.history, "scale": torch.ones(3, dtype=torch.int8), "raw": raw}

    def set_extra_state(self, state: Any) -> None:
        assert state["raw"].read() == b"as older releases of such libraries"
        self.history = state["history"]


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(Scaled(), nn.Sequential(nn.Tanh(), Scaled()))
        self.epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        self.epoch += 1
        return self.blocks(x).square().mean()

    def get_extra_state(self) -> Any:
        return self.epoch

    def set_extra_state(self, state: Any) -> None:
        self.epoch = state


def history(model: nn.Module) -> Any:
    """The extra state of all modules."""
    found = [[float(v) for v in m.history] for m in model.modules() if isinstance(m, Scaled)]
    return found, [m.epoch for m in model.modules() if isinstance(m, Quantized)]


class Kept:
    """A training under one of the wrappers, or under the engine at a stage."""

    def __init__(self, kind: str, **more: Any) -> None:
        self.model: nn.Module = Quantized()
        self.engine = None
        if kind.startswith("stage"):
            config = {
                "train_batch_size": 2,
                "train_micro_batch_size_per_gpu": 2 // dist.get_world_size(),
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "zero_optimization": {"stage": int(kind[-1])},
                "elastic": {"reduction": "native"},  # as without a loader of zero_torch's
            }
            self.engine, *_ = zero_deepspeed.initialize(model=self.model, config=config)
            return
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        if kind == "fsdp2":
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.run = zero_torch.protect(self.model, self.optimizer, **more)

    def step(self) -> None:
        x = torch.arange(8.0).view(2, 4)
        if self.engine is not None:
            self.engine.backward(self.engine(x))
            self.engine.step()
            return
        self.model(x).backward()
        self.optimizer.step()


def save_extra(root: str, kind: str) -> Any:
    kept = Kept(kind)
    for _ in range(3):
        kept.step()
    saver = kept.engine.save_checkpoint if kept.engine is not None else kept.run.save
    saver(root)
    return history(kept.model)


def load_extra(root: str, kind: str) -> Any:
    kept = Kept(kind)
    loader = kept.engine.load_checkpoint if kept.engine is not None else kept.run.load
    loader(root)
    return history(kept.model)


@pytest.mark.parametrize("loads", ["plain", "ddp", "fsdp2", "stage0", "stage3"])
@pytest.mark.parametrize("saves", ["plain", "ddp", "fsdp2", "stage0", "stage3"])
@pytest.mark.corners(saves=["ddp", "stage3"], loads=["fsdp2", "stage0"])
def test_the_extra_state_of_modules_comes_back(
    worlds: WorldPool, tmp_path: Path, saves: str, loads: str
) -> None:
    saved = worlds.run(1 if saves == "plain" else 2, save_extra, str(tmp_path), saves)
    assert len(saved[0][0]) == 2
    assert all(len(each) >= 3 for each in saved[0][0])
    loaded = worlds.run(1 if loads == "plain" else 2, load_extra, str(tmp_path), loads)
    assert loaded == [saved[0]] * len(loaded)


# ---- objects of the script ----


def save_average(root: str) -> dict[str, Any]:
    """Under DDP each rank has statistics of its own batches, until the next forward."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64)))
    average = AveragedModel(model.module, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = zero_torch.protect(model, optimizer, stateful={"average": average})
    for step in range(2):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step + dist.get_rank()))
        model(data).square().mean().backward()
        optimizer.step()
        average.update_parameters(model.module)
    run.save(root)
    return {name: value.tolist() for name, value in average.state_dict().items()}


def load_average(root: str) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64))
    model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    average = AveragedModel(getattr(model, "module", model), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_torch.protect(model, optimizer, stateful={"average": average}).load(root)
    return {name: value.tolist() for name, value in average.state_dict().items()}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.corners(world=[3])
def test_an_average_is_saved_as_rank_0_has_it_and_not_as_a_mixture(
    worlds: WorldPool, tmp_path: Path, world: int
) -> None:
    saved = worlds.run(2, save_average, str(tmp_path))
    assert saved[0] != saved[1]
    assert worlds.run(world, load_average, str(tmp_path)) == [saved[0]] * world


class Holder:
    """An object whose state is any structure."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["value"]


OBJECTS = st.dictionaries(
    st.sampled_from(["x", "x.value", "y"]), nested(st.one_of(SCALARS, TENSORS)), min_size=1
)


def examples(count: int) -> list[dict[str, Any]]:
    """The same ones in each process."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=count,
        deadline=None,  # a process of the pool has no profile
        derandomize=True,
        database=None,
        suppress_health_check=HealthCheck,
    )
    @given(OBJECTS)
    def draw(objects: dict[str, Any]) -> None:
        found.append(objects)

    draw()
    # Two paths that are equal as text, within one object and between two.
    one, other = torch.ones(2), torch.zeros(3)
    found.append({"x": {"a.b": one, "a": {"b": other}}, "x.value": {"a": {"b": one + 1}}})
    found.append({"x": {"value": {"c": one}}, "x.value": {"value.c": other, "value": {"c": one}}})
    return found


def protected(objects: dict[str, Any]) -> zero_torch.Checkpoints:
    model: nn.Module = nn.Linear(1, 1)
    model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    return zero_torch.protect(model, torch.optim.SGD(model.parameters(), lr=0.1), stateful=objects)


def save_objects(root: str, count: int) -> None:
    for number, each in enumerate(examples(count)):
        run = protected({name: Holder(state) for name, state in each.items()})
        run.save(f"{root}/{number}", client_state={"same": each})
        run.close()


def load_objects(root: str, count: int) -> int:
    expected = examples(count)
    for number, each in enumerate(expected):
        objects = {name: Holder(None) for name in each}
        run = protected(objects)
        run.load(f"{root}/{number}")
        run.close()
        found = {name: bits(holder.state) for name, holder in objects.items()}
        assert found == {name: bits(state) for name, state in each.items()}, each
        assert bits(run.client_state["same"]) == bits(each)
    return len(expected)


@pytest.mark.parametrize(("saves", "loads", "count"), [(2, 1, 15), (1, 3, 6), (3, 2, 150)])
@pytest.mark.corners(saves=[1])
def test_objects_of_the_script_come_back_with_types_and_bits(
    worlds: WorldPool, tmp_path: Path, saves: int, loads: int, count: int
) -> None:
    worlds.run(saves, save_objects, str(tmp_path), count)
    [found, *_] = worlds.run(loads, load_objects, str(tmp_path), count)
    assert found > count // 2


def save_what_one_rank_cannot(root: str, kind: str, of_object: bool) -> str:
    holder = Holder(0)
    kept = Kept(kind, **({"stateful": {"held": holder}} if of_object else {}))
    kept.step()
    bad = torch.eye(2).to_sparse() if dist.get_rank() == 1 else 0
    client: dict[str, Any] = {} if of_object else {"best": bad}
    holder.state = bad if of_object else 0
    saver = kept.engine.save_checkpoint if kept.engine is not None else kept.run.save
    with pytest.raises(CheckpointError) as refusal:
        saver(root, client_state=client)
    holder.state = 0
    assert saver(root, client_state={"best": 1})
    return str(refusal.value)


@pytest.mark.parametrize(("kind", "of_object"), [("ddp", False), ("ddp", True), ("stage3", False)])
def test_what_one_rank_cannot_save_is_refused_by_name_on_all(
    worlds: WorldPool, tmp_path: Path, kind: str, of_object: bool
) -> None:
    for said in worlds.run(2, save_what_one_rank_cannot, str(tmp_path), kind, of_object):
        assert "rank 1: " in said
        assert "is a tensor of another kind (sparse_coo); store a dense one" in said
