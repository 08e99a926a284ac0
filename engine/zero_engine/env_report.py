"""What this machine has for training: `python -m zero_engine.env_report`.

Source of the idea: DeepSpeed's ds_report.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from zero_engine.accelerator import get_accelerator

_PACKAGES = (
    "zero-elastic",
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "tensorboard",
    "wandb",
)
_GIB = 1 << 30


def main() -> int:
    """Print the report."""
    width = max(len(name) for name, _ in _facts())
    for name, value in _facts():
        print(f"{name:<{width}}  {value}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield from ((name, _version(name)) for name in _PACKAGES)
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    yield "backends", ", ".join(name for name, there in backends.items() if there) or "none"
    device = get_accelerator()
    count = device.device_count() if torch.cuda.is_available() else os.cpu_count()
    yield "device", f"{count} x {device.device_name()}"
    free, total = device.available_memory() / _GIB, device.total_memory() / _GIB
    yield "memory", f"{free:.1f} of {total:.1f} GiB free"
    yield "threads", f"{torch.get_num_threads()} per process; results are equal if they are"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
