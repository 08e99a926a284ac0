"""Which checkpoints the memory of the nodes holds, and where each file of them is.

Each rank says what its node holds; rank 0 puts that together, and `restore` offers what it finds
beside the checkpoints on disk, in one order. A checkpoint in memory is a candidate if some node
has its manifest and every file of it is on some node: the survivors' own images and, for the
nodes that are lost, the copies that their neighbours keep.

Must always hold: nothing that a node says about its holdings is believed beyond where to look;
manifest and blocks are verified as those from disk are.

Called by `restore`.
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
from zero_checkpoint.format.manifest import MANIFEST, Manifest, age
from zero_checkpoint.format.parse import MAX_MANIFEST_BYTES, ManifestError, parse
from zero_checkpoint.memory.node import Holdings, MemoryNode, home_of
from zero_checkpoint.memory.peers import open_remote, read_whole
from zero_checkpoint.reader import Opener

_log = logging.getLogger(__name__)

Places = Mapping[str, Sequence[str]]
"""File -> the addresses of the nodes that hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheckpoint:
    """A checkpoint in memory as one rank sees it: what is on its own node, and on others."""

    node: MemoryNode | None
    """None: this node keeps nothing, and cannot reach what others keep."""
    home: str
    name: str
    places: Places

    @property
    def path(self) -> Path:
        """Where this node's part of it is, or would be."""
        directory = self.node.directory if self.node is not None else Path("memory")
        return directory / self.home / self.name

    def read_manifest(self) -> Manifest:
        """The manifest from the nearest node that has a good one.

        Raises:
            DamagedCheckpoint: None has.
        """
        problem = "nobody holds it any more"
        for read in self._manifests():
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

    def _manifests(self) -> Iterator[Callable[[], bytes]]:
        own = self.path / MANIFEST
        if own.exists():
            yield own.read_bytes
        for address in self._others(MANIFEST) if self.node is not None else ():
            key = self.node.key if self.node is not None else ""
            yield partial(read_whole, address, key, self._wire_path(MANIFEST), MAX_MANIFEST_BYTES)

    def _others(self, file: str) -> list[str]:
        own = self.node.address if self.node is not None else ""
        return [address for address in self.places.get(file, ()) if address != own]

    def _wire_path(self, file: str) -> str:
        return f"{self.home}/{self.name}/{file}"


class MemorySearch:
    """One rank's part in finding checkpoints in memory; make one per load."""

    def __init__(self, node: MemoryNode | None) -> None:
        self._node = node
        self._holdings: Holdings = node.holdings() if node is not None else {}
        self._votes: list[Record | None] = []

    def gather(self, consensus: StoreConsensus) -> None:
        """Tell rank 0 what all nodes hold. Collective; raises as `StoreConsensus.ask`."""
        address = self._node.address if self._node is not None else ""
        consensus.ask({"address": address, "holdings": self._holdings}, self._take)

    def _take(self, votes: list[Record | None]) -> Record:
        self._votes = votes
        return {}

    def candidates(self, root: object) -> Iterator[tuple[MemoryCheckpoint, Manifest]]:
        """On rank 0, those that are whole, newest first; what is not is said."""
        home = home_of(root)
        places = self._places(home)
        for name in sorted(places, key=age, reverse=True):
            kept = MemoryCheckpoint(node=self._node, home=home, name=name, places=places[name])
            if MANIFEST not in kept.places:
                continue  # never committed
            try:
                yield kept, _whole(kept)
            except CheckpointError as error:
                _log.warning("a checkpoint in memory cannot be loaded: %s", error)

    def open(self, home: str, name: str, places: Places) -> MemoryCheckpoint:
        """What rank 0 offers, as this rank sees it."""
        return MemoryCheckpoint(node=self._node, home=home, name=name, places=places)

    def forget_others(self, home: str, loaded: str | None) -> None:
        """Give back what this node held when the search began, but for what was loaded."""
        if self._node is not None:
            self._node.forget(home, self._holdings.get(home, {}).keys() - {loaded})

    def _places(self, home: str) -> dict[str, dict[str, list[str]]]:
        """Checkpoint -> file -> addresses, each once, in rank order."""
        found: dict[str, dict[str, list[str]]] = {}
        for vote in self._votes:
            for name, files in (vote or {}).get("holdings", {}).get(home, {}).items():
                for file in files:
                    addresses = found.setdefault(name, {}).setdefault(file, [])
                    if vote is not None and vote["address"] not in addresses:
                        addresses.append(vote["address"])
        return found


def _whole(kept: MemoryCheckpoint) -> Manifest:
    """The manifest of a checkpoint of which every file is somewhere. Raises CheckpointError."""
    manifest = kept.read_manifest()
    lost = [file.name for file in manifest.files if file.name not in kept.places]
    if lost:
        raise CheckpointError(
            f"step {manifest.step}: {', '.join(lost)} went with the nodes that held "
            f"{'it' if len(lost) == 1 else 'them'}; with more checkpoint.ram.replicas more nodes "
            "may be lost at once"
        )
    return manifest
