"""The saves of one rank: copied and written in the background, or written while training waits.

Both are one path: a save always runs on the thread of `Background`, one at a time. If the state can
be copied, that thread begins to write during the copy, and training continues after the copy; if
not, training waits for the end of the save.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.errors import CheckpointError, DiskFull
from zero_checkpoint.files.chunks import gather_buffers
from zero_checkpoint.files.direct import DirectDisk
from zero_checkpoint.files.object_disk import disk_of
from zero_checkpoint.files.place import Place
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.files.writer import Image, LiveImage
from zero_checkpoint.format.layout import FileLayout
from zero_checkpoint.format.pieces import Piece, State
from zero_checkpoint.loading.candidates import newest_committed
from zero_checkpoint.options import Checkpoint
from zero_checkpoint.saving.commit import Lineage, own_layout, save
from zero_checkpoint.saving.copiers import BeforeChange
from zero_checkpoint.saving.housekeeping import Keep, tidy
from zero_checkpoint.saving.publish import Fence, NotPublished
from zero_checkpoint.saving.retention import Best
from zero_checkpoint.saving.staging import Background, OnPart, Outcome, StagingBuffer
from zero_checkpoint.saving.staging_memory import NoStagingMemory, PrivateStaging
from zero_comm.errors import Diverged
from zero_contract.errors import CommitRefused
from zero_contract.worker import ENV_COMMITTED_ROOT

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One save: the state, and the directory. `state.meta` must not change any more."""

    root: Place
    state: State
    step: int
    tag: str
    fence: Fence | None
    aside: bool = False
    """See `Manifest.is_aside`."""
    problem: CheckpointError | None = None
    """Why this rank cannot save its state; then no rank saves."""


@dataclass(frozen=True, slots=True)
class _NoImage:
    """In the place of an image: its use raises why this rank cannot save, so all ranks learn it."""

    problem: CheckpointError

    @property
    def layout(self) -> FileLayout:
        raise self.problem

    def chunks(self) -> Iterator[memoryview]:
        raise self.problem


