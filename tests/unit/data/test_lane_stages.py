"""Shuffle, mixture, packing: nothing is lost, and the rest after a state is that without it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from tests.support.lanes import read, resumed
from zero_contract.errors import ConfigError
from zero_data.lanes import Mixture, Pack, Shuffle, cu_seqlens


class Texts(IterableDataset):
    """Numbered documents of several lengths, divided among workers, with a state."""

    def __init__(self, name: int, sizes: list[int]) -> None:
        self.name, self.sizes, self.next = name, sizes, 0

    def __iter__(self):
        info = get_worker_info()
        mine = range(info.id, len(self.sizes), info.num_workers)
        while self.next < len(mine):
            number = mine[self.next]
            self.next += 1
            yield [self.name * 10**6 + number * 1000 + at for at in range(self.sizes[number])]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def _texts(name: int) -> st.SearchStrategy[Texts]:
    return st.lists(st.integers(0, 9), max_size=30).map(lambda sizes: Texts(name, sizes))


_fewer = settings(max_examples=settings().max_examples // 4)  # each reads several lanes twice
_ENDINGS = st.sampled_from(["stop", "restart", "continue"])
_STAGES = st.one_of(
    st.builds(Shuffle, _texts(1), buffer=st.integers(1, 9), seed=st.integers(0, 3)),
    st.builds(
        lambda one, two, when: Mixture(
            {"one": one, "two": two}, {"one": 3.0, "two": 1.0}, when_exhausted=when
        ),
        _texts(1),
        _texts(2),
        _ENDINGS,
    ),
    st.builds(
        Pack,
        _texts(1),
        st.integers(1, 12),
        how=st.sampled_from(["chunk", "first_fit"]),
        bins=st.integers(1, 4),
    ),
    st.builds(
        lambda texts, buffer: Shuffle(Pack(texts, 5, how="chunk"), buffer=buffer),
        _texts(1),
        st.integers(1, 4),
    ),
    st.builds(
        lambda one, two, when: Pack(
            Shuffle(
                Mixture({"one": one, "two": two}, {"one": 1.0, "two": 2.0}, when_exhausted=when),
                buffer=5,
            ),
            7,
        ),
        _texts(1),
        _texts(2),
        _ENDINGS,
    ),
)


def _plain(lanes):
    """Samples that can be compared: tensors as lists, with the documents of packed ones."""
    return [
        [
            [*(value.tolist() for value in sample.values()), sample.documents]
            if isinstance(sample, dict)
            else sample
            for sample in lane
        ]
        for lane in lanes
    ]


@_fewer
@given(_STAGES, st.integers(1, 4), st.lists(st.integers(0, 40), min_size=4), st.integers(0, 2))
def test_the_rest_after_a_state_is_the_rest_without_it(stage, lanes, cuts, epoch):
    whole = _plain(read(stage, lanes, epoch))
    rest = _plain(resumed(stage, lanes, cuts[:lanes], epoch=epoch))
    assert rest == [lane[cut:] for lane, cut in zip(whole, cuts[:lanes], strict=True)]


@_fewer
@given(_texts(1), st.integers(1, 9), st.integers(1, 4))
def test_a_shuffle_has_every_sample_once(texts, buffer, lanes):
    plain, shuffled = read(texts, lanes), read(Shuffle(texts, buffer=buffer), lanes)
    assert [sorted(lane) for lane in shuffled] == [sorted(lane) for lane in plain]


@_fewer
@given(_texts(1), _texts(2), st.integers(1, 4), _ENDINGS)
def test_a_mixture_ends_as_it_says(one, two, lanes, when):
    mixture = Mixture({"one": one, "two": two}, {"one": 1, "two": 1}, when_exhausted=when)
    for lane, first, second in zip(
        read(mixture, lanes), read(one, lanes), read(two, lanes), strict=True
    ):
        whole = [all(sample in lane for sample in part) for part in (first, second)]
        if when == "continue":
            assert sorted(lane) == sorted([*first, *second])
        else:
            assert all(whole) if when == "restart" else any(whole)
        if when == "stop":
            assert all(lane.count(sample) <= [*first, *second].count(sample) for sample in lane)


def test_a_mixture_has_its_weights():
    one, two = Texts(1, [1] * 900), Texts(2, [1] * 900)
    [lane] = read(Mixture({"one": one, "two": two}, {"one": 3, "two": 1}), 1)
    assert 0.7 < sum(sample[0] < 2 * 10**6 for sample in lane) / len(lane) < 0.8


@_fewer
@given(_texts(1), st.integers(1, 12), st.sampled_from(["chunk", "first_fit"]), st.integers(1, 4))
def test_packed_samples_have_every_token_once_and_say_of_which_document(texts, length, how, bins):
    [documents], [samples] = (
        read(texts, 1),
        read(Pack(texts, length, how=how, bins=bins, pad=-1), 1),
    )
    parts = []
    for sample in samples:
        assert all(value.shape == (length,) for value in sample.values())
        at = 0
        for number, (document, begin, end) in enumerate(sample.documents, 1):
            inside = slice(at, at + end - begin)
            tokens = documents[document][begin:end]
            assert sample["input_ids"][inside].tolist() == tokens
            assert sample["labels"][inside].tolist() == [-100, *tokens[1:]]
            assert sample["position_ids"][inside].tolist() == list(range(end - begin))
            assert (sample["document_ids"][inside] == number).all()
            parts.append((document, begin, end))
            at += end - begin
        assert sample["input_ids"][at:].tolist() == [-1] * (length - at)
        assert (sample["labels"][at:] == -100).all()
        assert (sample["document_ids"][at:] == 0).all()
    tokens = sorted((document, at) for document, begin, end in parts for at in range(begin, end))
    assert tokens == [(d, at) for d, tokens in enumerate(documents) for at in range(len(tokens))]
    if how == "chunk":
        assert all(sample["document_ids"].all() for sample in samples[:-1])
    else:  # only what is longer than a sample is cut
        cut = {document for document, begin, end in parts if end - begin < len(documents[document])}
        assert all(len(documents[document]) > length for document in cut)


def test_flash_attention_gets_the_beginnings_of_documents():
    [samples] = read(Pack(Texts(1, [3, 2, 4]), 6, how="chunk"), 1)
    batch = torch.stack([sample["position_ids"] for sample in samples])
    assert batch.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 1, 2]]
    assert cu_seqlens(batch).tolist() == [0, 3, 5, 6, 9, 12]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Shuffle(Texts(1, []), buffer=0),
        lambda: Mixture({"one": Texts(1, [])}, {"two": 1}),
        lambda: Mixture({"one": Texts(1, [])}, {"one": 1}, when_exhausted="never"),
        lambda: Pack(Texts(1, []), 0),
        lambda: Pack(iter([]), 4),
    ],
)
def test_a_stage_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
