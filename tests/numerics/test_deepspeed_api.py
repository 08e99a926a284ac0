"""What DeepSpeed's users call beside forward, backward and step: right at every stage."""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_engine
from tests.numerics.test_engine_features import one_result
from tests.numerics.test_leaving import under_agent
from tests.support.models import Tokens, make_model
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.world import WorldError, WorldPool
from zero_engine.engine import Engine
from zero_engine.utils import (
    RepeatingLoader,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zero_orchestrator.contract import ExitCode

STAGES = (0, 1, 2, 3)
PROBES = ("embed.weight", "blocks.0.qkv.weight", "blocks.1.norm2.bias", "norm.weight")
"""Tied, a matrix, and two of the other param group; one of them in the root."""


def probes(engine: Engine) -> list[nn.Parameter]:
    named = dict(engine.module.named_parameters())
    return [named[name] for name in PROBES]


def numbers(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.tolist()


# ---- looking at parameters, gradients and optimizer state ----


def look(bf16: bool) -> list[Any]:
    """Everything that can be read of the probes, before, between and after; per stage."""
    return [look_at(make_engine(config(stage, bf16=bf16))) for stage in STAGES]


def look_at(engine: Engine) -> list[Any]:
    seen: list[Any] = [[numbers(safe_get_full_fp32_param(p)) for p in probes(engine)]]
    seen.append([safe_get_full_optimizer_state(p, "exp_avg") for p in probes(engine)])
    seen.append([safe_get_full_grad(p) for p in probes(engine)])
    train(engine, 1)
    run_to_the_last_micro_step(engine)
    seen.append([numbers(safe_get_full_grad(p)) for p in probes(engine)])
    engine.step()
    seen += [
        [numbers(safe_get_full_optimizer_state(p, key)) for p in probes(engine)]
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    seen.append([numbers(safe_get_full_fp32_param(p)) for p in probes(engine)])
    return seen


def run_to_the_last_micro_step(engine: Engine) -> None:
    """All of a step but its end: the whole gradient is there."""
    while not engine.is_gradient_accumulation_boundary():
        run_micro_step(engine, step=True)
    run_micro_step(engine, step=False)


def run_micro_step(engine: Engine, *, step: bool) -> None:
    engine.backward(engine(next(iter(engine.training_dataloader))))
    if step:
        engine.step()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_what_is_seen_of_a_parameter_is_the_same_at_every_stage_and_world(
    worlds: WorldPool, bf16: bool
) -> None:
    stages = one_result(worlds, look, bf16)
    assert stages == [stages[0]] * len(STAGES)
    before, no_state, no_gradient, gradient, *state, after = stages[0]
    assert no_state == no_gradient == [None] * len(PROBES)
    assert state[-1] == [2.0] * len(PROBES)
    assert before != after
    assert all(any(torch.tensor(each).flatten().tolist()) for each in gradient)


@pytest.mark.parametrize("stage", STAGES)
def test_shares_are_the_pieces_of_the_whole(worlds: WorldPool, stage: int) -> None:
    ranks = worlds.run(3, shares, stage)
    for index in range(len(PROBES)):
        for kind in range(3):
            whole = ranks[0][0][index][kind]
            parts = [number for _, local in ranks for number in local[index][kind]]
            assert parts == torch.tensor(whole).flatten().tolist()


def shares(stage: int) -> tuple[Any, Any]:
    engine = make_engine(config(stage))
    train(engine, 1)
    run_micro_step(engine, step=False)
    whole, local = [], []
    for p in probes(engine):
        full = (safe_get_full_fp32_param(p), safe_get_full_grad(p))
        whole.append([numbers(t) for t in (*full, safe_get_full_optimizer_state(p, "exp_avg"))])
        mine = (safe_get_local_fp32_param(p), safe_get_local_grad(p))
        state = safe_get_local_optimizer_state(p, "exp_avg")
        if stage == 0 and engine.world_size > 1:
            assert state.numel() == mine[0].numel()
        local.append([numbers(t) for t in (*mine, state)])
    return whole, local


# ---- changing them ----


def change_and_train(stage: int, bf16: bool, how: str) -> tuple[Any, ...]:
    """Change weights, gradient and moments of the probes in the middle of a run."""
    engine = make_engine(config(stage, bf16=bf16))
    train(engine, 1)
    for p in probes(engine):
        change_weights(p, how)
        change_moments(p, how)
    evaluated = evaluate(engine)
    run_to_the_last_micro_step(engine)
    for p in probes(engine):
        change_gradient(p, how)
    engine.step()
    train(engine, 3)
    return evaluated, engine.weight_hash()


def change_weights(param: nn.Parameter, how: str) -> None:
    if how == "whole":
        safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5 + 0.01)
    elif how == "share":
        safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) * 0.5 + 0.01)


