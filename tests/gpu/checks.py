"""What must hold on a device: each function is one claim, and raises if it does not hold.

Each runs in a process of its own (`tests.gpu`), on one GPU and without a network. Without a device
the claims that do not name one hold on the CPU, which is how these checks are themselves tested.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import zero_engine
import zero_torch
from tests.support.models import Tokens, make_model, param_groups
from tests.support.ports import free_port
from zero_checkpoint import weight_hash
from zero_checkpoint.state.weight_hash import AT_ONCE_BYTES, BLOCK_BYTES
from zero_comm.errors import LeavingNow
from zero_comm.exchange.collectives import Collectives
from zero_comm.sums import fold
from zero_comm.waiting import Interrupt
from zero_comm.worker.distributed import backend_for, leave_group, local_device
from zero_step.gradients.norm import BLOCK, block_norms, sum_of_squares

CHECKS: dict[str, Callable[[], str]] = {}
TIMED = frozenset(
    {
        "an_interrupt_ends_a_wait_for_a_busy_device",
        "weights_on_the_device_have_the_hash_that_they_have_on_the_host",
        "a_background_save_copies_beside_forward_and_backward",
    }
)
"""Those that look at a clock."""
HAS_GPU = torch.cuda.is_available()
HAS_NCCL = HAS_GPU and dist.is_nccl_available()
STAGES = (0, 1, 2, 3)
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1024}},
}


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": partial(DistributedDataParallel, find_unused_parameters=True),
}
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    WRAPPERS["fsdp2"] = fully_shard


class NoDeviceError(Exception):
    """The claim needs a device, and there is none."""


def check(function: Callable[[], str]) -> Callable[[], str]:
    """Add a claim; it returns what it has seen."""
    CHECKS[function.__name__] = function
    return function


def on_a_gpu(function: Callable[[], str]) -> Callable[[], str]:
    """A claim about a device."""

    def claim() -> str:
        if not HAS_GPU:
            raise NoDeviceError
        return function()

    claim.__name__ = function.__name__
    return claim


def make_engine(
    stage: int, dtype: str = "fp32", of: tuple[nn.Module, Any] | None = None, **more: Any
) -> Any:
    """An engine for the tiny model of the tests, in steps of 4 micro-batches.

    Or for another model with its optimizer.

    With elastic.deterministic "warn", as most users have it: of 12 tokens attention has no partial
    sums to add in any order.
    """
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        **DTYPES[dtype],
        **more,
    }
    data = Tokens(64)
    if of is not None:
        return zero_engine.initialize(*of, training_data=data, config=config)
    model, config["optimizer"] = make_model(7), {"type": "AdamW", "params": {"lr": 1e-2}}
    return zero_engine.initialize(
        model, model_parameters=param_groups(model), training_data=data, config=config
    )


def train(engine: Any, steps: int) -> None:
    """Train until so many steps are done in all."""
    for batch in engine.training_dataloader:
        engine.backward(engine(batch.to(engine.device)))
        engine.step()
        if engine.global_steps == steps:
            return


def trained(stage: int, dtype: str = "fp32", **more: Any) -> str:
    """The weights after four steps."""
    engine = make_engine(stage, dtype, **more)
    train(engine, 4)
    assert engine.mean_loss == engine.mean_loss, "the loss is not a number"
    return str(engine.weight_hash())


def equal(found: dict[Any, str]) -> str:
    """Check that all hashes are the same one."""
    assert len(set(found.values())) == 1, f"not the same bits: {found}"
    return f"{len(found)} runs, one hash: {next(iter(found.values()))[:16]}"


@check
def stages_and_replays_give_the_same_bits() -> str:
    """World 1: stages 0-3 and a second run of each, in fp32, bf16 and fp16."""
    told = []
    for dtype in DTYPES:
        cases = [(stage, turn) for stage in STAGES for turn in (1, 2)]
        told.append(f"{dtype}: {equal({case: trained(case[0], dtype) for case in cases})}")
    return "; ".join(told)


@check
def world_sizes_give_the_same_bits() -> str:
    """Several processes share the device, over gloo: 1, 2 and 4 ranks, stages 0, 2 and 3."""
    found = {
        (world, stage): each
        for world in (1, 2, 4)
        for stage, each in _in_processes(world, "hashes").items()
    }
    return equal(found)


@check
def ddp_and_fsdp2_have_the_bits_of_the_engine() -> str:
    """In fp32, clipped: stages 0-3, one process of stock torch, DDP and FSDP2, DDP of two ranks."""
    _meet_alone(backend_for(has_gpu=HAS_GPU, has_nccl=HAS_NCCL))
    found = {f"stage {stage}": trained_by(stage) for stage in STAGES}
    found |= {wrapper: trained_by(wrapper) for wrapper in WRAPPERS}
    unseen = "" if "fsdp2" in WRAPPERS else "; not seen: FSDP2 needs torch 2.13"
    return equal(found | _in_processes(2, "ddp")) + unseen


def trained_by(back_end: int | str) -> str:
    """The weights after four steps: of the engine at a stage, or of stock torch."""
    model = make_model(7)
    if isinstance(back_end, int):
        engine = make_engine(back_end, of=(model, foreach_adamw(model)))
        train(engine, 4)
        return str(engine.weight_hash())
    wrapped = WRAPPERS[back_end](model.to(local_device()))
    optimizer, data = foreach_adamw(model), DataLoader(Tokens(64), batch_size=2, shuffle=True)
    run = zero_torch.protect(wrapped, optimizer, data, microbatches=4)
    for batch in run.loader:
        run.backward(wrapped(batch.to(local_device())))
        run.step(0.5)
        if run.global_step == 4:
            break
    try:
        return run.weight_hash()
    finally:
        run.close()


def foreach_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(param_groups(model), lr=1e-2, foreach=True)


@check
def a_script_s_nccl_group_is_enough() -> str:
    """`init_process_group("nccl")` reaches no CPUs: the engine makes its own control group."""
    _meet_alone("nccl" if HAS_NCCL else "gloo")
    first = trained(3)
    return equal({"the script's group": first, "ours": _in_processes(1, "hashes")["3"]})


@check
def a_group_is_aborted_and_another_founded_in_the_same_process() -> str:
    """As a survivor does."""
    hashes, seconds = {}, []
    for turn in range(3):
        _meet_alone(backend_for(has_gpu=HAS_GPU, has_nccl=HAS_NCCL))
        hashes[turn] = trained(2)
        begun = time.monotonic()
        assert leave_group(), "the abort has not ended in time"
        seconds.append(time.monotonic() - begun)
    return f"{equal(hashes)}; aborts took at most {max(seconds) * 1e3:.0f} ms"


@check
@on_a_gpu
def an_interrupt_ends_a_wait_for_a_busy_device() -> str:
    """A stream that is busy for seconds, as one that waits for a lost peer is for ever."""
    if not HAS_NCCL:
        return "not seen: torch is built without NCCL"
    _meet_alone("cpu:gloo,cuda:nccl")
    interrupt = Interrupt()
    group = Collectives(interrupt=interrupt)
    # The driver loads a kernel, and allocates pinned memory, when they are first asked for, and may
    # wait for a busy device then. That would be a wait inside of it, and none of ours.
    for _ in range(2):
        torch.cuda._sleep(1)
        group.to_host(torch.ones(1, device=local_device()), "a number")
    torch.cuda._sleep(8_000_000_000)  # cycles: about 4 s
    told: list[float] = []

    def ask() -> None:
        told.append(time.monotonic())
        interrupt.request("the agent says so")

    threading.Timer(0.3, ask).start()
    try:
        group.to_host(torch.ones(1, device=local_device()), "a number")
    except LeavingNow:
        took = time.monotonic() - told[0]
    else:
        raise AssertionError("the device was not busy, or the interrupt was not noticed")
    assert took < 0.1, f"it took {took:.2f} s"
    return f"after {took * 1e3:.1f} ms"


@check
@on_a_gpu
def no_step_waits_inside_the_driver() -> str:
    """A lost peer would keep such a wait for ever; the wait of a step asks an event instead."""
    for stage in STAGES:
        engine = make_engine(stage, "bf16")
        batches = [batch.to(engine.device) for batch in engine.training_dataloader]
        for number, batch in enumerate(batches[:12]):
            torch.cuda.set_sync_debug_mode("error" if number >= 8 else "default")
            engine.backward(engine(batch), tokens=(batch >= 0).sum())
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
    return "one step of 4 micro-batches at each stage"


@check
def a_norm_s_bits_do_not_depend_on_how_many_blocks_a_rank_has() -> str:
    """The bug: a device's reduction has another layout for fewer than 16 rows."""
    torch.manual_seed(3)
    values = torch.randn(64 * BLOCK, device=local_device()) * torch.rand(1).item()
    whole = block_norms(values)
    raw = torch.linalg.vector_norm(values.view(-1, BLOCK), dim=1)
    differing = []
    for rows in range(1, 65):
        assert torch.equal(block_norms(values[: rows * BLOCK]), whole[:rows]), rows
        alone = torch.linalg.vector_norm(values[: rows * BLOCK].view(-1, BLOCK), dim=1)
        if not torch.equal(alone, raw[:rows]):
            differing.append(rows)
    assert torch.equal(sum_of_squares(whole).cpu(), sum_of_squares(whole.cpu()))
    return f"without the rows of zeros it would, for {differing or 'no number'} of rows"


