"""The names that scripts import from DeepSpeed: where it has them, and doing what it does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_deepspeed
from tests.support.fresh import run_forked
from tests.support.models import Tokens, make_model, param_groups
from tests.support.training import DATASET_SIZE, DIVIDED, config, make_engine, train
from tests.support.world import WorldError, WorldPool, one_result
from zero_contract.errors import ConfigError
from zero_deepspeed import checkpointing, comm
from zero_deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zero_deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero_deepspeed.runtime.utils import see_memory_usage
from zero_deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zero_deepspeed.utils import (
    get_z3_leaf_modules,
    log_dist,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    zero_to_fp32,
)

STAGES = (0, 1, 2, 3)

NAMES = {
    "": "initialize init_distributed add_config_arguments DeepSpeedEngine DeepSpeedConfigError "
    "get_accelerator log_dist logger zero comm ops utils checkpointing runtime",
    "accelerator": "get_accelerator",
    "checkpointing": "checkpoint configure is_configured reset",
    "comm": "init_distributed is_initialized get_rank get_world_size get_local_rank barrier "
    "all_reduce reduce broadcast broadcast_object_list all_gather all_gather_into_tensor "
    "all_gather_object reduce_scatter reduce_scatter_tensor gather scatter send recv isend irecv "
    "all_to_all_single new_group ReduceOp destroy_process_group get_world_group",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "runtime.activation_checkpointing": "checkpointing",
    "runtime.dataloader": "RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.lr_schedules": "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
    "runtime.utils": "see_memory_usage",
    "runtime.zero": "GatheredParameters Init register_external_parameter",
    "runtime.zero.muon.muon_optimizer": "MuonWithAuxAdam",
    "runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "runtime.zero.partition_parameters": "GatheredParameters Init ZeroParamStatus",
    "utils": "logger log_dist RepeatingLoader set_z3_leaf_modules unset_z3_leaf_modules "
    "get_z3_leaf_modules z3_leaf_module set_z3_leaf_module safe_get_full_fp32_param",
    "utils.logging": "logger log_dist print_rank_0",
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint "
    "load_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict",
    "zero": "Init GatheredParameters register_external_parameter",
}


@pytest.mark.parametrize("place", NAMES)
def test_a_script_finds_the_names_where_deepspeed_has_them(place: str) -> None:
    module = importlib.import_module(f"zero_deepspeed.{place}".rstrip("."))
    assert [name for name in NAMES[place].split() if not hasattr(module, name)] == []


# ---- comm ----


def test_comm_is_torch_distributed_over_the_engines_group(worlds: WorldPool) -> None:
    assert worlds.run(3, talk) == [(rank, 3, [6.0, 6.0], [0, 1, 2], 0) for rank in range(3)]


def talk() -> tuple[Any, ...]:
    zero_deepspeed.init_distributed(dist_backend="nccl")  # there is a group already
    make_engine(config(0))
    rank, world = comm.get_rank(), comm.get_world_size()
    total = torch.full((2,), float(rank + 1))
    comm.all_reduce(total, op=comm.ReduceOp.SUM)
    everybody: list[Any] = [None] * world
    comm.all_gather_object(everybody, rank)
    comm.barrier()
    return rank, world, total.tolist(), everybody, comm.get_local_rank()


# ---- ops ----


def test_the_names_of_deepspeeds_kernels_make_the_configs_optimizer(worlds: WorldPool) -> None:
    by_config = one_result(worlds, train_with, "config", 2)
    assert {one_result(worlds, train_with, name, 3) for name in ("fused", "cpu")} == {by_config}


def train_with(how: str, stage: int) -> str:
    model, settings = make_model(), config(stage)
    groups: Any = param_groups(model)
    optimizer = None
    if how != "config":
        del settings["optimizer"]
        optimizer = {"fused": FusedAdam, "cpu": DeepSpeedCPUAdam}[how](groups, lr=1e-2)
    else:
        settings["optimizer"]["params"]["lr"] = 1e-2
    engine, *_ = zero_deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups,
        training_data=Tokens(DATASET_SIZE),
        config=settings,
    )
    train(engine, 3)
    return engine.weight_hash()


CLASSES: dict[str, tuple[dict[str, Any], bool, type, bool | None]] = {
    "AdamW": ({}, False, FusedAdam, True),
    "Adam": ({"adam_w_mode": False}, False, FusedAdam, False),
    "adam": ({"adam_w_mode": False}, True, DeepSpeedCPUAdam, False),
    "adamw": ({"torch_adam": True}, False, torch.optim.AdamW, None),
    "Adagrad": ({}, True, DeepSpeedCPUAdagrad, None),
    "SGD": ({}, False, torch.optim.SGD, None),
}
"""Name in a config -> its params, offloaded or not, the class that DeepSpeed makes, its mode."""


def test_an_optimizer_of_the_config_has_deepspeeds_class_and_calls_hooks(worlds: WorldPool) -> None:
    expected = {name: (cls.__name__, mode) for name, (_, _, cls, mode) in CLASSES.items()}
    assert worlds.run(1, classes_made) == [expected]


def classes_made() -> dict[str, tuple[str, bool | None]]:
    made = {}
    for name, (params, offloaded, cls, _) in CLASSES.items():
        settings = config(1)
        settings["zero_optimization"]["offload_optimizer"] = {
            "device": "cpu" if offloaded else "none"
        }
        settings["optimizer"] = {"type": name, "params": {"lr": 1e-2, **params}}
        engine, optimizer, *_ = zero_deepspeed.initialize(
            model=make_model(), training_data=Tokens(DATASET_SIZE), config=settings
        )
        called: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, called=called: called.append("before"))
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("after"))
        train(engine, 1)
        assert called[:2] == ["before", "after"]  # each sub-group that is offloaded is a step
        assert engine.optimizer is optimizer
        assert isinstance(optimizer, cls)
        made[name] = type(optimizer).__name__, getattr(optimizer, "adam_w_mode", None)
    return made


def test_options_of_deepspeeds_adam_that_would_change_the_result_are_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ConfigError, match="bias_correction=False: Adam is always corrected"):
        FusedAdam(parameters, bias_correction=False)
    with pytest.raises(ConfigError, match="fp32_optimizer_states=False: moments are fp32"):
        DeepSpeedCPUAdam(parameters, fp32_optimizer_states=False)
    adam, adamw = (
        FusedAdam(parameters, adam_w_mode=mode).param_groups[0] for mode in (False, True)
    )
    assert (adam["decoupled_weight_decay"], adamw["decoupled_weight_decay"]) == (False, True)


# ---- leaf modules ----


class Experts(nn.Module):
    """Sends a whole micro-batch to one of its experts: ranks take different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return torch.tanh(self.experts[choice](x))


