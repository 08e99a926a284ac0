"""State of torch's modules and optimizers in the words of a checkpoint: names, numbers, options.

Must always hold: a number is restored with its dtype and shape; what JSON cannot hold is refused by
name, unless the caller asks for its text.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.state.client_state import pack, unpack

_log = logging.getLogger(__name__)

STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Floating-point buffers of torch's own layers."""
_NO_OPTIONS = frozenset({"params", "step", "foreach", "fused", "capturable", "differentiable"})
"""Keys that are no hyperparameters: contents, a counter, and the choice of kernels."""
_NUMBER_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64)}


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that belong into a state_dict, with their names; shared ones once."""
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._buffers.keys() - child._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def plain(value: Any, what: str | None) -> Any:
    """A value of an optimizer as JSON.

    What JSON cannot hold is refused by the name `what`; without one it becomes its text.

    Raises:
        CheckpointError: JSON cannot hold it.
    """
    match value:
        case np.generic():  # np.float64 is a float, and yet none to JSON
            return plain(value.item(), what)
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.numel() == 1:
            return value.item()
        case list() | tuple():
            return [plain(inner, what) for inner in value]
        case _ if what is None:
            return str(value)
        case _:
            raise CheckpointError(f"{what} is a {type(value).__name__}, which JSON cannot hold")


def number_as_json(value: Any, what: str) -> Any:
    """A number of an optimizer's state as JSON; a tensor with its dtype and shape.

    Raises:
        CheckpointError: It is no number.
    """
    if not isinstance(value, Tensor):
        return plain(value, what)
    shape, dtype = list(value.shape), str(value.dtype)
    if value.numel() != 1 or dtype not in _NUMBER_DTYPES:
        raise CheckpointError(
            f"{what} has shape {tuple(shape)} and dtype {dtype}: neither one value per element nor "
            "one number, so it cannot be divided among ranks"
        )
    return {"tensor": value.item(), "dtype": dtype, "shape": shape}


def number_from_json(value: Any, device: torch.device) -> Any:
    """The inverse of `number_as_json`."""
    if not isinstance(value, Mapping):
        return value
    dtype = _NUMBER_DTYPES[value["dtype"]]
    return torch.tensor(value["tensor"], dtype=dtype, device=device).reshape(value["shape"])


def device_of_number(group: Mapping[str, Any], weights: torch.device) -> torch.device:
    """Where torch keeps step counts: beside the weights for kernels that read them there."""
    beside = group.get("fused") or group.get("capturable")
    return weights if beside else torch.device("cpu")


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a param group to a value from JSON; one in a tensor is set in place."""
    current = group.get(key)
    if isinstance(current, Tensor):
        current.fill_(value)
    else:  # JSON has no tuples
        group[key] = tuple(value) if isinstance(value, list) else value


