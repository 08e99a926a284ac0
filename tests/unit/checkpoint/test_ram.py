"""Checkpoints in memory among nodes: committed by all, found again, read at any world size.

The ranks are threads, and each node is a real agent's memory with its own server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.checkpoint.support import (
    Full,
    adam_state,
    blank,
    on_ranks,
    same_bits,
    saved,
    share,
)
from zero_agent.ram import Ram
from zero_engine.checkpoint import Ballot, Loaded, load, own_layout
from zero_engine.checkpoint.arena import Arena
from zero_engine.checkpoint.ram_commit import Kept, NotKept, RamOff, RamSave, commit_in_ram
from zero_engine.checkpoint.ram_node import RamNode, age, home_of
from zero_engine.checkpoint.ram_peers import Neighbours, neighbours
from zero_engine.checkpoint.ram_search import RamSearch
from zero_engine.errors import CommitRefused
from zero_orchestrator.contract import RamRequest

FULL = adam_state(width=4001)
"""Each rank's file has more than one page, and there are blocks that two ranks need."""


class Cluster:
    """Nodes with a memory each, and one rank on each; the disk that they share."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "checkpoints"
        self.directory = directory
        self.agents: dict[str, Ram] = {}
        self.nodes: dict[str, RamNode] = {}
        self.arenas: dict[str, list[Arena]] = {}
        self.peers: dict[str, Neighbours] = {}

    def add(self, *names: str, secret: str = "secret") -> None:
        for name in names:
            memory = self.directory / f"shm-{name}"
            memory.mkdir()
            agent = Ram("job", name, "127.0.0.1", memory)
            reply = agent.open(RamRequest(request=1, budget_bytes=64 << 20), secret)
            self.agents[name] = agent
            self.nodes[name] = RamNode(
                directory=Path(reply.directory),
                address=reply.address,
                key=reply.key,
                budget_bytes=reply.budget_bytes,
            )
            self.arenas[name] = [Arena("job", 0, Path(reply.directory)) for _ in range(2)]
            self.peers[name] = Neighbours(reply.key)

    def lose(self, *names: str) -> None:
        for name in names:
            self.agents.pop(name).close()
            del self.nodes[name]

    def close(self) -> None:
        self.lose(*list(self.agents))

    def keep(self, full: Full, step: int, **facts: object) -> list[Kept]:
        """Commit a step on all nodes; each rank's outcome, or what it raised."""
        names, world = list(self.nodes), len(self.nodes)

        def work(ballot: Ballot) -> Kept:
            name = names[ballot.rank]
            state = share(full, ballot.rank, world)
            image = self.arenas[name][0].freeze(own_layout(state, ballot.rank))
            settings = {
                "root": self.root,
                "state": state,
                "image": image,
                "problem": "",
                "step": step,
                "tag": f"global_step{step}",
                "round": 1,
                "fence": None,
                "newest": lambda: None,
                "replicas": 1,
                **facts,
            }
            save = RamSave(**settings)  # type: ignore[arg-type]
            kept = commit_in_ram(save, ballot, self.nodes[name], self.peers[name])
            self.arenas[name].reverse()
            return kept

        return on_ranks(world, work)

    def load(self, target: Full) -> list[Loaded | None]:
        """Load on all nodes."""
        names = list(self.nodes)
        searches = [RamSearch(self.nodes[name]) for name in names]

        def work(ballot: Ballot) -> Loaded | None:
            def wanted(_: object) -> object:
                return share(target, ballot.rank, ballot.world)

            return load(self.root, ballot, wanted, ram=searches[ballot.rank])

        return on_ranks(len(names), work)

    def files(self, name: str) -> list[str]:
        """What a node holds: `step-000000001/r00000.safetensors`."""
        held = self.nodes[name].holdings().get(home_of(self.root), {})
        return sorted(f"{step[:14]}/{file}" for step, files in held.items() for file in files)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    one = Cluster(tmp_path)
    yield one
    one.close()


def loaded_from_memory(cluster: Cluster, full: Full, step: int) -> None:
    target = blank(full)
    results = cluster.load(target)
    assert [(r.manifest.step, r.in_ram) for r in results] == [(step, True)] * len(results)
    assert same_bits(target, full)


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
    assert neighbours(roster, own, replicas) == expected


def test_each_node_holds_its_own_image_and_its_neighbours_of_the_newest_step_alone(cluster):
    cluster.add("a", "b", "c")
    for step in (1, 2, 3):
        assert [kept.poorer for kept in cluster.keep(FULL, step)] == [()] * 3
    assert cluster.files("a") == [
        "step-000000003/MANIFEST.json",
        "step-000000003/r00000.safetensors",
        "step-000000003/r00002.safetensors",
    ]
    assert len(list(cluster.nodes["a"].directory.glob("zero-arena.*"))) == 2


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
    cluster.peers["a"].hurry(limit_s=0.0)
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
    assert (result.manifest.step, result.in_ram) == (1, False)
    assert same_bits(target, adam_state(seed=9, width=4001))
    assert "step 2: r00001.safetensors went with the nodes that held it" in caplog.text


