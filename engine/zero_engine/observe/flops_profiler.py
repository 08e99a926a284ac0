"""The number of floating-point operations of one step, and the rate at which rank 0 does them.

torch counts matrix products, convolutions and attention, as it dispatches them; nothing
elementwise. Source of the idea: DeepSpeed's flops profiler; torch.utils.flop_counter.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from zero_engine.config.schema import FlopsProfiler

_log = logging.getLogger(__name__)

_TOTAL = "Global"
"""torch's name for the sum over all modules."""


def now_s(device: torch.device) -> float:
    """The time when a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class Profile:
    """Counts the operations of one step of rank 0."""

    def __init__(self, settings: FlopsProfiler, rank: int, device: torch.device) -> None:
        self._settings = settings
        self._is_first_rank = rank == 0
        self._device = device
        self._flops: Counter[str] = Counter()
        """Operations in forward and in backward."""
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._modules: Counter[str] = Counter()
        """Operations of both by module."""
        self.of_forward = FlopCounterMode(display=False)
        """What the last forward of that step has done."""

    def _is_due(self, steps_done: int) -> bool:
        settings = self._settings
        return settings.enabled and self._is_first_rank and steps_done == settings.profile_step

    @contextmanager
    def measure(self, part: str, steps_done: int) -> Iterator[None]:
        """Count the operations in this context, if `steps_done` steps precede the profiled one."""
        if not self._is_due(steps_done):
            yield
            return
        begun_s = now_s(self._device)
        with FlopCounterMode(display=False) as counter:
            yield
        self._spent_s[part] += now_s(self._device) - begun_s
        self._flops[part] += counter.get_total_flops()
        if part == "forward":
            self.of_forward = counter
        for module, operations in counter.get_flop_counts().items():
            if module != _TOTAL:
                self._modules[module] += sum(operations.values())

    def watch_backward(self, loss: Tensor, steps_done: int) -> Tensor:
        """`loss`, whose plain `.backward()` is measured in the profiled step."""
        if not self._is_due(steps_done):
            return loss

        def backward(*args: Any, **kwargs: Any) -> None:
            with self.measure("backward", steps_done):
                Tensor.backward(loss, *args, **kwargs)

        # On this tensor alone: the script calls `.backward()` of what it got.
        vars(loss)["backward"] = backward  # found before the method of its class
        return loss

    def report(self, steps_done: int) -> None:
        """Log the counts at the end of the profiled step."""
        if not self._is_due(steps_done):
            return
        text = "\n".join(self.lines(steps_done + 1))
        _log.info("%s", text)
        if self._settings.output_file is not None:
            file = Path(self._settings.output_file)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n", encoding="utf-8")
            except OSError as error:  # a report is no reason to end a run
                _log.warning("flops_profiler.output_file: %s", error)

    def lines(self, step: int) -> list[str]:
        """One line for the step, then one for each module, the largest first, if detailed."""
        parts = ", ".join(
            f"{part} {flops / 1e9:.3f} GFLOP in {self._spent_s[part] * 1e3:.1f} ms"
            for part, flops in self._flops.items()
        )
        rate = sum(self._flops.values()) / max(sum(self._spent_s.values()), 1e-9)
        head = f"step {step} on rank 0: {parts}: {rate / 1e9:.1f} GFLOP/s"
        if not self._settings.detailed:
            return [head]
        depth = self._settings.module_depth
        return [
            head,
            *(
                f"  {module}: {flops / 1e9:.3f} GFLOP"
                for module, flops in self._modules.most_common()
                if depth < 0 or module.count(".") <= depth
            ),
        ]
