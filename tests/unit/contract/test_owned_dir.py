"""A directory belongs to one process; what a dead one left goes with the next, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from zero_contract.owned_dir import OWNER, DirectoryTaken, Taken, claim, lock, make, sweep


def left_by_a_dead_process(parent: Path, name: str = "zero-x-") -> Path:
    child = os.fork()
    if child == 0:
        owned = make(parent, name)
        (owned.path / "deep").mkdir()
        (owned.path / "deep" / "file").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (found,) = set(parent.glob(f"{name}*"))
    return found


def test_what_a_dead_process_left_is_swept_once_and_the_living_keep_theirs(tmp_path):
    dead = left_by_a_dead_process(tmp_path)
    alive = make(tmp_path, "zero-x-")
    assert sweep(tmp_path, "zero-x-*") == [dead]
    assert sweep(tmp_path, "zero-x-*") == []
    assert list(tmp_path.iterdir()) == [alive.path]
    for _ in range(2):
        alive.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_spared_or_was_used_just_now_is_left_for_a_successor(tmp_path):
    dead = left_by_a_dead_process(tmp_path)
    assert sweep(tmp_path, "zero-*", spare="zero-x-*") == []
    assert sweep(tmp_path, "zero-*", grace_s=60.0) == []
    assert (dead / "deep" / "file").read_text() == "half"
    for one in (dead, dead / "deep"):
        os.utime(one, (0, 0))
    assert sweep(tmp_path, "zero-*", grace_s=60.0) == [dead]


def test_a_successor_takes_over_what_was_left_with_all_that_is_in_it(tmp_path):
    dead = left_by_a_dead_process(tmp_path)
    owned = claim(dead, only_left=True)
    assert (owned.path / "deep" / "file").read_text() == "half"
    with pytest.raises(DirectoryTaken) as refused:
        claim(dead)
    assert refused.value.why is Taken.OWNER_LIVES
    owned.remove()
    with pytest.raises(FileNotFoundError):
        claim(dead, only_left=True)


@pytest.mark.parametrize(
    ("mark", "why"),
    [(b"another kernel", Taken.OTHER_KERNEL), (None, Taken.NEVER_OWNED), (b"", Taken.NEVER_OWNED)],
)
def test_what_may_be_somebody_elses_is_neither_taken_nor_swept(tmp_path, mark, why):
    theirs = tmp_path / "zero-theirs"
    theirs.mkdir()
    (theirs / "notes").touch()
    if mark is not None:
        (theirs / OWNER).write_bytes(mark)
    assert sweep(tmp_path, "zero-*") == []
    with pytest.raises(DirectoryTaken) as refused:
        claim(theirs)
    assert refused.value.why is why
    assert (theirs / "notes").exists()


def test_a_link_that_leads_nowhere_is_refused_at_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        claim(tmp_path / "link")


def test_an_interrupted_removal_is_finished_by_the_next_sweep(tmp_path, monkeypatch):
    dead = left_by_a_dead_process(tmp_path)
    with monkeypatch.context() as patch:  # the process dies before it has removed the mark
        patch.setattr(Path, "unlink", Mock(side_effect=OSError))
        sweep(tmp_path, "zero-*")
    assert [path.name for path in dead.iterdir()] == [OWNER]
    assert sweep(tmp_path, "zero-*") == [dead]


def test_without_locks_there_are_directories_but_none_is_taken_over(tmp_path, monkeypatch):
    dead = left_by_a_dead_process(tmp_path)
    unlocked = OSError(errno.ENOSYS, "Function not implemented")  # as on Lustre without "flock"
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=unlocked))
    assert sweep(tmp_path, "zero-*") == []
    with pytest.raises(DirectoryTaken) as refused:
        claim(dead)
    assert refused.value.why is Taken.NO_LOCKS
    make(tmp_path, "zero-").remove()
    assert list(tmp_path.iterdir()) == [dead]


def test_a_lock_is_waited_for_no_longer_than_was_said(tmp_path):
    with (tmp_path / "lock").open("wb") as mine, (tmp_path / "lock").open("wb") as theirs:
        assert lock(mine.fileno())
        assert not lock(theirs.fileno(), 0.1)
        fcntl.flock(mine, fcntl.LOCK_UN)
        assert lock(theirs.fileno())
