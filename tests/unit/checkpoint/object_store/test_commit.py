"""An object store: a save that fails leaves nothing, and of two writers one wins."""

from __future__ import annotations

import threading

import fsspec
import pytest

from tests.support.s3_server import s3_server
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
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.object_disk import OBJECTS, _create
from zero_checkpoint.files.place import place
from zero_checkpoint.format.manifest import MANIFEST
from zero_contract.errors import CommitRefused

OLD, NEW = adam_state(seed=1, width=3000), adam_state(seed=2, width=3000)


# ---- a save that fails ----


class Failing(SmallObjects):
    def __init__(self, operation, name):
        self.operation, self.name = operation, name

    def _maybe(self, operation, name):
        if operation == self.operation and self.name in str(name):
            raise OSError(5, "Input/output error", str(name))

    def write(self, file, data):
        super().write(file, data)
        self._maybe("write", file.name)

    def sync(self, file):
        self._maybe("sync", file.name)
        super().sync(file)

    def publish(self, temporary, final, *, replace=False):
        self._maybe("publish", final)
        super().publish(temporary, final, replace=replace)


@pytest.mark.parametrize(
    ("operation", "name"),
    [("write", "r00001"), ("sync", "r00001"), ("sync", "MANIFEST")],
)
def test_a_failed_operation_fails_every_rank_and_leaves_nothing(root, operation, name):
    saved(root, OLD, 2, step=1)
    before = names(root)
    for error in save_all(root, NEW, 2, step=2, disk=Failing(operation, name)):
        assert type(error) is CheckpointError
        assert name in str(error)
    assert names(root) == before


def test_a_manifest_that_arrives_late_finds_all_its_files(root):
    """The answer to the conditional put is lost, and the store takes the request only later."""
    saved(root, OLD, 2, step=1)
    late = []

    class Late(SmallObjects):
        def publish(self, temporary, final, *, replace=False):
            if final.name == MANIFEST:
                late.append((final, temporary.read_bytes()))
                raise OSError(110, "Connection timed out", str(final))
            super().publish(temporary, final, replace=replace)

    for error in save_all(root, NEW, 2, step=2, disk=Late()):
        assert "it is not known whether this checkpoint was committed" in str(error)
    target = blank(NEW)
    assert {r.manifest.step for r in load_all(root, target, 2)} == {1}
    ((final, text),) = late
    _create(final, text)
    assert {r.manifest.step for r in load_all(root, target, 2)} == {2}
    assert same_bits(target, NEW)


def test_a_failed_save_leaves_no_part_of_an_upload_behind(s3, s3_root):
    large = adam_state(width=80_000)
    for error in save_all(s3_root, large, 1, disk=Failing("sync", "r00000")):
        assert isinstance(error, CheckpointError)
    assert names(s3_root) == []
    assert s3.uploads() == []


def test_a_fence_that_refuses_leaves_nothing(root):
    def fence(_):
        raise CommitRefused("round 3 is over")

    assert {type(e) for e in save_all(root, NEW, 2, fence=fence)} == {CommitRefused}
    assert names(root) == []


# ---- two writers ----


def test_of_many_writers_of_one_manifest_exactly_one_wins(s3_root):
    final, barrier, outcomes = s3_root / MANIFEST, threading.Barrier(6), []

    def write(number):
        with OBJECTS.create(s3_root / f"{number}.tmp") as file:
            OBJECTS.write(file, b"%d" % number)
            OBJECTS.sync(file)
        barrier.wait(60)
        try:
            OBJECTS.publish(s3_root / f"{number}.tmp", final)
            outcomes.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [b"%d" % number for number in outcomes] == [final.read_bytes()]


def test_a_directory_belongs_to_one_save(root):
    OBJECTS.make_directory(root / "step-000000001.g0.0000")
    with pytest.raises(FileExistsError):
        OBJECTS.make_directory(root / "step-000000001.g0.0000")


def test_a_writer_that_is_refused_because_of_its_own_first_attempt_has_won(root):
    """The answer to the first was lost, so the client sent it again."""
    _create(root / MANIFEST, b"mine")
    _create(root / MANIFEST, b"mine")
    with pytest.raises(FileExistsError):
        _create(root / MANIFEST, b"another's")


def test_a_store_that_ignores_the_condition_is_refused(monkeypatch):
    with s3_server("--forgetful") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        for error in save_all(place("s3://bucket/run"), NEW, 2):
            assert "s3://bucket/run: this store ignores 'If-None-Match: *'" in str(error)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
