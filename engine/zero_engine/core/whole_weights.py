"""The engine's base: an nn.Module around the script's module, and its weights as dictionaries.

As torch's wrappers do, it puts `module.` before every name. Every rank calls the methods of
weights, at every stage. In a load torch's own code decides what is loaded, what is missing and what
is wrong: it is run first, and its copies are recorded. Beside its dictionary and its shards a rank
then holds one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from zero_checkpoint.state.torch_state import persistent_buffers
from zero_comm.exchange.objects import gather_objects
from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_contract.errors import PeerLost, ZeroError
from zero_engine.offload_states import WEIGHTS, Inconsistency
from zero_engine.parameters.gather import GatheredParameters
from zero_engine.parts import Core
from zero_engine.sharding.flat_unit import FlatUnit, Slot
from zero_engine.sharding.recorded_load import RecordedLoad, with_own_code
from zero_engine.sharding.weights import module_state_dict


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """What has become of the dictionaries of all ranks."""

    keys: Any
    """torch's answer here, or that of rank 0 if this rank has no dictionary."""
    complete: bool
    """Whether rank 0 misses no key."""
    all_given: bool
    """Whether every rank has a dictionary."""


def load_given(core: Core, root: nn.Module, load: Callable[[], Any], *, given: bool) -> Any:
    """Load the dictionaries of all ranks; returns torch's answer, of rank 0 where a rank has none.

    The dictionaries have the names of `root`, and `load` is torch's load of this rank's. A rank
    that is not `given` one takes the parameters and buffers of rank 0.

    Raises:
        Exception: That of `load`, on the ranks where it has failed.
        RuntimeError: It has failed on another rank, or a rank has no memory for a unit.
        ZeroError: The weights are moved, or inconsistent and not all of them are loaded.
    """
    moved = core.moved
    mends = moved.inconsistent is not None and not moved.inconsistent.optimizer
    moved.need("load_state_dict()", WEIGHTS, refills=mends)
    opened, recorded = _prepare(core, root)
    # A module whose own code loads may read its parameters, and writes to them at once.
    with GatheredParameters([p for unit in opened for p in unit.params], modifier_rank=0):
        keys, error = _attempt(root, recorded, load, given=given)
    # Nothing changes before all ranks know that none of them has failed.
    answers = _agree(core, keys, error, given=given)
    written = _written(core, recorded)
    # Inconsistent weights are mended by a whole dictionary only.
    if mends and not (answers.complete and all(map(all, written))):
        moved.need("load_state_dict() of a part of the weights", WEIGHTS)
    for unit, flags in zip(core.units, written, strict=True):
        slots = [slot for slot, flag in zip(unit.layout.slots, flags, strict=True) if flag]
        if slots:
            _write(core, unit, slots, recorded)
    recorded.copy(root.buffers())
    for name, buffer in persistent_buffers(core.module) if not answers.all_given else ():
        sent = buffer.detach().clone(memory_format=torch.contiguous_format)
        with core.guard():
            core.collectives.broadcast(sent, f"buffer {name} of load_state_dict()")
        if not given:
            buffer.detach().copy_(sent)
    # If they were inconsistent, all of them have been replaced: a part is refused above.
    moved.inconsistent = None
    return answers.keys


def _prepare(core: Core, root: nn.Module) -> tuple[Sequence[FlatUnit], RecordedLoad]:
    """The units that must be whole while modules load, and the record of copies to all others."""
    apart = set(with_own_code(root))
    theirs = {id(param) for module in apart for param in module.parameters(recurse=False)}
    opened = [unit for unit in core.units if any(id(param) in theirs for param in unit.params)]
    params = [param for unit in core.units if unit not in opened for param in unit.params]
    others = [module for module in root.modules() if module not in apart]
    buffers = [buffer for module in others for buffer in module.buffers(recurse=False)]
    return opened, RecordedLoad([*params, *buffers])


def _attempt(
    root: nn.Module, recorded: RecordedLoad, load: Callable[[], Any], *, given: bool
) -> tuple[Any, Exception | None]:
    """The answer of torch's load, if this rank has a dictionary; or why it cannot load."""
    if not given:
        for name, module in root.named_modules():
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                return None, ZeroError(
                    f"load_state_dict() without a dictionary on this rank: {name} has extra state, "
                    "which is not sent between ranks; give every rank the dictionary"
                )
        return None, None
    try:
        with recorded:
            return load(), None
    except PeerLost:
        raise
    except Exception as error:  # of whatever kind it is, the other ranks must hear of it
        return None, error


def _agree(core: Core, keys: Any, error: Exception | None, *, given: bool) -> _Answers:
    """Exchange what has become of the dictionaries. Raises if one of them cannot be loaded."""
    own = {
        "given": given,
        "error": error and (str(error) or type(error).__name__),
        "keys": keys and [list(keys.missing_keys), list(keys.unexpected_keys)],
    }
    with core.guard():
        what = "what has become of load_state_dict()"
        by_rank = gather_objects(own, what, core.collectives.everybodys)
    if error is not None:  # says more here than that of another rank
        raise error
    for rank, answer in enumerate(by_rank):
        if answer["error"]:
            raise RuntimeError(
                f"rank {rank} could not load its state_dict, so it is loaded on none: "
                f"{answer['error']}"
            )
    missing, unexpected = by_rank[0]["keys"]
    return _Answers(
        keys=keys if given else _IncompatibleKeys(missing, unexpected),
        complete=not missing,
        all_given=all(answer["given"] for answer in by_rank),
    )


