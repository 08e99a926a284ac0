"""The additions of one call as one pass over memory: in a CPU's cache, or as one kernel of a GPU.

On a GPU each list of additions becomes one kernel, by torch.compile, that reads every gradient and
every sum once and writes every sum once; one after the other, additions read and write several
times as much. The bits are those of `run_one_by_one`: where a kernel cannot be made, or differs,
additions run one by one, with a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, fx

from zero_comm.sums.additions import ROUNDED, Addition, Memory, run_one_by_one
from zero_comm.sums.buffer_pool import BufferPool

_log = logging.getLogger(__name__)

SWITCH = "ZERO_FOLD"
_MOST_KERNELS = 64
"""The lists of additions repeat from step to step: three ranks and blocks of 8 have twelve."""
_OPTIONS: dict[str, Any] = {"triton.autotune_pointwise": False, "compile_threads": 1}
"""Nothing is timed on the device, and no process is started, for one small kernel."""
_SAMPLE = 1 << 10

_Key = tuple[tuple[Addition, ...], tuple[tuple[Memory, int, torch.dtype], ...], torch.device]


def run_additions(
    additions: Sequence[Addition],
    memory: Mapping[Memory, Tensor],
    dtype: torch.dtype,
    pool: BufferPool,
) -> None:
    """Do some additions in their order, at least one.

    `memory` is what they name, flat and of one length, `dtype` that of sums.
    """
    device = next(iter(memory.values())).device.type
    # A kernel adds, and nothing else: a division could be compiled to another one.
    rounds = any(addition.right == ROUNDED for addition in additions)
    # One is a kernel by itself, which is begun in a tenth of the time of a compiled one.
    alone = len(additions) == 1
    if rounds or alone or device != "cuda" or os.environ.get(SWITCH, "1") == "0":
        run_one_by_one(additions, memory, dtype, pool)
    else:
        ON_GPU.run(additions, memory, dtype, pool)


class Fold:
    """Runs additions as kernels, each made once for all lengths."""

    def __init__(
        self, backend: str | Callable[..., Any] = "inductor", most: int = _MOST_KERNELS
    ) -> None:
        self._backend = backend
        self._most = most
        self.is_broken = False
        """Whether one could not be made, or was wrong: from then on additions run one by one."""
        self.kernels: dict[_Key, Callable[..., object]] = {}

    def run(
        self,
        additions: Sequence[Addition],
        memory: Mapping[Memory, Tensor],
        dtype: torch.dtype,
        pool: BufferPool,
    ) -> None:
        """See `run_additions`."""
        named = {each: memory[each] for addition in additions for each in addition if each}
        places = _places(named)
        key = (
            tuple(additions),
            tuple((name, places[name], tensor.dtype) for name, tensor in named.items()),
            next(iter(named.values())).device,
        )
        try:
            kernel = self._kernel(key, dtype)
        except Exception as error:  # whatever a compiler does not like; samples alone are written
            self._give_up(f"they cannot be compiled: {shorten(str(error), 300)}")
            kernel = None
        if kernel is not None:
            try:
                with torch.no_grad():
                    kernel(*{places[name]: tensor for name, tensor in named.items()}.values())
                return
            except Exception as error:
                from torch._dynamo.exc import TorchDynamoException  # slow, and imported by now

                # Not compiled again, for another length, it has not run. Else it may have written:
                # nothing is added a second time.
                if not isinstance(error, TorchDynamoException):
                    raise
                self._give_up(f"they cannot be compiled: {shorten(str(error), 300)}")
        run_one_by_one(additions, memory, dtype, pool)

    def _kernel(self, key: _Key, dtype: torch.dtype) -> Callable[..., object] | None:
        # Bounded: a script whose steps all differ would compile in each.
        if self.is_broken or (key not in self.kernels and len(self.kernels) >= self._most):
            return None
        if key not in self.kernels:
            # Not with fullgraph: where torch does not compile (the modes that count operations), it
            # would run the additions as they are, and raise afterwards. And no module, for which
            # hooks of all modules would be called.
            kernel = torch.compile(
                graph_of(key[0], key[1], dtype).forward,
                backend=self._backend,
                dynamic=True,
                options=_OPTIONS if self._backend == "inductor" else None,
            )
            # Compared once, on numbers of all kinds: a compiler may be wrong on one device alone.
            with _beside(key[2]):
                differs = _differs(kernel, key, dtype)
            if differs:
                self._give_up("the compiled kernel gives other bits on this device")
                return None
            self.kernels[key] = kernel
        return self.kernels[key]

    def _give_up(self, reason: str) -> None:
        self.is_broken = True
        _log.warning(
            "gradients are added one by one, which gives the same sums in more time, because %s; "
            "%s=0 chooses this without a warning",
            *(reason, SWITCH),
        )


ON_GPU = Fold()


def _places(memory: Mapping[Memory, Tensor]) -> dict[Memory, int]:
    """The number of the place of each: the total may lie where a gradient does."""
    places: dict[int, int] = {}
    return {name: places.setdefault(t.data_ptr(), len(places)) for name, t in memory.items()}


def graph_of(
    additions: Sequence[Addition],
    places: Sequence[tuple[Memory, int, torch.dtype]],
    dtype: torch.dtype,
) -> fx.GraphModule:
    """Additions as a graph of places, which reads all that it reads before it writes.

    Each place has a number and a dtype.
    """
    graph = fx.Graph()
    inputs = [graph.placeholder(f"place_{number}") for number in range(_count(places))]
    values = {
        # A copy: what is not widened would be read again after it has been written.
        name: graph.call_function(torch.clone, (inputs[number],))
        if kind == dtype
        else graph.call_method("to", (inputs[number], dtype))
        for name, number, kind in places
    }
    written: dict[Memory, int] = {}
    at = {name: number for name, number, _ in places}
    # Nothing but additions, in their order: a compiler has nothing to contract or to reassociate.
    for target, left, right in additions:
        value = values[left]
        if right is not None:
            value = graph.call_function(torch.add, (value, values[right]))
        values[target] = value
        if target.kind != "given":
            written[target] = at[target]
    for name, number in written.items():
        graph.call_method("copy_", (inputs[number], values[name]))
    graph.output(())
    return fx.GraphModule({}, graph)


def _count(places: Sequence[tuple[Memory, int, torch.dtype]]) -> int:
    return 1 + max(number for _, number, _ in places)


def _beside(device: torch.device) -> AbstractContextManager[object]:
    # A stream of its own: the host waits here for nothing that waits for another rank.
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _differs(kernel: Callable[..., object], key: _Key, dtype: torch.dtype) -> bool:
    """Whether a kernel and the additions one by one come to other bits; NaN is NaN."""
    additions, places, device = key
    kinds = {number: kind for _, number, kind in places}
    one = [_sample(number, kinds[number]).to(device) for number in range(_count(places))]
    other = [each.clone() for each in one]
    with torch.no_grad():
        kernel(*one)
    memory = {name: other[number] for name, number, _ in places}
    run_one_by_one(additions, memory, dtype, BufferPool(device))
    written = {target: at for target, *_ in additions for name, at, _ in places if name == target}
    return any(
        not torch.equal(_bits(one[number]), _bits(other[number]))
        for name, number in written.items()
        if name.kind != "given"
    )


def _sample(seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes, NaN and infinities among them; below the normal ones; of one size."""
    draw, whole = torch.Generator("cpu").manual_seed(seed), (-(1 << 31), 1 << 31)
    bits = torch.randint(*whole, (2, _SAMPLE), generator=draw, dtype=torch.int32, device="cpu")
    # Without an exponent: a device may take numbers below the normal ones for zero.
    bits[1] &= -(1 << 31) | (1 << 23) - 1
    alike = torch.randn(2 * _SAMPLE, generator=draw, device="cpu")
    return torch.cat([bits.view(torch.float32).flatten(), alike]).to(dtype)


def _bits(numbers: Tensor) -> Tensor:
    is_double = numbers.dtype == torch.float64
    wide = numbers if is_double else numbers.float()
    return torch.where(wide.isnan(), torch.nan, wide).view(
        torch.int64 if is_double else torch.int32
    )
