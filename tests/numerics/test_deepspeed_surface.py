"""What a script of DeepSpeed's can read, call, subclass and configure, as tables."""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_deepspeed
from tests.support.cluster import environment
from tests.support.models import make_model
from tests.support.training import config, make_engine, run_micro_step, train
from tests.support.world import WorldError, WorldPool, one_result
from zero_contract.errors import ConfigError
from zero_deepspeed.checkpoint import ds_to_universal
from zero_deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from zero_deepspeed.utils import (
    get_z3_leaf_modules,
    safe_get_full_grad,
    safe_update_full_grad_vectorized,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from zero_deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from zero_deepspeed.zero import unwrap_model_for_generation

# ---- names and classes ----

NAMES = {
    "": "OnDevice __version_major__ __version_minor__ __version_patch__ launcher profiling",
    "checkpoint.ds_to_universal": "main",
    "launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME main",
    "ops": "__compatible_ops__ op_builder",
    "ops.aio": "AsyncIOBuilder",
    "ops.op_builder": "CPUAdamBuilder FusedAdamBuilder AsyncIOBuilder",
    "profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "runtime.activation_checkpointing.checkpointing": "non_reentrant_checkpoint checkpoint",
    "runtime.lr_schedules": "WARMUP_LR ONE_CYCLE CYCLE_MIN_LR WARMUP_MAX_LR TOTAL_NUM_STEPS",
    "runtime.zero": "TiledLinear unwrap_model_for_generation",
    "runtime.zero.tiling": "TiledLinear",
    "accelerator": "is_current_accelerator_supported",
    "elasticity": "compute_elastic_config",
    "utils": "set_log_level_from_string",
    "utils.torch": "required_torch_version",
    "zero": "TiledLinear unwrap_model_for_generation",
}
ACCELERATOR = (
    "Event Stream stream current_stream default_stream range_push range_pop lazy_call "
    "get_rng_state set_rng_state default_generator memory_cached max_memory_cached memory_stats "
    "reset_max_memory_allocated is_pinned is_synchronized_device FloatTensor HalfTensor "
    "BFloat16Tensor create_graph capture_to_graph replay_graph is_triton_supported amp "
    "get_compile_backend set_compile_backend visible_devices_envs set_visible_devices_envs "
    "export_envs"
)


def test_every_name_is_where_scripts_import_it_from() -> None:
    modules = {
        importlib.import_module(f"zero_deepspeed.{place}".rstrip(".")): names
        for place, names in NAMES.items()
    }
    missing = [
        f"{module.__name__}.{name}"
        for module, names in modules.items()
        for name in names.split()
        if not hasattr(module, name)
    ]
    device = zero_deepspeed.get_accelerator()
    assert missing + [name for name in ACCELERATOR.split() if not hasattr(device, name)] == []


@pytest.mark.filterwarnings("ignore:.*autocast")  # torch's, of the name that DeepSpeed gives
def test_a_script_compiles_and_autocasts_by_what_the_accelerator_names() -> None:
    device = zero_deepspeed.get_accelerator()
    ones = torch.ones(2, 2, device=device.device_name())
    with device.amp().autocast(dtype=torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
    assert device.get_compile_backend() == "inductor"
    with pytest.raises(ConfigError, match=r"'inductr'\): give one of .*inductor"):
        device.set_compile_backend("inductr")
    given: dict[str, str] = {}
    device.set_visible_devices_envs(given, [0, 2])
    assert given == {"CUDA_VISIBLE_DEVICES": "0,2"}


@pytest.mark.parametrize(
    "path",
    [
        "adam.FusedAdam",
        "adam.DeepSpeedCPUAdam",
        "adagrad.DeepSpeedCPUAdagrad",
        "lion.FusedLion",
        "lion.DeepSpeedCPULion",
        "lamb.FusedLamb",
    ],
)
def test_an_optimizer_is_a_class_that_scripts_test_for_and_derive_from(path: str) -> None:
    module, _, name = path.partition(".")
    cls = getattr(importlib.import_module(f"zero_deepspeed.ops.{module}"), name)

    class Derived(cls):  # type: ignore[misc]
        pass

    made = [kind(nn.Linear(2, 2).parameters(), lr=0.5) for kind in (cls, Derived)]
    assert all(isinstance(each, cls) for each in made)
    assert all(isinstance(each, torch.optim.Optimizer) for each in made)
    assert [each.param_groups[0]["lr"] for each in made] == [0.5, 0.5]


# ---- leaf modules ----


class Expert(nn.Linear):
    """Derived from a class that scripts name."""


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.ModuleList(Expert(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(sum(expert(x) for expert in self.experts)).square().mean()


MARKS: dict[str, tuple[Any, list[str]]] = {
    "base class": (
        lambda m: set_z3_leaf_modules(m, [nn.Linear]),
        ["experts.0", "experts.1", "last"],
    ),
    "qualified name": (
        lambda m: set_z3_leaf_modules(m, [f"{__name__}.Expert"]),
        ["experts.0", "experts.1"],
    ),
    "none": (lambda m: set_z3_leaf_modules(m, [nn.LSTM], raise_if_not_found=False), []),
    "name": (lambda m: set_z3_leaf_modules_by_name(m, ["last"]), ["last"]),
    "suffix": (lambda m: set_z3_leaf_modules_by_suffix(m, [".1"]), ["experts.1"]),
    "container": (lambda m: set_z3_leaf_modules_by_name(m, ["experts"]), ["experts"]),
    "missing": (lambda m: set_z3_leaf_modules_by_name(m, ["no"], raise_if_not_found=False), []),
}


def train_marked(_: None) -> list[Any]:
    found = []
    for mark, names in MARKS.values():
        for stage in (0, 3):
            model = Mixture()
            mark(model)
            by_module = {module: name for name, module in model.named_modules()}
            assert [by_module[module] for module in get_z3_leaf_modules(model)] == names
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            engine, *_ = zero_deepspeed.initialize(
                model=model, config=config(stage, zero_optimization=zero)
            )
            engine.backward(engine(torch.ones(2, 4)))
            found.append(safe_get_full_grad(model.last.weight).tolist())
    return found


def test_whatever_is_marked_trains_to_the_same_gradients(worlds: WorldPool) -> None:
    first, *others = one_result(worlds, train_marked, None, sizes=(2,))
    assert all(each == first for each in others)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 2, sparse=sparse)
        self.parts = nn.ModuleList([nn.EmbeddingBag(4, 2, mode="sum", sparse=sparse)])
        self.last = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.words(x).sum(1) + self.parts[0](x)).mean()


def train_sparsely(_: None) -> list[Any]:
    found = []
    for stage, sparse, asked in ((0, False, False), (0, True, True), (3, True, True)):
        torch.manual_seed(0)
        engine, *_ = zero_deepspeed.initialize(
            model=Words(sparse), config=config(stage, sparse_gradients=asked)
        )
        assert engine.sparse_gradients_enabled() is asked
        names = {"words.weight", "parts.0.weight"} if asked else set()
        assert engine.sparse_tensor_module_names == names
        engine.backward(engine(torch.tensor([[0, 1], [3, 1]])))
        found.append([safe_get_full_grad(p).tolist() for p in engine.module.parameters()])
    return found


def test_sparse_gradients_are_asked_for_by_name_and_are_those_of_dense_ones(
    worlds: WorldPool,
) -> None:
    first, *others = one_result(worlds, train_sparsely, None, sizes=(2,))
    assert all(each == first for each in others)


# ---- config ----

CONFIGS: dict[str, dict[str, Any]] = {
    "offload_param below stage 3": {
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}
    },
    "static scale with a window of 0": {
        "fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0, "min_loss_scale": 0}
    },
    "disabled with a minimum of 0": {"fp16": {"enabled": False, "min_loss_scale": 0}},
    "names of the fields": {
        "zero_optimization": {
            "stage": 3,
            "prefetch_bucket_size": 0,
            "param_persistence_threshold": 10,
            "model_persistence_threshold": 100,
            "max_live_parameters": 1000,
            "max_reuse_distance": 1000,
            "gather_16bit_weights_on_model_save": True,
            "pipeline_loading_checkpoint": False,
        }
    },
}


def accepted(settings: dict[str, Any]) -> bool:
    engine = make_engine(config(0) | settings)
    train(engine, 1)
    return engine.global_steps == 1


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_deepspeed_accepts_trains(
    worlds: WorldPool, settings: dict[str, Any]
) -> None:
    assert worlds.run(1, accepted, settings) == [True]


def overflow(stage: int, check: bool) -> tuple[int, set[str]]:
    """How many of nine steps were skipped, and which parameters are without NaN after them."""
    settings = config(stage) | {"bf16": {"enabled": True, "check_grad_overflow": check}}
    engine = make_engine(settings | {"elastic": {"max_skipped_steps": 8}})
    while engine.global_steps < 9:
        for batch in engine.training_dataloader:
            engine.backward(engine(batch) * float("inf"))
            engine.step()
            if engine.global_steps == 9:
                break
    with zero_deepspeed.zero.GatheredParameters(list(engine.parameters())):
        finite = {name for name, p in engine.named_parameters() if not p.isnan().any()}
    return engine.skipped_steps, finite


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.corners(stage=[3])
def test_a_script_that_does_not_check_for_overflows_steps_with_nan(
    worlds: WorldPool, stage: int
) -> None:
    untrained = {"module.unused", "module.blocks.0.scale", "module.blocks.1.scale"}
    assert worlds.run(2, overflow, stage, False) == [(0, untrained)] * 2


def test_skipped_steps_end_the_run(worlds: WorldPool) -> None:
    with pytest.raises(WorldError, match="the last 8 of them in a row"):
        worlds.run(1, overflow, 0, True)


def told(_: None) -> str:
    output = io.StringIO()
    zero_deepspeed.logger.addHandler(handler := logging.StreamHandler(output))
    make_engine(config(0))
    zero_deepspeed.logger.removeHandler(handler)
    return output.getvalue()


def test_libraries_find_deepspeeds_version_in_its_log(worlds: WorldPool) -> None:
    assert "DeepSpeed info: version=0.19.8+zero.elastic" in worlds.run(1, told, None)[0]


# ---- checkpoints ----


@pytest.mark.parametrize("where", ["", None])
def test_a_checkpoint_needs_a_place(worlds: WorldPool, where: str | None) -> None:
    with pytest.raises(WorldError, match="is no place for checkpoints: give a directory or a URL"):
        worlds.run(1, save_nowhere, where)


def save_nowhere(where: Any) -> None:
    engine = make_engine(config(0))
    with suppress(ValueError):  # as in DeepSpeed
        engine.save_checkpoint(where)
        raise AssertionError
    engine.save_checkpoint(where)


def threads_after_saves(root: str, settings: dict[str, Any]) -> list[str]:
    engine = make_engine(config(0) | {"checkpoint": settings})
    before = {thread.ident for thread in threading.enumerate()}
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(root, blocking=True)
    return [thread.name for thread in threading.enumerate() if thread.ident not in before]


@pytest.mark.parametrize("settings", [{}, {"async": True}], ids=["", "async"])
def test_no_thread_outlives_its_save(
    worlds: WorldPool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert worlds.run(1, threads_after_saves, str(tmp_path), settings) == [[]]


def load_into_the_trained_model(root: str) -> tuple[bool, bool]:
    engine = make_engine(config(3))
    train(engine, 1)
    engine.save_checkpoint(root)
    want = engine.get_fp32_state_dict()
    model = load_state_dict_from_zero_checkpoint(engine.module, root)
    found = model.state_dict()
    plain = make_model()
    plain.load_state_dict(found)
    return want.keys() == found.keys(), all(torch.equal(want[n], found[n]) for n in want)


def test_a_model_trained_at_stage_3_takes_the_weights_of_a_checkpoint(
    worlds: WorldPool, tmp_path: Path
) -> None:
    assert worlds.run(2, load_into_the_trained_model, str(tmp_path)) == [(True, True)] * 2


# ---- the rest ----


def see_and_change(_: None) -> list[Any]:
    found: list[Any] = []
    for stage in range(4):
        engine = make_engine(config(stage))
        with unwrap_model_for_generation(engine) as module:
            found.append([bool(p.isnan().any()) for p in module.parameters()])
        params = [p for p in engine.module.parameters() if p.requires_grad]
        run_micro_step(engine, step=False)
        safe_update_full_grad_vectorized(params, lambda gradient, _: gradient * 0 + 1)
        found.append([bool((safe_get_full_grad(p) == 1).all()) for p in params])
    return found


def test_whole_models_and_gradients_are_there_at_every_stage(worlds: WorldPool) -> None:
    found = one_result(worlds, see_and_change, None, sizes=(2,))
    assert not any(flag for flags in found[::2] for flag in flags)
    assert all(flag for flags in found[1::2] for flag in flags)


def test_a_model_is_counted_without_an_engine() -> None:
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 2, bias=False))
    macs, params = 4 * (100 * 50 + 50 * 2), 100 * 50 + 50 + 100
    counted = get_model_profile(model, (4, 100), print_profile=False, as_string=False)
    assert counted == (2 * macs, macs, params)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(4, 100))
    profiler.stop_profile()
    assert profiler.get_total_flops(as_string=True) == "40.80 KFLOPs"


