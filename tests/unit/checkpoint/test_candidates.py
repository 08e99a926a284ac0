"""Which checkpoint is the newest, which are none, and what a load makes of a root."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.unit.checkpoint.support import adam_state, blank, flip, load_all, same_bits, saved
from tests.unit.checkpoint.test_manifest import changed
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint
from zero_checkpoint.format.manifest import ASIDE, directory_name
from zero_checkpoint.loading import restore
from zero_checkpoint.loading.candidates import Why
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.saving.commit import Lineage, generation


def steps(root):
    return [(c.manifest.round, c.manifest.step) for c in find(root).candidates]


def test_a_later_round_is_newer_than_a_later_step(tmp_path):
    full = adam_state()
    for round_, step in [(1, 5), (1, 40), (2, 41), (3, 42)]:
        saved(tmp_path, full, step=step, round=round_)
    assert steps(tmp_path) == [(3, 42), (2, 41), (1, 40), (1, 5)]


@pytest.mark.parametrize(
    ("round_", "step", "newest", "expected"),
    [
        (1, 10, None, 1),
        (1, 20, (1, 10), 1),
        (2, 20, (1, 10), 2),
        (2, 5, (1, 10), 2),  # a new round that went back ranks first by its round
        (1, 20, (7, 10), 7),  # a new job in an old root counts rounds from 1 again
        (1, 10, (7, 10), 7),  # of one step, the one that was committed last
        (1, 5, (7, 10), 8),  # and went back to an earlier tag
        (1, 5, (1, 10), 2),
        (1, 10, (1, 10), 1),
    ],
)
def test_what_is_saved_last_is_newest(round_, step, newest, expected):
    assert generation(round_, step, newest) == expected
    assert newest is None or (expected, step) >= newest


def test_what_a_run_saves_next_ranks_no_lower_than_what_it_has_saved_or_loaded():
    lineage = Lineage(3)
    for step, round_, least in ((100, 5, 5), (900, 4, 5), (7, 6, 6)):
        lineage.advance_to(directory_name(step, round_, "abcd"))
        assert lineage.round == least


def test_work_resumed_from_an_earlier_tag_is_what_the_next_restart_finds(tmp_path):
    full = adam_state()
    for step in (10, 20, 30):
        saved(tmp_path, full, step=step, tag=f"s{step}", round=1)
    redone = adam_state(seed=50)
    path = saved(tmp_path, redone, step=15, tag="redone", round=1)

    target = blank(full)
    assert load_all(tmp_path, target)[0].path == path
    assert same_bits(target, redone)


def test_two_tags_of_one_step_are_both_there_and_the_later_is_newest(tmp_path):
    full = adam_state()
    first = saved(tmp_path, full, tag="a")
    second = saved(tmp_path, full, tag="b")
    os.utime(first / "MANIFEST.json", ns=(1, 1))  # clocks are coarse; make the order certain
    assert [c.path for c in find(tmp_path).candidates] == [second, first]


def test_nothing_was_ever_saved_means_none_and_not_an_error(tmp_path, caplog):
    assert load_all(tmp_path / "never", adam_state()) == [None, None]
    (tmp_path / "step-000000001.g0.abcd").mkdir()  # a save that died before its commit
    (tmp_path / "runs").mkdir()
    assert load_all(tmp_path, adam_state()) == [None, None]
    assert {r.path.name: r.why for r in find(tmp_path).rejected} == {
        "runs": Why.OTHER,
        "step-000000001.g0.abcd": Why.UNCOMMITTED,
    }
    assert caplog.messages == []


def test_the_hint_is_never_needed(tmp_path):
    full = adam_state()
    saved(tmp_path, full, step=1)
    path = saved(tmp_path, full, step=2)
    for hint in ["step-000000001.g0.0000", "../../etc", None]:
        (tmp_path / "latest").unlink()
        if hint is not None:
            (tmp_path / "latest").write_text(hint)
        else:
            (tmp_path / "latest").mkdir()
        assert load_all(tmp_path, blank(full))[0].path == path


def test_a_tag_finds_its_newest_checkpoint_and_an_unknown_one_lists_the_tags(tmp_path):
    full = adam_state()
    saved(tmp_path, full, step=1, tag="best")
    best = saved(tmp_path, full, step=2, tag="best")
    saved(tmp_path, full, step=3, tag="last")

    assert [r.path for r in load_all(tmp_path, blank(full), 3, tag="best")] == [best] * 3
    for error in load_all(tmp_path, blank(full), 3, tag="bset"):
        assert type(error) is CheckpointError
        assert f"no checkpoint tagged 'bset' under {tmp_path}" in str(error)
        assert str(error).endswith("tags there are: 'last', 'best'")


def test_a_damaged_manifest_is_skipped_with_a_warning(tmp_path, caplog):
    full = adam_state()
    good = saved(tmp_path, full, step=1)
    bad = saved(tmp_path, full, step=2) / "MANIFEST.json"
    bad.write_bytes(bad.read_bytes()[:-1])

    assert load_all(tmp_path, blank(full))[0].path == good
    assert f"checkpoint skipped: {bad}: does not match its own digest" in caplog.text


def test_a_root_with_only_unusable_checkpoints_is_an_error_and_no_fresh_start(tmp_path):
    manifest = saved(tmp_path, adam_state()) / "MANIFEST.json"
    manifest.write_bytes(changed(manifest.read_bytes(), "min_reader", 3))
    assert [r.why for r in find(tmp_path).rejected] == [Why.NEWER]
    for error in load_all(tmp_path, adam_state()):
        assert isinstance(error, DamagedCheckpoint)
        assert "no usable checkpoint" in str(error)
        assert "upgrade zero-elastic" in str(error)


def test_a_manifest_that_cannot_be_read_for_another_reason_is_not_skipped(tmp_path):
    full = adam_state()
    saved(tmp_path, full, step=1)
    manifest = saved(tmp_path, full, step=2) / "MANIFEST.json"
    manifest.unlink()
    manifest.symlink_to(manifest)  # ELOOP: works for root too, unlike a missing permission
    for error in load_all(tmp_path, blank(full)):
        assert type(error) is CheckpointError
        assert "rank 0 could not search" in str(error)
        assert "symbolic links" in str(error)


@pytest.mark.parametrize("which", ["root", "directory", "quarantine"])
def test_storage_that_fails_is_neither_a_fresh_start_nor_an_older_checkpoint(
    tmp_path, monkeypatch, which
):
    """From Python 3.14 on, pathlib takes every error for "no"."""
    saved(tmp_path, adam_state(), step=1)
    path = saved(tmp_path, adam_state(), step=2)
    fails = {"root": tmp_path, "directory": path, "quarantine": path / "QUARANTINE"}[which]
    look = os.stat

    def stat(where, **options):
        if str(where) == str(fails):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), where)
        return look(where, **options)

    monkeypatch.setattr(os, "stat", stat)
    for name in ("exists", "is_dir", "is_file"):
        monkeypatch.setattr(Path, name, getattr(os.path, name.replace("_", "")))
    for error in load_all(tmp_path, blank(adam_state())):
        assert type(error) is CheckpointError
        assert "Stale file handle" in str(error)


def test_a_manifest_in_another_directory_is_no_checkpoint(tmp_path):
    path = saved(tmp_path, adam_state())
    moved = path.rename(tmp_path / "step-000000009.g0.abcd")
    assert find(tmp_path).candidates == ()
    assert f"written for the directory {path.name!r}" in find(tmp_path).rejected[0].reason
    moved.rename(path)
    assert [c.path for c in find(tmp_path).candidates] == [path]
    assert isinstance(load_all(tmp_path, adam_state())[0], Loaded)


@pytest.mark.parametrize(("spare", "read_again"), [(0, 0), (-1, 1)], ids=["told", "too long"])
def test_the_ranks_are_told_the_manifest_unless_that_is_too_much_for_the_store(
    tmp_path, monkeypatch, spare, read_again
):
    text = (saved(tmp_path, adam_state()) / "MANIFEST.json").read_bytes()
    monkeypatch.setattr(restore, "_MOST_TOLD_BYTES", 2 * len(text) + spare)
    reads, read = [], restore.read_manifest
    monkeypatch.setattr(restore, "read_manifest", lambda path: reads.append(path) or read(path))

    target = blank(adam_state())
    assert [result.manifest.text for result in load_all(tmp_path, target)] == [text] * 2
    assert same_bits(target, adam_state())
    assert len(reads) == read_again


def test_the_ranks_meet_once_for_each_checkpoint_that_is_tried(tmp_path):
    older = saved(tmp_path, adam_state(), step=1)
    damaged = saved(tmp_path, adam_state(), step=2)
    flip(damaged / "r00001.safetensors", 5000)

    met = []
    assert load_all(tmp_path, blank(adam_state()), meet=met.append)[0].path == older
    told = [f"all ranks have read {path.name}" for path in (damaged, older)]
    assert met == [name for name in told for _ in range(2)]


def test_a_root_with_nothing_but_checkpoints_aside_is_a_fresh_start_that_names_their_tags(
    tmp_path, caplog
):
    for step, tag in ((1, "best"), (2, "other"), (3, "best")):
        saved(tmp_path, adam_state(), step=step, tag=tag, meta={"engine": {ASIDE: True}})
    assert load_all(tmp_path, adam_state()) == [None, None]
    aside = "all checkpoints here were saved aside; to load one, name its tag: best, other"
    assert f"{tmp_path}: {aside}" in caplog.messages
    assert load_all(tmp_path, blank(adam_state()), tag="best")[0].manifest.step == 3


def test_where_the_checkpoints_of_the_job_are_gone_there_is_no_fresh_start(tmp_path, monkeypatch):
    """As in the second round of a job, on a node on which the storage is not mounted."""
    root = tmp_path / "mount" / "checkpoints"
    monkeypatch.setenv("ZERO_COMMITTED_ROOT", str(root))
    for _ in ("not mounted", "empty"):
        for error in load_all(root, adam_state()):
            assert type(error) is CheckpointError
            assert f"{root} has no checkpoint any more, and this job has published" in str(error)
        root.mkdir(parents=True, exist_ok=True)
    assert load_all(tmp_path / "other", adam_state()) == [None, None]
    saved(root, adam_state(), tag="best", meta={"engine": {ASIDE: True}})
    assert load_all(root, adam_state()) == [None, None]


def test_an_unknown_tag_names_what_is_there_and_not_usable_too(tmp_path):
    bad = saved(tmp_path, adam_state(), tag="best") / "MANIFEST.json"
    saved(tmp_path, adam_state(), step=2, tag="last")
    bad.write_bytes(bad.read_bytes()[:-1])
    for error in load_all(tmp_path, blank(adam_state()), tag="best"):
        assert type(error) is CheckpointError
        assert f"tags there are: 'last'; not usable: {bad}: does not match" in str(error)
