"""elastic.overlap_param_gather: a step does not wait for the new weights, with the same bits.

What reads weights through the engine waits for them; what reads them without it sees NaN.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_deepspeed
from tests.numerics.test_branches import LEFT_OUT, Branching, Samples
from tests.numerics.test_leaving import await_leave, exit_code_of, under_agent
from tests.numerics.test_takeover import engine_for
from tests.support.models import WIDTH, Tokens
from tests.support.ports import free_port
from tests.support.queued import BACKEND
from tests.support.suspended import is_suspended
from tests.support.training import config, fingerprint, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldError, WorldPool, pids
from zero_comm.exchange.cpu.same_host import SWITCH
from zero_comm.topology import ENV_NODE_RANKS
from zero_contract.errors import ConfigError, PeerLost, ZeroError
from zero_contract.worker import ExitCode
from zero_deepspeed.utils import safe_get_full_fp32_param
from zero_deepspeed.zero import GatheredParameters
from zero_engine.core.engine import Engine

STAGES = (1, 2)
STEPS = 4


def overlapping(stage: int, *, on: bool = True, **more: Any) -> dict[str, Any]:
    return config(stage, elastic={"overlap_param_gather": on}, **more)


# ---- the bits ----


def train_stages(on: bool, more: dict[str, Any]) -> list[tuple[Any, ...]]:
    found = []
    for stage in STAGES:
        engine = make_engine(overlapping(stage, on=on, **copy.deepcopy(more)))
        losses = train(engine, STEPS)
        found.append((*fingerprint(engine), engine.skipped_steps, tuple(losses)))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("backend", ["gloo", BACKEND])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.corners(world=[3], backend=[BACKEND], bf16=[True])
def test_the_bits_are_those_of_a_step_that_waits(
    worlds: WorldPool, world: int, backend: str, bf16: bool
) -> None:
    more = {"bf16": bf16}
    waited = worlds.run(1, train_stages, False, more)
    assert worlds.run(world, train_stages, True, more, backend=backend) == waited * world


SETTINGS: dict[str, dict[str, Any]] = {
    "fp16, with overflows": {
        "fp16": {
            "enabled": True,
            "initial_scale_power": 22,
            "loss_scale_window": 2,
            "hysteresis": 1,
        }
    },
    "16-bit masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "whole parameters": {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}},
    "native": {"elastic": {"reduction": "native"}},
}


@pytest.mark.full
@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("backend", ["gloo", BACKEND])
def test_the_bits_are_the_same_under_every_setting(
    worlds: WorldPool, what: str, backend: str
) -> None:
    waited = worlds.run(2, train_settings, False, SETTINGS[what], backend=backend)
    assert worlds.run(2, train_settings, True, SETTINGS[what], backend=backend) == waited


def train_settings(on: bool, more: dict[str, Any]) -> str:
    found = []
    for stage in STAGES:
        settings = copy.deepcopy({**config(stage), **more})
        settings.setdefault("elastic", {})["overlap_param_gather"] = on
        engine = make_engine(settings)
        losses = train(engine, STEPS)
        assert engine.skipped_steps < STEPS
        found.append((*fingerprint(engine), engine.skipped_steps, tuple(losses)))
    return repr(found)  # a norm may be NaN


@pytest.mark.full
@pytest.mark.parametrize("reads", ["0", "1"], ids=["sockets", "memory"])
def test_the_bits_are_the_same_on_several_nodes(worlds: WorldPool, reads: str) -> None:
    waited = worlds.run(1, train_stages, False, {"bf16": True})
    assert worlds.run(4, train_on_nodes, reads) == waited * 4


def train_on_nodes(reads: str) -> list[tuple[Any, ...]]:
    os.environ.update({ENV_NODE_RANKS: "2,2", SWITCH: reads})
    try:
        return train_stages(True, {"bf16": True})
    finally:
        del os.environ[ENV_NODE_RANKS], os.environ[SWITCH]


# ---- what a script sees ----


def hidden(engine: Engine) -> set[str]:
    """The names of the parameters that show NaN, and nothing else."""
    shown = {name: param.data.isnan() for name, param in engine.module.named_parameters()}
    assert all(bool(nan.all()) == bool(nan.any()) for nan in shown.values())
    return {name for name, nan in shown.items() if nan.all()}


def look_until_forward_has_ended(stage: int) -> tuple[bool, list[set[str]], set[str]]:
    """Whether all that is trained is hidden after a step; what is, where each block computes."""
    engine, during = make_engine(overlapping(stage)), []
    train(engine, 1)
    trained = {name for name, param in engine.module.named_parameters() if param.requires_grad}
    all_hidden = hidden(engine) == trained
    for block in engine.module.blocks:
        block.register_forward_pre_hook(lambda *_: during.append(hidden(engine)))
    engine(Tokens(2)[0][None])
    return all_hidden, during, hidden(engine)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(world=[1], stage=[2])
def test_weights_show_nan_from_the_step_until_the_forward_of_their_module(
    worlds: WorldPool, stage: int, world: int
) -> None:
    for all_hidden, during, after in worlds.run(world, look_until_forward_has_ended, stage):
        assert all_hidden
        first, second = during
        assert {name.rpartition(".")[0].split(".")[1] for name in first} == {"1"}  # of the blocks
        assert second == after == set()


def evaluate(engine: Engine) -> float:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(Tokens(2)[1][None]))
    engine.train()
    return loss


def call_block(engine: Engine) -> torch.Tensor:
    block = engine.module.blocks[1].eval()
    with torch.no_grad():
        output: torch.Tensor = block(torch.ones(1, 3, WIDTH, dtype=block.up.weight.dtype))
    block.train()
    return output


def gather_later(engine: Engine) -> dict[str, torch.Tensor]:
    """In a context that was made before the step."""
    context = engine._context_of_the_test
    with context:
        return {name: param.clone() for name, param in engine.module.named_parameters()}


def offload(engine: Engine) -> dict[str, torch.Tensor]:
    engine.offload_states()
    engine.reload_states()
    return {name: param.clone() for name, param in engine.module.named_parameters()}


def load_own(engine: Engine) -> str:
    """Into the module, weights that it has."""
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    train(engine, engine.global_steps + 1)
    engine.module.load_state_dict(weights)
    engine.load_state_dict({f"module.{name}": value for name, value in weights.items()})
    return engine.weight_hash()


def of_rank_0(engine: Engine) -> Mapping[str, torch.Tensor]:
    return dict(engine.module.state_dict()) if engine.global_rank == 0 else {}


READERS: dict[str, Callable[[Engine], Any]] = {
    "state_dict": lambda engine: dict(engine.module.state_dict()),
    "state_dict of a part": lambda engine: dict(engine.module.blocks[1].up.state_dict()),
    "state_dict of the engine": lambda engine: dict(engine.state_dict()),
    "state_dict on rank 0 alone": of_rank_0,
    "module_state_dict": lambda engine: engine.module_state_dict(),
    "get_fp32_state_dict": lambda engine: engine.get_fp32_state_dict(),
    "weight_hash": lambda engine: engine.weight_hash(),
    "evaluation": evaluate,
    "a part, called by itself": lambda engine: engine.module.embed(torch.arange(9)).detach(),
    "a block, called by itself": call_block,
    "GatheredParameters": gather_later,
    "safe_get_full_fp32_param": lambda engine: safe_get_full_fp32_param(engine.module.position),
    "offload_states": offload,
    "load_state_dict": load_own,
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def read_after_steps(stage: int, bf16: bool, root: str) -> list[str]:
    """What has read something else than without the key, or disturbed a later step."""
    both = [make_engine(overlapping(stage, on=on, bf16=bf16)) for on in (False, True)]
    differs = []
    for name, read in READERS.items():
        for engine in both:
            # A member of the module would be looked up there.
            context = GatheredParameters(list(engine.module.parameters()))
            vars(engine)["_context_of_the_test"] = context
            train(engine, engine.global_steps + 1)
        waited, overlapped = map(read, both)
        if not same(waited, overlapped):
            differs.append(name)
    for engine in both:
        train(engine, engine.global_steps + 1)
    if not both[1].save_checkpoint(root, blocking=True):
        differs.append("save_checkpoint")
    loaded = make_engine(config(3, bf16=bf16))
    loaded.load_checkpoint(root)
    hashes = {engine.weight_hash() for engine in (*both, loaded)}
    return differs + ["the end"] * (len(hashes) != 1)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["gloo", BACKEND])
@pytest.mark.corners(world=[2], stage=[1], bf16=[False], backend=["gloo"])
def test_what_reads_weights_through_the_engine_or_a_module_waits_for_them(
    worlds: WorldPool, tmp_path: Path, stage: int, world: int, bf16: bool, backend: str
) -> None:
    found = worlds.run(world, read_after_steps, stage, bf16, str(tmp_path), backend=backend)
    assert found == [[]] * world


@pytest.mark.full
def test_the_backward_of_a_forward_before_the_step_computes_with_the_new_weights(
    worlds: WorldPool,
) -> None:
    """As without the key: a step does not touch the versions that autograd checks."""
    waited = worlds.run(2, train_late_backwards, False)
    assert worlds.run(2, train_late_backwards, True) == waited


def train_late_backwards(on: bool) -> str:
    settings = overlapping(2, on=on, managed_gradient_accumulation=False)
    engine = make_engine(settings, training_data=None)
    tokens = Tokens(8)
    for turn, plain in enumerate((False, True)):
        first, second = (engine(tokens[2 * turn + k][None]) for k in (0, 1))
        engine.backward(first)
        engine.step()
        second.backward() if plain else engine.backward(second)
        engine.step()
    return engine.weight_hash()


def train_leaving_layers_out(on: bool) -> tuple[Any, ...]:
    torch.manual_seed(5)
    settings = overlapping(2, on=on)
    engine, *_ = zero_deepspeed.initialize(
        model=Branching(LEFT_OUT), training_data=Samples(), config=settings
    )
    skipped = set()
    for batch in itertools.islice(engine.training_dataloader, 9):
        loss = engine(batch)
        skipped |= hidden(engine)
        engine.backward(loss)
        assert not hidden(engine)  # what is sent must not change in the step
        engine.step()
    assert bool(skipped) == on
    return fingerprint(engine)


@pytest.mark.parametrize("backend", ["gloo", BACKEND])
@pytest.mark.corners(backend=[BACKEND])
def test_weights_of_modules_that_forward_leaves_out_arrive_before_the_next_step(
    worlds: WorldPool, backend: str
) -> None:
    waited = worlds.run(2, train_leaving_layers_out, False, backend=backend)
    assert worlds.run(2, train_leaving_layers_out, True, backend=backend) == waited


# ---- who else uses the module ----


@pytest.mark.full
@pytest.mark.parametrize("gone", [False, True])
def test_another_engine_goes_on_from_weights_that_are_arriving(
    worlds: WorldPool, gone: bool
) -> None:
    assert worlds.run(2, hand_on, gone) == [True] * 2


def hand_on(gone: bool) -> bool:
    hashes = []
    for on in (False, True):
        first = make_engine(overlapping(2, on=on))
        train(first, 2)
        module = first.module
        if gone:
            del first
            gc.collect()
        second = engine_for(module, config(1))
        train(second, 1)
        assert not hidden(second)  # the hooks of the first are gone
        hashes.append(second.weight_hash())
    return hashes[0] == hashes[1]


@pytest.mark.full
def test_copies_and_parts_of_a_module_whose_weights_are_arriving_are_refused(
    worlds: WorldPool,
) -> None:
    [(copied, part)] = worlds.run(1, copy_and_divide)
    assert copied.startswith(
        "a module cannot be copied or pickled at stage 3, or with elastic.overlap_param_gather:"
    )
    assert "is held by an engine with elastic.overlap_param_gather that is gone; give" in part


def copy_and_divide() -> tuple[str, str]:
    engine = make_engine(overlapping(1))
    train(engine, 1)
    with pytest.raises(ZeroError) as copied:
        copy.deepcopy(engine.module)
    block = engine.module.blocks[0]
    del engine
    gc.collect()
    with pytest.raises(ConfigError) as part:
        engine_for(block, config(1))
    return str(copied.value), str(part.value)


@pytest.mark.full
def test_an_engine_that_is_let_go_of_leaves_no_memory_behind(worlds: WorldPool) -> None:
    assert worlds.run(2, left_over) == [0, 0]


def left_over() -> int:
    """Units that are still there after their engine, whose weights were arriving."""
    engine = make_engine(overlapping(2))
    train(engine, 2)
    units = [weakref.ref(unit) for unit in engine._core.units]
    del engine
    gc.collect()
    return sum(unit() is not None for unit in units)


# ---- peers ----


def stop_in_step(engine: Engine) -> None:
    """Stop this process in its next step, before it sends a weight."""
    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))


def shards(engine: Engine) -> list[bytes]:
    return [unit.shard.numpy().tobytes() for unit in engine._core.units]


def train_beside_a_peer_that_is_lost(directory: str, stage: int, on: bool) -> None:
    """Without `on` nobody is lost: what rank 0 then has is what it must have."""
    engine = make_engine(overlapping(stage))
    train(engine, 1)
    _, peer = pids()
    if on and engine.global_rank == 1:
        stop_in_step(engine)
    train(engine, 2)  # returns, though rank 1 has not sent its weights
    if engine.global_rank == 1:
        return
    if on:
        wait_for(lambda: is_suspended(peer), 30, "rank 1 is stopped")
        os.kill(peer, signal.SIGKILL)
        for read in (lambda: engine(Tokens(2)[0][None]), engine.weight_hash):
            with pytest.raises(PeerLost):
                read()
        assert engine._core.moved.inconsistent is None
        assert engine.global_steps == 2
    Path(directory, f"shards-{on}").write_bytes(b"".join(shards(engine)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.corners(stage=[2])
def test_a_step_waits_for_no_peer_and_one_that_is_lost_then_leaves_whole_shards(
    worlds: WorldPool, tmp_path: Path, stage: int
) -> None:
    worlds.run(2, train_beside_a_peer_that_is_lost, str(tmp_path), stage, False)
    with pytest.raises(WorldError, match=r"^rank 1 died, exit -9$"):
        worlds.run(2, train_beside_a_peer_that_is_lost, str(tmp_path), stage, True)
    whole, left = (tmp_path / f"shards-{on}" for on in (False, True))
    assert left.read_bytes() == whole.read_bytes()


@pytest.mark.full
def test_a_drain_saves_weights_that_are_arriving(worlds: WorldPool, tmp_path: Path) -> None:
    ends = worlds.run(3, drained, str(tmp_path))
    assert ends == [(ExitCode.LEFT, 3)] * 3
    waited = worlds.run(2, go_on, f"{tmp_path}/none")
    assert worlds.run(2, go_on, f"{tmp_path}/checkpoints") == waited


def drained(root: str) -> tuple[int | None, int]:
    """Rank 0 alone is asked to leave, after step 2."""
    asked = dist.get_rank() == 0
    with under_agent(root, leave_after=2 if asked else None) as agent:
        engine = make_engine(overlapping(2))
        engine.load_checkpoint(f"{root}/checkpoints")

        def run() -> None:
            for step in range(1, 6):
                if step == 3 and asked:
                    await_leave(engine)
                train(engine, step)

        code = exit_code_of(engine, run)
        agent.told()
    return code, engine.global_steps


def go_on(directory: str) -> tuple[Any, ...]:
    engine = make_engine(config(3))
    engine.load_checkpoint(directory)
    train(engine, 5)
    return fingerprint(engine)


SCRIPT = """
import os, signal, sys
import torch, zero_deepspeed
torch.set_num_threads(1)
torch.manual_seed(0)
engine, *_ = zero_deepspeed.initialize(model=torch.nn.Linear(64, 64), config={
    "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
    "elastic": {"overlap_param_gather": True}, "optimizer": {"type": "AdamW"}})
engine.backward(engine(torch.ones(1, 64)).sum())
if engine.global_rank == 0:
    engine.optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
engine.step()
if engine.global_rank == 0:
    print(any(bool(value.isnan().any()) for value in engine.module.state_dict().values()))
else:
    print("the end", flush=True)
"""


@pytest.mark.full
def test_a_process_does_not_end_before_its_peers_have_its_weights() -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        wait_for(lambda: is_suspended(ranks[0].pid), 60, "rank 0 is stopped in its step")
        assert ranks[1].stdout is not None
        assert ranks[1].stdout.readline() == "the end\n"
        os.kill(ranks[0].pid, signal.SIGCONT)
        assert [process.wait(60) for process in ranks] == [0, 0]
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.read() == "False\n"
    finally:
        for process in ranks:
            process.kill()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
