"""Every crash of the whole machine during a save leaves the old checkpoint or the new one.

A recording disk notes each operation of a real save. Then every prefix of them is turned into
the directories that a power cut at that point may leave: unsynced data there or gone, unsynced
directory entries all there, all gone, or (the nastiest) a rename there without the files that
were created before it. All of them must load, to the old bits or the new ones.
"""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.unit.checkpoint.support import (
    SmallBlocks,
    adam_state,
    blank,
    load_all,
    same_bits,
    saved,
)
from zero_checkpoint.files.storage import DISK

OLD, NEW = adam_state(seed=1), adam_state(seed=2)


class Recording(SmallBlocks):
    """Does everything for real, and notes it."""

    def __init__(self):
        self.events = []
        self._lock = threading.Lock()

    def _do(self, action, *event):
        with self._lock:
            result = action()
            self.events.append(event)
        return result

    def make_directory(self, path):
        self._do(lambda: super(Recording, self).make_directory(path), "mkdir", path)

    def create(self, path):
        return self._do(lambda: super(Recording, self).create(path), "create", path)

    def write(self, file, data):
        copy, path = bytes(data), Path(file.name)
        self._do(lambda: super(Recording, self).write(file, data), "write", path, copy)

    def sync(self, file):
        self._do(lambda: super(Recording, self).sync(file), "sync", Path(file.name))

    def sync_directory(self, path):
        self._do(lambda: super(Recording, self).sync_directory(path), "sync_directory", path)

    def publish(self, temporary, final, *, replace=False):
        publish = super().publish
        self._do(lambda: publish(temporary, final, replace=replace), "publish", temporary, final)

    def remove(self, path):
        self._do(lambda: super(Recording, self).remove(path), "remove", path)


@dataclass
class Inode:
    data: bytes = b""
    synced: bytes = b""


@dataclass
class Machine:
    """What is in the page cache, and what of it is on the disk. None stands for a directory."""

    live: dict[Path, Inode | None] = field(default_factory=dict)
    durable: dict[Path, Inode | None] = field(default_factory=dict)
    created: set[Path] = field(default_factory=set)

    def apply(self, operation, path, extra=None):
        getattr(self, operation)(path, *([] if extra is None else [extra]))

    def mkdir(self, path):
        self.live[path] = None

    def create(self, path):
        self.live[path] = Inode()
        self.created.add(path)

    def write(self, path, data):
        self.live[path].data += data

    def sync(self, path):
        self.live[path].synced = self.live[path].data

    def sync_directory(self, directory):
        others = {p: inode for p, inode in self.durable.items() if p.parent != directory}
        synced = {p: inode for p, inode in self.live.items() if p.parent == directory}
        self.durable = others | synced

    def publish(self, temporary, final):
        self.live[final] = self.live.pop(temporary)

    def remove(self, path):
        self.live.pop(path, None)

    def after_the_cut(self, root, kept, *, data_kept):
        """Write what is left into the present `root`."""
        lost = {"none": set(self.live), "renames": self.created, "all": set()}[kept]
        left = {path: inode for path, inode in self.live.items() if path not in lost}
        for path, inode in sorted((self.durable | left).items()):
            if not path.parent.is_dir():
                continue  # its directory's own entry is lost
            if inode is None:
                path.mkdir()
            else:
                path.write_bytes(inode.data if data_kept else inode.synced)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    root = tmp_path_factory.mktemp("machine") / "root"
    saved(root, OLD, 2, step=1)
    before = shutil.copytree(root, root.parent / "before")
    disk = Recording()
    saved(root, NEW, 2, step=2, disk=disk)
    return root, before, disk.events


@pytest.mark.parametrize("data_kept", [True, False])
@pytest.mark.parametrize("entries_kept", ["none", "renames", "all"])
def test_a_power_cut_at_any_point_leaves_the_old_checkpoint_or_the_new(
    history, entries_kept, data_kept
):
    root, before, events = history
    machine, loaded = Machine(), []
    for event in [None, *events]:
        if event is not None:
            machine.apply(*event)
        shutil.rmtree(root)
        shutil.copytree(before, root)
        machine.after_the_cut(root, entries_kept, data_kept=data_kept)
        target = blank(OLD)
        (result,) = {r.manifest.step for r in load_all(root, target, 2)}
        assert same_bits(target, {1: OLD, 2: NEW}[result])
        assert not list(root.glob("*/QUARANTINE")), "a crash is not damage"
        loaded.append(result)

    # Old until the commit, new ever after; and what `save` has returned is durable.
    commit = loaded.index(2)
    assert loaded == [1] * commit + [2] * (len(loaded) - commit)
    assert events[commit - 1][0] == ("sync_directory" if entries_kept == "none" else "publish")


def test_a_synced_file_is_whole_while_it_is_still_open(tmp_path):
    with DISK.create(tmp_path / "f") as file:
        DISK.write(file, b"short enough to stay in a buffer")
        DISK.sync(file)
        assert (tmp_path / "f").read_bytes() == b"short enough to stay in a buffer"
