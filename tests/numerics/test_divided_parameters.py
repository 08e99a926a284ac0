"""What scripts get that read or write divided parameters at stage 3 without gathering them."""

from __future__ import annotations

import copy
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.numerics.divided_reads import WAYS
from tests.numerics.test_offload import offloading
from tests.support.fresh import run_module
from tests.support.models import Tokens, make_model
from tests.support.training import (
    DATASET_SIZE,
    DIVIDED,
    config,
    divided,
    fingerprint,
    make_engine,
    run_micro_step,
    train,
)
from tests.support.world import WorldPool
from zero_contract.errors import ZeroError
from zero_deepspeed.zero import GatheredParameters
from zero_engine.core.engine import Engine


@pytest.mark.full
def test_a_script_that_reads_them_in_any_way_gets_nan_and_ends_well() -> None:
    seen = run_module("tests.numerics.divided_reads")
    parameters = 2 * len(list(make_model().parameters()))
    assert seen == [dict.fromkeys(WAYS, True)] * parameters


@pytest.mark.full
def test_views_that_a_hook_has_kept_show_nan_when_the_memory_is_gone() -> None:
    seen = run_module("tests.numerics.kept_views")
    assert seen == [{"views": True, "nan": True, "same": True}] * 2


# ---- whenever they are read, training goes on as if nobody had looked ----


def train_watched(settings: dict[str, Any], watched: bool) -> tuple[Any, ...]:
    """Seven micro-batches: in a world of two, two steps and the beginning of a third."""
    engine = make_engine(settings)
    look = partial(read_all, engine) if watched else lambda *_: None
    if watched:
        watch(engine)
    look()
    for _ in range(7):
        loss = engine(next(iter(engine.training_dataloader)))
        look()
        engine.backward(loss)
        look()
        engine.step()
        look()
    return fingerprint(engine)


def watch(engine: Engine) -> None:
    """Read everything at every hook of every module and at every gradient."""
    look = partial(read_all, engine)
    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    for param in engine.module.parameters():
        if param.requires_grad:
            param.register_hook(look)


def read_all(engine: Engine, *_: Any) -> None:
    for param in engine.module.parameters():
        param.detach().double().norm().item()


CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "no prefetch": {"zero_optimization": DIVIDED | {"stage3_prefetch_bucket_size": 0}},
    "far prefetch": {"zero_optimization": DIVIDED | {"stage3_prefetch_bucket_size": 10**9}},
    "quantized": {"zero_optimization": DIVIDED | {"zero_quantized_weights": True}},
    "nodes": {"zero_optimization": DIVIDED | {"zero_hpz_partition_size": 2}},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.corners(settings=[CONFIGS["nodes"]])
def test_reading_them_at_any_moment_changes_no_bit(
    worlds: WorldPool, settings: dict[str, Any]
) -> None:
    settings = config(3, **{"zero_optimization": DIVIDED, **settings})
    undisturbed = worlds.run(2, train_watched, settings, False)
    assert worlds.run(2, train_watched, settings, True) == undisturbed


@pytest.mark.parametrize("where", ["cpu+cpu", "nvme+nvme"])
@pytest.mark.corners(where=["nvme+nvme"])
def test_reading_offloaded_ones_at_any_moment_changes_no_bit(
    worlds: WorldPool, tmp_path: Path, where: str
) -> None:
    settings = offloading(3, where, str(tmp_path), bf16=True)
    undisturbed = worlds.run(2, train_watched, settings, False)
    assert worlds.run(2, train_watched, settings, True) == undisturbed


def train_by_a_method(beside_forward: bool) -> tuple[Any, ...]:
    """As `engine.forward_value(...)` of DeepSpeed-Chat: no hook of the model itself runs."""
    engine = make_engine(config(3, zero_optimization=DIVIDED))
    engine.module.eval()  # dropout is seeded by the engine's own forward
    for _ in range(7):
        batch = next(iter(engine.training_dataloader))
        with torch.no_grad():
            assert engine.module.norm(engine.module.embed(batch)).isfinite().all()
        run = engine.module.forward if beside_forward else engine
        engine.backward(run(batch))
        engine.step()
    return fingerprint(engine)


def test_a_method_beside_forward_trains_to_the_same_bits(worlds: WorldPool) -> None:
    assert worlds.run(2, train_by_a_method, True) == worlds.run(2, train_by_a_method, False)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