@check
def kernels_do_not_ask_in_which_block_a_parameter_begins() -> str:
    """Parameters begin at multiples of 64 elements; told is what begins elsewhere and differs."""
    torch.manual_seed(3)
    differing = set()
    for dtype in (torch.float32, torch.bfloat16):
        for rows, width, out in ((20, 36, 108), (64, 256, 768)):
            x = torch.randn(rows, width, device=local_device()).to(dtype)
            weight = torch.randn(out, width, device=local_device()).to(dtype)
            vector, first = weight[0], None
            for start in (0, 1, 2, 4, 8, BLOCK, 2 * BLOCK, 3 * BLOCK):
                w, v = (_from(each, start) for each in (weight, vector))
                made = [x @ w.t(), (x @ w.t()) @ w, F.layer_norm(x, (width,), v, v)]
                first = first or made
                if not all(map(torch.equal, made, first)):
                    assert start % BLOCK, f"{dtype}, {width}: it differs from element {start} on"
                    differing.add(start)
    if not differing:
        return "the same bits wherever one begins"
    return f"other bits if one begins at element {', '.join(map(str, sorted(differing)))}"


def _from(values: Tensor, start: int) -> Tensor:
    """The same values, in memory that begins at this element."""
    memory = values.new_zeros(start + values.numel())
    memory[start:].copy_(values.flatten())
    return memory[start:].view(values.shape)


