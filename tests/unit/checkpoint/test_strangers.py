"""Whoever can connect to the store of a round can neither vote nor make a torn checkpoint."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed import HashStore

from tests.unit.checkpoint.support import SMALL, blank, load_all, on_ranks, same_bits, share
from zero_checkpoint import StoreConsensus
from zero_checkpoint.format.pieces import PARAM, TensorId
from zero_checkpoint.saving.commit import save

KEY = "of the ranks"
FULL = {TensorId(PARAM, "w"): torch.arange(1000, dtype=torch.float32)}


def forged(
    name: str, record: dict, *, key: str | None = None, signed_as: str = ""
) -> dict[str, bytes]:
    """What a stranger would write as `name`, perhaps what a rank once signed for another name."""
    store = HashStore()
    StoreConsensus(store, 1, 2, key=key)._put(signed_as or name, record)
    return {name: store.get(signed_as or name)}


OPENING = {"round": 7, "nonce": "../../elsewhere"}
FAILED = {"problem": "rank 1: forged"}
WAYS = {
    "unsigned": forged,
    "signed with another key": lambda name, record: forged(name, record, key="guessed"),
    "signed for another name": lambda n, r: forged(n, r, key=KEY, signed_as="consensus/9/1"),
    "noise": lambda name, record: {name: b"\x00\xffnoise"},
    "parts without end": lambda name, record: {name: b"99999999999999999999 x"},
    "parts that are not there": lambda name, record: {name: b"4096 x"},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_stranger_writes_into_the_store_changes_no_checkpoint(tmp_path, caplog, way):
    store = HashStore()
    for name, record in {
        "consensus/1": OPENING,
        "consensus/2": FAILED,
        "consensus/2/1": FAILED,
    }.items():
        for key, value in WAYS[way](name, record).items():
            store.set(key, value)

    def work(consensus):
        state = share(FULL, consensus.rank, consensus.world)
        return save(
            tmp_path / "c", state, consensus, step=1, tag="t", round=0, fence=None, disk=SMALL
        )

    with caplog.at_level(logging.WARNING):
        first, second = on_ranks(2, work, store=store, key=KEY)
    assert first == second
    target = blank(FULL)
    load_all(tmp_path / "c", target)
    assert same_bits(target, FULL)
    assert sorted(path.name for path in first.iterdir()) == [
        "MANIFEST.json",
        "r00000.safetensors",
        "r00001.safetensors",
    ]
    assert "is no signed record of a rank of this job and is ignored" in caplog.text