@pytest.mark.corners(whole=[False])
def test_compiled_modules_train_to_the_bits_of_stage_2(worlds: WorldPool, whole: bool) -> None:
    (shared,) = worlds.run(1, train_compiled, 2, whole)
    assert worlds.run(2, train_compiled, 3, whole) == [shared] * 2


def train_compiled(stage: int, whole: bool) -> str:
    model = make_model()
    for module in [model] if whole else model.blocks:
        module.compile(backend="aot_eager")
    engine, *_ = zero_deepspeed.initialize(
        model=model, training_data=Tokens(DATASET_SIZE), config=config(stage)
    )
    train(engine, 2)
    return engine.weight_hash()


# ---- what they are while they are divided ----


class Odd(nn.Module):
    """Parameters of all sorts: a single element, none, integers, a scalar, a channels-last one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(4, 3, 2, 2, generator=generator)
        self.images = nn.Parameter(images.to(memory_format=torch.channels_last))
        self.across = nn.Parameter(torch.randn(4, 6, generator=generator).t())
        self.single = nn.Parameter(torch.full((1,), 2.0))
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.counts = nn.Parameter(torch.arange(1, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.images.square().mean(), self.across.abs().sum(), self.empty.sum())
        return torch.stack(sizes).sum() * x.mean() * self.single * self.scalar * self.counts.sum()


def make_odd(stage: int) -> Engine:
    settings = {"train_batch_size": 2, "zero_optimization": DIVIDED | {"stage": stage}}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = zero_deepspeed.initialize(model=Odd(), config=settings)
    return engine


def step_odd(engine: Engine) -> None:
    engine.backward(engine(torch.ones(1)).sum())
    engine.step()


def test_they_keep_shape_and_dtype_and_show_nan_or_0(worlds: WorldPool) -> None:
    nan, shown = "nan", worlds.run(2, shown_by_odd)[0]
    assert shown == {
        "images": ((4, 3, 2, 2), "torch.float32", [nan] * 48, 0),
        "across": ((6, 4), "torch.float32", [nan] * 24, 0),
        "single": ((1,), "torch.float32", [nan], 0),
        "scalar": ((), "torch.float32", [nan], 0),
        "empty": ((0, 5), "torch.float32", [], 0),
        "counts": ((3,), "torch.int64", ["0", "0", "0"], 0),
    }


def shown_by_odd() -> dict[str, Any]:
    engine = make_odd(3)
    step_odd(engine)
    state = engine.module.state_dict()
    return {
        name: (
            tuple(param.shape),
            str(param.dtype),
            [str(value) for value in param.flatten().tolist()],
            state[name].numel(),
        )
        for name, param in engine.module.named_parameters()
    }


def test_gathered_they_are_whole_and_each_is_in_the_state_dict(worlds: WorldPool) -> None:
    assert worlds.run(2, gather_odd) == [True, True]


def gather_odd() -> bool:
    divided, whole = make_odd(3), make_odd(0)
    for engine in (divided, whole):
        step_odd(engine)
    expected = whole.module.state_dict()
    with GatheredParameters(divided.module):
        found = divided.module.state_dict()
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_is_written_to_them_is_refused_or_gone_with_the_next_forward(
    worlds: WorldPool,
) -> None:
    refused, disturbed = worlds.run(1, write_to_divided)[0]
    assert refused == {"copy_", "add_", "normal_"}
    assert disturbed == worlds.run(1, train_watched, config(3, zero_optimization=DIVIDED), False)[0]


def write_to_divided() -> tuple[set[str], tuple[Any, ...]]:
    engine, refused = make_engine(config(3, zero_optimization=DIVIDED)), set()
    for _ in range(7):
        for param in engine.module.parameters():
            for name, value in [
                ("copy_", torch.ones_like(param)),
                ("add_", 1),
                ("normal_", 0),
                ("fill_", 7),
            ]:
                try:
                    getattr(param.data, name)(value)
                except RuntimeError:
                    refused.add(name)
            assert bool((param == 7).all())
        run_micro_step(engine, step=True)
        assert all(bool(param.isnan().all()) for param in engine.module.parameters())
    return refused, fingerprint(engine)


class Nothing(nn.Module):
    """A block whose only parameter has no element, as an adapter of rank 0 has."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.none.sum()