@check
@on_a_gpu
def weights_on_the_device_have_the_hash_that_they_have_on_the_host() -> str:
    """Of every element size, around a block and beyond what is hashed at once; then the speed."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        for count in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, AT_ONCE_BYTES + 3 * BLOCK_BYTES + 5):
            data = torch.randint(256, (8 * (count // 8 + 2),), dtype=torch.uint8).view(dtype)[1:]
            here, there = (weight_hash([("w", each)]) for each in (data, data.to(local_device())))
            assert here == there, f"{count} bytes of {dtype}"
    big = torch.randn(1 << 28, device=local_device())  # 1 GiB
    speeds = []
    for each in (big, big.cpu()):
        weight_hash([("w", each)])
        begun = time.monotonic()
        weight_hash([("w", each)])
        speeds.append(each.nbytes / 1e9 / (time.monotonic() - begun))
    return "{:.0f} GB/s on the device, {:.1f} GB/s on the host".format(*speeds)


@check
def a_checkpoint_of_one_stage_resumes_at_another() -> str:
    """Saved in the background at stage 3, loaded at 1."""
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(3, checkpoint={"async": True})
        train(engine, 2)
        assert engine.save_checkpoint(directory)
        train(engine, 4)
        engine.destroy()
        other = make_engine(1)
        path, _ = other.load_checkpoint(directory)
        assert path is not None
        train(other, 4)
        return equal({"straight on": engine.weight_hash(), "resumed": other.weight_hash()})


class Wide(nn.Module):
    """A model with a state of some size, and with buffers that its forward changes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(self.norm(batch)).square().mean()


