"""Ranks that make a model too large for each of them; each tells how much memory that took.

What is read is the peak of the resident memory above what the process had before, and an address
space that a whole model would break is a limit meanwhile.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once: each rank would import it
import torch.distributed as dist
from torch import Tensor, nn

import zero_deepspeed
from tests.numerics.peak_memory import AnonymousPeak, resident
from zero_engine.parameters import construction


class Stack(nn.Module):
    """Layers of one size, each a unit."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def make(given: dict[str, Any]) -> Any:
    """An engine of the model, at stage 3."""
    construction.OPEN_ELEMENTS = given["width"] * (given["width"] + 1)  # a unit
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    width, layers = given["width"], given["layers"]
    if given["how"] == "init":
        with zero_deepspeed.zero.Init():
            model = Stack(width, layers)
    elif given["how"] == "again":
        model = given["module"]
    elif given["how"] in ("meta", "load", "dictionary"):
        with torch.device("meta"):
            model = Stack(width, layers)
    else:
        model = Stack(width, layers)
    if given["how"] == "load":
        settings["elastic"] = {"initial_weights": "checkpoint"}
    engine = zero_deepspeed.initialize(model=model, config=settings)[0]
    if given["how"] == "load":
        engine.load_checkpoint(given["directory"])
    if given["how"] == "dictionary":
        engine.load_state_dict(given["weights"])
    return engine


def measure(given: dict[str, Any], rank: int, store: str) -> dict[str, int]:
    """The peaks of one rank in bytes: until there is an engine, and of its export."""
    world = given["world"]
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    small = {"width": 8, "layers": 2, "how": "meta"}
    make(small).save_16bit_model(given["directory"], "small.safetensors")  # libraries, threads
    if given["how"] == "load":
        make(given | {"how": "meta"}).save_checkpoint(given["directory"])
    if given["how"] == "again":
        given["module"] = make(given | {"how": "meta"}).module
    if given["how"] == "dictionary":
        make(given | {"how": "meta"}).save_16bit_model(given["directory"], "given.bin")
        path = os.path.join(given["directory"], "given.bin")
        mapped = torch.load(path, mmap=True) if rank == 0 else {}
        given["weights"] = {f"module.{name}": value for name, value in mapped.items()}
    gc.collect()
    before = resident("VmRSS")
    held = resident("VmData") + given["limit_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (held, held))
    peaks = {}
    Path("/proc/self/clear_refs").write_text("5")
    peak = AnonymousPeak()
    engine = make(given)
    peaks["anonymous"] = peak.end()
    peaks["made"] = resident("VmHWM") - before
    if given["save"]:
        gc.collect()
        peak = AnonymousPeak()  # a .bin is in a file before it is written
        engine.save_16bit_model(given["directory"], given["save"])
        peaks["saved"] = peak.end()
    dist.barrier()
    return peaks


def run_ranks(job: Callable[..., dict[str, Any]], given: dict[str, Any], store: str) -> Any:
    """Run `job(given, rank, store)` in a fork for each rank: exit codes, and what each has told."""
    reads, writes = os.pipe()
    children = []
    for rank in range(given["world"]):
        if not (child := os.fork()):
            _run_rank(job, given, rank, store, writes)
        children.append(child)
    os.close(writes)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    with os.fdopen(reads) as pipe:
        found = [json.loads(line) for line in pipe]
    return {"codes": codes, "ranks": sorted(found, key=lambda each: each["rank"])}


def _run_rank(
    job: Callable[..., dict[str, Any]], given: dict[str, Any], rank: int, store: str, out: int
) -> None:
    """One rank, to its end: the process ends here."""
    code = 1
    try:
        found = job(given, rank, store)
        os.write(out, (json.dumps({"rank": rank, **found}) + "\n").encode())
        code = 0
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    os._exit(code)


def main() -> None:
    """What to make on standard input, the peaks of all ranks on standard output."""
    given = json.load(sys.stdin)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        given["directory"] = directory
        print(json.dumps(run_ranks(measure, given, os.path.join(directory, "store"))))


if __name__ == "__main__":
    main()
