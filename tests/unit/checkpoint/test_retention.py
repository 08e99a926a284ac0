"""What may be deleted is decided on plain values; deleting leaves no half of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.checkpoint.support import adam_state, names, saved
from zero_checkpoint import Candidate, Manifest, Rejected, find
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.storage import DISK, Disk
from zero_checkpoint.format.fragments import COLUMNS, from_lists
from zero_checkpoint.loading.candidates import WAS_COMMITTED, Why
from zero_checkpoint.saving.retention import abandoned, expired, remove, sweep

ROOT = Path("root")


def candidates(*steps: int) -> list[Candidate]:
    """Newest first, as `find` lists them."""
    empty = from_lists({name: [] for name in COLUMNS})
    return [
        Candidate(
            ROOT / f"{number}-{step}",
            Manifest(
                step=step,
                round=0,
                nonce="0000",
                tag="",
                world=1,
                tensors={},
                aliases={},
                files=(),
                fragments=empty,
            ),
        )
        for number, step in enumerate(steps)
    ]


def gone(steps: list[int], **policy) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in expired(candidates(*steps), **policy)]


def test_the_oldest_beyond_the_last_ones_go_first():
    assert gone([50, 40, 30, 20, 10], keep_last=2) == [10, 20, 30]


def test_fewer_than_are_kept_stay_all():
    assert gone([20, 10], keep_last=3) == []
    assert gone([], keep_last=2) == []


def test_milestones_stay_the_newest_of_each_step():
    # Step 40 was saved twice, because the run went back to 30 in between.
    steps = [60, 50, 40, 30, 40, 20, 10]
    paths = expired(candidates(*steps), keep_last=2, keep_every=20)
    assert [path.name for path in paths] == ["6-10", "4-40", "3-30"]


def test_what_is_protected_stays_whatever_the_numbers_say():
    protected = [candidates(50, 40, 30)[2].path]
    assert gone([50, 40, 30], keep_last=2, protected=protected) == []


@pytest.mark.parametrize("keep_last", [-1, 0, 1])
def test_a_policy_that_keeps_fewer_than_two_is_refused(keep_last):
    with pytest.raises(CheckpointError, match="keep at least 2"):
        expired(candidates(2, 1), keep_last=keep_last)


def test_a_milestone_of_no_steps_is_refused():
    with pytest.raises(CheckpointError, match="keep_every=0: write a number of steps from 1"):
        expired(candidates(2, 1), keep_last=2, keep_every=0)


def test_a_removed_checkpoint_is_gone_and_the_others_are_untouched(tmp_path):
    old, new = (saved(tmp_path, adam_state(), step=step) for step in (1, 2))
    before = [name for name in names(tmp_path) if not name.startswith(old.name)]

    remove(old)

    assert names(tmp_path) == before
    assert [c.path for c in find(tmp_path).candidates] == [new]


class Dying(Disk):
    """Dies at the n-th operation of a deletion; `remove_tree` is one for each file."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _step(self) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1

    def publish(self, temporary: Path, final: Path) -> None:
        self._step()
        super().publish(temporary, final)

    def sync_directory(self, path: Path) -> None:
        self._step()
        super().sync_directory(path)

    def remove_tree(self, path: Path) -> None:
        for inner in sorted(path.iterdir()):
            self._step()
            inner.unlink()
        self._step()
        path.rmdir()


OPERATIONS = 9
"""Of deleting two ranks' checkpoint: two renames, three syncs, three files, one directory."""


@pytest.mark.parametrize("at", range(OPERATIONS + 1))
def test_dying_anywhere_in_a_deletion_leaves_all_of_it_or_what_a_sweep_removes(tmp_path, at):
    old, new = (saved(tmp_path, adam_state(), step=step) for step in (1, 2))
    died = False
    try:
        remove(old, Dying(at))
    except KeyboardInterrupt:
        died = True

    assert died == (at < OPERATIONS)
    found = find(tmp_path)
    if old not in [c.path for c in found.candidates]:
        for leftover in abandoned(found.rejected, now_s=2e9 + 1e9, older_than_s=0)[0]:
            sweep(leftover.path)
        assert [path.name for path in tmp_path.glob("step-*")] == [new.name]
        assert [path.name for path in tmp_path.glob("removed.*")] == []
    else:
        assert at == 0
        assert not died or len(names(old)) == 3  # two files and the manifest


def test_a_save_that_was_swept_cannot_publish(tmp_path):
    attempt = tmp_path / "step-000000001.g0.abcd"
    attempt.mkdir()
    temporary = attempt / "MANIFEST.json.tmp"
    temporary.write_text("{}")
    sweep(attempt)
    with pytest.raises(FileNotFoundError):
        DISK.publish(temporary, attempt / "MANIFEST.json")
    assert names(tmp_path) == []


def test_only_saves_that_are_idle_for_long_are_abandoned(tmp_path):
    for name, changed_s in (("step-000000001.g0.aaaa", 100), ("step-000000002.g0.bbbb", 900)):
        path = tmp_path / name
        path.mkdir()
        (path / "r00000.safetensors").write_bytes(b"half")
        for entry in (path / "r00000.safetensors", path):
            os.utime(entry, (changed_s, changed_s))
    found = find(tmp_path)

    leftovers, kept = abandoned(found.rejected, now_s=1000, older_than_s=600)

    assert [item.path.name for item in leftovers] == ["step-000000001.g0.aaaa"]
    assert leftovers[0].reason == "never committed, last written 900 s ago"
    assert len(kept) == 1
    assert "last written 100 s ago; the save may still be running" in kept[0]


def test_quarantined_and_foreign_directories_are_never_abandoned():
    others = [Rejected(ROOT / why, why, "") for why in [*WAS_COMMITTED, Why.OTHER]]
    assert abandoned(others, now_s=1e12, older_than_s=0) == ([], [])
