"""A process that trains in one config after the other and tells how much memory each took.

The peak of its resident memory is set back after the first step (/proc/self/clear_refs), so what
is read is that of steady training, above what the process had before the engine.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_deepspeed

WIDTH, LAYERS = 512, 24
PARAMETERS = LAYERS * WIDTH * (WIDTH + 1)


class Stack(nn.Module):
    """Layers of one size, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def resident(line: str) -> int:
    """Bytes: VmRSS is what there is, VmHWM the peak."""
    words = Path("/proc/self/status").read_text(encoding="ascii").split()
    return int(words[words.index(f"{line}:") + 1]) * 1024


class AnonymousPeak:
    """The largest anonymous memory of a process, looked at every millisecond.

    What is mapped from files is not in it: the kernel may drop that.
    """

    def __init__(self) -> None:
        self.most_bytes = self.before = resident("RssAnon")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self.most_bytes = max(self.most_bytes, resident("RssAnon"))

    def end(self) -> int:
        """Bytes above what there was before."""
        self._ended.set()
        self._thread.join()
        return self.most_bytes - self.before


def peak(settings: dict[str, Any]) -> int:
    """The peak of two steps, after one, above what there was before."""
    gc.collect()
    before = resident("VmRSS")
    dtype = torch.bfloat16 if settings["bf16"]["enabled"] else torch.float32
    engine, *_ = zero_deepspeed.initialize(model=Stack(), config=settings)
    for step in range(3):
        if step == 1:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
        engine.backward(engine(torch.ones(1, WIDTH, dtype=dtype)))
        engine.step()
    return resident("VmHWM") - before


def main() -> None:
    """Settings on standard input, peaks on standard output."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps([peak(settings) for settings in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