class Around(nn.Module):
    """That block between two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Nothing(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train_around(
    stage: int, name: str, trains: bool, load: str | None, save: str | None, offload: Any = None
) -> str:
    model = Around()
    model.blocks[1].requires_grad_(trains)
    settings = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    settings |= {"zero_optimization": divided(stage) | (offload or {})}
    settings |= {"optimizer": {"type": name, "params": {"lr": 0.01}}}
    engine, *_ = zero_deepspeed.initialize(model=model, config=settings)
    if load:
        engine.load_checkpoint(load)
    until = engine.global_steps + 2
    while engine.global_steps < until:
        engine.backward(engine(torch.ones(2, 4) + engine.global_steps))
        engine.step()
    if save:
        engine.save_checkpoint(save)
    return engine.weight_hash()


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
@pytest.mark.corners(name=["AdamW"], trains=[True])
def test_a_block_without_elements_is_trained_saved_loaded_and_offloaded_as_any_other(
    worlds: WorldPool, tmp_path: Path, name: str, trains: bool
) -> None:
    root = str(tmp_path / "root")
    saved = worlds.run(2, train_around, 2, name, trains, None, root)
    assert worlds.run(1, train_around, 0, name, trains, None, None) * 2 == saved
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    offload = {"offload_optimizer": nvme, "offload_param": nvme}
    places = [(1, 0, None), (2, 1, None), (3, 2, None), (3, 3, None), (2, 3, offload)]
    loaded = set[str]()
    for world, stage, where in places:
        loaded |= set(worlds.run(world, train_around, stage, name, trains, root, None, where))
    assert len(loaded) == 1


# ---- modules without their weights ----


def test_a_copy_of_the_module_is_refused_in_words(worlds: WorldPool) -> None:
    messages = worlds.run(1, copy_modules)[0]
    assert len(messages) == 4
    assert all(each.startswith("a module cannot be copied or pickled at") for each in messages)


def copy_modules() -> list[str]:
    engine = make_engine(config(3, zero_optimization=DIVIDED))
    train(engine, 1)
    messages = []
    for module in (engine.module, engine.module.blocks[0].qkv):
        for way in (copy.deepcopy, lambda module: torch.save(module, BytesIO())):
            with pytest.raises(ZeroError) as error:
                way(module)
            messages.append(str(error.value))
    return messages


def test_evaluating_in_inference_mode_does_not_spoil_the_next_step(worlds: WorldPool) -> None:
    assert worlds.run(2, train_and_infer, True) == worlds.run(2, train_and_infer, False)


def train_and_infer(infers: bool) -> str:
    engine = make_engine(config(3, zero_optimization=DIVIDED))
    train(engine, 1)
    if infers:
        with torch.inference_mode():
            engine(torch.zeros(1, 5, dtype=torch.long))
            with GatheredParameters(engine.module):
                assert not engine.module.embed.weight.isnan().any()
            engine(torch.zeros(1, 5, dtype=torch.long))
    train(engine, 3)
    return engine.weight_hash()


def test_what_a_script_has_gathered_stays_while_modules_run(worlds: WorldPool) -> None:
    """As in generating from a model in training: token by token, from one gather."""
    assert worlds.run(2, train_and_generate, True) == worlds.run(2, train_and_generate, False)


def train_and_generate(generates: bool) -> str:
    engine = make_engine(config(3, zero_optimization=DIVIDED))
    train(engine, 1)
    if generates:
        with GatheredParameters(engine.module):
            take_the_hooks_away(engine)
            sent = sum(engine._core.collectives.bytes_sent.values())
            for tokens in range(1, 4):
                with torch.no_grad():
                    engine.module(torch.zeros(1, tokens, dtype=torch.long))
                assert not any(param.isnan().any() for param in engine.module.parameters())
            assert sum(engine._core.collectives.bytes_sent.values()) == sent
            put_the_hooks_back(engine)
        assert all(param.isnan().all() for param in engine.module.parameters())
    train(engine, 3)
    return engine.weight_hash()


def take_the_hooks_away(engine: Engine) -> None:
    """In the words of TRL's `remove_hooks`."""
    offload = engine.optimizer.parameter_offload
    for _, param in [
        *offload.module.named_parameters(recurse=True),
        *offload.module.ds_external_parameters(),
    ]:
        param.ds_active_sub_modules.clear()
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []


def put_the_hooks_back(engine: Engine) -> None:
    offload = engine.optimizer.parameter_offload
    offload._register_deepspeed_module(offload.module)