@pytest.mark.parametrize(
    ("in_splits", "out_splits", "bias"), [(1, 1, True), (3, 2, True), (2, 5, False)]
)
def test_a_tiled_layer_is_the_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    plain = nn.Linear(10, 7, bias=bias, dtype=torch.float64)
    tiled = zero_deepspeed.zero.TiledLinear(
        10, 7, bias, in_splits, out_splits, init_linear=plain, dtype=torch.float64
    )
    x = torch.randn(2, 3, 10, dtype=torch.float64)
    torch.testing.assert_close(tiled(x), plain(x))


def test_a_model_is_made_on_a_device_in_a_dtype() -> None:
    with zero_deepspeed.OnDevice(torch.float16, device="meta"):
        weight = nn.Linear(2, 2).weight
    after = nn.Linear(2, 2).weight
    assert (weight.device.type, weight.dtype) == ("meta", torch.float16)
    assert (after.device.type, after.dtype) == ("cpu", torch.float32)


@pytest.mark.full
def test_there_is_nothing_to_convert_to_a_universal_checkpoint() -> None:
    command = ["-m", "deepspeed.checkpoint.ds_to_universal"]
    done = subprocess.run(
        [sys.executable, "-m", "zero_deepspeed.as_deepspeed", *command, "--input_folder", "x"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "loads at every world size and stage; give x to load_checkpoint()" in done.stdout


def save_and_convert(place: str) -> str:
    engine = make_engine(config(1))
    train(engine, 2)
    engine.save_checkpoint(place, tag="old")
    engine.save_checkpoint(place, tag="older")
    if engine.global_rank == 0:
        folders = {"input_folder": f"{place}/old", "output_folder": f"{place}/old_universal"}
        ds_to_universal.main(argparse.Namespace(**folders))
    return engine.weight_hash()


def load_the_converted(place: str) -> tuple[str, str]:
    engine = make_engine(config(3), seed=8)
    path, _ = engine.load_checkpoint(place, tag="old_universal")
    return Path(path or "").name, engine.weight_hash()


def test_a_converted_checkpoint_loads_by_its_new_tag_at_another_world(
    worlds: WorldPool, tmp_path: Path
) -> None:
    saved = worlds.run(2, save_and_convert, str(tmp_path))[0]
    assert worlds.run(1, load_the_converted, str(tmp_path)) == [
        ((tmp_path / "old").resolve().name, saved)
    ]


def assertions(_: None) -> dict[str, str]:
    engine = make_engine(config(0))
    sharded = make_engine(config(2))
    unmanaged = make_engine(config(1) | {"managed_gradient_accumulation": False})
    output = torch.ones(3, requires_grad=True)

    def within(*contexts: Any, call: Any = lambda: None) -> None:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            call()

    calls: dict[str, Any] = {
        "no model": lambda: zero_deepspeed.initialize(None, config={}),
        "no config": lambda: zero_deepspeed.initialize(model=make_model()),
        "nested": lambda: within(engine.no_sync, engine.no_sync),
        "nested in coalesce": lambda: within(engine.coalesce_grad_reduction, engine.no_sync),
        "coalesce in no_sync": lambda: within(engine.no_sync, engine.coalesce_grad_reduction),
        "coalesce twice": lambda: within(
            engine.coalesce_grad_reduction, engine.coalesce_grad_reduction
        ),
        "no_sync, sharded": lambda: within(sharded.no_sync),
        "step in no_sync": lambda: within(engine.no_sync, call=engine.step),
        "step in coalesce": lambda: within(sharded.coalesce_grad_reduction, call=sharded.step),
        "unmanaged coalesce": lambda: within(unmanaged.coalesce_grad_reduction),
        "unmanaged boundary": lambda: unmanaged.set_gradient_accumulation_boundary(True),
        "no scalar": lambda: engine.backward(output),
        "no scalar to scale": lambda: engine.scale(output),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except AssertionError as error:
            found[name] = str(error)
    run_micro_step(engine, step=True)  # no context is left entered
    return found


ASSERTED = {
    "no model": "initialize() needs a model",
    "no config": "initialize() needs a config: a dict, a JSON string or a path",
    "nested": "no_sync context manager reentry is unsupported",
    "nested in coalesce": "no_sync context manager reentry is unsupported",
    "coalesce in no_sync": "cannot be nested",
    "coalesce twice": "cannot be nested",
    "no_sync, sharded": "no_sync context manager is incompatible with the sharded gradients of "
    "ZeRO stage 2; leave it out, or use stage 0 or 1",
    "step in no_sync": "It is illegal to call Engine.step() inside no_sync context manager",
    "step in coalesce": "leave it for after the context",
    "unmanaged coalesce": "coalesce_grad_reduction(): with managed_gradient_accumulation: false",
    "unmanaged boundary": "set_gradient_accumulation_boundary(): with managed_gradient",
    "no scalar": "backward(): the loss must be a scalar tensor, and is of shape (3,)",
    "no scalar to scale": "scale(): the loss must be a scalar tensor, and is of shape (3,)",
}


def test_what_deepspeed_asserts_is_an_assertion_error_with_a_remedy(worlds: WorldPool) -> None:
    found = worlds.run(1, assertions, None)[0]
    assert {name: text for name, text in ASSERTED.items() if text not in found.get(name, "")} == {}


# ---- what the optimizer shows ----


def shown_by_optimizers(_: None) -> list[Any]:
    found = []
    fp16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 1}
    for stage in range(4):
        for more in ({}, {"fp16": fp16}, {"fp16": {"enabled": True, "loss_scale": 4.0}}):
            engine = make_engine(config(stage) | more)
            optimizer = engine.optimizer
            scaler = optimizer.loss_scaler
            assert optimizer.optimizer.param_groups is optimizer.param_groups
            before = scaler.cur_scale, scaler.cur_iter
            engine.allreduce_gradients()
            for batch in engine.training_dataloader:
                engine.backward(engine(batch) * (float("inf") if "fp16" in more else 1))
                engine.step()
                if engine.global_steps:
                    break
            after = scaler.loss_scale, scaler.cur_iter, scaler.last_overflow_iter
            rules = optimizer.dynamic_loss_scale, scaler.dynamic, scaler.scale_window
            assert scaler.cur_scale == engine.loss_scale
            found.append((before, after, rules))
    return found


def test_optimizers_show_their_loss_scaler_and_the_optimizer_inside(worlds: WorldPool) -> None:
    expected = [
        ((1.0, 0), (1.0, 1, -1), (False, False, 1000)),
        ((32.0, 0), (16.0, 1, 0), (True, True, 7)),
        ((4.0, 0), (4.0, 1, 0), (False, False, 1000)),
    ]
    assert worlds.run(1, shown_by_optimizers, None) == [expected * 4]


def without_group(name: str) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    more = {"model": make_model(), "config": config()} if name == "initialize" else {}
    getattr(zero_deepspeed, name)(dist_init_required=False, **more)


@pytest.mark.parametrize("name", ["initialize", "init_distributed"])
def test_a_group_that_the_script_is_to_make_is_not_made(worlds: WorldPool, name: str) -> None:
    with pytest.raises(WorldError, match=r"dist_init_required=False without a process group"):
        worlds.run(1, without_group, name)


def change_micro_batch(_: None) -> list[Any]:
    engine = make_engine(config(1))
    train(engine, 1)
    engine.set_train_micro_batch_size(4)
    sizes = engine.get_batch_info()[:2]
    train(engine, 2)
    return [sizes, engine.global_samples, engine.weight_hash()]


def test_a_step_of_larger_micro_batches_has_as_many_of_them(worlds: WorldPool) -> None:
    sizes, samples, _ = one_result(worlds, change_micro_batch, None, sizes=(1, 2))
    assert (sizes, samples) == ((20, 4), 23)
