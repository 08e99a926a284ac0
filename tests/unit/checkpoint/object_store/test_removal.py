"""An object store: what is removed is gone, and nothing else."""

from __future__ import annotations

import pytest

from tests.unit.checkpoint.support import (
    SmallObjects,
    adam_state,
    blank,
    load_all,
    names,
    same_bits,
    save_all,
    saved,
)
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.object_disk import OBJECTS
from zero_checkpoint.loading.candidates import Why
from zero_checkpoint.saving.housekeeping import Keep, tidy
from zero_checkpoint.saving.retention import remove, sweep

OLD, NEW = adam_state(seed=1, width=3000), adam_state(seed=2, width=3000)


def test_a_removed_checkpoint_is_gone_and_the_others_are_untouched(root):
    old, new = (saved(root, OLD, 2, step=step) for step in (1, 2))
    remove(old)
    assert [candidate.path for candidate in find(root).candidates] == [new]
    assert not old.exists()


class Dying(SmallObjects):
    """Dies when it has removed so many objects."""

    def __init__(self, after):
        self.left = after

    def remove(self, path):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        super().remove(path)


@pytest.mark.corners(after=[2])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_deletion_that_dies_leaves_no_checkpoint_and_is_finished_later(root, after):
    old, new = (saved(root, OLD, 2, step=step) for step in (1, 2))
    with pytest.raises(KeyboardInterrupt):
        remove(old, Dying(after))
    assert [candidate.path for candidate in find(root).candidates] == [new]
    assert [entry.why for entry in find(root).rejected] == [Why.REMOVED]

    tidy(root, new, Keep())
    assert not old.exists()
    assert load_all(root, blank(OLD), 1)[0].path == new


def test_a_save_whose_directory_was_swept_meanwhile_cannot_commit(root):
    """It stalled for so long that it was taken for dead."""
    saved(root, OLD, 2, step=1)

    def fence(_):
        (attempt,) = (entry.path for entry in find(root).rejected)
        OBJECTS.retire(attempt, committed=False)  # the sweep, interrupted before it deletes

    before = names(root)
    for error in save_all(root, NEW, 2, step=2, fence=fence):
        assert isinstance(error, CheckpointError)
        assert "there is such an object already" in str(error)
    assert names(root) == before


def test_a_sweep_that_comes_after_the_commit_is_refused_and_takes_nothing(root):
    path = saved(root, NEW, 2)
    with pytest.raises(CheckpointError, match="has just been committed, so it stays"):
        sweep(path)
    target = blank(NEW)
    load_all(root, target, 3)
    assert same_bits(target, NEW)


def test_old_checkpoints_go_after_a_commit(root):
    paths = [saved(root, OLD, 2, step=step) for step in range(1, 6)]
    tidy(root, paths[-1], Keep(last=2))
    assert [candidate.path for candidate in find(root).candidates] == [paths[4], paths[3]]
    assert not any(path.exists() for path in paths[:3])
