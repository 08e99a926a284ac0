"""DeepSpeed's `deepspeed.accelerator`: the device of this worker, under names for any device.

A script that uses it runs unchanged with and without a GPU. Scripts call `get_accelerator()`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_comm.worker.distributed import local_device
from zero_contract.errors import ConfigError

__all__ = ["Accelerator", "get_accelerator", "is_current_accelerator_supported"]


@cache
def get_accelerator() -> Accelerator:
    """The accelerator of this worker: CUDA if there is a GPU, else the CPU."""
    return Cuda() if torch.cuda.is_available() else Accelerator()


def is_current_accelerator_supported() -> bool:
    """Whether the engine works on this worker's accelerator: it does."""
    return True


class Accelerator:
    """The CPU."""

    _name = "cpu"

    # ---- the device ----

    def device_name(self, device_index: int | None = None) -> str:
        """The name for `.to()`; a CPU has no index."""
        del device_index
        return self._name

    def current_device_name(self) -> str:
        """The device that this worker computes on."""
        return str(local_device())

    def current_device(self) -> int | str:
        """The index of the current device; on a CPU the local rank, as in DeepSpeed."""
        return os.environ.get("LOCAL_RANK", "0")

    def device(self, device_index: int | None = None) -> Any:
        """The device as a context."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Make a device the current one; a CPU has one only."""

    def device_count(self) -> int:
        """The number of devices on this node; a CPU counts as one for every worker."""
        # LOCAL_SIZE: as DeepSpeed's launcher and its users name it
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")

    def is_available(self) -> bool:
        """Whether the device can be used."""
        return True

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed for the device."""
        return "gloo"

    # ---- dtypes ----

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return True

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes to train in."""
        return [torch.float32, torch.bfloat16, torch.float16]

    # ---- synchronization and random numbers ----

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until all work of the device is done; a CPU has none left."""

    def is_synchronized_device(self) -> bool:
        """Whether an operation has ended when its call returns: on a CPU."""
        return True

    use_host_timers = is_synchronized_device
    resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    @property
    def Stream(self) -> Any:  # noqa: N802 - DeepSpeed's name, as are the next ones
        """The class of streams; a CPU has none."""
        return None

    @property
    def Event(self) -> Any:  # noqa: N802
        """The class of events; a CPU has none."""
        return None

    def stream(self, stream: Any) -> Any:
        """A context in which a stream is the current one."""
        del stream
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """The current stream; a CPU has none."""

    def default_stream(self, device_index: int | None = None) -> Any:
        """The default stream; a CPU has none."""

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin a range of the device's profiler; a CPU has none."""

    def range_pop(self, domain: Any = None) -> None:
        """End the range."""

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call a function when the device is ready; a CPU is."""
        return callback()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of the device's random numbers."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Replace the state of the device's random numbers."""
        torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of the device's random numbers."""
        return torch.default_generator

    def manual_seed(self, seed: int) -> None:
        """Seed the device's random numbers."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """The seed of the device's random numbers."""
        return torch.initial_seed()

    def random(self) -> Any:
        """The module of the device's random numbers."""
        return torch.random

    # ---- memory, in bytes ----

    def empty_cache(self) -> None:
        """Free cached memory; a CPU caches none."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """The memory in use: on a CPU, by this process."""
        # The resident memory stands for that of a device.
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    memory_reserved = memory_allocated
    memory_cached = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of the memory in use."""
        # The kernel updates the peak a little later than the memory in use.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(peak, self.memory_allocated())

    max_memory_reserved = max_memory_allocated
    max_memory_cached = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """The memory in use and its peak, by torch's names."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(device_index),
            "allocated_bytes.all.peak": self.max_memory_allocated(device_index),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """The memory of the device."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        """The free memory."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peak; that of a process cannot be reset."""

    reset_max_memory_allocated = reset_peak_memory_stats
    reset_max_memory_cached = reset_peak_memory_stats

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A tensor from which the device copies faster."""
        del align_bytes
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the device copies faster from a tensor."""
        return tensor.is_pinned()

    # ---- tensors of the device by their dtype, graphs ----

    BFloat16Tensor, ByteTensor = torch.BFloat16Tensor, torch.ByteTensor
    DoubleTensor, FloatTensor, HalfTensor = torch.DoubleTensor, torch.FloatTensor, torch.HalfTensor
    IntTensor, LongTensor = torch.IntTensor, torch.LongTensor

    def is_triton_supported(self) -> bool:
        """Whether triton compiles for the device."""
        return False

    def create_graph(self) -> Any:
        """A graph of device operations; a CPU has none."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """A context whose operations a graph records."""
        del graph, pool, stream
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Run a graph."""

    # ---- compilers, and variables of the environment ----

    _compile_backend = "inductor"

    def amp(self) -> Any:
        """The module of autocast for the device."""
        return getattr(torch, self._name).amp

    def get_compile_backend(self) -> str:
        """The backend to give to torch.compile."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend to give to torch.compile."""
        if backend not in (known := torch.compiler.list_backends(exclude_tags=())):
            raise ConfigError(f"set_compile_backend({backend!r}): give one of {', '.join(known)}")
        self._compile_backend = backend

    def visible_devices_envs(self) -> list[str]:
        """The variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: Iterable[int]
    ) -> None:
        """Write these variables to an environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """The first letters of variables that a launcher hands to other nodes."""
        return ["NCCL"] if self.communication_backend_name() == "nccl" else []


class Cuda(Accelerator):
    """An NVIDIA or AMD GPU, through torch.cuda."""

    _name = "cuda"

    def __getattribute__(self, name: str) -> Any:
        # torch.cuda has the same names for the rest. Not `__getattr__`: the class of the CPU, from
        # which this one derives, has them, too.
        if name in _TORCH_CUDA:
            return getattr(torch.cuda, name)
        return super().__getattribute__(name)

    def device_name(self, device_index: int | None = None) -> str:
        """cuda:N, or cuda for the current one."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which the device is the current one."""
        return torch.cuda.device(self.current_device() if device_index is None else device_index)

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed: NCCL."""
        return "nccl"

    def is_synchronized_device(self) -> bool:
        """Whether an operation has ended when its call returns: not on a GPU."""
        return False

    use_host_timers = is_synchronized_device
    resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    def random(self) -> Any:
        """The module that makes the random numbers."""
        return torch.cuda.random

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin a range of the device's profiler."""
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """End the range."""
        torch.cuda.nvtx.range_pop()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of the device's random numbers."""
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Replace the state of the device's random numbers."""
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of the device's random numbers."""
        return torch.cuda.default_generators[device_index]

    def is_triton_supported(self) -> bool:
        """Whether triton compiles for the device."""
        return torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)

    def create_graph(self) -> Any:
        """A graph of device operations."""
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """A context whose operations a graph records."""
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        """Run a graph."""
        graph.replay()

    def total_memory(self, device_index: int | None = None) -> int:
        """The memory of the device."""
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """The free memory of the device."""
        return torch.cuda.mem_get_info(device_index)[0]

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A tensor from which the device copies faster."""
        del align_bytes
        return tensor.pin_memory()


_NAMES = """
    BFloat16Tensor ByteTensor DoubleTensor Event FloatTensor HalfTensor IntTensor LongTensor Stream
    current_device current_stream default_stream device_count empty_cache initial_seed is_available
    is_bf16_supported manual_seed manual_seed_all max_memory_allocated max_memory_cached
    max_memory_reserved memory_allocated memory_cached memory_reserved memory_stats
    reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats set_device stream
    synchronize
"""
_TORCH_CUDA = frozenset(_NAMES.split())
