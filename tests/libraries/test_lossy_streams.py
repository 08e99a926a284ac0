"""A state of a stream of `datasets` is used where it is whole, whatever version is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zero_data.lanes.adapters.libraries import library_of

datasets = pytest.importorskip("datasets")
SIZE = 23
WAYS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda stream: stream,
    "map": lambda stream: stream.map(dict),
    "map twice": lambda stream: stream.map(dict).map(dict),
    "batched": lambda stream: stream.map(dict, batched=True, batch_size=4),
    "filter": lambda stream: stream.filter(lambda row: row["number"] % 5),
    "take": lambda stream: stream.map(dict).take(20),
    "arrow": lambda stream: stream.with_format("arrow").map(lambda table: table, batched=True),
    "shuffle": lambda stream: stream.shuffle(seed=1, buffer_size=4),
}


def stream(way: str) -> Any:
    rows = datasets.Dataset.from_list([{"number": number} for number in range(SIZE)])
    return WAYS[way](rows.to_iterable_dataset(num_shards=2)).with_format(None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [1, 2, 7, 13])
def test_a_stream_goes_on_behind_its_state_or_the_state_is_not_used(way: str, at: int) -> None:
    whole, begun = [*stream(way)], stream(way)
    samples = iter(begun)
    for _ in range(at):
        next(samples)
    resumed = stream(way)
    resumed.load_state_dict(begun.state_dict())
    assert library_of(begun).lossy(begun) or [*resumed] == whole[at:]
