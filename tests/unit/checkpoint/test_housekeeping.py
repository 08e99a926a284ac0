"""After a commit the old goes, the good stays, and what the dead have left is swept."""

from __future__ import annotations

import math
import os

import pytest

from tests.unit.checkpoint.support import adam_state, names, saved
from zero_checkpoint import find
from zero_checkpoint.loading.candidates import quarantine
from zero_checkpoint.saving.housekeeping import Keep, tidy
from zero_checkpoint.saving.retention import Best


def steps(root):
    return [candidate.manifest.step for candidate in find(root).candidates]


def test_only_the_newest_and_every_so_many_steps_stay(tmp_path):
    for step in range(1, 8):
        newest = saved(tmp_path, adam_state(), step=step)
        tidy(tmp_path, newest, Keep(last=2, every=3))
    assert steps(tmp_path) == [7, 6, 3]
    assert len(list(tmp_path.iterdir())) == 3 + 2  # and the two hints


@pytest.mark.parametrize(("mode", "stay"), [("min", [7, 6, 4, 2]), ("max", [7, 6, 5, 1])])
def test_the_best_stay_by_the_number_that_the_script_has_given(tmp_path, mode, stay):
    losses = {1: 9.0, 2: 2.0, 3: math.nan, 4: 1, 5: 8.0, 6: 3.0}
    best = Best(metric="eval_loss", mode=mode, count=2)
    for step in range(1, 8):
        client = {"eval_loss": losses[step]} if step in losses else {}
        newest = saved(tmp_path, adam_state(), step=step, meta={"client": client})
        tidy(tmp_path, newest, Keep(last=2, best=best))
    assert steps(tmp_path) == stay


def test_of_equally_good_ones_the_newer_stays(tmp_path):
    for step in range(1, 5):
        newest = saved(tmp_path, adam_state(), step=step, meta={"client": {"loss": 1.0}})
        tidy(tmp_path, newest, Keep(last=2, best=Best(metric="loss")))
    assert steps(tmp_path) == [4, 3]


@pytest.mark.parametrize("value", [None, "1.0", True, [1], {}])
def test_what_is_no_number_is_not_the_best(tmp_path, value):
    first = saved(tmp_path, adam_state(), step=1, meta={"client": {"loss": value}})
    second = saved(tmp_path, adam_state(), step=2, meta={"client": {"loss": 5.0}})
    best = Best(metric="loss", count=2).among(find(tmp_path).candidates)
    assert [candidate.path for candidate in best] == [second]
    assert first.exists()


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
