"""Lanes in tests: read by hand, in parts, and by all ranks of a loop."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.ranks import Exchange, Ranks
from zero_data import Lanes, Ledger
from zero_data.lanes.adapters import source_of
from zero_data.lanes.stored import dump, load


def stored(state: Any) -> Any:
    """A state as a script saves and loads it."""
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
        states.append(None if given is None else load(dump(given)))
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


class Trained(NamedTuple):
    """What a loop has had of `Lanes`, on all ranks together."""

    steps: list[list[Any]]
    """The samples of each step, in the order of micro-batches."""
    epochs: list[int]
    """Of each step."""
    state: dict[str, Any]
    """At the end."""


def trained(
    make: Callable[[], Any],
    world: int,
    *,
    until: int,
    state: Any = None,
    ledger: tuple[Path, int] | None = None,
    **options: Any,
) -> Trained:
    """The steps up to `until` of ranks that each make the data, with the options of `Lanes`.

    Every rank has equally many micro-batches, their weights are their shares of a step, and the
    state is equal on all ranks.
    """

    def of_rank(rank: int, exchange: Exchange) -> tuple[dict[Any, list[Any]], dict[str, Any]]:
        record = ledger and Ledger(ledger[0], round=ledger[1], rank=rank, world=world)
        own = {"rank": rank, "world": world, "exchange": exchange, "ledger": record}
        lanes = Lanes(make(), collate_fn=list, **options, **own)
        if state is not None:
            lanes.load_state_dict(state)
        steps: dict[Any, list[Any]] = {}
        while lanes.step < until:
            epoch = lanes.epoch
            for batch in lanes:
                step = steps.setdefault((lanes.step - lanes.last, epoch), [])
                step.append((len(step) * world + rank, lanes.weight, batch))
                if lanes.last and lanes.step == until:
                    break
        if record:
            record.close()
        return steps, lanes.state_dict()

    ranks = Ranks(world).run(of_rank)
    found, epochs = [], []
    for step, epoch in ranks[0][0]:
        run = [steps[step, epoch] for steps, _ in ranks]
        assert len(set(map(len, run))) == 1, "every rank has equally many micro-batches"
        live = sorted((each for each in chain(*run) if each[1]), key=itemgetter(0))
        found.append([*chain(*(batch for _, _, batch in live))])
        epochs.append(epoch)
        assert all(weight == len(batch) / len(found[-1]) for _, weight, batch in live)
    assert all(str(position) == str(ranks[0][1]) for _, position in ranks), "equal on all ranks"
    return Trained(found, epochs, ranks[0][1])
