"""One rank of one system for `training.py`; writes what it measured as JSON.

Runs under any Python that has torch, and DeepSpeed for its stages: it imports nothing of ours
but the engine, and that only for our own stages and the floor.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from counters import begin_memory, resident_bytes
from stock_systems import STOCK
from torch import nn
from training_model import GPT, Shape, batch
from training_systems import SYSTEMS, Setting

INTERFACES = {"between": "wire0", "inside": "lo"}
"""Of a node's network namespace."""


def sent_bytes(interface: str) -> int:
    """Bytes that have left through an interface of this network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def all_sent_bytes() -> dict[str, int]:
    return {name: sent_bytes(interface) for name, interface in INTERFACES.items()}


def machine_busy_s() -> float:
    """Seconds of CPU that everything on this machine has used so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def count(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def measure(system: str, task: dict[str, Any]) -> dict[str, Any]:
    rank, accumulation = dist.get_rank(), task["accumulation"]
    systems = {**SYSTEMS, **STOCK}
    importlib.import_module(systems[system].package)
    baseline = begin_memory()
    torch.manual_seed(0)
    shape = Shape(**task["shape"])
    model = GPT(shape)
    parameters, blocks = count(model), [count(block) for block in model.blocks]
    setting = Setting(
        nodes=tuple(task["nodes"]),
        shape=shape,
        accumulation=accumulation,
        bf16=task["dtype"] == "bf16",
    )
    step = systems[system].make(model, setting)
    steps: list[dict[str, float]] = []
    sent_before = dict.fromkeys(INTERFACES, 0)
    for number in range(task["warmup"] + task["steps"]):
        if number == task["warmup"]:
            dist.barrier()
            sent_before = all_sent_bytes()
        begun, cpu, busy = time.perf_counter(), time.process_time(), machine_busy_s()
        loss = step([batch(shape, number * accumulation + k, rank) for k in range(accumulation)])
        steps.append(
            {
                "wall_s": time.perf_counter() - begun,
                "cpu_s": time.process_time() - cpu,
                "machine_s": machine_busy_s() - busy,
                "loss": loss,
            }
        )
    dist.barrier()
    return {
        "steps": steps[task["warmup"] :],
        "sent_bytes": {name: sent - sent_before[name] for name, sent in all_sent_bytes().items()},
        "peak_bytes": resident_bytes("VmHWM:") - baseline,
        "parameters": parameters,
        "largest_unit": max(blocks),
        "root": parameters - sum(blocks),
    }


def main() -> None:
    system, path, task = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = measure(system, task)
    path.write_text(json.dumps(measured))
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads may not end by themselves


if __name__ == "__main__":
    main()
