"""The state of a learning-rate scheduler as JSON, and back.

Must always hold: what JSON has stays as it is, so that any release reads it; all else, such as the
milestones of MultiStepLR, whose keys are numbers, is written as `client_state` writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from zero_checkpoint.state.client_state import pack, unpack


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
