"""Kernels that repeat themselves, and the hardware that the bits of a run depend on.

Owns `elastic.deterministic`: torch's switches, and the record of what computes.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic

from zero_comm.exchange.objects import gather_objects
from zero_contract.errors import ConfigError, ZeroError

_log = logging.getLogger(__name__)

Record = Mapping[str, str | int | None]
"""The hardware and the libraries of one rank, as JSON."""

_REFUSAL = re.compile(r"(\S+) does not have a deterministic implementation")
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With more than one workspace, cuBLAS may add in another order in each run."""
_LIBRARIES = ("Intel(R)", "CUDA Runtime", "CuDNN", "HIP", "MIOpen")
"""The beginnings of the lines in which torch describes the libraries that compute."""
_ON_CPU = {
    "processor": "the processor",
    "instructions": "the vector instructions",
    "libraries": "the libraries of torch",
    "kernels": "the choice of kernels",
}
_ON_DEVICE = {
    "device": "the device",
    "libraries": "the libraries of torch",
    "kernels": "the choice of kernels",
}
"""Causes of other bits that have no key of their own in the record of a run: key ->
its name for a user. Where a device computes, the processor decides nothing."""
_OF_RUN = {"torch": "the version of torch", "threads": "torch's number of threads"}
"""Causes that the record of a run has under keys of its own."""