def change_moments(param: nn.Parameter, how: str) -> None:
    if how == "whole":
        value = safe_get_full_optimizer_state(param, "exp_avg") * 2
        safe_set_full_optimizer_state(param, value, "exp_avg")
        assert numbers(safe_get_full_optimizer_state(param, "exp_avg")) == numbers(value)
    elif how == "share":
        share = safe_get_local_optimizer_state(param, "exp_avg")
        safe_set_local_optimizer_state(param, share * 2, "exp_avg")


def change_gradient(param: nn.Parameter, how: str) -> None:
    gradient = safe_get_full_grad(param)
    assert gradient is not None
    if how == "whole":
        safe_set_full_grad(param, gradient * 4)
        assert numbers(safe_get_full_grad(param)) == numbers(gradient * 4)
    elif how == "share":
        share = safe_get_local_grad(param)
        assert share is not None
        safe_set_local_grad(param, share * 4)


def evaluate(engine: Engine) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(torch.stack([Tokens(3)[i] for i in range(3)])))
    engine.train()
    return loss


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_change_reaches_the_next_forward_and_the_next_step_at_every_stage(
    worlds: WorldPool, bf16: bool
) -> None:
    results = {
        how: {
            one_result(worlds, change_and_train, stage, bf16, how, sizes=(1, 2)) for stage in STAGES
        }
        for how in ("whole", "share", "not at all")
    }
    assert len(results["whole"]) == 1
    assert results["whole"] == results["share"]
    (changed,), (unchanged,) = results["whole"], results["not at all"]
    assert changed[0] != unchanged[0]
    assert changed[1] != unchanged[1]


def test_fp16_gradients_are_seen_without_the_loss_scale(worlds: WorldPool) -> None:
    (small, large), *_ = worlds.run(1, gradients_at_scales, (4, 8))
    assert small == large


def gradients_at_scales(powers: tuple[int, ...]) -> list[Any]:
    seen = []
    for power in powers:
        torch.manual_seed(0)
        fp16 = {"enabled": True, "initial_scale_power": power, "auto_cast": True}
        settings = {"train_micro_batch_size_per_gpu": 2, "fp16": fp16, "optimizer": {"type": "SGD"}}
        engine, *_ = zero_engine.initialize(model=nn.Linear(4, 1), config=settings)
        engine.backward(engine(torch.ones(2, 4)).float().square().mean())
        seen.append(numbers(safe_get_full_grad(engine.module.weight)))
    return seen


