"""What a directory promises, an object store promises: nothing torn, one winner, clear errors.

Against a real S3 server, and where no server is needed against fsspec's own memory.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
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
    on_ranks,
    same_bits,
    save_all,
    saved,
    share,
)
from zero_engine.checkpoint import find, save
from zero_engine.checkpoint.candidates import Why
from zero_engine.checkpoint.housekeeping import Keep, tidy
from zero_engine.checkpoint.manifest import MANIFEST
from zero_engine.checkpoint.object_disk import OBJECTS, _create
from zero_engine.checkpoint.objects import ObjectPath
from zero_engine.checkpoint.place import place
from zero_engine.checkpoint.retention import remove, sweep
from zero_engine.checkpoint.tools.cli import main
from zero_engine.errors import CheckpointError, CommitRefused, DamagedCheckpoint

_roots = itertools.count()
OLD, NEW = adam_state(seed=1, width=3000), adam_state(seed=2, width=3000)


@pytest.fixture(params=["memory", "s3"])
def root(request):
    """A prefix that no other test uses, in either store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    return place(f"{request.param}://bucket/run-{next(_roots)}")


@pytest.fixture
def s3_root(s3):
    return place(f"s3://{s3.bucket}/run-{next(_roots)}")


def key(path):
    return str(path).partition("bucket/")[2]


# ---- saving and loading ----


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_what_is_saved_is_loaded_at_any_world_size_and_each_byte_is_read_once(root, world):
    large = adam_state(width=20_000)
    path = saved(root, large, 2, step=1)
    target = blank(large)
    results = load_all(root, target, world)
    assert same_bits(target, large)
    assert {result.path for result in results} == {path}
    blocks = sum(len(file.digests) for file in results[0].manifest.files)
    data = sum(file.size_bytes for file in results[0].manifest.files)
    shared = (world + 1) * 3 * SmallObjects.block_bytes  # a block at each end of a run is shared
    assert blocks > 40
    assert data - 2 * 4096 <= sum(result.bytes_read for result in results) <= data + shared


def test_the_newest_is_loaded_and_latest_names_it(root):
    saved(root, OLD, 2, step=1)
    path = saved(root, NEW, 3, step=2)
    assert (root / "latest").read_text().strip() == path.name
    target = blank(NEW)
    assert load_all(root, target, 2)[0].path == path


def test_an_empty_prefix_holds_nothing(root):
    assert load_all(root, blank(NEW), 2) == [None, None]


def test_a_damaged_object_is_named_and_quarantined_and_the_one_before_is_loaded(s3, s3_root):
    saved(s3_root, OLD, 2, step=1)
    bad = saved(s3_root, NEW, 2, step=2)
    where = {"Bucket": s3.bucket, "Key": key(bad / "r00001.safetensors")}
    data = bytearray(s3.client().get_object(**where)["Body"].read())
    data[len(data) // 2] ^= 1
    s3.client().put_object(**where, Body=bytes(data))

    target = blank(OLD)
    assert {r.manifest.step for r in load_all(s3_root, target, 3)} == {1}
    assert same_bits(target, OLD)
    (rejected,) = find(s3_root).rejected
    assert rejected.why is Why.QUARANTINED
    assert re.search(r"r00001.safetensors: block \d+ .*XXH3-64 differs", rejected.reason)


@pytest.mark.parametrize("cut", ["shorter", "gone"])
def test_an_object_that_is_cut_or_gone_is_damage(s3, s3_root, cut):
    bad = saved(s3_root, NEW, 2, step=2)
    where = {"Bucket": s3.bucket, "Key": key(bad / "r00001.safetensors")}
    data = s3.client().get_object(**where)["Body"].read()
    s3.client().delete_object(**where)
    if cut == "shorter":
        s3.client().put_object(**where, Body=data[:70_000])
    for error in load_all(s3_root, blank(NEW), 3):
        assert isinstance(error, DamagedCheckpoint)
        assert f"{bad}/r00001.safetensors" in str(error)


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
    [("write", "r00001"), ("sync", "r00001"), ("sync", "MANIFEST"), ("publish", "MANIFEST")],
)
def test_a_failed_operation_fails_every_rank_and_leaves_nothing(root, operation, name):
    saved(root, OLD, 2, step=1)
    before = names(root)
    for error in save_all(root, NEW, 2, step=2, disk=Failing(operation, name)):
        assert type(error) is CheckpointError
        assert name in str(error)
    assert names(root) == before


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
        barrier.wait(20)
        try:
            OBJECTS.publish(s3_root / f"{number}.tmp", final)
            outcomes.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
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


