"""Damage in the memory of a node: found, and read around."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit.checkpoint.memory.nodes import FULL, Cluster, loaded_from_memory
from tests.unit.checkpoint.support import adam_state, blank, on_ranks, same_bits, saved, share
from zero_checkpoint import StoreConsensus
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.loading.restore import Loaded, load


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def held(cluster: Cluster, node: str, file: str) -> Path:
    (path,) = cluster.nodes[node].directory.glob(f"*/step-*/{file}")
    return path


def test_a_damaged_image_is_replaced_by_its_neighbours_copy(cluster):
    cluster.add("a", "b")
    cluster.keep(FULL, 1)
    # The staging buffer is longer than the image, so damage its half of the bytes that are read.
    path = held(cluster, "a", "r00000.safetensors")
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    loaded_from_memory(cluster, FULL, step=1)


def test_a_damaged_copy_of_a_lost_image_is_refused_and_the_one_before_is_loaded(cluster, caplog):
    saved(cluster.root, adam_state(seed=9, width=4001), step=1)
    cluster.add("a", "b", "c")
    cluster.keep(FULL, 2)
    flip(held(cluster, "a", "r00002.safetensors"))
    cluster.lose("c")
    results = cluster.load(target := blank(FULL))
    assert [(r.manifest.step, r.in_memory) for r in results] == [(1, False)] * 2
    assert same_bits(target, adam_state(seed=9, width=4001))
    assert "XXH3-64 differs" in caplog.text


def test_a_damaged_manifest_is_taken_from_another_node(cluster):
    cluster.add("a", "b")
    cluster.keep(FULL, 1)
    flip(held(cluster, "a", "MANIFEST.json"))
    loaded_from_memory(cluster, FULL, step=1)


def test_an_image_that_is_lost_with_all_copies_while_it_is_loaded_makes_all_fall_back(cluster):
    saved(cluster.root, FULL, step=1)
    cluster.add("a", "b", "c")
    cluster.keep(FULL, 2)
    names = list(cluster.nodes)
    searches = [MemorySearch(cluster.nodes[name]) for name in names]
    for path in cluster.directory.glob("shm-*/*/*/step-*/r00001.safetensors"):
        path.unlink()
    target = blank(FULL)

    def work(consensus: StoreConsensus) -> Loaded | None:
        return load(
            cluster.root,
            consensus,
            lambda _: share(target, consensus.rank, 3),
            ram=searches[consensus.rank],
        )

    assert [(r.manifest.step, r.in_memory) for r in on_ranks(3, work)] == [(1, False)] * 3
