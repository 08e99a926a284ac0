from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zero_contract.errors import ZeroError
from zero_data.ledger import Entry, Ledger, read_ledger, verify


def entry(
    step: int, round_: int, rank: int, world: int, microbatches: dict[int, tuple[int, ...]]
) -> Entry:
    return Entry(step, round_, rank, world, microbatches)


WHOLE = [
    entry(1, 0, 0, 2, {0: (3, 1)}),
    entry(1, 0, 1, 2, {1: (0, 4)}),
    entry(2, 0, 0, 2, {0: (2,)}),
    entry(2, 0, 1, 2, {}),
]


def test_an_epoch_consumed_once_is_exact() -> None:
    report = verify(WHOLE, 5)
    assert report.exact
    assert (report.steps, report.samples, report.repeated_steps) == (2, 5, 0)
    assert report.world_by_step == {1: 2, 2: 2}


def test_the_highest_round_that_executed_a_step_is_the_one_that_counts() -> None:
    again = [*WHOLE, entry(2, 1, 0, 1, {0: (2,)}), entry(3, 1, 0, 1, {0: (1, 0)})]
    report = verify(again, 5)
    assert report.exact
    assert (report.steps, report.samples, report.repeated_steps) == (3, 7, 1)
    assert report.world_by_step == {1: 2, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([*WHOLE[:2], entry(3, 0, 0, 1, {0: (2,)})], "step 2 is in no ledger"),
        (WHOLE[:1] + WHOLE[2:], "step 1: 1 of 2 ranks have an entry"),
        ([entry(1, 0, 0, 1, {1: (0,)})], "step 1: micro-batch 0 ran on no rank"),
        (
            [entry(1, 0, 0, 2, {0: (0,)}), entry(1, 0, 1, 2, {0: (1,)})],
            "step 1: micro-batch 0 ran 2 times",
        ),
        ([entry(1, 0, 0, 1, {0: (0, 1, 1, 2, 3)})], "epoch 0: sample 1 consumed 2 times"),
        ([entry(1, 0, 0, 1, {0: (0, 1, 1, 2, 3)})], "epoch 0: sample 4 never consumed"),
        ([entry(1, 0, 0, 1, {0: (9,)})], "epoch 0: sample 9 is not in the dataset"),
    ],
)
def test_whatever_is_lost_or_repeated_is_named(entries: list[Entry], problem: str) -> None:
    report = verify(entries, 5)
    assert not report.exact
    assert problem in report.problems


def test_an_unfinished_epoch_may_lack_samples_but_not_repeat_them() -> None:
    assert verify([entry(1, 0, 0, 1, {0: (4, 0)})], 5).exact
    assert not verify([entry(1, 0, 0, 1, {0: (4, 4)})], 5).exact


def test_what_was_written_is_read_back_and_a_line_cut_short_by_a_kill_is_left_out(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path, round=3, rank=1, world=2)
    ledger.consume(0, (7, 8))
    ledger.consume(2, (9,))
    ledger.end_step(1)
    ledger.consume(1, (4,))
    ledger.end_step(2)
    written = [entry(1, 3, 1, 2, {0: (7, 8), 2: (9,)}), entry(2, 3, 1, 2, {1: (4,)})]
    assert read_ledger(tmp_path) == written  # before the file is closed: as a kill leaves it
    ledger.close()
    path = tmp_path / "round3-rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert read_ledger(tmp_path) == written[:1]
    again = Ledger(tmp_path, round=3, rank=1, world=2)
    again.consume(1, (4,))
    again.end_step(2)
    again.close()
    assert read_ledger(tmp_path) == written


@contextmanager
def no_room_behind(size_bytes: int) -> Iterator[None]:
    """Files have no room behind their first bytes: a write is cut short there, the next fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("ends", [4, 5], ids=["written at the next step", "written at the end"])
@pytest.mark.parametrize("room", range(0, 60, 7))
def test_without_room_steps_go_on_whole_lines_stay_and_the_others_follow(
    tmp_path: Path, room: int, ends: int, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path, round=0, rank=0, world=1)
    steps = [entry(step, 0, 0, 1, {0: (step,)}) for step in range(1, 6)]
    for each in steps:
        size = (tmp_path / "round0-rank0.jsonl").stat().st_size
        with no_room_behind(size + room if each.step in range(2, ends + 1) else -1):
            ledger.consume(0, (each.step,))
            ledger.end_step(each.step)
        assert read_ledger(tmp_path) == steps[: 1 if each.step in range(2, ends + 1) else each.step]
    ledger.close()
    assert read_ledger(tmp_path) == steps
    assert caplog.text.count("round0-rank0.jsonl waits for room, the run goes on") == 1


def test_the_documents_of_packed_samples_are_written_and_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, round=0, rank=0, world=1)
    ledger.consume(2, (4, 5), (((0, 0, 3), (1, 0, 5)), ((1, 5, 7),)))
    ledger.consume(3, (0,))
    ledger.end_step(1)
    ledger.end_step(2)
    ledger.close()
    first, second = read_ledger(tmp_path)
    assert first.documents == {2: (((0, 0, 3), (1, 0, 5)), ((1, 5, 7),))}
    assert second.documents == {}


def packed(step: int, round_: int, first: int, *parts: tuple[int, int, int]) -> Entry:
    """A step of one lane, each of whose samples has one part of a document."""
    numbers = tuple(range(first, first + len(parts)))
    return Entry(step, round_, 0, 1, {0: numbers}, {0: tuple((part,) for part in parts)})


@pytest.mark.parametrize(
    ("entries", "problems"),
    [
        ([packed(1, 0, 0, (0, 0, 3), (1, 0, 9)), packed(2, 0, 2, (1, 9, 12))], ()),
        ([packed(1, 0, 0, (1, 9, 12)), packed(2, 0, 1, (1, 0, 9)), packed(3, 0, 0, (0, 0, 1))], ()),
        (
            [packed(1, 0, 0, (1, 0, 9)), packed(2, 0, 1, (1, 8, 12))],
            ("epoch 0, lane 0, document 1: token 8 consumed twice",),
        ),
        ([packed(1, 0, 0, (1, 9, 12))], ()),  # the rest may follow
        (
            [packed(1, 0, 0, (1, 9, 12)), packed(2, 0, 0, (1, 0, 9))],  # the epoch has ended
            ("epoch 0, lane 0, document 1: token 0 never consumed",),
        ),
        (
            [packed(1, 0, 0, (1, 0, 9)), packed(1, 1, 0, (1, 0, 8))],
            ("step 1 had other samples when it was done again",),
        ),
    ],
)
def test_tokens_of_a_document_that_are_lost_or_repeated_are_named(
    entries: list[Entry], problems: tuple[str, ...]
) -> None:
    assert verify(entries, None).problems == problems


def test_a_leaf_that_is_run_twice_in_a_step_shows(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, round=0, rank=0, world=1)
    ledger.consume(0, (0,))
    ledger.consume(0, (0,))
    ledger.end_step(1)
    ledger.close()
    assert "epoch 0: sample 0 consumed 2 times" in verify(read_ledger(tmp_path), 4).problems


def test_a_line_that_is_no_entry_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "round0-rank0.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ZeroError, match=r"round0-rank0\.jsonl:1: not a ledger entry"):
        read_ledger(tmp_path)
