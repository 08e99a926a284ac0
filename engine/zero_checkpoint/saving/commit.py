"""Saves a checkpoint: every rank writes its file, rank 0 publishes all of them or none.

    rank 0 makes a new directory                    announce: its name
    each rank writes and fsyncs its own file        vote: size, digests, fragments; or its error
    rank 0 checks the votes, writes and fsyncs
    MANIFEST.json.tmp, asks the fence, RENAMES      verdict: published, or why not, or unknown

The rename is the only commit point. A process that dies before it leaves a directory without a
manifest, which no load chooses and a later sweep removes; one that dies after it leaves a whole
checkpoint. Earlier checkpoints are never touched. Every rank calls `save`, in step, on the thread
of its saves.

Source of the protocol: two-phase commit with the rename as its decision record; torchsnapshot
writes its metadata last in the same way.
"""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from zero_checkpoint.consensus import COORDINATOR, Judge, Record, StoreConsensus
from zero_checkpoint.errors import CheckpointError, DiskFull, OtherRun
from zero_checkpoint.files.object_disk import disk_of
from zero_checkpoint.files.place import Place, exists, is_dir
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.files.writer import Image, LiveImage, write_file
from zero_checkpoint.format.layout import FileLayout, block_bytes_for, lay_out
from zero_checkpoint.format.manifest import MANIFEST, age, directory_name, file_name
from zero_checkpoint.format.pieces import State
from zero_checkpoint.loading import ownership
from zero_checkpoint.loading.candidates import newest_committed
from zero_checkpoint.saving.publish import (
    Attempt,
    Fence,
    Header,
    NotPublished,
    Unsure,
    assemble,
    prepare,
    publish,
    vote_for,
    withdraw,
)
from zero_checkpoint.saving.staging import PUBLISH, WRITE, OnPart
from zero_contract.errors import CommitRefused

_log = logging.getLogger(__name__)