def matched(
    records: Sequence[Mapping[str, Any]], groups: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> list[Mapping[str, Any] | None]:
    """For each param group the saved record of the same parameters; None: there is none.

    A group is the names of its trained and of its frozen parameters.
    """
    left = list(records)

    def taken(names: Iterable[str], *keys: str) -> Mapping[str, Any] | None:
        wanted = set(names)
        for place, record in enumerate(left):
            if {name for key in keys for name in record.get(key, ())} == wanted:
                return left.pop(place)
        return None

    # Those with the same parameters in all belong together; after them, those that train the same:
    # an optimizer may have frozen parameters or not, and imported records do not name them.
    found = [taken((*trained, *frozen), "params", "frozen") for trained, frozen in groups]
    return [
        taken(trained, "params") if record is None and trained else record
        for record, (trained, _) in zip(found, groups, strict=True)
    ]


def numbers_of(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Of each parameter of a saved group the numbers of its state, such as its count of steps."""
    own: Mapping[str, Any] = record.get("own", {})
    return {**dict.fromkeys(record["params"], record["state"]), **own}


def group_record(
    names: Sequence[str], options: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """One param group in the engine's form."""
    # What holds one value per element of a parameter is a tensor of the checkpoint.
    counters = {k: v for k, v in state.items() if not (isinstance(v, Tensor) and v.dim() > 0)}
    if "step" in options:  # some optimizers count their steps in the group
        counters.setdefault("step", options["step"])
    record: dict[str, Any] = {
        "params": list(names),
        "hyperparameters": {k: plain(v, None) for k, v in options.items() if k not in _NO_OPTIONS},
        "state": {},
    }
    for key, value in counters.items():
        number = plain(value, None)
        if isinstance(number, int | float) and not isinstance(number, bool):
            # torch's optimizers keep a counter as a 0-d fp32 tensor.
            number = {"tensor": float(number), "dtype": "torch.float32", "shape": []}
        record["state"][key] = number
    return record


def is_buffer(name: str, dtype: torch.dtype, patterns: Sequence[str] = ()) -> bool:
    """Whether a tensor of a state_dict is a buffer, judged by its dtype and its name."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    return any(fnmatchcase(name, pattern) for pattern in (*STATISTICS, *patterns))


# ---- learning-rate schedulers ----
# What JSON has stays as it is, so that any release reads it; all else, such as the milestones of
# MultiStepLR, whose keys are numbers, is written as `client_state` writes it.


_UNSAVED = (
    "the learning rate has a scheduler that is in no checkpoint: a run that resumes begins it "
    "again; give it to initialize(lr_scheduler=...) or protect(scheduler=...), to "
    "protect(stateful=...), or save its state_dict() in client_state"
)
_told: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Those whose schedule is known to be unsaved."""


def warn_of_unsaved_schedule(optimizer: torch.optim.Optimizer) -> None:
    """Warn once of a scheduler of torch that steps an optimizer, and that nobody saves."""
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if scheduled and optimizer not in _told:
        _told.add(optimizer)
        _log.warning("%s", _UNSAVED)


def schedule_as_json(scheduler: Any) -> Any:
    """The state of a scheduler as JSON, as of now; None without a scheduler.

    Raises:
        CheckpointError: A value in it cannot be restored.
    """
    if scheduler is None:
        return None
    name = f"the state of the scheduler {type(scheduler).__name__}"
    return _storable(scheduler.state_dict(), name)


def _storable(value: Any, path: str) -> Any:
    """Pack as `client_state.pack`; numbers of numpy become plain ones, and tuples lists."""
    match value:
        case np.generic():
            return _storable(value.item(), path)
        # A key such as "$tensor" would be read as a mark: `pack` escapes it.
        case Mapping() if all(type(key) is str and key[:1] != "$" for key in value):
            return {key: _storable(inner, f"{path}.{key}") for key, inner in value.items()}
        case list() | tuple():
            return [_storable(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
        case Counter():  # as before there was a mark for it, see `_counted`
            return pack(dict(value), path)
        case _:
            return pack(value, path)


def restore_schedule(scheduler: Any, saved: Any) -> None:
    """Give a scheduler the state that `schedule_as_json` has returned."""
    scheduler.load_state_dict(_counted(unpack(saved), scheduler.state_dict()))


def _counted(saved: Any, present: Any) -> Any:
    """With a Counter where the present state has one: the milestones of MultiStepLR."""
    match saved, present:
        case dict(), Counter():
            return Counter(saved)
        case dict(), Mapping():
            return {key: _counted(inner, present.get(key)) for key, inner in saved.items()}
        case list(), list() if len(saved) == len(present):
            return [_counted(*pair) for pair in zip(saved, present, strict=True)]
        case _:
            return saved


# ---- the extra state of modules, such as scales of FP8 ----


EXTRA_STATE = "extra_state"
"""In the engine's record of a run."""
Named = Callable[[str], str]
"""From a module's name to its name in the user's module."""


def extra_state(model: nn.Module, named: Named = str) -> dict[str, Any]:
    """The extra state of all modules, as JSON, as of now.

    Raises:
        CheckpointError: A module's cannot be restored; names it.
    """
    return {
        name: pack(module.get_extra_state(), f"the extra state of {name or 'the model'}")
        for name, module in _with_extra_state(model, named)
    }


def restore_extra_state(
    model: nn.Module, saved: Mapping[str, Any] | None, named: Named = str
) -> list[str]:
    """Give the modules what `extra_state` has returned; returns the names of those without it."""
    absent = []
    for name, module in _with_extra_state(model, named):
        if saved is not None and name in saved:
            module.set_extra_state(unpack(saved[name]))
        else:
            absent.append(name or "the model")
    return absent


def _with_extra_state(model: nn.Module, named: Named) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield named(name), module