def _written(core: Core, recorded: RecordedLoad) -> list[list[bool]]:
    """By unit and parameter, whether rank 0 has recorded a copy to it."""
    params = [param for unit in core.units for param in unit.params]
    flags = torch.tensor([float(recorded.source(param) is not None) for param in params])
    with core.guard():
        core.collectives.broadcast(flags, "the weights that load_state_dict() gives")
    parts = flags.bool().split([len(unit.params) for unit in core.units])
    return [part.tolist() for part in parts]


def _write(core: Core, unit: FlatUnit, slots: Sequence[Slot], recorded: RecordedLoad) -> None:
    """Write the recorded copies of rank 0 to one unit on all ranks."""
    error: Exception | None = None
    try:
        full = unit.open()
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            source = recorded.source(param)
            if source is not None and core.collectives.rank == 0:
                full[slot.start : slot.stop].view(slot.shape).copy_(source)
    except Exception as failure:  # no memory; the other ranks wait for this one
        error = failure
    with core.guard():
        failures = core.collectives.everybodys(
            torch.tensor([float(error is not None)]), f"who has memory for {unit.label}"
        )
        if bool(failures.any()):
            _give_up(core, unit, int(failures.flatten().argmax()), error)
        # A script's context may have changes in other slots, which its end would find no more.
        unit.adopt_full(0, None if unit.holders else slots)
        if unit.holders:
            unit.gather()


def _give_up(core: Core, unit: FlatUnit, rank: int, error: Exception | None) -> NoReturn:
    if not unit.gathered:
        unit.release()
    reason = f"load_state_dict() has failed half way: rank {rank} could not write {unit.label}"
    every = frozenset(slot.fqn for each in core.units for slot in each.layout.slots)
    core.moved.inconsistent = Inconsistency(reason, False, every)
    raise RuntimeError(
        f"{reason}; free memory and load a whole dictionary or a checkpoint, or start again"
    ) from error


class WholeWeights(nn.Module):
    """The part of the engine around its module, in which it looks up what it does not have."""

    module: nn.Module
    _core: Core
    _link: AgentLink

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        del self.training  # so that it, too, is looked up in the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before `module` is set, looking it up in itself would never end; and the special
            # methods that copy and pickle look up are those of the engine, not of the module.
            if name == "module" or name.startswith("__"):
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            ours, its = type(self).__name__, type(self.module).__name__
            raise AttributeError(
                f"neither {ours!r} nor its module {its!r} has an attribute {name!r}",
                name=name,
                obj=self,
            ) from error

    def train(self, mode: bool = True) -> Self:
        """Put the module in training or evaluation mode."""
        self.module.train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward, as `torch.compile` does, with its arguments."""
        self.module.compile(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to()`, `.half()` and `.cuda()` come here; they are refused, unless they change nothing.
        for name, param in self.named_parameters():
            # A view of the engine's buffer, which the optimizer steps: no parameter may be taken
            # away from it.
            if fn(param) is not param:
                raise ZeroError(
                    f"to(), half() and the like would take {name} away from the engine, which "
                    "steps it where it is; choose the dtype in the config, or call them on the "
                    "model before initialize()"
                )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise ZeroError(
            "an engine cannot be copied or pickled: it is one rank's part of a run; copy "
            "engine.module, or call engine.save_checkpoint() or engine.module_state_dict()"
        )

    def module_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """The module's whole state_dict on the CPU, at any stage. Every rank calls it.

        Args:
            rank: The rank that receives it; the others receive an empty dict, and need no memory
                for the model. None: every rank receives it.
        """
        return self._whole("module_state_dict()", here=self._is(rank))

    def get_fp32_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """The same in the highest precision, frozen parameters included."""
        return self._whole("get_fp32_state_dict()", here=self._is(rank), highest=True)

    def _is(self, rank: int | None) -> bool:
        return rank in (None, self._core.collectives.rank)

    def _whole(
        self, caller: str, *, here: bool, highest: bool = False, left_out: Collection[str] = ()
    ) -> dict[str, Tensor]:
        core = self._core
        core.moved.need(caller, WEIGHTS)
        with exit_on_peer_loss(self._link):
            return module_state_dict(
                core.module, core.units, core.aliases, highest=highest, left_out=left_out, here=here
            )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights into the module, at any stage. Every rank calls it.

        Args:
            state_dict: Tensors by the names of `state_dict()`, which begin with `module.`.
                Parameters are those of rank 0, each rank loads its own buffers; another rank that
                passes an empty dictionary takes the buffers of rank 0, too. Beside the dictionary
                a rank needs memory for its shards and one unit.
            strict: As for torch.
            assign: Without effect: weights are always copied into the engine's buffers.

        Returns:
            The missing and the unexpected keys.

        Raises:
            RuntimeError: The dictionary of a rank does not fit, on all ranks; no rank has changed.
                Or a rank has no memory for a unit; the weights are inconsistent then.
        """
        del assign
        load = partial(super().load_state_dict, state_dict, strict)
        given = self._core.collectives.rank == 0 or bool(state_dict)
        with exit_on_peer_loss(self._link):
            return load_given(self._core, self, load, given=given)
