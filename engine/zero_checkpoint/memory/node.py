"""What one node keeps in memory: files of checkpoints, in the directory that its agent owns.

    <directory>/zero-staging.*                    a worker's two staging buffers, see `staging`
    <directory>/<home>/step-000000012.g3.ab12/  a checkpoint, or this node's part of it
        r00000.safetensors                      an image of this node's worker, linked to its buffer
        r00002.safetensors                      a copy of a neighbour's
        MANIFEST.json                           it is committed

The files are those of a checkpoint on disk, byte for byte. `home` stands for the root on disk
that these steps belong to: what a script loads from another directory is another run.

Must always hold: an image is linked before its rank votes, a manifest is written after all have;
a checkpoint loses its manifest before any of its files.

Called by `commit` and `search`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero_checkpoint.format.manifest import MANIFEST, NAME, age
from zero_checkpoint.staging import FrozenImage

_TEMPORARY = f"{MANIFEST}.tmp."

Holdings = Mapping[str, Mapping[str, Mapping[str, int]]]
"""home -> checkpoint -> file -> its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNode:
    """This node's memory, as its agent told its workers."""

    directory: Path
    address: str
    """Where the agent serves it; also what tells one node from another."""
    key: str
    """Opens the memory of all nodes of the job."""
    budget_bytes: int

    def directory_of(self, home: str, name: str) -> Path:
        """Where this node keeps its part of a checkpoint."""
        return self.directory / home / name

    def holdings(self) -> Holdings:
        """All that is here."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for path in self.directory.glob("*/*/*"):
            if NAME.fullmatch(path.parent.name) and not path.name.startswith("."):
                with suppress(OSError):  # gone meanwhile
                    home = found.setdefault(path.parent.parent.name, {})
                    home.setdefault(path.parent.name, {})[path.name] = path.stat().st_size
        return found

    def forget(self, home: str, names: Iterable[str]) -> None:
        """Give the memory of some checkpoints back; never raises."""
        for name in names:
            directory = self.directory_of(home, name)
            with suppress(OSError):  # memory that is not given back now is so later
                (directory / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(directory)

    def forget_before(self, home: str, newest: str) -> None:
        """Give back what is older than a checkpoint; of newer ones, copies may be arriving."""
        with suppress(OSError):
            here = os.listdir(self.directory / home)
            self.forget(home, [name for name in here if age(name) < age(newest)])


def home_of(root: object) -> str:
    """What stands for a root on disk; the same for every process that names it so."""
    where = os.path.abspath(root) if isinstance(root, Path) else str(root)
    return hashlib.sha256(where.encode()).hexdigest()[:16]


def seal(image: FrozenImage, path: Path) -> None:
    """Let an image outlive its worker and its staging buffer, under a name. Raises OSError."""
    assert image.path is not None, "a checkpoint in memory is in a shared room"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.link(image.path, path)


def keep_manifest(directory: Path, text: bytes) -> None:
    """Make a checkpoint committed as far as this node can tell. Raises OSError."""
    temporary = directory / f"{_TEMPORARY}{os.getpid()}"
    directory.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(text)
    temporary.replace(directory / MANIFEST)