# ---- removing ----


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


# ---- errors ----


def test_credentials_that_are_refused_are_no_empty_store(s3, s3_root, capsys):
    """A run whose credentials have expired must not start from scratch."""
    saved(s3_root, OLD, 2, step=1)
    s3.check_credentials(True)
    try:
        for error in load_all(s3_root, blank(OLD), 2):
            assert type(error) is CheckpointError
            assert "the store refuses" in str(error)
            assert "check the credentials" in str(error)
        for error in save_all(s3_root, NEW, 2, step=2):
            assert "check the credentials" in str(error)
        assert main(["ls", str(s3_root)]) == 2
        assert f"zero-ckpt: {s3_root}: the store refuses" in capsys.readouterr().err
    finally:
        s3.check_credentials(False)


def test_a_bucket_that_does_not_exist_is_named(s3):
    root = place("s3://no-such-bucket/run")
    for error in [*save_all(root, NEW, 2), *load_all(root, blank(NEW), 2)]:
        assert "s3://no-such-bucket/run" in str(error)
        assert "there is no such bucket; create it, or mend the URL" in str(error)


def test_a_store_out_of_reach_is_named(s3_root, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for error in load_all(s3_root, blank(NEW), 1):
        assert "the store cannot be reached (Could not connect to the endpoint" in str(error)
        assert "check the network, and AWS_ENDPOINT_URL" in str(error)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("azure://bucket/dir", "under s3://, s3a://, gs://, gcs://, memory://; mount other"),
        ("s3://", "write s3://BUCKET/DIRECTORY"),
        ("s3://bucket/../other", "write s3://BUCKET/DIRECTORY"),
        ("s3:/bucket/dir", "a URL in a Path loses a slash; give it as text: 's3://bucket/dir'"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_the_remedy(text, says):
    with pytest.raises(CheckpointError, match=re.escape(says)):
        place(text)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'zero-elastic[gcs]'")):
        place("gs://bucket/dir")


@pytest.mark.parametrize("text", ["s3://bucket/run", "s3://bucket//run/", "s3://bucket/run//"])
def test_slashes_do_not_make_another_place(s3, text):
    assert place(text) == ObjectPath("s3://bucket/run")


def test_a_path_and_a_file_url_are_directories(tmp_path):
    assert place(tmp_path) == place(str(tmp_path)) == place(f"file://{tmp_path}") == tmp_path


# ---- tools, and an engine ----


def test_zero_ckpt_works_on_urls(root, capsys, tmp_path):
    old, new = saved(root, OLD, 2, step=1, tag="a"), saved(root, NEW, 3, step=2, tag="b")

    def run(*arguments, code=0):
        assert main([*map(str, arguments), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    assert [row["name"] for row in run("ls", root)] == [new.name, old.name]
    assert run("show", f"{root}@a")["path"] == str(old)
    assert [result["damage"] for result in run("verify", root, "--all")] == [[], []]
    assert run("diff", f"{root}@a", new, code=1)["counts"]["different"] > 0
    out = tmp_path / "model.pt"
    assert run("export", root, out, "--to", "torch")["files"] == [str(out)]
    assert run("import", out, root, "--from", "torch")["path"].startswith(str(root))
    assert [a["path"] for a in run("prune", root, "--keep-last", 2)["actions"]] == [str(old)]
    assert run("repair", root)["actions"] == []
    assert not old.exists()


SCRIPT = """
import sys, torch, zero_engine
config = {"train_micro_batch_size_per_gpu": 2,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
for number in range(2):
    engine, *_ = zero_engine.initialize(model=torch.nn.Linear(4, 1), config=config)
    print(*engine.load_checkpoint(sys.argv[1]))
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1], client_state={"seen": number}, blocking=number == 0)
"""


def test_an_engine_saves_to_a_url_and_goes_on_from_it(s3, s3_root):
    """The script ends while its last save is in flight."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(s3_root)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=150)
    newest, first = find(s3_root).candidates
    assert done.stdout.splitlines() == ["None {}", f"{first.path} {{'seen': 0}}"]
    assert (newest.manifest.step, newest.manifest.meta["client"]) == (2, {"seen": 1})


def test_ranks_that_see_another_store_are_told_so(root):
    def work(ballot):
        where = root if ballot.rank == 0 else place(f"{root}-other")
        state = share(NEW, ballot.rank, ballot.world)
        return save(where, state, ballot, step=1, tag="t", round=0, fence=None)

    for error in on_ranks(2, work):
        assert "rank 0 sees None" in str(error)
        assert "storage that all nodes share" in str(error)
