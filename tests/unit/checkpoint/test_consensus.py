"""Ranks that vote through a store agree, or know that they do not."""

from __future__ import annotations

import os
import resource
import threading
import time
import zlib

import pytest
from torch.distributed import HashStore, TCPStore

from tests.support.packed import packed_zeros
from tests.unit.checkpoint.support import on_ranks
from zero_checkpoint import StoreConsensus
from zero_checkpoint.consensus import NO_VOTE
from zero_checkpoint.errors import CheckpointError
from zero_contract.errors import PeerLost


def test_all_ranks_hear_the_same_verdict_on_all_votes():
    def work(consensus):
        return consensus.ask(
            {"rank": consensus.rank}, lambda votes: {"all": [v["rank"] for v in votes]}
        )

    assert on_ranks(4, work) == [{"all": [0, 1, 2, 3]}] * 4


def test_only_rank_0_makes_an_announcement():
    results = on_ranks(3, lambda consensus: consensus.announce(lambda: {"by": consensus.rank}))
    assert results == [{"by": 0}] * 3


def test_the_judge_is_told_who_did_not_vote_and_the_others_still_hear():
    def work(consensus):
        if consensus.rank == 1:
            return None
        return consensus.ask({}, lambda votes: {"missing": ["problem" in v for v in votes]})

    verdict = {"missing": [False, True, False]}
    assert on_ranks(3, work, timeout_s=2.0) == [verdict, None, verdict]


def test_a_silent_rank_0_ends_the_wait_of_the_others():
    def work(consensus):
        return None if consensus.rank == 0 else consensus.ask({}, lambda _: {})

    _, error = on_ranks(2, work, timeout_s=0.05)
    assert isinstance(error, CheckpointError)
    assert "rank 1: no verdict from rank 0 within 0.1 s" in str(error)


def test_a_rank_that_gives_up_is_in_no_verdict_so_that_no_save_succeeds_on_some_ranks_alone():
    given_up = threading.Event()

    def work(consensus):
        if consensus.rank == 1:
            try:
                return consensus.ask({}, dict)
            finally:
                given_up.set()
        assert given_up.wait(60)
        return consensus.ask({}, lambda votes: {"missing": ["problem" in v for v in votes]})

    verdict, error = on_ranks(2, work, timeout_s=0.05)
    assert isinstance(error, CheckpointError)
    assert verdict == {"missing": [False, True]}


def test_a_rank_whose_vote_counts_does_not_give_up_while_rank_0_judges():
    refused = threading.Event()

    def work(consensus):
        if consensus.rank == 0:
            return consensus.ask({}, lambda votes: {"of": len(votes), "late": refused.wait(60)})
        take_back = consensus._delete

        def tell(keys):
            try:
                return take_back(keys)
            finally:
                refused.set()

        consensus._delete = tell
        return consensus.ask({}, dict)

    assert on_ranks(2, work, timeout_s=1.0) == [{"of": 2, "late": True}] * 2


def test_a_long_job_leaves_next_to_nothing_in_the_store():
    store = HashStore()
    before = store.num_keys()

    def work(consensus):
        for _ in range(50):
            consensus.announce(lambda: {"x": 1})
            consensus.announce(lambda: {"x": 1}, voted_on="x")
            consensus.ask({"x": 1}, lambda votes: {})

    on_ranks(3, work, store=store)
    assert store.num_keys() == before


def test_rank_0_stays_until_the_others_have_heard_because_it_may_host_the_store(monkeypatch):
    monkeypatch.setattr("zero_checkpoint.consensus._ANSWERED_S", 60.0)
    heard = []

    def work(consensus):
        if consensus.rank == 0:
            consensus.announce(dict)
            return list(heard)
        take = consensus._get

        def slow(key):
            got = take(key)
            heard.append(consensus.rank)
            return got

        consensus._get = slow
        return consensus.announce(dict)

    assert sorted(on_ranks(4, work)[0]) == [1, 2, 3]


def test_rank_0_does_not_wait_to_be_heard_where_all_ranks_vote_next():
    announced = threading.Event()

    def work(consensus):
        if consensus.rank == 1:
            assert announced.wait(60)  # before that it hears nothing
        record = consensus.announce(lambda: {"x": 1}, voted_on="x")
        announced.set()
        return consensus.ask(record, lambda votes: {"of": len(votes)})

    assert on_ranks(2, work) == [{"of": 2}] * 2


def test_bytes_travel_as_they_are_beside_json():
    record = {"a": b"\x00 7 \xff", "words": ["x"], "nothing": b"", "z": b"[1]"}
    votes = on_ranks(
        3, lambda consensus: consensus.ask(record, lambda votes: {"b": b"1 ", **votes[1]})
    )
    assert votes == [{"b": b"1 ", **record}] * 3


def test_a_vote_larger_than_a_tcp_store_takes_goes_through_in_parts():
    noise = os.urandom(6 << 20).hex()  # compresses to half: 6 MiB in two parts
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ours = StoreConsensus(store, 1, 2, timeout_s=60)
    ours._put("k", {"noise": noise * 2})
    record, keys = ours._get("k")
    assert record == {"noise": noise * 2}
    assert len(keys) > 1


FOREIGN = {
    "bomb": packed_zeros(1024),
    "no JSON": zlib.compress(b"{"),
    "another type": zlib.compress(b'[{"a": 1}, {"b": -1}]'),
    "no zlib": b"record",
    "nested": zlib.compress(b"[" * 100_000),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_no_rank_has_written_is_no_vote_and_takes_little_memory(what, caplog):
    store = HashStore()
    store.set("consensus/1/1", b"1 %d %b" % (len(FOREIGN[what]), FOREIGN[what]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verdict = StoreConsensus(store, 0, 2, timeout_s=0.05).ask({}, lambda votes: {"votes": votes})
    assert verdict == {"votes": [{}, {"problem": NO_VOTE.format(1)}]}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # KiB
    assert "consensus/1/1 is no signed record" in caplog.text


def test_a_caller_can_leave_while_it_waits():
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    begin = time.monotonic()
    with pytest.raises(Stop):
        StoreConsensus(HashStore(), 1, 2, on_wait=stop).ask({}, lambda _: {})
    assert time.monotonic() - begin < 60  # the store consensus itself waits for ten minutes


def test_a_store_that_is_gone_is_a_lost_peer():
    class Gone(HashStore):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(PeerLost, match="Connection reset by peer"):
        StoreConsensus(Gone(), 1, 2).ask({}, lambda _: {})
