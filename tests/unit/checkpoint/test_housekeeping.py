"""After a commit the old goes, the good stays, and what the dead have left is swept."""

from __future__ import annotations

import os

from tests.unit.checkpoint.support import adam_state, names, saved
from zero_engine.checkpoint import find
from zero_engine.checkpoint.candidates import quarantine
from zero_engine.checkpoint.housekeeping import Keep, tidy


def steps(root):
    return [candidate.manifest.step for candidate in find(root).candidates]


def test_only_the_newest_and_every_so_many_steps_stay(tmp_path):
    for step in range(1, 8):
        newest = saved(tmp_path, adam_state(), step=step)
        tidy(tmp_path, newest, Keep(last=2, every=3))
    assert steps(tmp_path) == [7, 6, 3]
    assert len(list(tmp_path.iterdir())) == 3 + 1  # and the hint


def test_by_default_everything_stays(tmp_path):
    for step in range(1, 5):
        newest = saved(tmp_path, adam_state(), step=step)
        tidy(tmp_path, newest, Keep())
    assert steps(tmp_path) == [4, 3, 2, 1]


def test_a_quarantined_checkpoint_does_not_count_as_kept(tmp_path):
    first, second, third = (saved(tmp_path, adam_state(), step=step) for step in (1, 2, 3))
    quarantine(second, "damaged")
    tidy(tmp_path, third, Keep(last=2))
    assert steps(tmp_path) == [3, 1]
    assert first.exists()


def test_what_a_dead_save_has_left_goes_and_what_is_being_written_stays(tmp_path):
    for step, idle_s in ((5, 7200), (6, 0)):
        attempt = tmp_path / f"step-00000000{step}.g0.abcd"
        attempt.mkdir()
        (attempt / "r00000.safetensors").write_bytes(b"half")
        for path in (attempt / "r00000.safetensors", attempt):
            then = path.stat().st_mtime - idle_s
            os.utime(path, (then, then))
    newest = saved(tmp_path, adam_state(), step=7)
    tidy(tmp_path, newest, Keep())
    assert [name for name in names(tmp_path) if "g0.abcd" in name] == [
        "step-000000006.g0.abcd",
        "step-000000006.g0.abcd/r00000.safetensors",
    ]
    assert steps(tmp_path) == [7]


def test_a_root_that_cannot_be_looked_at_is_a_warning(tmp_path, caplog):
    tidy(tmp_path / "none", tmp_path / "none" / "step", Keep(last=2))
    assert "could not be looked at" in caplog.text