_PRECISIONS = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
"""Torch's newer words for them: its older ones, which `set_float32_matmul_precision` has."""
_VARIABLES = (
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables of the environment that decide how the libraries of torch compute."""
_UNUSUAL: Mapping[str, Callable[[], bool]] = {
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "einsum by opt_einsum": lambda: torch.backends.opt_einsum.enabled,
    "no denormals": lambda: sys.float_info.min / 2 == 0,  # the host waits for no tensor
    "no oneDNN": lambda: not torch.backends.mkldnn.enabled,
}
"""Settings that are not as torch makes them by itself, where a CPU computes."""
_UNUSUAL_ON_DEVICE: Mapping[str, Callable[[], bool]] = {
    "autocast": lambda: torch.is_autocast_enabled("cuda"),
    "einsum by opt_einsum": _UNUSUAL["einsum by opt_einsum"],
    "no cuDNN": lambda: not torch.backends.cudnn.enabled,
    "sums of bf16 in fp32": lambda: (
        not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "sums of fp16 in fp16": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "sums of fp16 in fp32": lambda: (
        not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
}


class Deterministic(StrEnum):
    """The values of elastic.deterministic."""

    ERROR = "error"
    WARN = "warn"
    OFF = "off"

    def replays(self, device: torch.device) -> bool:
        """Whether a run begins with a replay."""
        # On a CPU all kernels that are chosen repeat themselves.
        warns_on_device = self is Deterministic.WARN and device.type != "cpu"
        return self is Deterministic.ERROR or warns_on_device

    def refusals(self) -> AbstractContextManager[None]:
        """A context of operators that torch may refuse, which names them and this setting."""
        return _refusals() if self is Deterministic.ERROR else nullcontext()


def mode_of(value: Deterministic | None, *, ordered: bool) -> Deterministic:
    """The mode that `elastic.deterministic` comes to."""
    if value is not None:
        return value
    # Without an ordered sum the bits vary in any case.
    return Deterministic.WARN if ordered else Deterministic.OFF


# ---- torch's switches ----


def choose_kernels(mode: Deterministic) -> None:
    """Let torch use kernels that repeat themselves, in this process, from now on."""
    if mode is Deterministic.OFF:
        return
    if torch.cuda.is_available():
        os.environ.setdefault(*_WORKSPACE)
    torch.backends.cudnn.benchmark = False  # it chooses by time, and so differently in each run
    import torch._dynamo.config as dynamo  # slow, and an optimizer has imported it

    # By itself torch.compile makes one graph for all shapes when it meets the second one: which
    # kernels a shape gets would depend on what this process has met before, and so on its rank and
    # on restarts. A script that says `dynamic` decides by itself.
    dynamo.automatic_dynamic_shapes = False
    # Shapes beyond the limit run without a graph, in other kernels.
    dynamo.recompile_limit = max(dynamo.recompile_limit, dynamo.accumulated_recompile_limit)
    dynamo.fail_on_recompile_limit_hit |= mode is Deterministic.ERROR
    if not torch.are_deterministic_algorithms_enabled():
        # Else torch fills all memory that it allocates, to show reads of what nobody has written.
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # What a script has switched on by itself stays on.
    elif not torch.is_deterministic_algorithms_warn_only_enabled():
        return  # the script refuses the others
    torch.use_deterministic_algorithms(True, warn_only=mode is Deterministic.WARN)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        found = _REFUSAL.search(str(error))
        if found is None:
            raise
        raise ZeroError(
            f'elastic.deterministic is "error", and {found[1]} has no kernel that repeats itself '
            'here; use another operator, or set elastic.deterministic to "warn", and the bits may '
            "differ from run to run"
        ) from error


# ---- what computes ----


def hardware(device: torch.device) -> dict[str, str | int | None]:
    """The hardware and the libraries of this rank, which computes on `device`."""
    on_device = device.type == "cuda"
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if on_device else None,
        "libraries": _libraries(),
        "kernels": _kernels(on_device=on_device),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


@cache
def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            # Those of the first processor are enough, of hundreds perhaps.
            fields = (line.partition(":") for line in islice(lines, 32))
            names = [value.strip() for key, _, value in fields if key.strip() == "model name"]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


@cache
def _libraries() -> str:
    lines = (line.strip(" -\n") for line in torch.__config__.show().splitlines())
    return "; ".join(line for line in lines if line.startswith(_LIBRARIES))


def _kernels(*, on_device: bool) -> str:
    cuda = torch.backends.cuda
    library: Any = torch.backends.cudnn if on_device else torch.backends.mkldnn
    matmul = _precision(cuda if on_device else library, "matmul")
    repeat = torch.are_deterministic_algorithms_enabled()
    chosen = ["deterministic" if repeat else "any", f"matmul precision {matmul}"]
    if on_device:
        enabled = {
            "cudnn": cuda.cudnn_sdp_enabled(),
            "flash": cuda.flash_sdp_enabled(),
            "math": cuda.math_sdp_enabled(),
            "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        }
        chosen.append(f"attention {' '.join(name for name, on in enabled.items() if on)}")
    for name, key in {"convolution": "conv", "recurrence": "rnn"}.items():
        found = _precision(library, key)
        # cuDNN computes in TF32 unless the script says otherwise.
        if found not in ("", "high" if on_device else "highest"):
            chosen.append(f"{name} precision {found}")
    switches = _UNUSUAL_ON_DEVICE if on_device else _UNUSUAL
    chosen += [name for name, is_set in switches.items() if is_set()]
    chosen += [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    return ", ".join(chosen)


def _precision(library: Any, operation: str) -> str:
    """The precision of products of fp32; empty: not known."""
    word: str | None = getattr(getattr(library, operation, None), "fp32_precision", None)
    # The older call last: it raises once a script has set the precision by the newer names.
    if word is None:
        # torch < 2.9 tells it of matrix products alone.
        return torch.get_float32_matmul_precision() if operation == "matmul" else ""
    return _PRECISIONS.get(word, word)


class Hardware:
    """The hardware of this round, as this rank knows it."""

    def __init__(self, mode: Deterministic, device: torch.device) -> None:
        """Note what this rank computes on; `compare` tells it to the others."""
        self.mode = mode
        self._device = device
        self._own: Record = hardware(device)
        self._between_steps = self._as_between_steps()
        self.records: tuple[Record, ...] = (self._own,)
        """Of all ranks, each one once, in the order of ranks."""

    def _as_between_steps(self) -> Record:
        # Autocast lasts for a block: one rank may end its step within that, and another after.
        with torch.autocast(self._device.type, enabled=False):
            return hardware(self._device)

    def note(self) -> int:
        """A checksum of 24 bits, which fp32 holds, of what a script has changed since; else 0."""
        # A script may change kernels in any step: ranks that differ then are named after it.
        if (
            self.mode is Deterministic.OFF
            or (now := self._as_between_steps()) == self._between_steps
        ):
            return 0
        return _checksum(now) & ((1 << 24) - 1)

    def compare_again(self, everybodys: Callable[[Tensor, str], Tensor], rank: int) -> None:
        """Compare what the notes of a step say to be different. Collective. See `compare`."""
        self._own = self._between_steps = self._as_between_steps()
        self.compare(everybodys, rank)

    def compare(self, everybodys: Callable[[Tensor, str], Tensor], rank: int) -> None:
        """Compare what the ranks compute on; rank 0 logs what differs. Collective.

        Raises:
            ConfigError: It is not the same on all ranks, and elastic.deterministic is "error".
        """
        what, self.records = "the hardware of the ranks", (self._own,)
        # First a number: where all are equal, nothing else is exchanged.
        seen = everybodys(torch.tensor([_checksum(self._own)], device="cpu"), what)
        if bool((seen == seen[0]).all()):
            return
        by_rank = gather_objects(self._own, what, everybodys)
        problem = f"the ranks do not compute on the same: {mixture(by_rank)}"
        if self.mode is Deterministic.ERROR:
            raise ConfigError(
                f'elastic.deterministic is "error", and {problem}. Results would depend on which '
                "rank runs which micro-batch: use equal nodes, or set elastic.deterministic to "
                '"warn"'
            )
        if rank == 0:
            _log.warning(
                "%s; results differ by rounding from those of equal ranks, and depend on which "
                "rank runs which micro-batch",
                problem,
            )
        once = {json.dumps(each, sort_keys=True): each for each in by_rank}
        self.records = tuple(once.values())

    def resume(self, saved: Mapping[str, Any]) -> list[str]:
        """How a checkpoint was made on something else: the beginning of a sentence for each.

        Raises:
            ConfigError: There is one, and elastic.deterministic is "error".
        """
        lines = changes(self.records, saved.get("hardware") or ())
        if self.mode is not Deterministic.ERROR:
            return lines
        # As warnings these are among those of the record of the run.
        for key, name in _OF_RUN.items():
            ours = self.records[0][key]
            if saved.get(key) not in (None, ours):
                lines.append(f"{name} is {ours} and was {saved[key]}")
        if lines:
            raise ConfigError(
                'elastic.deterministic is "error", and the checkpoint was made on something else: '
                f"{'; '.join(lines)}. Results would differ by rounding from those of the "
                "uninterrupted run: resume on what it was made on, or set elastic.deterministic "
                'to "warn"'
            )
        return lines


def meet(
    mode: Deterministic,
    device: torch.device,
    everybodys: Callable[[Tensor, str], Tensor],
    rank: int,
) -> Hardware:
    """Choose kernels, and compare what the ranks compute on. Collective, unless "off".

    Raises:
        ConfigError: See `Hardware.compare`.
    """
    choose_kernels(mode)
    found = Hardware(mode, device)
    if mode is not Deterministic.OFF:
        found.compare(everybodys, rank)
    return found


def _checksum(record: Record) -> int:
    # The record has everything; only what decides the bits is compared.
    decisive = {key: record[key] for key in (*_names(record), *_OF_RUN)}
    return zlib.crc32(json.dumps(decisive, sort_keys=True).encode())


def _names(record: Record) -> Mapping[str, str]:
    return _ON_CPU if record.get("device") is None else _ON_DEVICE


def mixture(by_rank: Sequence[Record]) -> str:
    """The differences among the ranks, with the ranks of each value."""
    found = []
    for key, name in {**_ON_CPU, **_ON_DEVICE, **_OF_RUN}.items():
        if not any(key in (*_names(each), *_OF_RUN) for each in by_rank):
            continue
        ranks: dict[Any, list[str]] = {}
        for rank, each in enumerate(by_rank):
            ranks.setdefault(each.get(key), []).append(str(rank))
        if len(ranks) > 1:
            where = (f"{value} on {_listed(numbers)}" for value, numbers in ranks.items())
            found.append(f"{name} is {', '.join(where)}")
    return "; ".join(found)


def _listed(ranks: Sequence[str]) -> str:
    """Some ranks by number; of many the first four."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rest = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"ranks {', '.join(ranks[:4])}{rest}"


def changes(ours: Sequence[Record], saved: Sequence[Record]) -> list[str]:
    """Causes of other bits that have changed; without a record none is known."""
    if not ours or not saved:
        return []
    found = []
    for key, name in {**_names(ours[0]), **_names(saved[0])}.items():
        now, then = (sorted({str(each.get(key)) for each in side}) for side in (ours, saved))
        if now != then:
            found.append(f"{name} is {' or '.join(now)} and was {' or '.join(then)}")
    return found
