"""Counts what a model computes.

Source of the names: deepspeed.profiling.flops_profiler.profiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero_engine.parameters.access import owner_of

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


class FlopsProfiler:
    """Counts the operations of a module's forwards between `start_profile` and `stop_profile`."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0):
        del ds_engine, recompute_fwd_factor
        self.model = model
        self.started = False
        self._counter = FlopCounterMode(display=False)
        self._begun_s = self._spent_s = 0.0

    @classmethod
    def of_engine(cls, model: nn.Module, counted: FlopCounterMode) -> FlopsProfiler:
        """The counts that an engine has made of its module."""
        shown = cls(model)
        shown._counter = counted
        return shown

    @property
    def flops(self) -> int:
        """The operations."""
        return self._counter.get_total_flops()

    @property
    def macs(self) -> int:
        """The multiplications that are added up."""
        return self.flops // 2

    @property
    def params(self) -> int:
        """The parameters, whole ones also at stage 3."""
        return sum(_numel(param) for param in self.model.parameters())

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Begin to count; torch counts operations, so `ignore_list` has no effect."""
        del ignore_list
        self.reset_profile()
        self._counter.__enter__()
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting; the counts stay."""
        if self.started:
            self._counter.__exit__(None, None, None)
            self._spent_s = perf_counter() - self._begun_s
            self.started = False

    def reset_profile(self) -> None:
        """Forget the counts."""
        self.stop_profile()
        self._counter = FlopCounterMode(display=False)
        self._begun_s, self._spent_s = perf_counter(), 0.0

    def end_profile(self) -> None:
        """Stop counting, and forget the counts."""
        self.stop_profile()
        self._counter = FlopCounterMode(display=False)

    def get_total_flops(self, as_string: bool = False) -> Any:
        """The operations, as a number or as text."""
        return flops_to_string(self.flops) if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """The multiplications that are added up: half of the operations."""
        return macs_to_string(self.macs) if as_string else self.macs

    def get_total_params(self, as_string: bool = False) -> Any:
        """The parameters, whole ones also at stage 3."""
        return params_to_string(self.params) if as_string else self.params

    def get_total_duration(self, as_string: bool = False) -> Any:
        """The time between start and stop, in seconds."""
        return f"{self._spent_s * 1e3:.2f} ms" if as_string else self._spent_s

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the counts, with `detailed` by module, or write them to a file."""
        del top_modules
        lines = [
            f"step {profile_step}: {self.get_total_params(as_string=True)} parameters, "
            f"{self.get_total_flops(as_string=True)}, {self.get_total_macs(as_string=True)} in "
            f"{self.get_total_duration(as_string=True)}"
        ]
        for name, by_operation in self._counter.get_flop_counts().items() if detailed else ():
            if name != "Global" and (module_depth < 0 or name.count(".") <= module_depth):
                lines.append(f"  {name}: {flops_to_string(sum(by_operation.values()))}")
        text = "\n".join(lines)
        if output_file is None:
            print(text)
        else:
            Path(output_file).write_text(text + "\n", encoding="utf-8")


def _numel(param: nn.Parameter) -> int:
    owner = owner_of(param)
    return param.numel() if owner is None else owner.slot.numel


def get_model_profile(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """The operations, the multiply-adds and the parameters of one call of a model.

    Args:
        model: The model.
        input_shape: The shape of an input of ones; otherwise `args` and `kwargs` are given.
        args: Positional arguments of the call.
        kwargs: Named arguments of the call.
        print_profile: Print the counts.
        detailed: Print those of each module.
        module_depth: Down to this depth; -1: all.
        top_modules: Without effect.
        warm_up: Calls before the one that is counted.
        as_string: Return text.
        output_file: Write the counts there instead.
        ignore_modules: Without effect.
        mode: "forward" or "generate", the method that is called.
    """
    if input_shape is not None:
        first = next(model.parameters(), torch.empty(0))
        args = [torch.ones(input_shape, dtype=first.dtype, device=first.device)]
    call: Any = model.generate if mode == "generate" else model
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_modules)
    call(*args, **(kwargs or {}))
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A number with its unit, of thousands."""
    factor, unit = next(
        (each for each in _UNITS if (units is None and abs(num) >= each[0]) or units == each[1]),
        (1.0, ""),
    )
    return f"{num / factor:.{precision}f} {unit}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations as text."""
    return f"{number_to_string(flops, units, precision)}FLOPs"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds as text."""
    return f"{number_to_string(macs, units, precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters as text."""
    return number_to_string(params_num, units, precision).rstrip()