def misuse(kind: str) -> None:
    engine = make_engine(config(2))
    param = engine.module.norm.weight
    match kind:
        case "foreign":
            safe_get_full_fp32_param(nn.Parameter(torch.zeros(3)))
        case "shape":
            safe_set_full_fp32_param(param, torch.zeros(3))
        case "no gradient":
            safe_set_full_grad(param, torch.zeros(36))
        case "no state":
            safe_set_full_optimizer_state(param, torch.zeros(36), "exp_avg")
        case "external too late":
            zero_engine.zero.register_external_parameter(engine.module, param)
        case "no_sync":
            with engine.no_sync():
                pass
        case "batch":
            engine.set_train_batch_size(7)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("foreign", r"shape \(3,\) belongs to no engine; pass one of the module"),
        ("shape", r"norm.weight has shape \(36,\), the value has \(3,\)"),
        ("no gradient", "norm.weight has no gradient to set; call this between"),
        ("no state", "no optimizer state 'exp_avg' to set; it has: none before the first step"),
        ("external too late", "call it before initialize"),
        ("no_sync", "no_sync.. does not go with divided gradients, stage 2"),
        ("batch", "7.: not a multiple of the micro-batch size 2"),
    ],
)
def test_what_cannot_be_done_is_named(worlds: WorldPool, kind: str, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        worlds.run(2, misuse, kind)


# ---- zero.* ----


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_changes_inside_gathered_parameters_are_those_of_the_modifier_everywhere(
    worlds: WorldPool, bf16: bool
) -> None:
    results = {one_result(worlds, modify_gathered, stage, bf16, sizes=(2, 3)) for stage in STAGES}
    assert len(results) == 1
    (before, after, kept), *_ = results
    assert before != after
    # One element was changed; the fp32 weights of the others are what they were.
    assert kept == 1


def modify_gathered(stage: int, bf16: bool) -> tuple[str, str, int]:
    engine = make_engine(config(stage, bf16=bf16))
    train(engine, 1)
    before = engine.weight_hash()
    block = engine.module.blocks[0]
    weight = block.qkv.weight
    master = safe_get_full_fp32_param(weight)
    with zero_engine.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        assert weight.shape == (108, 36)
        if engine.global_rank == 1:
            weight[3, 4] = 7.0
    changed = int((safe_get_full_fp32_param(weight) != master).sum())
    assert safe_get_full_fp32_param(weight)[3, 4] == 7.0
    with zero_engine.zero.GatheredParameters(block):  # frozen ones, too
        assert all(torch.isfinite(p).all() for p in block.parameters())
    train(engine, 2)
    return before, engine.weight_hash(), changed


class Borrower(nn.Module):
    """Its blocks multiply with each other's weights."""

    def __init__(self, register: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        if register:
            zero_engine.zero.register_external_parameter(self, self.blocks[1].weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) @ self.blocks[1].weight
        return self.blocks[1](x).square().mean()


def test_a_registered_external_parameter_is_there_for_every_module(worlds: WorldPool) -> None:
    hashes = one_result(worlds, train_borrower, sizes=(1, 2))
    assert len(set(hashes)) == 1


def train_borrower() -> list[str]:
    hashes = []
    for stage in STAGES:
        torch.manual_seed(0)
        with zero_engine.zero.Init(config_dict_or_path=config(stage), enabled=stage == 3):
            model = Borrower(register=True)
        settings = config(stage, train_batch_size=4, train_micro_batch_size_per_gpu=2)
        engine, *_ = zero_engine.initialize(model=model, config=settings)
        for step in range(3):
            while engine.global_steps == step:
                engine.backward(engine(torch.full((2, 8), 0.1 * step)))
                engine.step()
        hashes.append(engine.weight_hash())
    return hashes


# ---- exports ----


def test_the_exported_weights_hold_everything_at_every_stage(
    worlds: WorldPool, tmp_path: Path
) -> None:
    for stage in STAGES:
        worlds.run(2, export, stage, str(tmp_path / str(stage)))
    names = set(make_model().state_dict())
    whole = [torch.load(tmp_path / str(s) / "pytorch_model.bin") for s in STAGES]
    assert all(set(each) == names for each in whole)
    assert {each["embed.weight"].dtype for each in whole} == {torch.bfloat16}
    for each in whole[1:]:
        assert all(torch.equal(each[name], whole[0][name]) for name in names)
    plain = make_model(seed=9).bfloat16()
    plain.load_state_dict(whole[3])
    from safetensors.torch import load_file

    trained = load_file(tmp_path / "3" / "trained.safetensors")
    assert set(trained) == names - {"blocks.0.scale", "blocks.1.scale"}
    assert list((tmp_path / "3").glob(".*")) == []


def export(stage: int, root: str) -> None:
    engine = make_engine(config(stage, bf16=True))
    train(engine, 1)
    assert engine.save_16bit_model(root)
    engine.save_16bit_model(root, "trained.safetensors", exclude_frozen_parameters=True)
    precise = engine.get_fp32_state_dict()
    assert {value.dtype for value in precise.values()} == {torch.float32}
    assert torch.equal(precise["head.weight"], safe_get_full_fp32_param(engine.module.embed.weight))
    assert "blocks.0.scale" in precise


def test_a_model_that_cannot_be_written_is_an_error_on_every_rank(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorldError) as caught:
        worlds.run(2, export, 1, str(tmp_path / "file" / "below"))
    assert str(caught.value).count("errors.CheckpointError: ") == 2
    assert "Not a directory" in str(caught.value)


# ---- accumulation, batches, loaders ----


def test_no_sync_and_declared_boundaries_change_nothing(worlds: WorldPool) -> None:
    plain = one_result(worlds, train_plainly, 1)
    assert one_result(worlds, train_without_sync) == plain
    assert one_result(worlds, train_with_declared_boundaries) == plain
    assert one_result(worlds, train_coalesced) == plain


def train_plainly(stage: int) -> str:
    engine = make_engine(config(stage))
    train(engine, 4)
    return engine.weight_hash()


def train_without_sync() -> str:
    engine = make_engine(config(1))
    loader = RepeatingLoader(engine.training_dataloader)
    while engine.global_steps < 4:
        with engine.no_sync():
            while not engine.is_gradient_accumulation_boundary():
                engine.backward(engine(next(loader)))
        engine.backward(engine(next(loader)))
        engine.step()
    return engine.weight_hash()


def train_with_declared_boundaries() -> str:
    engine = make_engine(config(1))
    loader = RepeatingLoader(engine.training_dataloader)
    while engine.global_steps < 4:
        engine.set_gradient_accumulation_boundary(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(next(loader)))
        engine.step()
    return engine.weight_hash()


def train_coalesced() -> str:
    engine = make_engine(config(3))
    loader = RepeatingLoader(engine.training_dataloader)
    for _ in range(4):
        with engine.coalesce_grad_reduction():
            for _ in range(engine._run.plan().micro_steps(engine.world_size)):
                engine.backward(engine(next(loader)))
        engine.step()
    return engine.weight_hash()


def test_a_boundary_that_would_change_the_global_batch_is_an_error(worlds: WorldPool) -> None:
    message = r"set_gradient_accumulation_boundary\(True\), but micro-step 1 of 5 is not the last"
    with pytest.raises(WorldError, match=message):
        worlds.run(1, declare_a_boundary)


def declare_a_boundary() -> None:
    engine = make_engine(config(1))
    engine.set_gradient_accumulation_boundary(True)
    run_micro_step(engine, step=True)


def test_another_batch_size_counts_from_the_next_step_within_a_running_loop(
    worlds: WorldPool,
) -> None:
    samples, digest = one_result(worlds, change_the_batch_size, 0)
    assert samples == [10, 14, 18, 22, 23]
    assert one_result(worlds, change_the_batch_size, 1) == (samples, digest)


def change_the_batch_size(num_workers: int) -> tuple[list[int], str]:
    engine = make_engine(config(2), num_workers=num_workers)
    samples: list[int] = []
    for batch in engine.training_dataloader:
        engine.backward(engine(batch))
        engine.step()
        if engine.global_steps > len(samples):
            samples.append(engine.global_samples)
        if engine.global_samples == 10 and engine.train_batch_size() == 10:
            engine.set_train_batch_size(4)
    return samples, engine.weight_hash()


def test_deepspeed_io_gives_the_engines_own_loader_or_a_plain_share(worlds: WorldPool) -> None:
    plain = one_result(worlds, train_plainly, 2)
    assert one_result(worlds, train_through_deepspeed_io) == plain


def train_through_deepspeed_io() -> str:
    engine = make_engine(config(2), training_data=None)
    loader = engine.deepspeed_io(Tokens(DATASET_SIZE))
    assert engine.training_dataloader is loader
    shares = engine.deepspeed_io(Tokens(12), batch_size=3, route="eval")
    batches = sum(len(batch) for batch in shares)
    assert batches == 12 // engine.world_size
    train(engine, 4)
    return engine.weight_hash()


# ---- checkpoints, as DeepSpeed's scripts name and load them ----


@pytest.mark.parametrize(("mode", "messages"), [("Ignore", 0), ("warn", 1)])
def test_rank_0_names_a_checkpoint_and_other_names_are_told_of(
    worlds: WorldPool, tmp_path: Path, mode: str, messages: int
) -> None:
    first, *others = worlds.run(3, save_by_loss, str(tmp_path), mode)
    assert [len(lines) for lines in (first, *others)] == [messages, 0, 0]
    assert all("ranks 1, 2 said another name than rank 0; name it after" in line for line in first)
    assert [json.loads(p.read_text())["tag"] for p in tmp_path.glob("*/MANIFEST.json")] == ["0"]


def test_other_names_are_an_error_on_request_and_nothing_is_saved(
    worlds: WorldPool, tmp_path: Path
) -> None:
    with pytest.raises(WorldError) as caught:
        worlds.run(2, save_by_loss, str(tmp_path), "Fail")
    assert str(caught.value).count("errors.CheckpointError: save_checkpoint(tag=") == 2
    assert list(tmp_path.iterdir()) == []


def save_by_loss(root: str, mode: str) -> list[str]:
    engine = make_engine(config(1, checkpoint={"tag_validation": mode}))
    train(engine, 1)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_engine").addHandler(handler)
    try:
        engine.save_checkpoint(root, str(engine.global_rank), {"a": 1}, True, False)
    finally:
        logging.getLogger("zero_engine").removeHandler(handler)
    return lines


@pytest.mark.parametrize("stage", [0, 3])
def test_a_function_of_the_scripts_own_loads_the_module(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    worlds.run(2, save_plainly, str(tmp_path))
    assert worlds.run(2, load_by_own_function, str(tmp_path), stage) == [(1, True)] * 2


def save_plainly(root: str) -> None:
    engine = make_engine(config(1))
    train(engine, 1)
    engine.save_checkpoint(root)


def load_by_own_function(root: str, stage: int) -> tuple[int, bool]:
    engine = make_engine(config(stage), seed=9)

    def load_halved(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: value / 2 for name, value in src.items()})

    engine.load_checkpoint(root, custom_load_fn=load_halved)
    halved = engine.get_fp32_state_dict()
    plain = make_engine(config(2))
    plain.load_checkpoint(root)
    weights = plain.get_fp32_state_dict()
    named = dict(engine.module.named_parameters())
    return engine.global_steps, all(torch.equal(halved[n], weights[n] / 2) for n in named)


@pytest.mark.parametrize("stage", STAGES)
def test_of_weights_loaded_alone_the_master_weights_are_the_same(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    worlds.run(2, save_plainly, str(tmp_path))
    assert worlds.run(2, load_weights_alone, str(tmp_path), stage) == [(0, [True] * 4)] * 2


def load_weights_alone(root: str, stage: int) -> tuple[int, list[bool]]:
    engine = make_engine(config(stage, bf16=True), seed=9)
    engine.load_checkpoint(root, load_module_only=True)
    computed = engine.module_state_dict()
    masters = [
        (name, safe_get_full_fp32_param(p)) for name, p in zip(PROBES, probes(engine), strict=True)
    ]
    return engine.global_steps, [torch.equal(computed[n], m.bfloat16()) for n, m in masters]


# ---- several engines, the command line, a base64 config ----


def test_two_engines_of_one_process_take_turns(worlds: WorldPool) -> None:
    alone = one_result(worlds, train_plainly, 3)
    assert one_result(worlds, train_two) == (alone, alone)


def train_two() -> tuple[str, str]:
    first, second = make_engine(config(3)), make_engine(config(1))
    for step in range(1, 5):
        train(first, step)
        train(second, step)
    return first.weight_hash(), second.weight_hash()


def test_the_config_comes_from_the_command_line_as_with_deepspeed(
    worlds: WorldPool, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(1)))
    encoded = base64.urlsafe_b64encode(path.read_bytes()).decode()
    plain = worlds.run(1, train_plainly, 1)[0]
    assert worlds.run(1, train_from_arguments, ["--deepspeed_config", str(path)]) == [plain]
    assert worlds.run(1, train_from_arguments, ["--deepspeed_config", encoded]) == [plain]


def train_from_arguments(arguments: list[str]) -> str:
    parser = zero_engine.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", *arguments])
    assert args.deepspeed is True
    model = make_model()
    from tests.support.models import param_groups

    engine, *_ = zero_engine.initialize(
        args, model, model_parameters=param_groups(model), training_data=Tokens(DATASET_SIZE)
    )
    train(engine, 4)
    return engine.weight_hash()


# ---- peers that vanish ----


@pytest.mark.parametrize("where", ["plain backward", "look", "gathered"])
def test_under_an_agent_a_lost_peer_ends_the_process_wherever_it_is_noticed(
    worlds: WorldPool, tmp_path: Path, where: str
) -> None:
    with pytest.raises(WorldError, match="rank 1 died, exit -9"):
        worlds.run(2, lose_a_peer, str(tmp_path), where)
    assert (tmp_path / "code").read_text() == str(int(ExitCode.PEER_LOST))


def lose_a_peer(root: str, where: str) -> None:
    with under_agent(root):
        engine = make_engine(config(3))
    loss = engine(next(iter(engine.training_dataloader)))
    if engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(SystemExit) as ended:
        notice(where, loss, engine)
    Path(root, "code").write_text(str(ended.value.code))


def notice(where: str, loss: Tensor, engine: Engine) -> None:
    weight = engine.module.blocks[0].up.weight
    match where:
        case "plain backward":
            engine.scale(loss).backward()
        case "look":
            safe_get_full_fp32_param(weight)
        case "gathered":
            with zero_engine.zero.GatheredParameters(weight):
                pass