_NONCES = 16
"""Directory names to try: each is taken once in 65536 times, and only within one step."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNKNOWN = (
    "; it is not known whether this checkpoint was committed, so nothing of it was removed: a load "
    "takes it if it was, a later save or zero-ckpt repair removes it if it was not"
)


def save(
    root: Place,
    state: State,
    consensus: StoreConsensus,
    *,
    step: int,
    tag: str,
    round: int,
    fence: Fence | None,
    disk: Disk | None = None,
    image: Image | None = None,
    on_part: OnPart = lambda part, size_bytes, took_s: None,
) -> Place:
    """Save the state of all ranks under `root`; every rank calls it, and returns when it is done.

    Args:
        root: A directory on storage that all ranks share; created if need be. If ranks name
            different ones, rank 0's counts.
        state: This rank's pieces; `tensors`, `aliases` and `meta` equal on every rank.
        consensus: The votes of this group.
        step: Steps done; the second key of the order among checkpoints.
        tag: The user's name for it; need not be unique.
        round: The round of this group; the first key of that order, see `generation`.
        fence: Called on rank 0 right before the commit; None if no worker can be stale.
        disk: File operations; None: those that `root` needs. Tests replace it.
        image: A snapshot of the pieces, see `own_layout`; None: they do not change meanwhile.
        on_part: Called when this rank has written its file; and on rank 0, when it has checked the
            files of all ranks and published them, or not.

    Returns:
        The directory of the checkpoint, committed and on stable storage.

    Raises:
        CommitRefused: The fence refused; nothing is published. On every rank.
        NotPublished: The fence cannot be asked for now; the files stay. On every rank.
        DiskFull: One or more ranks lacked room, and nothing else failed; nothing is published.
            On every rank.
        OtherRun: Another run saves to `root`, see `ownership`; nothing is published. On every rank.
        CheckpointError: A rank failed, and nothing is published; names rank, file and cause.
            On every rank. Or: no verdict came, or the storage failed in the commit itself, and the
            outcome is unknown.
        PeerLost: The store of the votes is gone.
    """
    disk = disk or disk_of(root)
    opened = consensus.announce(partial(_open, root, step, round, disk), voted_on="nonce")
    raise_problem(opened)
    block_bytes = disk.block_bytes or block_bytes_for(state.tensors)
    number, nonce = opened["round"], opened["nonce"]
    header = Header(
        tag=tag,
        step=step,
        block_bytes=block_bytes,
        round=number,
        nonce=nonce,
        runs=ownership.runs(),
    )
    name = directory_name(step, number, nonce)
    directory = _as_opened(root, opened["root"], name) / name
    path = directory / file_name(consensus.rank)
    attempt: Attempt | None = None

    def judge(votes: list[Record]) -> Record:
        nonlocal attempt
        verdict, attempt = _judge(directory, state, header, votes, fence, disk)
        return verdict

    def write() -> Record:
        own = image or LiveImage(own_layout(state, consensus.rank))
        is_first = consensus.rank == COORDINATOR
        file = write_file(path, own, block_bytes, disk, log_progress=is_first)
        return vote_for(state, own.layout, file)

    try:
        verdict = vote(consensus, write, judge, where=path, on_part=on_part)
    except KeyboardInterrupt:
        # With other ranks, or once committed, the attempt must not be undone from here.
        if consensus.world == 1 and not exists(directory / MANIFEST):
            withdraw(directory, disk)
        raise
    if "problem" in verdict and not (verdict.get("unknown") or verdict.get("written")):
        # Only on the verdict "not published": without one the rename may have happened. Rank 0 has
        # removed the attempt already, unless this rank was still writing then.
        with suppress(OSError):
            disk.remove(path)
            disk.remove_directory(path.parent)
    raise_problem(verdict, attempt)
    return directory


def generation(round: int, step: int, newest: tuple[int, int] | None) -> int:
    """The round to put into the name, so that the last checkpoint saved is the next one loaded.

    `newest` is (round, step) of the newest one in the root.
    """
    if newest is None or (round, step) >= newest:
        return round
    # A new job in an old root counts its rounds from the beginning, and a user may go back to an
    # earlier tag: the work done from there would rank below what is there already, and the next
    # restart would silently resume from the wrong checkpoint.
    newest_round, newest_step = newest
    return newest_round if step >= newest_step else newest_round + 1


class Lineage:
    """The checkpoints of one run, on disk and in memory: a later save counts as newer.

    A run that goes back, to a tag or because the newest checkpoint is damaged, saves existing steps
    again, under a higher round; from then on no checkpoint gets a lower round, on disk or in
    memory.
    """

    def __init__(self, round: int) -> None:
        self.round = round
        """The least round of the next checkpoint's name."""

    def advance_to(self, name: str) -> None:
        """A checkpoint of this name was saved or loaded."""
        self.round = max(self.round, age(name)[0])


def _open(root: Place, step: int, round: int, disk: Disk) -> Record:
    """Rank 0: make a directory that never existed; its round and nonce, or the problem."""
    try:
        if step < 0:  # no load would take the directory's name for that of a checkpoint
            raise CheckpointError(f"step {step} is less than 0; count the steps done")
        _check_runs(root)
        number = generation(round, step, newest_committed(root))
        disk.make_directories(root)
        for _ in range(_NONCES):
            nonce = secrets.token_hex(2)
            name = directory_name(step, number, nonce)
            try:
                disk.make_directory(root / name)
            except FileExistsError:  # another save drew the same nonce for this step
                continue
            ownership.written(root, name)
            where = root.absolute() if isinstance(root, Path) else root
            return {"round": number, "nonce": nonce, "root": str(where)}
        raise CheckpointError(f"{_NONCES} names for step {step} are taken; remove some")
    except Exception as error:  # the other ranks wait for the record
        return problem(f"rank {COORDINATOR}: no new directory under {root}", error)


def _check_runs(root: Place) -> None:
    if problem := ownership.refusal(root):
        raise OtherRun(problem)


def _as_opened(own: Place, first: str, name: str) -> Place:
    """The root that this rank writes to: its own, or rank 0's, which has made `name` in it."""
    # Scripts name directories after the time, which ranks read at different moments.
    if not isinstance(own, Path) or is_dir(own / name) or not is_dir(Path(first, name)):
        return own
    _log.warning(
        "save_checkpoint(%r): rank 0 has named %s, and its directory is used; name a directory "
        "after a value that is equal on all ranks, as the time is not",
        str(own),
        first,
    )
    return Path(first)