@check
def a_background_save_copies_beside_forward_and_backward() -> str:
    """A state of 4 GB: how long the script is kept, and the bytes of a save that it waits for."""
    width, layers = (4096, 20) if HAS_GPU else (16, 2)
    data = list(torch.randn(64, width, generator=torch.Generator().manual_seed(3)))
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "checkpoint": {"async": True},
    }
    engine = zero_engine.initialize(Wide(width, layers), training_data=data, config=config)
    with tempfile.TemporaryDirectory() as directory:
        train(engine, 1)
        assert engine.save_checkpoint(f"{directory}/first")  # it allocates and pins the memory
        assert engine.wait_for_checkpoint()
        shutil.rmtree(f"{directory}/first")
        train(engine, 2)
        assert engine.save_checkpoint(f"{directory}/waited", blocking=True)
        begun = time.monotonic()
        assert engine.save_checkpoint(f"{directory}/beside")
        kept_ms = (time.monotonic() - begun) * 1e3
        train(engine, 4)
        assert engine.wait_for_checkpoint()
        engine.destroy()
        files = [
            next(Path(directory, each).glob("step-*/r00000.safetensors"))
            for each in ("waited", "beside")
        ]
        assert filecmp.cmp(*files, shallow=False), "not the bytes of a save that was waited for"
        size_gb = files[0].stat().st_size / 1e9
    if HAS_GPU:
        assert kept_ms <= 10, f"it kept the script for {kept_ms:.1f} ms, with {size_gb:.1f} GB"
    return f"{size_gb:.3f} GB: the script was kept for {kept_ms:.1f} ms; the same bytes"


@check
def state_in_host_memory_trains_as_on_the_device() -> str:
    """To the bits only on a CPU, whose kernel steps the optimizer there."""
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    return equal({turn: trained(2, **offloaded) for turn in (1, 2)})


@check
@on_a_gpu
def sums_in_host_memory_between_micro_steps_have_the_same_bits() -> str:
    """World 1 keeps up to three pieces of each gradient: none of them on a device without room."""
    here = trained(2, "bf16")
    with mock.patch.object(torch.cuda, "mem_get_info", return_value=(-(1 << 50), 0)):
        return equal({"here": here, "away": trained(2, "bf16")})


@check
@on_a_gpu
def additions_are_one_kernel_with_the_bits_of_doing_them_one_by_one() -> str:
    """In bf16 and fp32, with the compiler and without."""
    told = []
    for dtype in ("bf16", "fp32"):
        found = {}
        for switch in ("0", "1"):
            os.environ[fold.SWITCH] = switch
            found[switch] = trained(2, dtype)
        told.append(f"{dtype}: {equal(found)}")
    assert not fold.ON_GPU.is_broken, "some additions could not be compiled; the log says why"
    assert fold.ON_GPU.kernels
    return f"{len(fold.ON_GPU.kernels)} kernels; {'; '.join(told)}"


@check
@on_a_gpu
def nothing_reads_or_writes_outside_its_memory() -> str:
    """A short run under compute-sanitizer, if the machine has it."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return "not seen: there is no compute-sanitizer"
    # What torch asks of the driver and gets refused is no access to memory. Each tensor has memory
    # of its own: in the blocks of torch's allocator the neighbour's would be read without an error.
    options = ["--error-exitcode", "9", "--report-api-errors", "no"]
    ended = subprocess.run(
        [tool, *options, sys.executable, "-m", "tests.gpu", "--rank", "short"],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-2000:]
    return "stage 3, two steps: no error"


# ---- several processes ----


def _meet_alone(backend: str) -> None:
    leave_group()
    if HAS_GPU:
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _in_processes(world: int, job: str) -> dict[str, str]:
    """What every rank of a world prints at its end, which must be the same."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu", "--rank", job],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=100 if HAS_GPU else 1000)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), f"ranks ended with {ranks}"
    found = [json.loads(each.splitlines()[-1]) for each in told]
    assert all(one == other for one, other in pairwise(found)), found
    return dict(found[0])


def run_rank(job: str) -> None:
    """One rank of a check: prints its result as JSON."""
    if "RANK" in os.environ:  # one device, which NCCL does not share
        dist.init_process_group("cpu:gloo,cuda:gloo" if HAS_GPU else "gloo")
    if job == "short":
        engine = make_engine(3)
        train(engine, 2)
        return
    if job == "ddp":
        print(json.dumps({f"ddp of {dist.get_world_size()}": trained_by("ddp")}))
        return
    print(json.dumps({str(stage): trained(stage) for stage in (0, 2, 3)}))
