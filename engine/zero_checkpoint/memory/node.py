"""Files of checkpoints that one node keeps in memory, in the directory that its agent owns.

    <directory>/zero-staging.*                  a worker's two staging buffers, see `staging`
    <directory>/<home>/step-000000012.g3.ab12/  a checkpoint, or this node's part of it
        r00000.safetensors                      an image of this node's worker, linked to its buffer
        r00002.safetensors                      a copy of another node's image
        MANIFEST.json                           the checkpoint is committed

The files are those of a checkpoint on disk, byte for byte; for `home` see `home_of`.
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
from zero_contract.signing import Key

_TEMPORARY = f"{MANIFEST}.tmp."

Holdings = Mapping[str, Mapping[str, Mapping[str, int]]]
"""home -> checkpoint -> file -> its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNode:
    """This node's memory, as its agent describes it to its workers."""

    directory: Path
    address: str
    """The address at which the agent serves the memory; it identifies the node."""
    key: Key
    """Opens the memory of all nodes of the job."""
    budget_bytes: int

    def directory_of(self, home: str, name: str) -> Path:
        """The directory of this node's part of a checkpoint."""
        return self.directory / home / name

    def holdings(self) -> Holdings:
        """All files of checkpoints on this node."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for parent, _, names in os.walk(self.directory):  # skips what is gone meanwhile
            home, name = Path(parent).parts[-2:]
            for file in names if NAME.fullmatch(name) else ():
                with suppress(OSError):  # it is being freed
                    size_bytes = os.stat(os.path.join(parent, file)).st_size
                    if not file.startswith("."):  # a copy that is still arriving
                        found.setdefault(home, {}).setdefault(name, {})[file] = size_bytes
        return found

    def forget(self, home: str, names: Iterable[str]) -> None:
        """Free the memory of some checkpoints; never raises."""
        for name in names:
            directory = self.directory_of(home, name)
            with suppress(OSError):  # memory that is not freed now is freed later
                # First: a checkpoint without all of its files has no manifest.
                (directory / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(directory)

    def forget_before(self, home: str, newest: str) -> None:
        """Free the checkpoints older than `newest`."""
        # Not all others: copies of newer ones may be arriving.
        with suppress(OSError):  # nothing was kept there, or another worker frees it, too
            here = os.listdir(self.directory / home)
            self.forget(home, [name for name in here if age(name) < age(newest)])


def home_of(root: object, place: int = 0) -> str:
    """The hash of a root on disk; equal in every process that names the root in the same way.

    `place` is that of an engine among those of its process: two may resume from one root.
    """
    # Checkpoints of another directory belong to another run.
    where = os.path.abspath(root) if isinstance(root, Path) else str(root)
    return hashlib.sha256((f"{where}#{place}" if place else where).encode()).hexdigest()[:16]


def seal(image: Path, path: Path) -> None:
    """Link an image to a name, so that it outlives its worker and its staging buffer.

    Raises:
        OSError: The link could not be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.link(image, path)


def keep_manifest(directory: Path, text: bytes) -> None:
    """Write a manifest, which makes a checkpoint committed on this node. Raises OSError."""
    temporary = directory / f"{_TEMPORARY}{os.getpid()}"
    directory.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(text)
    # Whole or not at all; the workers of a node write the same bytes.
    temporary.replace(directory / MANIFEST)