def own_layout(state: State, rank: int) -> FileLayout:
    """The layout of this rank's file; it does not depend on the root. Raises as `lay_out`."""
    return lay_out(state, comment={"file": file_name(rank)})


def vote(
    consensus: StoreConsensus,
    write: Callable[[], Record],
    judge: Judge,
    *,
    where: object,
    on_part: OnPart,
) -> Record:
    """Let each rank write its file, and rank 0 judge all of them; the verdict, on every rank.

    `judge` must not raise; `where` is the file's path, for errors.
    """
    begin_s = time.monotonic()
    try:
        own = write()
        on_part(WRITE, own["size_bytes"], time.monotonic() - begin_s)
    except Exception as error:
        # Without its vote all ranks would wait for the whole timeout.
        own = problem(f"rank {consensus.rank}: {where}", error)

    def timed(votes: list[Record]) -> Record:
        begin_s = time.monotonic()
        verdict = judge(votes)
        size_bytes = sum(each.get("size_bytes", 0) for each in votes)
        on_part(PUBLISH, size_bytes, time.monotonic() - begin_s)
        return verdict

    return consensus.ask(own, timed)


def _judge(
    directory: Place,
    state: State,
    header: Header,
    votes: list[Record],
    fence: Fence | None,
    disk: Disk,
) -> tuple[Record, Attempt | None]:
    """Rank 0: publish the files of all ranks; or remove them, unless they may be published."""
    try:
        attempt = prepare(directory, assemble(state, header, votes), disk)
    except CheckpointError as error:
        # The disk is full if every rank that failed has failed for want of room alone.
        failed = [vote for vote in votes if "problem" in vote]
        full = bool(failed) and all(vote.get("full") for vote in failed)
        withdraw(directory, disk)
        return {"problem": f"{directory} was not saved: {error}", "full": full}, None
    except Exception as error:  # a bug, too: the other ranks wait for the verdict
        withdraw(directory, disk)
        return problem(f"rank {COORDINATOR}: {directory / MANIFEST}", error), None
    return publish_or_withdraw(attempt, fence), attempt


def publish_or_withdraw(attempt: Attempt, fence: Fence | None) -> Record:
    """On rank 0: publish the files; or remove them, unless they are, or may yet be, published."""
    directory, disk = attempt.directory, attempt.disk
    where = f"rank {COORDINATOR}: {directory / MANIFEST}"
    try:
        _check_runs(directory.parent)  # once more: much time may have passed
        publish(attempt, fence)
        return {}
    except Unsure as error:
        verdict = problem(where, error.failure)
        # The storage has failed in the rename itself, so rank 0 does not know either.
        # Only a manifest that is surely gone makes it a failure like any other.
        if not withdraw(directory, disk, committing=True):
            return {"problem": verdict["problem"] + _UNKNOWN, "unknown": True}
        return verdict
    except Exception as error:
        verdict = problem(where, error)
    if verdict.get("passing"):  # the files stay, and are published when etcd agrees
        return {**verdict, "written": str(directory)}
    withdraw(directory, disk)
    return verdict


def problem(where: str, error: Exception) -> Record:
    """The record of what has failed, for `raise_problem` on every rank."""
    match error:
        case CommitRefused():
            return {"problem": str(error), "refused": True, "passing": error.passing}
        case OtherRun():
            return {"problem": str(error), "other_run": True}
        case OSError() if error.strerror:
            text = f"{where}: {error.strerror} (errno {error.errno})"
            return {"problem": text, "full": error.errno in _NO_ROOM}
    # A MemoryError, for example, has no text of its own.
    return {"problem": f"{where}: {str(error) or type(error).__name__}"}


def raise_problem(
    verdict: Record,
    attempt: Attempt | None = None,
    failure: type[CheckpointError] | None = None,
) -> None:
    """Raise what a verdict says, `failure` unless the commit was refused; return if all is well.

    `attempt` is rank 0's, for `NotPublished`.
    """
    if written := verdict.get("written"):
        raise NotPublished(verdict["problem"], written, attempt)
    if verdict.get("refused"):
        raise CommitRefused(verdict["problem"], passing=verdict["passing"])
    if "problem" in verdict:
        full, other = verdict.get("full"), verdict.get("other_run")
        of_save = OtherRun if other else DiskFull if full else CheckpointError
        raise (failure or of_save)(verdict["problem"])
