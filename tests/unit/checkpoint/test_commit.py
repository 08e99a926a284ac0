"""A save that fails anywhere publishes nothing, leaves nothing, and says what went wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.unit.checkpoint.support import (
    SmallBlocks,
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
from zero_checkpoint import find
from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.errors import CheckpointError, DiskFull, OtherRun
from zero_checkpoint.format import manifest
from zero_checkpoint.format.pieces import PARAM, Piece, State, TensorId
from zero_checkpoint.loading import ownership
from zero_checkpoint.saving.commit import save
from zero_contract.beside import heir_of
from zero_contract.errors import CommitRefused
from zero_contract.worker import ENV_RUN


class Failing(SmallBlocks):
    """Fails with an errno whenever an operation touches a file whose name has this in it."""

    def __init__(self, operation: str, name: str, number: int = errno.EIO) -> None:
        self.operation, self.name, self.number = operation, name, number

    def _maybe(self, operation, name):
        if operation == self.operation and self.name in str(name):
            raise OSError(self.number, os.strerror(self.number), str(name))

    def create(self, path):
        self._maybe("create", path)
        return super().create(path)

    def write(self, file, data):
        self._maybe("write", file.name)
        super().write(file, data)

    def sync(self, file):
        self._maybe("sync", file.name)
        super().sync(file)

    def publish(self, temporary, final, *, replace=False):
        self._maybe("publish", final)
        super().publish(temporary, final, replace=replace)

    def sync_directory(self, path):
        # Once the manifest has its final name: the fsync that follows the rename.
        if (path / "MANIFEST.json").exists():
            self._maybe("sync_directory", path)
        super().sync_directory(path)

    def make_directory(self, path):
        self._maybe("make_directory", path)
        super().make_directory(path)


@pytest.fixture
def old(tmp_path):
    """A root with a good checkpoint of step 1."""
    saved(tmp_path, adam_state(seed=1), 2, step=1)
    return tmp_path


def check_only_the_old_one(root, before):
    assert names(root) == before
    target = blank(adam_state(seed=1))
    assert {r.manifest.step for r in load_all(root, target, 3)} == {1}
    assert same_bits(target, adam_state(seed=1))


@pytest.mark.parametrize(
    ("operation", "name", "says"),
    [
        ("make_directory", "step-", "rank 0: no new directory under"),
        ("create", "r00001", "rank 1: .*r00001.safetensors"),
        ("write", "r00001", "rank 1: .*r00001.safetensors"),
        ("sync", "r00002", "rank 2: .*r00002.safetensors"),
        ("create", "MANIFEST", "rank 0: .*MANIFEST.json"),
        ("write", "MANIFEST", "rank 0: .*MANIFEST.json"),
        ("sync", "MANIFEST", "rank 0: .*MANIFEST.json"),
        ("publish", "MANIFEST", "rank 0: .*MANIFEST.json"),
        ("sync_directory", "step-000000002", "rank 0: .*MANIFEST.json"),
    ],
)
def test_a_failed_operation_fails_every_rank_and_leaves_nothing(old, operation, name, says):
    before = names(old)

    errors = save_all(old, adam_state(), 3, step=2, disk=Failing(operation, name))

    for error in errors:
        assert type(error) is CheckpointError
        assert error.args == errors[0].args
        with pytest.raises(CheckpointError, match=f"{says}.*Input/output error \\(errno 5\\)"):
            raise error
    check_only_the_old_one(old, before)


class AnswerLost(SmallBlocks):
    """Renames the manifest, or not, and fails; from then on nothing there can be removed."""

    def __init__(self, *, renames: bool) -> None:
        self.renames, self.failed = renames, False

    def _fail(self, path):
        self.failed = True
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def publish(self, temporary, final, *, replace=False):
        if final.name != "MANIFEST.json" or self.renames:
            super().publish(temporary, final, replace=replace)
        if final.name == "MANIFEST.json":
            self._fail(final)

    def remove(self, path):
        if self.failed and path.name == "MANIFEST.json":
            self._fail(path)
        super().remove(path)


@pytest.mark.parametrize("renames", [True, False])
def test_nobody_removes_a_file_of_what_may_be_committed(old, renames):
    before, new = names(old), adam_state(seed=2)

    errors = save_all(old, new, 3, step=2, disk=AnswerLost(renames=renames))

    assert len({str(error) for error in errors}) == 1
    assert "it is not known whether this checkpoint was committed" in str(errors[0])
    left = [name for name in names(old) if name not in before and ".safetensors" in name]
    assert len(left) == 3
    target = blank(new)
    assert {r.manifest.step for r in load_all(old, target, 3)} == {2 if renames else 1}
    assert same_bits(target, new if renames else adam_state(seed=1))


class Interrupted(Failing):
    """Ctrl-C in the same operations."""

    def _maybe(self, operation, name):
        if operation == self.operation and self.name in str(name):
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        *(("create", "r00000"), ("write", "r00000"), ("sync", "r00000")),
        *(("create", "MANIFEST"), ("write", "MANIFEST"), ("sync", "MANIFEST")),
        ("publish", "MANIFEST"),
    ],
)
def test_a_save_of_one_process_that_is_interrupted_leaves_nothing(old, operation, name):
    before, disk = names(old), Interrupted(operation, name)
    with pytest.raises(KeyboardInterrupt):
        save_alone(old, disk)
    check_only_the_old_one(old, before)


@pytest.mark.parametrize(
    ("operation", "name"), [("sync_directory", "step-000000002"), ("create", "latest")]
)
def test_what_is_published_stays_when_the_process_is_interrupted_then(old, operation, name):
    with pytest.raises(KeyboardInterrupt):
        save_alone(old, Interrupted(operation, name))
    assert load_all(old, blank(adam_state()), 3)[0].manifest.step == 2


def save_alone(root, disk):
    consensus = StoreConsensus(HashStore(), 0, 1)
    state = share(adam_state(), 0, 1)
    save(root, state, consensus, step=2, tag="t", round=1, fence=None, disk=disk)


@pytest.fixture
def foreign(tmp_path_factory, monkeypatch):
    """A checkpoint of another run."""
    with monkeypatch.context() as other:
        other.setenv(ENV_RUN, "another")
        other.setattr(ownership, "_seen", ownership._Seen())
        return saved(tmp_path_factory.mktemp("foreign"), adam_state(seed=9), 2, step=9)


def test_nothing_is_saved_beside_the_checkpoint_of_another_run(old, foreign):
    class Untouched(SmallBlocks):
        def make_directory(self, path):
            raise AssertionError(f"{path} was made")

    there = foreign.rename(old / foreign.name)
    before = names(old)
    errors = save_all(old, adam_state(), 2, step=10, disk=Untouched())
    assert [type(error) for error in errors] == [OtherRun] * 2
    assert there.name in str(errors[0])
    assert names(old) == before


def test_nothing_is_published_if_another_run_does_so_while_the_files_are_written(old, foreign):
    class Overtaken(SmallBlocks):
        def create(self, path):
            if path.name.startswith("MANIFEST"):
                foreign.rename(old / foreign.name)
            return super().create(path)

    before = names(old)
    errors = save_all(old, adam_state(), 2, step=10, disk=Overtaken())
    assert [type(error) for error in errors] == [OtherRun] * 2
    assert [name for name in names(old) if not name.startswith(foreign.name)] == before


def test_a_root_that_is_not_there_is_made(tmp_path):
    root = tmp_path / "new" / "deeper"
    assert saved(root, adam_state(), 2).parent == root


def test_ranks_that_name_different_roots_save_to_that_of_rank_0_and_are_told(tmp_path, caplog):
    full = adam_state(seed=3)

    def work(consensus):
        state = share(full, consensus.rank, consensus.world)
        root = tmp_path / f"at-{consensus.rank}"
        return save(
            root, state, consensus, step=1, tag="t", round=0, fence=None, disk=SmallBlocks()
        )

    paths = on_ranks(2, work)
    assert [path.parent for path in paths] == [tmp_path / "at-0"] * 2
    assert not (tmp_path / "at-1").exists()
    [told] = [record.getMessage() for record in caplog.records]
    assert f"save_checkpoint('{tmp_path}/at-1'): rank 0 has named {tmp_path}/at-0, and" in told
    target = blank(full)
    load_all(tmp_path / "at-0", target, 2)
    assert same_bits(target, full)


def test_the_write_and_the_publication_of_a_save_are_measured_apart(tmp_path):
    told, begin_s = [], time.monotonic()
    path = save(
        tmp_path,
        share(adam_state(), 0, 1),
        StoreConsensus.alone(),
        step=1,
        tag="t",
        round=0,
        fence=lambda digest: time.sleep(0.05),
        on_part=lambda *part: told.append(part),
    )
    (first, own_bytes, write_s), (second, all_bytes, publish_s) = told
    assert (first, second) == ("write", "publish")
    assert own_bytes == all_bytes == (path / "r00000.safetensors").stat().st_size
    assert write_s > 0
    assert publish_s >= 0.05, "the fence is part of it"
    assert write_s + publish_s <= time.monotonic() - begin_s


def test_a_hint_that_cannot_be_written_does_not_fail_the_save(old, caplog):
    path = saved(old, adam_state(), step=2, disk=Failing("create", "latest"))
    assert find(old).candidates[0].path == path
    assert "latest could not be updated" in caplog.text


def test_a_full_disk_is_named_and_leaves_the_previous_checkpoint(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        saved(tmp_path, adam_state(seed=1), 2, step=1)
        before = names(tmp_path)
        large = adam_state(width=2000)
        errors = save_all(tmp_path, large, 2, step=2)
        assert {type(error) for error in errors} == {DiskFull}
        assert "safetensors: No space left on device (errno 28)" in str(errors[0])
        check_only_the_old_one(tmp_path, before)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(("other", "kind"), [(None, DiskFull), (errno.EIO, CheckpointError)])
def test_a_save_lacks_room_if_every_rank_that_failed_lacked_it(old, other, kind):
    class Failures(SmallBlocks):
        def sync(self, file):
            numbers = {"r00001": errno.ENOSPC, "r00002": other}
            if number := next((n for name, n in numbers.items() if name in file.name), None):
                raise OSError(number, os.strerror(number), file.name)
            super().sync(file)

    before = names(old)
    errors = save_all(old, adam_state(), 3, step=2, disk=Failures())
    assert [type(error) for error in errors] == [kind] * 3
    check_only_the_old_one(old, before)


def test_an_error_without_words_is_told_by_its_name(old):
    class OutOfMemory(SmallBlocks):
        def write(self, file, data):
            raise MemoryError

    for error in save_all(old, adam_state(), 2, step=2, disk=OutOfMemory()):
        assert str(error).endswith("r00000.safetensors: MemoryError")


def test_the_bytes_of_a_failed_save_are_those_that_were_written(old):
    told = []
    save_all(
        old,
        adam_state(),
        3,
        step=2,
        disk=Failing("write", "r00001"),
        on_part=lambda part, size_bytes, took_s: told.append((part, size_bytes)),
    )
    written = [size_bytes for part, size_bytes in told if part == "write"]
    assert len(written) == 2
    assert [size_bytes for part, size_bytes in told if part == "publish"] == [sum(written)]


def test_a_fence_that_refuses_leaves_no_manifest_and_no_files(old):
    before, digests = names(old), []

    def fence(digest):
        digests.append(digest)
        raise CommitRefused("round 3 is over: round 4 began at revision 17")

    errors = save_all(old, adam_state(), 3, step=2, fence=fence)

    assert [type(error) for error in errors] == [CommitRefused] * 3
    assert {str(error) for error in errors} == {"round 3 is over: round 4 began at revision 17"}
    assert len(digests) == 1
    check_only_the_old_one(old, before)


def test_nothing_is_published_through_a_store_that_another_one_has_followed(old, monkeypatch):
    monkeypatch.setenv("ZERO_STORE", "1a2b")
    before = names(old)
    (old / heir_of("1a2b")).touch()
    errors = save_all(old, adam_state(), 3, step=2, fence=lambda digest: None)
    assert [type(error) for error in errors] == [CommitRefused] * 3
    assert "the job has a new store" in str(errors[0])
    (old / heir_of("1a2b")).unlink()
    check_only_the_old_one(old, before)


def test_the_fence_is_told_the_digest_before_anything_is_visible(tmp_path):
    asked = []

    def fence(digest):
        asked.append((digest, find(tmp_path).candidates))

    saved(tmp_path, adam_state(), fence=fence)
    assert asked == [(find(tmp_path).candidates[0].manifest.digest, ())]


def test_a_fence_that_breaks_fails_the_save_on_every_rank(old):
    before = names(old)

    def fence(_):
        raise TimeoutError("the agent does not answer")

    for error in save_all(old, adam_state(), 2, step=2, fence=fence):
        assert type(error) is CheckpointError
        assert "the agent does not answer" in str(error)
    check_only_the_old_one(old, before)


def test_a_rank_that_never_votes_is_named_and_the_attempt_removed(old):
    before = names(old)

    def work(consensus):
        state = share(adam_state(), consensus.rank, consensus.world)
        if consensus.rank == 1:
            return consensus.announce(dict)  # is there, and dies before it has written
        return save(old, state, consensus, step=2, tag="t", round=0, fence=None, disk=SmallBlocks())

    errors = on_ranks(3, work, timeout_s=2.0)
    for error in (errors[0], errors[2]):
        assert "rank 1 did not report in time" in str(error)
    check_only_the_old_one(old, before)


def test_the_file_of_a_rank_that_died_before_its_vote_is_removed(old):
    before = names(old)

    def die(*_part: object) -> None:
        raise SystemExit  # neither votes nor cleans up, like a process that is killed

    def work(consensus):
        state = share(adam_state(), consensus.rank, consensus.world)
        parts = {"on_part": die} if consensus.rank == 1 else {}
        settings = {"step": 2, "tag": "t", "round": 0, "fence": None, "disk": SmallBlocks()}
        with suppress(SystemExit):
            return save(old, state, consensus, **settings, **parts)

    errors = on_ranks(3, work, timeout_s=2.0)
    for error in (errors[0], errors[2]):
        assert "rank 1 did not report in time" in str(error)
    check_only_the_old_one(old, before)


def test_a_rank_that_comes_too_late_hears_so_and_removes_its_file(old):
    before, others_left = names(old), threading.Event()

    class Stalled(SmallBlocks):
        def sync(self, file):
            assert others_left.wait(60)
            super().sync(file)

    def work(consensus):
        state = share(adam_state(), consensus.rank, consensus.world)
        disk = Stalled() if consensus.rank == 1 else SmallBlocks()
        try:
            return save(old, state, consensus, step=2, tag="t", round=0, fence=None, disk=disk)
        finally:
            if consensus.rank == 0:
                others_left.set()

    for error in on_ranks(2, work, timeout_s=2.0):
        assert "rank 1 did not report in time" in str(error)
    check_only_the_old_one(old, before)


def test_what_rank_0_could_not_remove_each_rank_removes_itself(old):
    class LostRace(Failing):
        def remove_tree(self, path):
            """Somebody created a file while the tree was being removed."""

    before = names(old)
    for error in save_all(old, adam_state(), 3, step=2, disk=LostRace("sync", "r00001")):
        assert isinstance(error, CheckpointError)
    check_only_the_old_one(old, before)


def test_storage_that_is_not_shared_is_found_before_the_commit(old, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("other-node")

    class Local(SmallBlocks):
        def create(self, path):
            return super().create(elsewhere / path.name)

    def work(consensus):
        state = share(adam_state(), consensus.rank, consensus.world)
        disk = Local() if consensus.rank == 1 else SmallBlocks()
        return save(old, state, consensus, step=2, tag="t", round=0, fence=None, disk=disk)

    before = names(old)
    for error in on_ranks(2, work):
        assert "rank 0 sees None" in str(error)
        assert "on storage that all nodes share" in str(error)
    check_only_the_old_one(old, before)


def save_states(root, *states):
    def work(consensus):
        return save(root, states[consensus.rank], consensus, step=2, tag="t", round=0, fence=None)

    return on_ranks(len(states), work)


def test_an_element_that_nobody_owns_or_two_own_is_named(old):
    before, full = names(old), adam_state()
    whole, nothing = share(full, 0, 1), State(share(full, 0, 1).tensors, ())

    short = State(whole.tensors, whole.pieces[1:])
    for error in save_states(old, short, nothing):
        assert "not own every element exactly once: param/wte.weight[0:407] is" in str(error)
    for error in save_states(old, whole, State(whole.tensors, whole.pieces[:1])):
        assert "wte.weight[0:407] is in more than one place: files [0, 1]" in str(error)
    check_only_the_old_one(old, before)


def test_ranks_with_different_models_are_told_so(old):
    before = names(old)
    for error in save_states(old, share(adam_state(), 0, 2), share(adam_state(width=3), 1, 2)):
        assert "rank 1 has another table of tensors" in str(error)
    check_only_the_old_one(old, before)


W = TensorId(PARAM, "w")


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (Piece(TensorId(PARAM, "v"), 0, torch.zeros(2)), "v[0:2] is not in the table"),
        (Piece(W, 0, torch.zeros(2, dtype=torch.float64)), "is torch.float64, its tensor"),
        (Piece(W, 0, torch.zeros(2, 2)), "flatten it first"),
        (Piece(W, 0, torch.zeros(8)[::2]), "flatten it first"),
        (Piece(W, 3, torch.zeros(2)), "w[3:5] leaves the 4 elements"),
        (Piece(W, -1, torch.zeros(2)), "leaves the 4 elements"),
    ],
)
def test_a_piece_that_is_no_run_of_its_tensor_is_refused_on_every_rank(old, piece, says):
    before = names(old)
    good = State({W: share({W: torch.zeros(4)}, 0, 1).tensors[W]}, (Piece(W, 0, torch.zeros(4)),))
    for error in save_states(old, good, State(good.tensors, (piece,))):
        assert str(error).startswith(str(old)[:5]) or "rank 1" in str(error)
        assert says in str(error)
    check_only_the_old_one(old, before)


def test_a_dtype_that_the_format_does_not_know_is_refused_by_name(old):
    full = {W: torch.zeros(4, dtype=torch.complex128)}
    for error in save_all(old, full, 2, step=2):
        assert "torch.complex128 cannot be stored; cast the tensor to one of" in str(error)


def test_meta_that_json_cannot_hold_fails_the_save_and_names_the_key(old):
    before = names(old)
    for error in save_all(old, adam_state(), 2, step=2, meta={"user": {"seen": {1, 2}}}):
        assert "meta.user.seen is a set" in str(error)
    check_only_the_old_one(old, before)


def test_what_a_load_would_take_for_no_manifest_is_not_published(old, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 1 << 16)
    before, long = names(old), {"client": {"seen": "x" * (1 << 16)}}
    for error in save_all(old, adam_state(), 2, step=2, meta=long):
        assert "bytes, and a load reads 65536: keep less in client_state" in str(error)
    check_only_the_old_one(old, before)