class Mixture(nn.Module):
    """Two layers of experts between an embedding and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, 16)
        self.first, self.second = Experts(), Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        x = self.first(x, int(tokens[0, 0]) % 3)
        return self.second(x, int(tokens[0, 1]) % 3).square().mean()


@pytest.mark.full
def test_with_leaf_modules_ranks_may_take_different_ways_at_every_stage(worlds: WorldPool) -> None:
    by_call = one_result(worlds, train_mixture, "call", sizes=(1, 2, 3))
    assert len(set(by_call)) == 1
    rules = {"classes": ["Experts"], "names": ["first", "second"], "name_suffixes": ["st", "ond"]}
    for key, wanted in rules.items():
        assert one_result(worlds, train_mixture, {key: wanted}, sizes=(2,)) == by_call


def train_mixture(how: Any) -> list[str]:
    hashes = []
    for stage in STAGES:
        torch.manual_seed(0)
        model, settings = Mixture(), config(stage)
        if how == "call":
            assert set_z3_leaf_modules(model, ["Experts"]) == [model.first, model.second]
        else:
            settings["zero_optimization"]["leaf_module"] = how
        engine, *_ = zero_deepspeed.initialize(
            model=model, training_data=Tokens(DATASET_SIZE), config=settings
        )
        assert {unit.spec.name for unit in engine._core.units} == {"first", "second", "root"}
        train(engine, 4)
        hashes.append(engine.weight_hash())
    return hashes


def test_marks_can_be_read_and_taken_away() -> None:
    model = Mixture()
    assert set_z3_leaf_modules(model, [Experts]) == get_z3_leaf_modules(model)
    assert unset_z3_leaf_modules(model, [Experts]) == [model.first, model.second]
    assert get_z3_leaf_modules(model) == []
    with pytest.raises(ConfigError, match="LSTM: no such module in the model; it has: Embedding"):
        set_z3_leaf_modules(model, [nn.LSTM])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("late", r"Block belongs to an engine already: mark leaf modules before initialize"),
        ("nothing", r"leaf_module\.names: no module of the model fits 'blocks\.7'"),
    ],
)
def test_a_mark_that_would_do_nothing_is_an_error(
    worlds: WorldPool, how: str, message: str
) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(1, mark, how)


def mark(how: str) -> None:
    if how == "late":
        set_z3_leaf_modules(make_engine(config(3)).module, ["Block"])
    else:
        make_engine(config(3, zero_optimization={"leaf_module": {"names": ["blocks.7"]}}))


# ---- reading parameters as DeepSpeed's examples do ----


def test_a_script_that_gathers_what_is_not_available_reads_every_parameter(
    worlds: WorldPool,
) -> None:
    results = [one_result(worlds, read_as_in_deepspeed_chat, stage) for stage in (2, 3)]
    assert results[0][0] == results[1][0]
    assert [result[1] for result in results] == [(False, None), (True, True)]


def read_as_in_deepspeed_chat(stage: int) -> tuple[Any, Any]:
    engine = make_engine(config(stage, zero_optimization=DIVIDED | {"stage": stage}))
    train(engine, 1)
    sums, inside = {}, None
    for name, param in engine.module.named_parameters():
        divided = hasattr(param, "ds_id") and param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with zero_deepspeed.zero.GatheredParameters([param] if divided else []):
            sums[name] = (param.data.cpu().double().sum().item(), param.numel())
            if divided:
                assert param.ds_shape == param.shape
                assert param.ds_numel == param.numel()
                assert param.partition_numel() == -(-param.numel() // engine.world_size)
                inside = param.ds_status == ZeroParamStatus.AVAILABLE
    return sums, (divided, inside)


def test_a_pickled_parameter_leaves_its_engine_behind(worlds: WorldPool, tmp_path: Path) -> None:
    worlds.run(1, pickle_parameters, str(tmp_path / "parameters.pt"))
    assert set(torch.load(tmp_path / "parameters.pt")) == set(dict(make_model().named_parameters()))


def pickle_parameters(path: str) -> None:
    torch.save(dict(make_engine(config(2)).module.named_parameters()), path)


# ---- zero_to_fp32 ----


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.corners(stage=[3])
def test_the_fp32_weights_of_a_checkpoint_are_the_engines(
    worlds: WorldPool, tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkpoints"
    expected = worlds.run(2, save_and_export, str(root), stage)[0]
    whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(root, tag="mine")
    assert {name: value.tolist() for name, value in whole.items()} == expected
    plain = zero_to_fp32.load_state_dict_from_zero_checkpoint(make_model(seed=9), root)
    assert {name: value.tolist() for name, value in plain.state_dict().items()} == expected

    assert zero_to_fp32.main([str(root), str(tmp_path / "out"), "--exclude_frozen_parameters"]) == 0
    written = tmp_path / "out" / "pytorch_model.bin"
    assert capsys.readouterr().out == f"{written}\n"
    trained = torch.load(written)
    assert expected.keys() - trained.keys() == {"blocks.0.scale", "blocks.1.scale"}
    assert {value.dtype for value in trained.values()} == {torch.float32}

    assert zero_to_fp32.main([str(root), str(tmp_path / "out")]) == 2
    assert "pytorch_model.bin is there already" in capsys.readouterr().err
    assert zero_to_fp32.main([str(tmp_path / "none"), "x"]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    told = run_forked("zero_deepspeed.utils.zero_to_fp32", "--help")
    assert (told.returncode, told.stderr) == (0, "")
    arguments = [str(root), str(tmp_path / "hf"), "--safe_serialization", "--max_shard_size=20KB"]
    assert zero_to_fp32.main(arguments) == 0
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()


def save_and_export(root: str, stage: int) -> dict[str, Any]:
    engine = make_engine(config(stage, bf16=True))
    train(engine, 2)
    engine.save_checkpoint(root, tag="mine")
    return {name: value.tolist() for name, value in engine.get_fp32_state_dict().items()}


# ---- the rest ----


class Recomputing(nn.Module):
    """Its blocks through DeepSpeed's function."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x) if self.recompute else block(x)
        return x.square().mean()


