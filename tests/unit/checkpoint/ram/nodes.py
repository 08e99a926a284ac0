"""Nodes with a memory each, for tests of checkpoints in memory.

The ranks are threads, and each node is a real agent's memory with its own server.
"""

from __future__ import annotations

from pathlib import Path

from tests.unit.checkpoint.support import Full, adam_state, blank, on_ranks, same_bits, share
from zero_agent.node.memory import Ram
from zero_checkpoint import Ballot
from zero_checkpoint.commit import own_layout
from zero_checkpoint.memory.commit import Kept, RamSave, commit_in_ram
from zero_checkpoint.memory.node import RamNode, home_of
from zero_checkpoint.memory.peers import Neighbours
from zero_checkpoint.memory.search import RamSearch
from zero_checkpoint.restore import Loaded, load
from zero_checkpoint.room import SharedRoom
from zero_checkpoint.staging import Arena
from zero_contract.worker import RamRequest

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
            self.arenas[name] = [
                Arena(SharedRoom("job", 0, Path(reply.directory))) for _ in range(2)
            ]
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


def loaded_from_memory(cluster: Cluster, full: Full, step: int) -> None:
    target = blank(full)
    results = cluster.load(target)
    assert [(r.manifest.step, r.in_ram) for r in results] == [(step, True)] * len(results)
    assert same_bits(target, full)