class Saver:
    """Runs the saves of this rank, one after the other."""

    def __init__(
        self,
        config: Checkpoint,
        consensus: StoreConsensus,
        lineage: Lineage,
        before_change: BeforeChange | None = None,
    ) -> None:
        """Nothing is saved yet.

        `on_wait` of the consensus raises when the group is lost; `lineage` is shared by all savers
        of this run.
        """
        self.disk: Disk = DirectDisk()
        self.staging = StagingBuffer(
            PrivateStaging(), before_change=before_change, on_wait=consensus.on_wait
        )
        self.last_step = 0
        """The step of the newest checkpoint that this worker knows to be committed."""
        wanted = config.keep_best
        best = Best(metric=wanted.metric, mode=wanted.mode, count=wanted.n) if wanted else None
        self._keep = Keep(last=config.keep_last, every=config.keep_every, best=best)
        self._rank = consensus.rank
        self._lineage = lineage
        self._consensus = consensus
        self._raise_if_lost = consensus.on_wait
        consensus.on_wait = self._on_wait
        self._background = Background()
        self._in_flight_step = 0
        self._in_flight_root: Place | None = None
        self.roots = {os.environ.get(ENV_COMMITTED_ROOT, "")}
        """The directories of which this worker knows that they have a checkpoint."""
        self._failed: Place | None = None
        self.last_lacked_room = False
        """Whether the last save that has ended found the disk full."""
        self.on_published: Callable[[], object] = lambda: None
        """Called when a save has succeeded, on its thread."""
        self.look: Callable[[], object] = lambda: None
        """Called while training waits for a save; raises if some rank will never come to it."""
        self._has_warned = False
        self._buffers = gather_buffers()
        self._layout: tuple[Sequence[Piece], FileLayout] | None = None

    @property
    def last_failed(self) -> bool:
        """Whether the last save that has ended failed."""
        return self._failed is not None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._background.busy

    def begin(self, request: Request, *, copy: bool) -> bool:
        """Begin a save; none may be in flight. Returns whether the state was copied.

        If it was not, for want of memory, it must not change before `wait`.
        """
        self._in_flight_step, self._in_flight_root = request.step, request.root
        try:
            layout = self.lay_out(request.state, request.problem)
        except CheckpointError:  # the save itself reports it, to all ranks
            # Without an image the save lays the state out itself, and meets the same error.
            self._start(request, _NoImage(request.problem) if request.problem else None)
            return False
        if copy:
            try:
                # The write begins before the copy, and follows it half by half.
                self.staging.snapshot(layout, begin=partial(self._start, request))
                return True
            except NoStagingMemory as error:
                if not self._has_warned:
                    _log.warning("training waits for checkpoints to be written: %s", error)
                self._has_warned = True
        self._start(request, LiveImage(layout, self._buffers))
        return False

    def _on_wait(self) -> None:
        self._raise_if_lost()
        if not threading.main_thread().is_alive():  # the script has ended: this wait is its last
            self.look()

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> Outcome | None:
        """The outcome of the save in flight, once it has ended; None if it was returned before.

        `meanwhile` is called now and then.

        Raises:
            Diverged: A rank will never come to this save.
        """

        def look() -> None:
            meanwhile()
            self.look()

        try:
            return self._noted(self._background.wait(look))
        except Diverged as error:
            diverged = error

            def give_up() -> None:
                raise diverged

            self._consensus.on_wait = give_up  # of this save, and of all later ones
            raise

    def finished(self) -> Outcome | None:
        """The outcome as of `wait`; None if the save is still in flight."""
        return self._noted(self._background.finished())

    def wait_for_room(self) -> Outcome | None:
        """The outcome as of `wait`; logs that training waits, if the save is still in flight."""
        if self.busy and self._rank == 0:
            step = self._in_flight_step
            _log.info("waiting: the checkpoint of step %d is still being written", step)
        return self.wait()

    def report(self, outcome: Outcome | None) -> None:
        """Log the failure of a save that the script has not waited for."""
        match outcome:
            case Outcome(error=NotPublished() as error):
                _log.warning(
                    "nothing was published for step %d, and training continues; what is written in "
                    "%s is published when the script ends, if no newer checkpoint is: %s",
                    outcome.step,
                    error.directory,
                    error,
                )
            case Outcome(error=CommitRefused() as error):
                _log.warning(
                    "nothing was written for step %d, and training continues: %s",
                    outcome.step,
                    error,
                )
            # All ranks know of a CheckpointError, which the votes decided; of others only this one.
            case Outcome(error=Exception() as error) if self._rank == 0 or not isinstance(
                error, CheckpointError
            ):
                _log.warning(
                    "the checkpoint of step %d was not saved; training continues, and the one "
                    "before stays: %s",
                    outcome.step,
                    error,
                )

    def log_lost_steps(self, *, in_memory: bool) -> None:
        """When leaving: log which steps are lost, if the last save has failed."""
        if self._failed is None or self._rank != 0:
            return
        try:
            newest = newest_committed(self._failed)
        except (OSError, CheckpointError):  # it has failed the save as well, and is logged
            return
        kept = newest[1] if newest is not None else 0
        _log.warning(
            "leaving without a checkpoint: the newest in %s is of step %d, "
            "steps %d to %d are lost%s",
            self._failed,
            kept,
            kept + 1,
            self._in_flight_step,
            ", unless a node that stays has them in memory" if in_memory else "",
        )

    def forget(self) -> None:
        """Drop the references to the tensors of the last save."""
        self._layout = None
        self.staging.forget()

    def close(self) -> None:
        """Finish the save in flight, and free the memory."""
        self.report(self.wait())
        self.staging.close()

    def _noted(self, outcome: Outcome | None) -> Outcome | None:
        if outcome is not None:
            self._failed = self._in_flight_root if outcome.path is None else None
            if outcome.path is not None:
                self.roots.add(str(outcome.path.parent.resolve()))
            self.last_lacked_room = isinstance(outcome.error, DiskFull)
            self.last_step = outcome.step if outcome.path is not None else self.last_step
        return outcome

    def _start(self, request: Request, image: Image | None) -> None:
        self._background.start(request.step, partial(self._save, request, image))

    def lay_out(self, state: State, problem: CheckpointError | None = None) -> FileLayout:
        """The layout of this rank's file.

        Raises:
            CheckpointError: It cannot be laid out, or there is a `problem` already.
        """
        if problem is not None:
            raise problem
        # Kept: of many tensors it may take as long as the copy, for which training waits.
        if self._layout is None or not self.has_laid_out(state):
            self._layout = (state.pieces, own_layout(state, self._rank))
        return self._layout[1]

    def has_laid_out(self, state: State) -> bool:
        """Whether the last layout is that of a state: of the same tensors, in the same memory."""
        return self._layout is not None and self._layout[0] is state.pieces

    def _save(self, request: Request, image: Image | None, on_part: OnPart) -> Place:
        """On the thread of the saves."""
        path = save(
            request.root,
            request.state,
            self._consensus,
            step=request.step,
            tag=request.tag,
            round=self._lineage.round,
            fence=request.fence,
            disk=disk_of(request.root, self.disk),
            image=image,
            on_part=on_part,
        )
        self._published(request, path)
        return path

    def published(self, request: Request, path: Place) -> None:
        """A checkpoint that was written before is published; no save is in flight."""
        self.last_step, self._failed = request.step, None
        self._published(request, path)

    def _published(self, request: Request, path: Place) -> None:
        self._lineage.advance_to(path.name)
        if self._rank == 0:
            digest = request.state.meta["engine"]["weight_hash"]
            _log.info("saved %s%s", path, f", weights {digest[:16]}" if digest else "")
            tidy(request.root, path, self._keep)
        self.on_published()
