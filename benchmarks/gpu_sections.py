"""The sections of `gpu.py`, one in each process; prints a JSON object for each figure."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled
from training_model import GPT, Shape, batch

import zero_engine
from zero_comm.worker.distributed import leave_group

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
logging.getLogger("zero_engine").setLevel(logging.ERROR)  # the loader is our own
SMALL = "--small" in sys.argv
SHAPE = (
    Shape(width=128, layers=2, length=64, vocabulary=512, micro=2)
    if SMALL
    else Shape(width=1024, layers=24, length=1024, vocabulary=32000, micro=8)
)
DTYPES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1024}},
}
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STAGES = (0, 1, 2, 3)
CLIP, RATE = 1.0, 1e-4
Step = Callable[[int], object]


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def synchronize() -> None:
    """Wait for the stream of the script; copies of a save beside it do not hold it up."""
    if GPU:
        torch.cuda.current_stream().synchronize()


def timed_ms(call: Callable[[], object]) -> float:
    synchronize()
    begun = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - begun) * 1e3


def in_turns(systems: dict[str, Step], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """The milliseconds of each step of each system, whose steps follow each other in turns."""
    found: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(warm_up + rounds):
        for name, step in systems.items():
            took = timed_ms(partial(step, turn))
            if turn >= warm_up:
                found[name].append(took)
    return found


def summary(times: list[float]) -> dict[str, float]:
    return {
        "ms": round(statistics.median(times), 3),
        "from": round(min(times), 3),
        "to": round(max(times), 3),
    }


def model() -> GPT:
    torch.manual_seed(0)
    with DEVICE:  # a third of a billion random numbers take a CPU seconds
        return GPT(SHAPE)


def tokens(step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(SHAPE, step, micro)
    return inputs.to(DEVICE), targets.to(DEVICE)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, fused=GPU)


def engine(stage: int, dtype: str, micros: int = 1, **more: Any) -> Any:
    config = {
        "train_batch_size": SHAPE.micro * micros * _world(),
        "train_micro_batch_size_per_gpu": SHAPE.micro,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        # As `plain` beside it: torch has these switches once in a process.
        "elastic": {"deterministic": "error"},
        **DTYPES[dtype],
        **more,
    }
    return zero_engine.initialize(model(), adamw, config=config)


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def step_of(of: Any, micros: int = 1) -> Step:
    rank = int(os.environ.get("RANK", "0"))

    def step(turn: int) -> None:
        for micro in range(micros):
            of.backward(of(*tokens(turn, micro * _world() + rank)))
            of.step()

    return step


def plain(dtype: str) -> Step:
    """The same step in plain torch: weights of the narrow type, masters in fp32."""
    net = model()
    wide = [nn.Parameter(param.detach().clone()) for param in net.parameters()]
    narrow = dtype != "fp32"
    masters: list[nn.Parameter] = wide if narrow else list(net.parameters())
    net.to(NARROW[dtype])
    optimizer, scale = adamw(masters), 1024.0 if dtype == "fp16" else 1.0

    def step(turn: int) -> None:
        (net(*tokens(turn)) * scale).backward()
        if narrow:
            for master, param in zip(masters, net.parameters(), strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float().div_(scale), None
        nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        if narrow:
            with torch.no_grad():
                torch._foreach_copy_(list(net.parameters()), masters)
        optimizer.zero_grad()

    return step


# ---- sections ----


def overhead() -> None:
    """World 1, stages 0-3, beside plain torch; the goal is 1.02 times its time."""
    for dtype in DTYPES:
        engines = {stage: engine(stage, dtype) for stage in STAGES}
        systems = {"plain": plain(dtype)} | {
            f"stage {stage}": step_of(each) for stage, each in engines.items()
        }
        times = in_turns(systems, 3 if SMALL else 10)
        floor = statistics.median(times["plain"])
        for name, each in times.items():
            ratio = round(statistics.median(each) / floor, 4)
            tell(dtype=dtype, system=name, ratio=ratio, **summary(each))
        hashes = {each.weight_hash()[:16] for each in engines.values()}
        tell(dtype=dtype, stages_have_one_hash=len(hashes) == 1, hashes=sorted(hashes))
        for each in engines.values():
            each.destroy()
        del engines, systems
        free()


def free() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def determinism() -> None:
    """The sum: ordered or native. Kernels: as they are, or repeatable; do replays agree?"""
    micros = 4
    sums = {
        name: step_of(engine(2, "bf16", micros, elastic={"reduction": name}), micros)
        for name in ("ordered", "native")
    }
    for name, times in in_turns(sums, 3 if SMALL else 8).items():
        tell(sum=name, micro_batches=micros, **summary(times))
    del sums
    free()
    for switch in ("off", "run-to-run"):
        torch.use_deterministic_algorithms(switch != "off")
        for attention, backend in ATTENTION.items():
            for compiled in (False, True):
                _replay(switch, attention, backend, compiled=compiled)


def _replay(switch: str, attention: str, backend: SDPBackend, *, compiled: bool) -> None:
    net = model().to(torch.bfloat16)
    # What is compiled has the attention in it that was chosen then, and is used for every model.
    torch.compiler.reset()
    if compiled:
        for block in net.blocks:
            block.compile()
    shown = {"switch": switch, "attention": attention, "compiled": compiled}

    def run() -> str:
        net.zero_grad()
        with sdpa_kernel(backend) if GPU else nullcontext():
            net(*tokens(0)).backward()
        return digest(param.grad for param in net.parameters() if param.grad is not None)

    try:
        run()
        hashes = {run() for _ in range(3)}
        times = [timed_ms(lambda: _backward(net, backend)) for _ in range(3 if SMALL else 6)]
        tell(**shown, replays_agree=len(hashes) == 1, **summary(times))
    except RuntimeError as error:  # an operator that refuses, or a backend that is not there
        tell(**shown, refused=str(error).splitlines()[0][:120])


def _backward(net: GPT, backend: SDPBackend) -> None:
    with sdpa_kernel(backend) if GPU else nullcontext():
        net(*tokens(0)).backward()


def digest(tensors: Iterator[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def processes() -> None:
    """Ranks that share the device over gloo: hashes at each world; and from abort to step."""
    for world in (1, 2, 4):
        port = 29400 + os.getpid() % 500 + world
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", *["--small"] * SMALL],
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
        told = [rank.communicate()[0] for rank in ranks]
        tell(world=world, **json.loads(told[0].splitlines()[-1]))


def rank() -> None:
    """One of them: 4 micro-batches a step in all, whatever the world."""
    dist.init_process_group("cpu:gloo,cuda:gloo" if GPU else "gloo")
    micros = 4 // _world()
    of = engine(2, "bf16", micros)
    step = step_of(of, micros)
    times = in_turns({"": step}, 3)[""]
    found = {"hash": of.weight_hash()[:16], **summary(times)}
    begun = time.perf_counter()
    leave_group()
    found["abort_ms"] = round((time.perf_counter() - begun) * 1e3, 1)
    tell(**found)


def saves() -> None:
    """How long a save in the background keeps training, beside the limits of the link."""
    of = engine(2, "bf16")
    step = step_of(of)
    state = sum(p.numel() for p in of.module.parameters()) * 12
    alone = in_turns({"": step}, 5)[""]
    with room(4 * state) as directory:
        for turn in range(3):
            stall = timed_ms(lambda: of.save_checkpoint(str(directory), blocking=False))
            during = [timed_ms(partial(step, number)) for number in range(5)]
            of.wait_for_checkpoint()
            tell(
                save=turn,
                state_gb=round(state / 1e9, 2),
                stall_ms=round(stall, 2),
                next_step_ms=round(during[0], 2),
                step_ms=round(statistics.median(during), 2),
                step_without_ms=round(statistics.median(alone), 2),
            )
    copies(min(state, 4 << 30))


@contextmanager
def room(size: int) -> Iterator[Path]:
    """A directory for so many bytes: in memory, if there is as much."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > size
    directory = Path(tempfile.mkdtemp(dir=memory if fits else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def copies(size: int) -> None:
    """The limits: copies between device and host, in pinned and in pageable memory."""
    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    for pinned in (True, False) if GPU else (False,):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        for name, call in (("to host", here.copy_), ("to device", there.copy_)):
            source = there if name == "to host" else here
            took = min(timed_ms(partial(call, source, non_blocking=pinned)) for _ in range(3))
            tell(copy=name, pinned=pinned, gb_per_s=round(size / took / 1e6, 2))


def offload() -> None:
    """Steps with optimizer state in host memory and on a disk, beside the limits of both."""
    with tempfile.TemporaryDirectory() as disk:
        places: dict[str, dict[str, Any]] = {
            "device": {},
            "cpu": {"offload_optimizer": {"device": "cpu", "pin_memory": GPU}},
            "nvme": {"offload_optimizer": {"device": "nvme", "nvme_path": str(disk)}},
        }
        for name, more in places.items():
            of = engine(2, "bf16", zero_optimization={"stage": 2, **more})
            times = in_turns({"": step_of(of)}, 3, warm_up=1)[""]
            state = sum(p.numel() for p in of.module.parameters()) * 12
            tell(state_in=name, state_gb=round(state / 1e9, 2), **summary(times))
            of.destroy()
            del of
            free()
    copies(1 << (24 if SMALL else 30))
    block = bytes(1 << 24)
    with tempfile.NamedTemporaryFile() as file:
        begun = time.perf_counter()
        for _ in range(2 if SMALL else 64):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        tell(disk_write_gb_per_s=round(file.tell() / (time.perf_counter() - begun) / 1e9, 2))


def profile() -> None:
    """Where the time of a step at stage 3 goes."""
    step = step_of(engine(3, "bf16"))
    for turn in range(3):
        step(turn)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * GPU
    with profiled(activities=activities) as seen:
        took = timed_ms(partial(step, 3))
    averages = seen.key_averages()
    # An operator has the time of its kernels as well, which have rows of their own.
    kind = DeviceType.CUDA if GPU else DeviceType.CPU
    rows = [row for row in averages if row.device_type == kind and not row.is_user_annotation]
    busy = "self_device_time_total" if GPU else "self_cpu_time_total"
    total = sum(getattr(row, busy) for row in rows) / 1e3
    tell(step_ms=round(took, 2), busy_ms=round(total, 2))
    for row in sorted(rows, key=lambda row: -getattr(row, busy))[:12]:
        tell(kernel=row.key[:60], calls=row.count, ms=round(getattr(row, busy) / 1e3, 3))
    waits = [row for row in averages if "Synchronize" in row.key or row.key == "aten::item"]
    tell(host_waits={row.key: row.count for row in waits})


SECTIONS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (overhead, determinism, processes, saves, offload, profile, rank)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--small", action="store_true")
    section = parser.parse_args().section
    if section != "rank":
        name = torch.cuda.get_device_name(0) if GPU else "cpu"
        tell(torch=torch.__version__, device=name, cuda=torch.version.cuda)
    SECTIONS[section]()


if __name__ == "__main__":
    main()