def test_activation_checkpointing_changes_no_bit(worlds: WorldPool) -> None:
    checkpointing.configure(None, partition_activations=True)
    assert checkpointing.is_configured()
    checkpointing.reset()
    assert len(set(one_result(worlds, train_recomputing))) == 1


def train_recomputing() -> list[str]:
    hashes = []
    for stage, recompute in ((0, False), (2, True), (3, True)):
        torch.manual_seed(0)
        settings = config(stage, train_batch_size=4, train_micro_batch_size_per_gpu=2)
        engine, *_ = zero_deepspeed.initialize(model=Recomputing(recompute), config=settings)
        while engine.global_steps < 3:
            engine.backward(engine(torch.full((2, 9), 0.1 * (1 + engine.global_steps))))
            engine.step()
        hashes.append(engine.weight_hash())
    return hashes


def test_the_accelerator_answers_for_the_device_of_this_worker() -> None:
    device = zero_deepspeed.get_accelerator()
    tensor = torch.ones(3).to(device.device_name())
    assert device.on_accelerator(tensor)
    assert torch.device(device.current_device_name()) == tensor.device
    assert device.communication_backend_name() in ("gloo", "nccl")
    assert 0 <= device.memory_allocated() < device.total_memory()
    assert device.max_memory_allocated() < device.total_memory()
    device.set_device(0)
    device.synchronize()
    device.empty_cache()


def test_lines_of_some_ranks_and_of_memory_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    log_dist("here", ranks=[0])  # before initialize(), and whatever the config asks for
    see_memory_usage("before", force=True)
    see_memory_usage("not asked for")
    here, memory = caplog.messages
    assert here == "[rank -1] here"
    assert memory.startswith("before: ")
    assert memory.endswith(" GiB")
