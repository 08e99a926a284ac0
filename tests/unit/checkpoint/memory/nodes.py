"""Nodes with a memory each, for tests of checkpoints in memory.

The ranks are threads, and each node is a real agent's memory with its own server.
"""

from __future__ import annotations

from pathlib import Path

from tests.unit.checkpoint.support import Full, adam_state, blank, on_ranks, same_bits, share
from zero_agent.node.memory import NodeMemory
from zero_checkpoint import StoreConsensus
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.loading.restore import Loaded, load
from zero_checkpoint.memory.node import MemoryNode, home_of
from zero_checkpoint.memory.peers import ReplicaPeers
from zero_checkpoint.saving.commit import own_layout
from zero_checkpoint.saving.memory_commit import Kept, MemorySave, commit_in_memory
from zero_checkpoint.saving.staging import StagingBuffer
from zero_checkpoint.saving.staging_memory import SharedStaging
from zero_contract.worker import PeerMemoryRequest

FULL = adam_state(width=4001)
"""Each rank's file has more than one page, and there are blocks that two ranks need."""


class Cluster:
    """Nodes with a memory each, and one rank on each; the disk that they share."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "checkpoints"
        self.directory = directory
        self.agents: dict[str, NodeMemory] = {}
        self.nodes: dict[str, MemoryNode] = {}
        self.stagings: dict[str, list[StagingBuffer]] = {}
        self.peers: dict[str, ReplicaPeers] = {}

    def add(self, *names: str, secret: str = "secret") -> None:
        for name in names:
            memory = self.directory / f"shm-{name}"
            memory.mkdir()
            agent = NodeMemory("job", name, "127.0.0.1", memory)
            reply = agent.open(PeerMemoryRequest(request=1, budget_bytes=64 << 20), secret)
            self.agents[name] = agent
            self.nodes[name] = MemoryNode(
                directory=Path(reply.directory),
                address=reply.address,
                key=reply.key,
                budget_bytes=reply.budget_bytes,
            )
            self.stagings[name] = [
                StagingBuffer(SharedStaging("job", 0, Path(reply.directory))) for _ in range(2)
            ]
            self.peers[name] = ReplicaPeers(reply.key)

    def lose(self, *names: str) -> None:
        for name in names:
            self.agents.pop(name).close()
            del self.nodes[name]

    def close(self) -> None:
        self.lose(*list(self.agents))

    def keep(self, full: Full, step: int, **facts: object) -> list[Kept]:
        """Commit a step on all nodes; each rank's outcome, or what it raised."""
        names, world = list(self.nodes), len(self.nodes)

        def work(consensus: StoreConsensus) -> Kept:
            name = names[consensus.rank]
            state = share(full, consensus.rank, world)
            image = self.stagings[name][0].snapshot(own_layout(state, consensus.rank))
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
            save = MemorySave(**settings)  # type: ignore[arg-type]
            kept = commit_in_memory(save, consensus, self.nodes[name], self.peers[name])
            self.stagings[name].reverse()
            return kept

        return on_ranks(world, work)

    def load(self, target: Full) -> list[Loaded | None]:
        """Load on all nodes."""
        names = list(self.nodes)
        searches = [MemorySearch(self.nodes[name]) for name in names]

        def work(consensus: StoreConsensus) -> Loaded | None:
            def wanted(_: object) -> object:
                return share(target, consensus.rank, consensus.world)

            return load(self.root, consensus, wanted, ram=searches[consensus.rank])

        return on_ranks(len(names), work)

    def files(self, name: str) -> list[str]:
        """What a node holds: `step-000000001/r00000.safetensors`."""
        held = self.nodes[name].holdings().get(home_of(self.root), {})
        return sorted(f"{step[:14]}/{file}" for step, files in held.items() for file in files)


def loaded_from_memory(cluster: Cluster, full: Full, step: int) -> None:
    target = blank(full)
    results = cluster.load(target)
    assert [(r.manifest.step, r.in_memory) for r in results] == [(step, True)] * len(results)
    assert same_bits(target, full)
