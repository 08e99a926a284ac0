"""Lanes read by hand: all of them, in parts, through a state that a checkpoint would store."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from zero_data.lanes.adapters import source_of


def stored(state: Any) -> Any:
    """A state as a checkpoint gives it back."""
    memory = io.BytesIO()
    torch.save(state, memory)
    return torch.load(io.BytesIO(memory.getvalue()), weights_only=True)


def read(dataset: Any, lanes: int, epoch: int = 0) -> list[list[Any]]:
    """All samples of each lane; each lane on its own."""
    return [list(source_of(dataset).open(lane, lanes, epoch, None)) for lane in range(lanes)]


def resumed(
    dataset: Any, lanes: int, cuts: Sequence[int], *, group: int = 1, epoch: int = 0
) -> list[list[Any]]:
    """The samples after `cuts[lane]` of them, from states, in groups of lanes that share a source.

    Where a lane has no state, it is read again from its beginning.
    """
    saved = source_of(dataset)
    readers = [saved.open(lane, lanes, epoch, None) for lane in range(lanes)]
    states, at = [], []
    for reader, cut in zip(readers, cuts, strict=True):
        list(islice(reader, cut))
        given = reader.state()
        states.append(None if given is None else stored(given))
        at.append(0 if given is not None else cut)
    rest: list[list[Any]] = []
    for first in range(0, lanes, group):
        source = source_of(dataset)
        own = range(first, min(first + group, lanes))
        readers = [source.open(lane, lanes, epoch, states[lane]) for lane in own]
        rest += [
            list(islice(reader, at[lane], None)) for lane, reader in zip(own, readers, strict=True)
        ]
    return rest
