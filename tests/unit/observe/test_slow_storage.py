"""Storage is called slow only if a rank, or all of them, write much slower than usual, twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_contract.worker import RankTimes
from zero_orchestrator.membership.job_state import Members
from zero_orchestrator.observe.detectors.slow_storage import SlowStorage, SlowWrite, Storage

MB = 1e6


def reports(*checkpoints, size_bytes=1000 * MB):
    """Those of checkpoints with these rates in MB/s, each reported twice."""
    for rates in checkpoints:
        report = RankTimes(
            step=1,
            steps=1,
            compute_s=(),
            wait_s=(),
            slow_steps=(),
            write_bytes_per_s=tuple(rate * MB for rate in rates),
            write_s=tuple(size_bytes / (rate * MB) if rate else 0.0 for rate in rates),
        )
        yield from (report, report)


def after(*checkpoints, size_bytes=1000 * MB):
    """What is known after them."""
    found = Storage()
    for report in reports(*checkpoints, size_bytes=size_bytes):
        found = found.add(report)
    return found.verdict


def test_a_rank_that_writes_slower_than_the_others_is_named_at_its_second_checkpoint():
    even, slow, again = (200, 210, 190), (202, 20, 192), (201, 21, 191)
    assert after(even, slow) is None
    found = after(even, slow, again)
    assert found == SlowWrite(rank=1, bytes_per_s=21 * MB, usual_bytes_per_s=196 * MB)
    assert after(even, slow, again, even) is None
    assert after(even, slow, (203, 20, 193)) is None, "rank 1 has not ended its next save"


def test_all_ranks_are_slow_if_they_were_three_times_as_fast_before():
    fast = [(200, 210), (201, 211), (202, 212)]
    found = after(*fast, (20, 21), (19, 23))
    assert found is not None
    assert (found.rank, found.bytes_per_s) == (None, 21 * MB)
    assert after(*fast, (20, 21), (199, 200)) is None


def test_a_storage_that_is_slow_for_all_names_no_rank_and_no_node():
    detector = SlowStorage(Members())
    for report in reports((200, 210), (201, 211), (202, 212), (20, 21), (19, 23)):
        found = detector.add(report, 0.0)
    [verdict] = [each.verdict for each in found]
    assert (verdict.rank, verdict.node) == (None, "")
    assert verdict.text == "all ranks write checkpoints at 21 MB/s; earlier: 206 MB/s"


def test_writes_that_take_no_time_and_ranks_without_one_are_not_judged():
    assert after((200, 20), (201, 21), size_bytes=MB) is None
    assert after((0, 20), (0, 21)) is None
    assert after((20,), (21,)) is None


@given(st.lists(st.lists(st.floats(100, 290), min_size=4, max_size=4), max_size=30))
def test_no_storage_is_slow_in_noise(checkpoints):
    assert after(*checkpoints) is None
