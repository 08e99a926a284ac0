"""Which checkpoints the memory of the nodes holds, and which nodes hold each file of them.

Each rank reports the files on its node; rank 0 gathers the reports, and `restore` offers the
checkpoints found beside those on disk, in one order. A checkpoint in memory is a candidate if some
node has its manifest and every file of it is on some node: the survivors' own images and, for lost
nodes, the copies on their replica peers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zero_checkpoint.consensus import Record, StoreConsensus
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint
from zero_checkpoint.files.local_file import open_file
from zero_checkpoint.format.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, age
from zero_checkpoint.format.parse import ManifestError, parse
from zero_checkpoint.loading.reader import Opener
from zero_checkpoint.memory.node import Holdings, MemoryNode, home_of
from zero_checkpoint.memory.peers import open_remote, read_whole

_log = logging.getLogger(__name__)

Places = Mapping[str, Sequence[str]]
"""File -> the addresses of the nodes that hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheckpoint:
    """A checkpoint in memory as one rank sees it: files on its own node, and on others."""

    node: MemoryNode | None
    """None: this node keeps nothing, and cannot reach the memory of others."""
    home: str
    name: str
    places: Places

    @property
    def path(self) -> Path:
        """The directory of this node's part of the checkpoint; it may be missing."""
        directory = self.node.directory if self.node is not None else Path("memory")
        return directory / self.home / self.name

    def read_manifest(self) -> Manifest:
        """The manifest from the nearest node that has a valid one.

        Raises:
            DamagedCheckpoint: No node has a valid one.
        """
        own, node = self.path / MANIFEST, self.node
        sources: list[Callable[[], bytes]] = [own.read_bytes] if own.exists() else []
        if node is not None:
            path = self._wire_path(MANIFEST)
            sources += [
                partial(read_whole, address, node.key, path, MAX_MANIFEST_BYTES)
                for address in self._others(MANIFEST)
            ]
        problem = "no node holds it any more"
        # Each is verified: of nodes that disagree, one may have lost its memory since.
        for read in sources:
            try:
                manifest = parse(read())
                if manifest.directory == self.name:
                    return manifest
                problem = f"is that of {manifest.directory}"
            except (ManifestError, OSError) as error:
                problem = str(error)
        raise DamagedCheckpoint(f"{self.path / MANIFEST}: {problem}")

    def copies(self, file: str) -> list[Opener]:
        """The copies of a file, see `reader.Copies`."""
        node, own = self.node, self.path / file
        if node is None:
            return []
        remote: list[Opener] = [
            partial(open_remote, address, node.key, self._wire_path(file))
            for address in self._others(file)
        ]
        return [partial(open_file, own), *remote] if own.exists() else remote

    def _others(self, file: str) -> list[str]:
        # Its own files are read from the directory, without the agent.
        own = self.node.address if self.node is not None else ""
        return [address for address in self.places.get(file, ()) if address != own]

    def _wire_path(self, file: str) -> str:
        return f"{self.home}/{self.name}/{file}"


class MemorySearch:
    """One rank's part in finding checkpoints in memory; make one per load."""

    def __init__(self, node: MemoryNode | None, place: int = 0) -> None:
        self._node = node
        self._place = place
        # As of now: what arrives later is of a save after this load, and `forget_others` leaves it.
        self._holdings: Holdings = node.holdings() if node is not None else {}
        self._votes: list[Record] = []

    def gather(self, consensus: StoreConsensus) -> None:
        """Tell rank 0 what all nodes hold. Collective; raises as `StoreConsensus.ask`."""
        address = self._node.address if self._node is not None else ""

        def keep(votes: list[Record]) -> Record:
            self._votes = votes
            return {}

        # A report decides only where to look: manifest and blocks are verified as those from disk
        # are.
        consensus.ask({"address": address, "holdings": self._holdings}, keep)

    def candidates(self, root: object) -> Iterator[tuple[MemoryCheckpoint, Manifest]]:
        """On rank 0, the checkpoints that are whole, newest first; logs why others are not."""
        home = home_of(root, self._place)
        # Checkpoint -> file -> addresses, each once, in rank order.
        places: dict[str, dict[str, list[str]]] = {}
        for vote in self._votes:
            for name, files in vote.get("holdings", {}).get(home, {}).items():
                for file in files:
                    addresses = places.setdefault(name, {}).setdefault(file, [])
                    if vote["address"] not in addresses:
                        addresses.append(vote["address"])
        for name in sorted(places, key=age, reverse=True):
            kept = self.open(home, name, places[name])
            if MANIFEST not in kept.places:
                continue  # never committed
            try:
                manifest = kept.read_manifest()
            except CheckpointError as error:
                _log.warning("a checkpoint in memory cannot be loaded: %s", error)
                continue
            lost = [file.name for file in manifest.files if file.name not in kept.places]
            if not lost:
                yield kept, manifest
                continue
            _log.warning(
                "a checkpoint in memory cannot be loaded: step %d: %s went with the nodes that "
                "held %s; with more checkpoint.ram.replicas more nodes may be lost at once",
                manifest.step,
                ", ".join(lost),
                "it" if len(lost) == 1 else "them",
            )

    def open(self, home: str, name: str, places: Places) -> MemoryCheckpoint:
        """A checkpoint that rank 0 offers, as this rank sees it."""
        return MemoryCheckpoint(node=self._node, home=home, name=name, places=places)

    def forget_others(self, root: object, loaded: str | None) -> None:
        """Free the checkpoints that this node held when the search began, except the loaded one."""
        home = home_of(root, self._place)
        if self._node is not None:
            self._node.forget(home, self._holdings.get(home, {}).keys() - {loaded})
