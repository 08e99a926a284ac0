"""Which node of a few holds what, and what is loaded when some of them are lost."""

from __future__ import annotations

import shutil

import pytest

from tests.support.listing import before_listing
from tests.unit.checkpoint.memory.nodes import FULL, loaded_from_memory
from tests.unit.checkpoint.support import adam_state, blank, same_bits, saved
from zero_checkpoint.format.manifest import age
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.memory.node import home_of
from zero_checkpoint.memory.peers import replica_peers
from zero_contract.errors import CommitRefused

# ---- what is where ----


@pytest.mark.parametrize(
    ("roster", "own", "replicas", "expected"),
    [
        (["a", "b", "c"], "a", 1, ["b"]),
        (["a", "b", "c"], "c", 2, ["a", "b"]),
        (["a", "a", "b", "b"], "a", 2, ["b"]),
        (["a"], "a", 1, []),
        (["a", "b"], "b", 0, []),
    ],
)
def test_copies_go_to_the_next_nodes_in_the_order_of_ranks(roster, own, replicas, expected):
    assert replica_peers(roster, own, replicas) == expected


def test_each_node_holds_its_own_image_and_its_neighbours_of_the_newest_step_alone(cluster):
    cluster.add("a", "b", "c")
    for step in (1, 2, 3):
        assert [kept.poorer for kept in cluster.keep(FULL, step)] == [()] * 3
    assert cluster.files("a") == [
        "step-000000003/MANIFEST.json",
        "step-000000003/r00000.safetensors",
        "step-000000003/r00002.safetensors",
    ]
    assert len(list(cluster.nodes["a"].directory.glob("zero-staging.*"))) == 2


@pytest.mark.parametrize(
    ("lost", "new"), [((), ()), (("b",), ()), (("b",), ("d", "e")), ((), ("d",))]
)
def test_what_is_kept_is_loaded_at_any_world_size_also_after_a_node_is_lost(cluster, lost, new):
    cluster.add("a", "b", "c")
    cluster.keep(FULL, 1)
    cluster.keep(FULL, 2)
    cluster.lose(*lost)
    cluster.add(*new)
    loaded_from_memory(cluster, FULL, step=2)


def test_two_nodes_read_what_three_have_kept_once_and_hardly_a_byte_more(cluster):
    full = adam_state(width=250_000)  # 36 MB
    cluster.add("a", "b", "c")
    cluster.keep(full, 1)
    cluster.lose("b")
    target = blank(full)
    results = cluster.load(target)
    assert same_bits(target, full)
    size = sum(file.size_bytes for file in results[0].manifest.files)
    assert 0.999 * size < sum(result.bytes_read for result in results) <= 1.01 * size


def test_a_copy_is_given_up_when_its_worker_wants_to_leave_and_the_checkpoint_is_kept(cluster):
    cluster.add("a", "b")
    cluster.peers["a"].set_deadline(limit_s=0.0)
    for kept in cluster.keep(FULL, 1):
        (lacking,) = kept.poorer
        assert lacking.startswith("rank 0: ")
        assert lacking.endswith("took no copy: it was not done when this worker wanted to leave")
    loaded_from_memory(cluster, FULL, step=1)


def test_the_one_that_is_kept_is_not_touched_while_the_next_is_written(cluster):
    """Two steps of different bits: after the second has failed, the first is there as it was."""
    cluster.add("a", "b")
    cluster.keep(FULL, 1)
    other = adam_state(seed=50, width=4001)

    def refuse(digest: str) -> None:
        raise CommitRefused("round 1 is over")

    refused = cluster.keep(other, 2, fence=refuse)
    assert [type(error) for error in refused] == [CommitRefused] * 2
    assert cluster.files("a") == [
        "step-000000001/MANIFEST.json",
        "step-000000001/r00000.safetensors",
        "step-000000001/r00001.safetensors",
    ]
    loaded_from_memory(cluster, FULL, step=1)


def test_two_neighbours_lost_mean_the_checkpoint_on_disk(cluster, caplog):
    saved(cluster.root, adam_state(seed=9, width=4001), step=1)
    cluster.add("a", "b", "c")
    cluster.keep(FULL, 2)
    cluster.lose("b", "c")
    target = blank(FULL)
    (result,) = cluster.load(target)
    assert (result.manifest.step, result.in_memory) == (1, False)
    assert same_bits(target, adam_state(seed=9, width=4001))
    assert "step 2: r00001.safetensors went with the nodes that held it" in caplog.text


def test_two_neighbours_lost_are_no_loss_with_two_copies(cluster):
    cluster.add("a", "b", "c")
    cluster.keep(FULL, 2, replicas=2)
    cluster.lose("b", "c")
    loaded_from_memory(cluster, FULL, step=2)


@pytest.mark.parametrize(("on_disk", "in_memory"), [(3, False), (1, True), (2, True)])
def test_the_newest_is_loaded_wherever_it_is(cluster, on_disk, in_memory):
    cluster.add("a", "b")
    cluster.keep(FULL, 2)
    saved(cluster.root, FULL, step=on_disk, round=1)
    results = cluster.load(blank(FULL))
    assert [result.in_memory for result in results] == [in_memory] * 2


def test_nothing_anywhere_is_no_checkpoint(cluster):
    cluster.add("a", "b")
    assert cluster.load(blank(FULL)) == [None, None]


# ---- small things ----


def test_a_run_does_not_find_what_another_directory_belongs_to(cluster):
    cluster.add("a")
    cluster.keep(FULL, 1)
    cluster.root = cluster.directory / "elsewhere"
    assert cluster.load(blank(FULL)) == [None]


def test_names_are_ordered_by_round_and_step():
    names = ["step-000000009.g2.ffff", "step-000000100.g1.0000", "step-1000000000.g1.aaaa"]
    assert sorted([*names, ".hidden"], key=age) == [".hidden", names[1], names[2], names[0]]


def test_what_a_load_has_not_chosen_is_given_back(cluster):
    cluster.add("a")
    cluster.keep(FULL, 1)
    search = MemorySearch(cluster.nodes["a"])
    search.forget_others(cluster.root, None)
    assert cluster.files("a") == []


def test_a_checkpoint_that_is_freed_while_a_worker_looks_for_it_is_not_held(cluster):
    """Agents and neighbours free old ones at any time; the worker then loads what is left."""
    cluster.add("a")
    cluster.keep(FULL, 2)
    node = cluster.nodes["a"]
    held = node.holdings()
    freed = node.directory_of(home_of(cluster.root), "step-000000001.g1.ab12")
    freed.mkdir()
    (freed / "r00000.safetensors").write_bytes(bytes(100))
    before_listing(freed, lambda: shutil.rmtree(freed))
    assert node.holdings() == held
    assert not freed.exists()
