"""What forwards write to a module: its buffers, the same at every world size, and no parameter.

Must always hold: the forward of each micro-batch begins with the buffers that its step has begun
with, and after the step all ranks have those that its first micro-batch has left. So the running
statistics of batch norm, the vectors of spectral norm, and whatever else a forward keeps in a
buffer depend on the samples alone: neither on who ran them, nor on how many ranks there are. What
a script writes between two steps stays.

A buffer that is replaced by one of another shape is a cache: it stays as its rank has it.

A forward that writes to a parameter is an error: each rank would write what its samples say, and
train a model of its own.

What a forward keeps elsewhere is a warning: in a buffer that no checkpoint has, in a number in an
attribute, of which each rank has its own, or over the ranks of a micro-step (SyncBatchNorm). So is
a buffer that the ranks hold differently, as one that a script has written to on one of them. A
generator that the first forward makes and keeps is an error: nobody has seeded it.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor, nn

from zero_comm.exchange.collectives import Collectives
from zero_comm.exchange.objects import gather_objects
from zero_contract.errors import ConfigError, ZeroError
from zero_data.generators import generators_of, is_generator
from zero_step.checks.bit_sum import bit_sum

_PARAMETER = (
    "the forward writes to the parameter {}: each rank would write what its own samples say, and "
    "train a model of its own; write to it between two steps, the same on all ranks, or keep what "
    "it writes in a buffer"
)
_ABSENT = (
    "a forward on another rank has written to the buffer {}, which the module on this rank lacks; "
    "register it when the module is made, on all ranks"
)
_RENORMALISES = (
    "{} has max_norm={}: its forward would shrink the rows that it reads, so each rank would train "
    "weights of its own; leave max_norm out, and between two steps do under torch.no_grad() "
    "embedding.weight.copy_(torch.renorm(embedding.weight, {}, 0, {}))"
)
_NOT_PERSISTENT = (
    "the forward writes to the buffer %s, which is in no checkpoint: a run that resumes begins "
    "with what its constructor gives, and computes something else unless it is a cache; register "
    "it with persistent=True"
)
_ATTRIBUTE = (
    "the forward changes the attribute %s, a number: each rank has one of its own, of the "
    "micro-batches that it runs, and no checkpoint has it; if results depend on it, keep it in a "
    "buffer (register_buffer)"
)
_MADE = (
    "the first forward makes the generator of random numbers {}: on each rank, and after each "
    "restart, it gives its first numbers to another micro-batch. Make it in the constructor of the "
    "module, where it is found and seeded for each micro-batch; or draw from torch's own"
)
_DIFFERS = (
    "the buffer %s has different values on the ranks: a script has written to it on some of them, "
    "or not the same, or a forward has made it of its own samples. Each rank computes with its "
    "own, so results depend on the number of ranks; write the same on all ranks, and register "
    "what a forward keeps when the module is made"
)
_SYNC = (
    "%s is a SyncBatchNorm, which normalizes over the micro-batches that the ranks run at the same "
    "time: results depend on the world size; BatchNorm does not"
)
_CPU = torch.device("cpu")
_FEW = 1 << 20
"""Elements of a buffer that is kept in every step: a forward may begin to write to it in any."""
_log = logging.getLogger(__name__)


class ForwardWrites:
    """The writes of forwards to one module, on one rank."""

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self.unsaved = ""
        """A buffer that forwards write to and no checkpoint has; empty: there is none."""
        self._module = module
        self._collectives = collectives
        self._modes: list[bool] | None = None
        """Which modules with buffers trained when these were last compared."""
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        """By name, of each buffer its module and its name there."""
        self._parameters: dict[str, nn.Parameter] = {}
        self._versions: list[int] = []
        """Of the parameters, when the micro-step began."""
        self._written: list[str] = []
        """Buffers that forwards write to, equal on all ranks."""
        self._found: set[str] = set()
        """Others that a forward of this rank has written to in this step."""
        self._own: dict[str, Tensor] = {}
        """The buffers themselves."""
        self.before: dict[str, Tensor] = {}
        """What they held when the step began; empty between two steps."""
        self._versions_before: dict[str, int | None] = {}
        """Of those buffers; None: what they hold is compared."""
        self._after: dict[str, Tensor] = {}
        """What the first micro-batch has left in them, if this rank has run it."""
        self._numbers: dict[str, dict[str, float]] = {}
        """Of each module the numbers in its attributes, before the first forward of the run."""
        self._generators: Counter[str] = Counter()
        """Where there were generators at that time."""
        self._told: set[str] = set()
        """The buffers and attributes that a warning has named."""
        self._seen: dict[str, int] | None = None
        """The versions of all buffers between two steps; None: before the first."""
        self._begun = False
        self._is_untouched = False
        """Whether there was no forward in this step yet."""
        self._first = 0, 0
        """Micro-step and rank that run the first micro-batch of the step."""
        self._micro = 0

    def begin_micro_step(self, first: tuple[int, int]) -> None:
        """Keep what the step begins with, before its first forward.

        `first`: micro-step and rank that run the first micro-batch of the step.

        Raises:
            ConfigError: A module is known to write to its parameters.
        """
        if not self._begun:
            self._begun, self._first, self._micro = True, first, 0
            compares = self._find()
            # A kernel may write to a buffer without a trace in its version (batch norm does), so
            # buffers are compared: all of them in the first step, and in each before which the
            # script has called `train()` or `eval()` of a module that has some. Later small ones
            # are kept, and those which have been written to: a model may have gigabytes of buffers
            # that never change, such as quantized weights.
            known = set(self._written)
            for name, (module, key) in self._owners.items():
                each, is_known = module._buffers.get(key), name in known
                if each is not None and (compares or is_known or each.numel() <= _FEW):
                    self._keep(name, each, compares=compares and not is_known)
            self._is_untouched = True
        self._versions = [each._version for each in self._parameters.values()]

    def begin_forward(self, *_: object) -> None:
        """A forward begins: what the script has written before the first one of a step stays."""
        is_first, self._is_untouched = self._is_untouched, False
        for name in [*self._own] if is_first else ():
            module, key = self._owners[name]
            if (each := module._buffers.get(key)) is not None and self._is_touched(name, each):
                self._keep(name, each, compares=self._versions_before[name] is None)

    def _keep(self, name: str, buffer: Tensor, *, compares: bool) -> None:
        """Keep what a buffer holds as the step begins."""
        self._own[name] = buffer
        self._versions_before[name] = None if compares else _version(buffer)
        # Compared where there is room: nearly all of them are of no use after this step.
        self.before[name] = buffer.detach().to(_CPU if compares else buffer.device, copy=True)

    def check_parameters(self) -> None:
        """Check, after a forward of the micro-step, that it has written to no parameter.

        Raises:
            ZeroError: It has.
        """
        if not self._begun:  # a forward of no micro-step, as of an evaluation
            return
        # By the version: what is written to `.data` leaves it as it is, and nobody sees that.
        for (name, each), version in zip(self._parameters.items(), self._versions, strict=True):
            if each._version != version:
                raise ZeroError(_PARAMETER.format(name))

    def end_micro_step(self) -> None:
        """Let the next forward begin as the one of this micro-step has.

        Raises:
            ZeroError: It has made a generator of random numbers, in the first micro-step of a run.
        """
        # Once in a run: numbers are noted before its first forward.
        before, self._numbers = self._numbers, {}
        now = self._attributes() if before else {}
        if before and (made := sorted(self._of_generators() - self._generators)):
            raise ZeroError(_MADE.format(made[0]))
        for name, numbers in now.items():
            for key, each in before.get(name, numbers).items():
                if numbers.get(key) != each:
                    self._warn(_ATTRIBUTE, f"{name}.{key}" if name else key)
        written = [name for name in self._own if self._is_written(name)]
        self._found.update(set(written).difference(self._written))
        if (self._micro, self._collectives.rank) == self._first:
            self._after = {name: self._buffer(name).detach().clone() for name in written}
        self._put(self.before, written)
        self._micro += 1

    def note(self) -> int:
        """A note for the end of a step: what this rank knows of writes, in the bits of an fp32."""
        known, seen = {*self._written, *self._found}, self._seen or {}
        told = sorted(known)
        for name, each in self._held(known).items():
            if seen.get(name) != _version(each):
                told.append(f"{name} {int(bit_sum(each))}")
        return zlib.crc32("".join(told).encode()) >> 8

    def _held(self, known: Container[str] = ()) -> dict[str, Tensor]:
        """The buffers beside those that forwards are known to write to."""
        of_all = {name: module._buffers.get(key) for name, (module, key) in self._owners.items()}
        return {
            name: each
            for name, each in of_all.items()
            if each is not None and name not in known and each.layout is torch.strided
        }

    def _now(self) -> dict[str, int]:
        return {name: _version(each) for name, each in self._held().items()}

    def end_step(self, notes: Iterable[float]) -> None:
        """Give all ranks what the first micro-batch of the step has left. Collective.

        `notes`: the `note` of each rank.

        Raises:
            PeerLost: A peer is lost.
            ZeroError: A forward on another rank writes to a buffer that this module lacks.
        """
        if self._found or len({*notes}) > 1:
            held = self._held({*self._written, *self._found})
            bits = {n: [list(each.shape), int(bit_sum(each))] for n, each in held.items()}
            everybodys = gather_objects(
                [sorted(self._found), bits], "what buffers hold", self._collectives.everybodys
            )
            found = {name for each, _ in everybodys for name in each}
            self._written = sorted({*self._written, *found})
            for name, (shape, own) in everybodys[0][1].items():
                theirs = [each[name] for _, each in everybodys if name in each]
                # Of another shape it is a cache.
                if name not in found and any(s == shape and b != own for s, b in theirs):
                    self._warn(_DIFFERS, name)
            if absent := [name for name in self._written if name not in self._owners]:
                raise ZeroError(_ABSENT.format(absent[0]))
            for name in self._written:
                module, key = self._owners[name]
                if key in module._non_persistent_buffers_set:
                    self.unsaved = name
                    self._warn(_NOT_PERSISTENT, name)
        if self._written:
            held = {name: self._buffer(name) for name in self._written}
            # After the first micro-batch; else as before it; else, for what no forward of this rank
            # has touched, as it is.
            left = {**held, **self.before, **self._after}
            self._put(self._shared([left[name] for name in self._written]), self._written)
        self._close()
        self._seen = self._now()

    def _warn(self, what: str, name: str) -> None:
        if name not in self._told and self._collectives.rank == 0:
            _log.warning(what, name)
        self._told.add(name)

    def _attributes(self) -> dict[str, dict[str, float]]:
        return {
            name: {key: each for key, each in vars(module).items() if type(each) in (int, float)}
            for name, module in self._module.named_modules()
        }

    def _of_generators(self) -> Counter[str]:
        found = Counter(
            f"{name}.{key}" if name else key
            for name, module in self._module.named_modules()
            for key, each in vars(module).items()
            if is_generator(each)
        )
        for kind in {type(module) for module in self._module.modules()}:
            found[f"that {kind.__name__} uses of its class or file"] = len(generators_of(kind))
        return found

    def drop(self, micro: int) -> None:
        """Drop what was written since the begin of a micro-step; of the first one: of the step."""
        self._put(self.before, [name for name in self._own if self._is_written(name)])
        self._micro = micro
        if not micro:
            self._close()

    def _close(self) -> None:
        self._begun, self._first = False, (0, 0)
        self._found.clear()
        for each in (self._own, self.before, self._after):
            each.clear()
        self._versions_before.clear()

    def _find(self) -> bool:
        """Find the buffers; whether they have to be compared."""
        modes = [module.training for module, _ in self._owners.values()]
        # The same layers train: those that write to buffers have been seen writing.
        if self._modes == modes:
            return False
        owners = {
            f"{prefix}.{key}" if prefix else key: (module, key)
            for prefix, module in self._module.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        # By name, since FSDP2 drops what is written to gathered weights: no version would show it.
        for name, module in self._module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                most, kind = module.max_norm, module.norm_type
                raise ConfigError(_RENORMALISES.format(name or "the model", most, kind, most))
            if self._modes is None and isinstance(module, nn.SyncBatchNorm):
                self._warn(_SYNC, name)
        self._parameters = dict(self._module.named_parameters())
        # A forward may make buffers: those of the first one are known to the second.
        again = self._seen is None or owners.keys() != self._owners.keys()
        self._owners = owners
        if self._seen is None:
            self._numbers, self._generators = self._attributes(), self._of_generators()
            self._seen = self._now()
        self._modes = None if again else [module.training for module, _ in owners.values()]
        return True

    def _buffer(self, name: str) -> Tensor:
        module, key = self._owners[name]
        buffer = module._buffers[key]
        assert buffer is not None, name
        return buffer

    def _is_written(self, name: str) -> bool:
        module, key = self._owners[name]
        now, before = module._buffers.get(key), self.before[name]
        if now is None or (now.shape, now.dtype) != (before.shape, before.dtype):
            return False  # gone, or a cache
        if name in self._written:
            return True
        return self._is_touched(name, now) and not torch.equal(now.to(before.device), before)

    def _is_touched(self, name: str, now: Tensor) -> bool:
        """Whether a buffer may hold something else than as the step began."""
        before = self._versions_before[name]
        return before is None or now is not self._own[name] or _version(now) != before

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor], names: Sequence[str]) -> None:
        """Set buffers; one that a forward has replaced is replaced again."""
        for name in names:
            module, key = self._owners[name]
            own = self._own.get(name)
            if own is None:
                own = self._buffer(name)
            own.copy_(values[name])
            module._buffers[key] = own

    def _shared(self, own: Sequence[Tensor]) -> dict[str, Tensor]:
        """The contents of the buffers that are written to: one rank's, in one broadcast."""
        if self._collectives.world == 1:
            return dict(zip(self._written, own, strict=True))
        # The wide ones first, so that each begins where its dtype may.
        order = sorted(range(len(own)), key=lambda at: -own[at].itemsize)
        device = own[order[0]].device
        parts = [own[at].to(device).reshape(-1).view(torch.uint8) for at in order]
        packed = torch.cat(parts)
        self._collectives.broadcast(packed, "buffers of the module", self._first[1])
        shared = {}
        for at, part in zip(order, packed.split([part.numel() for part in parts]), strict=True):
            shared[self._written[at]] = part.view(own[at].dtype).view(own[at].shape)
        return shared


def _version(buffer: Tensor) -> int:
    """How often it was written to; one of an inference does not tell."""
    return -1 if buffer.is_inference() else buffer._version
