"""What lanes read of datasets: each sample once, whoever divides, and the rest from a state."""

import os
import pickle
import random
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.support.lanes import read, resumed, trained
from zero_contract.errors import ConfigError, ZeroError
from zero_data import Lanes
from zero_data.lanes import Shuffle
from zero_data.lanes.adapters import source_of


class Divided(IterableDataset):
    """Divides itself by workers, as torch's documentation shows."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, self.size, info.num_workers)


class ByRank(Divided):
    """Divides itself by ranks, and those by workers."""

    def __iter__(self):
        rank, world, info = dist.get_rank(), dist.get_world_size(), get_worker_info()
        assert (os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")) == ("0", "1")
        place = rank * info.num_workers + info.id
        yield from range(place, self.size, world * info.num_workers)


class Whole(Divided):
    """Knows nothing of workers."""

    def __iter__(self):
        yield from range(self.size)


class Counting(Divided):
    """Has a state."""

    def __init__(self, size):
        super().__init__(size)
        self.next = 0

    def __iter__(self):
        while self.next < self.size:
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class OfIterator(Divided):
    """Its iterator has a state, by the names of Grain."""

    def __iter__(self):
        info = get_worker_info()
        return _Numbers(range(info.id, self.size, info.num_workers))


class _Numbers:
    def __init__(self, numbers):
        self.numbers, self.next = numbers, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.numbers):
            raise StopIteration
        self.next += 1
        return self.numbers[self.next - 1]

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


class Mapped(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        assert number < self.size
        return number


class Sharded:
    def __init__(self, size):
        self.shard_sizes = [size // 3, 0, size - size // 3]

    def read_shard(self, shard, start):
        return iter(
            range(sum(self.shard_sizes[:shard]), sum(self.shard_sizes[: shard + 1]))[start:]
        )


class Random(Divided):
    """Draws from the random numbers of the process, and divides nothing."""

    def __iter__(self):
        order = list(range(self.size))
        random.shuffle(order)
        for number in order:
            yield number, random.random(), float(np.random.rand()), float(torch.rand(()))


class AtOnce(Random):
    """Draws its order where its iterator is made."""

    def __iter__(self):
        order = list(range(self.size))
        random.shuffle(order)
        return ((number, random.random()) for number in order)


class OfClass(Random):
    """Draws by a generator that all copies of it have in common."""

    rng = np.random.default_rng(1)

    def __iter__(self):
        for number in self.rng.permutation(self.size):
            yield int(number), float(self.rng.random())


def _of_function(size):
    return lambda lane, lanes: range(lane, size, lanes)


_KINDS = [Divided, ByRank, Whole, Counting, OfIterator, Mapped, Sharded, _of_function]
_FAST = [ByRank, Counting, Sharded]
_fewer = settings(max_examples=settings().max_examples // 4)  # of lanes, cuts and groups


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.corners(kind=_FAST)
@_fewer
@given(size=st.integers(0, 40), lanes=st.integers(1, 5))
def test_lanes_read_every_sample_once(kind, size, lanes):
    samples = [sample for lane in read(kind(size), lanes) for sample in lane]
    assert sorted(samples) == list(range(size))


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.corners(kind=_FAST)
@_fewer
@given(
    size=st.integers(0, 40),
    lanes=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 12), min_size=5),
    group=st.integers(1, 5),
)
def test_a_lane_goes_on_where_it_was_whoever_reads_it(kind, size, lanes, cuts, group):
    cuts = cuts[:lanes]
    whole = read(kind(size), lanes)
    expected = [lane[cut:] for lane, cut in zip(whole, cuts, strict=True)]
    assert resumed(kind(size), lanes, cuts, group=group) == expected


@pytest.mark.parametrize("kind", [Random, AtOnce, OfClass])
@pytest.mark.corners(kind=[AtOnce])
@_fewer
@given(st.integers(0, 20), st.integers(2, 4), st.integers(1, 4), st.integers(0, 3))
def test_data_that_draws_random_numbers_is_read_alike_by_all(kind, size, lanes, group, cut):
    whole = read(kind(size), lanes)
    assert sorted(number for lane in whole for number, *_ in lane) == list(range(size))
    rest = resumed(kind(size), lanes, [cut] * lanes, group=group)
    assert rest == [lane[cut:] for lane in whole]


class Permuted(Divided):
    """Divides itself, and draws its order, by numpy, where its iterator is made."""

    def __iter__(self):
        info = get_worker_info()
        own = range(info.id, self.size, info.num_workers)
        return iter([own[place] for place in self.draw(len(own))])

    def draw(self, count):
        return np.random.permutation(count)


class PermutedByClass(Permuted):
    """Draws it by a generator that all copies of it have in common."""

    rng = np.random.default_rng(1)

    def draw(self, count):
        return self.rng.permutation(count)


@pytest.mark.parametrize("kind", [Permuted, PermutedByClass])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_order_that_is_drawn_at_the_begin_of_a_lane_is_the_same_on_any_rank(kind, world):
    options = {"batch_size": 2, "lanes": 4}
    whole = trained(lambda: kind(32), 1, until=4, **options)
    assert sorted(chain(*whole.steps)) == list(range(32))
    begun = trained(lambda: kind(32), 1, until=2, **options)
    rest = trained(lambda: kind(32), world, until=4, state=begun.state, **options)
    assert rest.steps == whole.steps[2:]


def test_lanes_of_a_process_read_data_that_does_not_divide_itself_once():
    reads = []

    class Counted(Whole):
        def __iter__(self):
            for number in range(self.size):
                reads.append(number)
                yield number

    source = source_of(Counted(12))
    lanes = [source.open(lane, 4, 0, None) for lane in range(4)]
    tried = len(reads)
    assert [list(lane) for lane in lanes] == [[lane, lane + 4, lane + 8] for lane in range(4)]
    assert len(reads) - tried == 12
    reads.clear()
    list(Lanes(Counted(12), batch_size=2, lanes=4))
    assert len(reads) == 12 + tried


def test_a_dataset_that_asks_too_late_whether_it_is_divided_is_refused():
    class Late(Whole):
        def __iter__(self):
            yield 0
            yield from range(get_worker_info().id, self.size)

    with pytest.raises(ZeroError, match="not before its first sample"):
        read(Late(9), 2)


def test_a_rank_and_the_environment_are_as_before_after_reading(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    before = dist.get_rank, dist.get_world_size
    assert sorted(chain(*read(ByRank(10), 3))) == list(range(10))
    assert (dist.get_rank, dist.get_world_size) == before
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "8")
    assert get_worker_info() is None


def test_every_epoch_of_a_map_style_dataset_has_its_order():
    first, second = read(Mapped(50), 2, epoch=0), read(Mapped(50), 2, epoch=1)
    assert first != second
    assert sorted(chain(*second)) == list(range(50))


def test_a_dataset_hears_of_its_epoch():
    class Epochs(Divided):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return ((self.epoch, number) for number in super(Epochs, self).__iter__())  # noqa: UP008

    assert read(Epochs(2), 2, epoch=5) == [[(5, 0)], [(5, 1)]]


def test_a_loader_in_a_stage_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"DataLoader, whose batches .*give it that"):
        Shuffle(DataLoader(Divided(6), batch_size=2), buffer=2)


def test_a_source_travels_to_the_processes_that_read():
    source = pickle.loads(pickle.dumps(source_of(Divided(5))))
    assert list(source.open(1, 2, 0, None)) == [1, 3]


class Locked(Divided):
    def __init__(self):
        super().__init__(3)
        self.file = open(os.devnull)  # noqa: SIM115


@pytest.mark.parametrize(
    ("dataset", "said"),
    [(iter([1]), "cannot be begun again"), (3, "cannot be begun again"), (Locked, "open files in")],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_lanes_cannot_read_is_refused(dataset, said):
    with pytest.raises(ConfigError, match=said):
        read(dataset() if dataset is Locked else dataset, 2)
