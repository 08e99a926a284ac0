"""The order of shards: every sample once, chunk by chunk, whatever the sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_contract.errors import ConfigError, ZeroError
from zero_data.shards import Interleaving, ShardReader


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5), chunk=st.integers(1, 5))
def test_every_sample_of_every_shard_is_at_one_position(sizes: list[int], chunk: int) -> None:
    order = Interleaving(sizes, chunk)
    places = [order.place(position) for position in range(order.size)]
    expected = [(shard, number) for shard, size in enumerate(sizes) for number in range(size)]
    assert sorted(places) == expected


def test_shards_take_turns_with_a_chunk_each_until_they_are_used_up() -> None:
    order = Interleaving([3, 5, 0, 2], chunk=2)
    places = [order.place(position) for position in range(10)]
    first, second, third = places[:6], places[6:9], places[9:]
    assert first == [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (3, 1)]
    assert second == [(0, 2), (1, 2), (1, 3)]
    assert third == [(1, 4)]


class Numbers:
    """Shard k holds k*10, k*10 + 1, ...; notes where it is opened."""

    def __init__(self, sizes: list[int], really: list[int] | None = None) -> None:
        self.shard_sizes = sizes
        self.really = really or sizes
        self.opened: list[tuple[int, int]] = []

    def read_shard(self, shard: int, start: int) -> Iterator[int]:
        self.opened.append((shard, start))
        yield from range(shard * 10 + start, shard * 10 + self.really[shard])


def test_a_shard_is_read_forward_over_gaps_and_opened_again_to_go_back() -> None:
    numbers = Numbers([6, 4])
    reader = ShardReader(numbers, chunk=1)
    assert reader.__getitems__([0, 1, 4, 8, 0]) == [0, 10, 2, 4, 0]
    assert numbers.opened == [(0, 0), (1, 0), (0, 0)]


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match="shard_sizes: -1 is not a number of samples"):
        Interleaving([3, -1], chunk=1)
    reader = ShardReader(Numbers([3], really=[2]), chunk=1)
    with pytest.raises(ZeroError, match="shard 0 has no sample 2, though shard_sizes says so"):
        reader.__getitems__([2])