def test_two_neighbours_lost_are_no_loss_with_two_copies(cluster):
    cluster.add("a", "b", "c")
    cluster.keep(FULL, 2, replicas=2)
    cluster.lose("b", "c")
    loaded_from_memory(cluster, FULL, step=2)


@pytest.mark.parametrize(("on_disk", "in_ram"), [(3, False), (1, True), (2, True)])
def test_the_newest_is_loaded_wherever_it_is(cluster, on_disk, in_ram):
    cluster.add("a", "b")
    cluster.keep(FULL, 2)
    saved(cluster.root, FULL, step=on_disk, round=1)
    results = cluster.load(blank(FULL))
    assert [result.in_ram for result in results] == [in_ram] * 2


def test_nothing_anywhere_is_no_checkpoint(cluster):
    cluster.add("a", "b")
    assert cluster.load(blank(FULL)) == [None, None]


# ---- damage ----


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
    # The arena is longer than the image, so damage its half of the bytes that are read.
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
    assert [(r.manifest.step, r.in_ram) for r in results] == [(1, False)] * 2
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
    searches = [RamSearch(cluster.nodes[name]) for name in names]
    for path in cluster.directory.glob("shm-*/*/*/step-*/r00001.safetensors"):
        path.unlink()
    target = blank(FULL)

    def work(ballot: Ballot) -> Loaded | None:
        return load(
            cluster.root,
            ballot,
            lambda _: share(target, ballot.rank, 3),
            ram=searches[ballot.rank],
        )

    assert [(r.manifest.step, r.in_ram) for r in on_ranks(3, work)] == [(1, False)] * 3


# ---- who cannot ----


def test_a_rank_without_memory_switches_it_off_for_all_and_says_why(cluster):
    cluster.add("a", "b")
    names = list(cluster.nodes)

    def work(ballot: Ballot) -> None:
        state = share(FULL, ballot.rank, 2)
        name = names[ballot.rank]
        image = cluster.arenas[name][0].freeze(own_layout(state, ballot.rank))
        save = RamSave(
            root=cluster.root,
            state=state,
            image=image,
            problem="",
            step=1,
            tag="t",
            round=1,
            fence=None,
            newest=lambda: None,
            replicas=1,
        )
        if ballot.rank == 1:
            save = replace(save, image=None, problem="/dev/shm has room for 0 MiB")
        commit_in_ram(save, ballot, cluster.nodes[name], cluster.peers[name])

    results = on_ranks(2, work)
    assert [type(error) for error in results] == [RamOff] * 2
    assert {str(error) for error in results} == {"rank 1: /dev/shm has room for 0 MiB"}


def test_a_rank_that_fails_leaves_nothing_of_the_attempt_on_any_node(cluster):
    cluster.add("a", "b")
    cluster.keep(FULL, 1)
    home = cluster.nodes["b"].directory / home_of(cluster.root)
    os.rename(home, home.with_suffix(".away"))
    home.write_bytes(b"a file where the directory belongs")
    results = cluster.keep(FULL, 2)
    assert [type(error) for error in results] == [NotKept] * 2
    assert "rank 1" in str(results[0])
    assert [name for name in cluster.files("a") if "000000002" in name] == []


_STOPPED = """
import sys
from pathlib import Path
from zero_agent.ram import Ram
from zero_orchestrator.contract import RamRequest
reply = Ram("job", "b", "127.0.0.1", Path(sys.argv[1])).open(RamRequest(request=1), "secret")
print(reply.directory, reply.address, flush=True)
sys.stdin.read()
"""


def test_a_neighbour_that_does_not_answer_costs_its_copy_and_is_then_left_out(cluster, tmp_path):
    cluster.add("a", "b")
    command = [sys.executable, "-c", _STOPPED, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        directory, address = process.stdout.readline().split()
        cluster.nodes["b"] = replace(cluster.nodes["b"], directory=Path(directory), address=address)
        process.send_signal(signal.SIGSTOP)
        try:
            for step, why in ((1, f"{address} took no copy: timed out"), (2, "is left out for")):
                kept = cluster.keep(FULL, step, replicas=1)
                assert [k.name[:14] for k in kept] == [f"step-00000000{step}"] * 2
                (lacks,) = kept[0].poorer
                assert lacks.startswith("rank 0")
                assert why in lacks
        finally:
            process.kill()


def test_who_does_not_know_the_secret_gets_and_gives_no_copy(cluster):
    cluster.add("a", "b")
    cluster.add("c", secret="another")
    kept = cluster.keep(FULL, 1)
    assert sorted(why.split(":")[0] for why in kept[0].poorer) == ["rank 1", "rank 2"]
    assert [name for name in cluster.files("c") if "r00001" in name] == []
    assert [name for name in cluster.files("a") if "r00002" in name] == []


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
    search = RamSearch(cluster.nodes["a"])
    search.forget_others(home_of(cluster.root), None)
    assert cluster.files("a") == []
