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

import zero_deepspeed
from tests.numerics.test_leaving import under_agent
from tests.numerics.test_param_access import PROBES, probes
from tests.support.models import Tokens, make_model
from tests.support.saving import heard
from tests.support.training import DATASET_SIZE, config, make_engine, run_micro_step, train
from tests.support.world import WorldError, WorldPool, one_result
from zero_contract.worker import ExitCode
from zero_deepspeed.utils import RepeatingLoader, safe_get_full_fp32_param
from zero_engine.core.engine import Engine

STAGES = (0, 1, 2, 3)


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
    (plain,) = worlds.run(1, train_plainly, 1)
    for job in (train_without_sync, train_with_declared_boundaries, train_coalesced):
        assert one_result(worlds, job, sizes=(3,)) == plain


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


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.corners(world=[2])
def test_another_batch_size_counts_from_the_next_step_within_a_running_loop(
    worlds: WorldPool, world: int
) -> None:
    samples, digest = one_result(worlds, change_the_batch_size, 0, sizes=(3,))
    assert samples == [10, 14, 18, 22, 23]
    with_processes = worlds.run(world, change_the_batch_size, 1)
    assert with_processes == [(samples, digest)] * world


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
    assert all("ranks 1, 2 gave another name than rank 0; name it after" in line for line in first)
    assert [json.loads(p.read_text())["tag"] for p in tmp_path.glob("step-*/MANIFEST.json")] == [
        "0"
    ]


def test_other_names_are_an_error_on_request_and_nothing_is_saved(
    worlds: WorldPool, tmp_path: Path
) -> None:
    with pytest.raises(WorldError) as caught:
        worlds.run(2, save_by_loss, str(tmp_path), "Fail")
    assert str(caught.value).count("TagsDiffer: save_checkpoint(tag=") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_number_names_a_checkpoint(worlds: WorldPool, tmp_path: Path) -> None:
    """As in DeepSpeed's tutorials, whose names are losses and counts of steps."""
    for world in (1, 2):
        root = str(tmp_path / str(world))
        assert worlds.run(world, save_by_number, root) == [["0.125", "7"]] * world


def save_by_number(root: str) -> list[str]:
    engine = make_engine(config(1))
    train(engine, 1)
    names = []
    for number in (0.125, 7):
        assert engine.save_checkpoint(root, number)
        path, _ = engine.load_checkpoint(root, number, load_module_only=True)
        names.append(json.loads(Path(str(path), "MANIFEST.json").read_text())["tag"])
    return names


def save_by_loss(root: str, mode: str) -> list[str]:
    engine = make_engine(config(1, checkpoint={"tag_validation": mode}))
    train(engine, 1)
    with heard(logging.WARNING) as lines:
        engine.save_checkpoint(root, str(engine.global_rank), {"a": 1}, True, False)
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


@pytest.mark.parametrize(
    "given",
    [
        {"load_optimizer_states": False},
        {"load_lr_scheduler_states": False},
        {"load_module_only": True},
        {"tag": "global_step1"},
    ],
    ids=lambda given: next(iter(given)),
)
@pytest.mark.corners(given=[{"load_optimizer_states": False}, {"load_module_only": True}])
def test_a_load_of_something_else_on_one_rank_is_an_error_that_names_it(
    worlds: WorldPool, tmp_path: Path, given: dict[str, object]
) -> None:
    worlds.run(2, save_plainly, str(tmp_path))
    with pytest.raises(WorldError) as caught:
        worlds.run(2, load_otherwise_on_rank_1, str(tmp_path), given)
    ((name, value),) = given.items()
    theirs = f"the ranks are not given the same: {name} is {{}} on rank 0, and {value} on rank 1"
    assert str(caught.value).count(theirs.format(None if name == "tag" else not value)) == 2


def load_otherwise_on_rank_1(root: str, given: dict[str, Any]) -> None:
    engine = make_engine(config(1))
    engine.load_checkpoint(root, **(given if engine.global_rank == 1 else {}))


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
    (alone,) = worlds.run(1, train_plainly, 3)
    assert one_result(worlds, train_two, sizes=(3,)) == (alone, alone)


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
    parser = zero_deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", *arguments])
    assert args.deepspeed is True
    model = make_model()
    from tests.support.models import param_groups

    engine, *_ = zero_deepspeed.initialize(
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
            with zero_deepspeed.zero.GatheredParameters(weight):
                pass
