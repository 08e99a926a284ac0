"""The storage of all nodes: real files, on which a machine may lose power before they are durable.

It is the `Disk` of the product, with the semantics of a file system whose clients write back: what
a machine has written is visible to all, and durable once that machine has synced it, or another
one has worked in the same directory. A machine that loses its power loses the end of what it has
not synced: bytes of its files (the rest is zeros, or missing), and names that it has made, changed
or removed, the last ones first.

Must always hold: what was synced is never lost; a process that is killed loses nothing that it has
written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tests.simulation.kernel import Kernel
from tests.simulation.standard_library import EPOCH_S
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.format.manifest import MANIFEST
from zero_checkpoint.loading.candidates import find

WRITE_S, SYNC_S = 0.02, 0.1
"""About how long a disk that is not slow needs."""


@dataclass(frozen=True)
class Change:
    """A name in a directory that is not durable yet."""

    machine: str
    directory: Path
    undo: Callable[[], object]


class SimulatedDisk(Disk):
    """See the module."""

    def __init__(self, kernel: Kernel, root: Path) -> None:
        self.root = root
        self.full = self.fails = False
        """Whether there is no room; whether operations fail now and then."""
        self.slow = 1.0
        self.on_publish: Callable[[Path], None] = lambda directory: None
        self.on_remove: Callable[[Path], None] = lambda directory: None
        self._kernel, self._draw = kernel, kernel.random("disk")
        self._changes: list[Change] = []
        self._dirty: dict[Path, str] = {}
        """Files whose bytes are not durable, and the machine that has written them."""
        self.damaged: set[Path] = set()
        """The checkpoints that `corrupt` has damaged."""

    # ---- what saves do ----

    def make_directory(self, path: Any) -> None:
        self._work(path.parent, WRITE_S, writes=True)
        super().make_directory(path)
        self._changed(
            path.parent, lambda: path.is_dir() and not any(path.iterdir()) and path.rmdir()
        )
        self._stamp(path)

    def create(self, path: Any) -> BinaryIO:
        self._work(path.parent, WRITE_S, writes=True)
        file = super().create(path)
        self._dirty[path] = self._here
        self._changed(path.parent, lambda: path.unlink(missing_ok=True))
        self._stamp(path)
        return file

    def write(self, file: BinaryIO, data: memoryview | bytes) -> None:
        self._work(Path(file.name).parent, 0.0, writes=True)
        half = len(data) // 2
        super().write(file, data[:half])
        file.flush()
        self._work(Path(file.name).parent, WRITE_S, writes=True)
        super().write(file, data[half:])
        file.flush()
        self._stamp(Path(file.name))

    def sync(self, file: BinaryIO) -> None:
        self._work(Path(file.name).parent, SYNC_S)
        file.flush()
        self._dirty.pop(Path(file.name), None)

    def sync_directory(self, path: Any) -> None:
        self._work(path, WRITE_S)
        self._changes = [one for one in self._changes if one.directory != path]

    def publish(self, temporary: Any, final: Any, *, replace: bool = False) -> None:
        self._work(final.parent, WRITE_S)
        before = final.read_bytes() if final.is_file() else None
        super().publish(temporary, final, replace=replace)
        if temporary in self._dirty:
            self._dirty[final] = self._dirty.pop(temporary)

        def undo() -> None:
            if final.exists():
                final.replace(temporary)
            if before is not None:
                final.write_bytes(before)

        self._changed(final.parent, undo)
        if final.name == MANIFEST:
            self._stamp(final)
            self.on_publish(final.parent)

    def retire(self, path: Any, *, committed: bool) -> Any:
        if committed:
            self.on_remove(path)
        return super().retire(path, committed=committed)

    def remove(self, path: Any) -> None:
        self._work(path.parent, WRITE_S)
        if not path.is_file():
            return
        before = path.read_bytes()
        if path.name == MANIFEST:
            self.on_remove(path.parent)
        super().remove(path)

        def undo() -> None:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(before)

        self._changed(path.parent, undo)

    # ---- what happens to it ----

    def lose_power(self, machine: str) -> None:
        """A machine loses what it has not made durable."""
        kept: dict[Path, bool] = {}
        for one in reversed([one for one in self._changes if one.machine == machine]):
            if not kept.setdefault(one.directory, False):
                kept[one.directory] = self._draw.random() < 0.3
                if not kept[one.directory]:
                    one.undo()
        for path in [path for path, owner in self._dirty.items() if owner == machine]:
            if path.exists():
                whole = path.read_bytes()
                written = self._draw.randrange(len(whole) + 1)
                zeros = (len(whole) - written) * self._draw.choice([0, 1])
                path.write_bytes(whole[:written] + bytes(zeros))
            del self._dirty[path]
        self._changes = [one for one in self._changes if one.machine != machine]

    def corrupt(self) -> Path | None:
        """Damage a file of the newest checkpoint, if there is another whole one."""
        whole = [one.path for one in find(self.root).candidates if one.path not in self.damaged]
        if len(whole) < 2:
            return None
        assert isinstance(whole[0], Path)
        path = self._draw.choice(sorted(p for p in whole[0].iterdir() if p.suffix != ".tmp"))
        self.flip(path)
        self.damaged.add(whole[0])
        return path

    def flip(self, path: Path) -> None:
        """Change one bit of a file, near its end: nobody reads the header of a rank's file."""
        data = bytearray(path.read_bytes())
        data[-1 - self._draw.randrange(min(len(data), 200))] ^= 1 << self._draw.randrange(8)
        path.write_bytes(data)

    def seen(self) -> None:
        """Whoever lists a file system makes the others write back."""
        self._flush(lambda directory: True)

    # ---- the parts ----

    @property
    def _here(self) -> str:
        task = self._kernel.current
        return task.process.name.partition("/")[0] if task is not None else "world"

    def _work(self, directory: Path, seconds: float, *, writes: bool = False) -> None:
        if seconds:
            self._kernel.park(self._draw.uniform(0.5, 1.5) * seconds * self.slow)
        self._flush(lambda other: other == directory)
        if self.fails and self._draw.random() < 0.1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))
        if self.full and writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))

    def _flush(self, where: Callable[[Path], bool]) -> None:
        here = self._here
        self._changes = [
            one for one in self._changes if one.machine == here or not where(one.directory)
        ]
        self._dirty = {
            path: owner
            for path, owner in self._dirty.items()
            if owner == here or not where(path.parent)
        }

    def _changed(self, directory: Path, undo: Callable[[], object]) -> None:
        self._changes.append(Change(self._here, directory, undo))

    def _stamp(self, path: Path) -> None:
        """Files have the time of the simulation."""
        now_ns = round((EPOCH_S + self._kernel.now) * 1e9)
        os.utime(path, ns=(now_ns, now_ns))
