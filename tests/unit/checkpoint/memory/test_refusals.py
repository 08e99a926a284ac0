"""A rank that cannot keep a checkpoint, and a node that does not answer or is not trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.support.suspended import suspend
from tests.unit.checkpoint.memory.nodes import FULL
from tests.unit.checkpoint.support import on_ranks, share
from zero_checkpoint import StoreConsensus
from zero_checkpoint.memory.node import home_of
from zero_checkpoint.saving.commit import own_layout
from zero_checkpoint.saving.memory_commit import MemoryOff, MemorySave, NotKept, commit_in_memory


def test_a_rank_without_memory_switches_it_off_for_all_and_says_why(cluster):
    cluster.add("a", "b")
    names = list(cluster.nodes)

    def work(consensus: StoreConsensus) -> None:
        state = share(FULL, consensus.rank, 2)
        name = names[consensus.rank]
        image = cluster.stagings[name][0].snapshot(own_layout(state, consensus.rank))
        save = MemorySave(
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
        if consensus.rank == 1:
            save = replace(save, image=None, problem="/dev/shm has room for 0 MiB")
        commit_in_memory(save, consensus, cluster.nodes[name], cluster.peers[name])

    results = on_ranks(2, work)
    assert [type(error) for error in results] == [MemoryOff] * 2
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
from zero_agent.node.memory import NodeMemory
from zero_contract.worker import PeerMemoryRequest
memory = NodeMemory("job", "b", "127.0.0.1", Path(sys.argv[1]))
reply = memory.open(PeerMemoryRequest(request=1), "secret")
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
        suspend(process.pid)
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
