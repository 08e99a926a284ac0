"""The save that a script must not end without: it waits for room on the disk, and for etcd.

A save that fails costs a warning, because the next one may succeed. So the last one is owed: at the
end of the script it is tried again, and without it the script does not exit with 0. If etcd did not
let it be published, its files are written already, and rank 0 alone publishes them.

Must always hold: all ranks know of the same debt, since a verdict of the votes is its reason; what
was written and not published is removed only when a newer checkpoint is published, or written, or
when the workers leave; a worker that waits sends heartbeats.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakMethod

from zero_checkpoint.commit import publish_or_withdraw, raise_problem
from zero_checkpoint.consensus import Record, StoreConsensus
from zero_checkpoint.errors import DiskFull
from zero_checkpoint.files.place import Place, place
from zero_checkpoint.publish import Attempt, NotPublished, withdraw
from zero_checkpoint.saver import Request, Saver
from zero_checkpoint.staging import Outcome
from zero_checkpoint.training import Training
from zero_comm.agent_link import AgentLink, exit_on_peer_loss
from zero_contract.errors import ZeroError

_log = logging.getLogger(__name__)

ROOM_WAIT_S = 3600.0
"""The time that a save which a script relies on waits for room on a full disk."""
LEAVING_WAIT_S = 10.0
"""The same for a worker that leaves: its agent kills it if it takes longer."""
_PAUSE_S = 5.0


class LastSave:
    """The last save of one training, on one rank."""

    def __init__(
        self,
        training: Training,
        link: AgentLink,
        saver: Saver,
        consensus: StoreConsensus,
        note: Callable[[Outcome], None],
    ) -> None:
        """Nothing is owed.

        Args:
            training: The training that is saved.
            link: The link to the agent.
            saver: Makes the saves.
            consensus: The votes of all ranks on whether to wait.
            note: A method that is called with the outcome of a save; calls `failed` or `settle`.
                Its object, which has this one, lives longer only while a save is under way.
        """
        self._training = training
        self._link = link
        self._saver = saver
        self._consensus = consensus
        self._noting = WeakMethod(note)
        self._request: Request | None = None
        self._owed: Request | None = None
        self._written: _Written | None = None

    # ---- what is owed ----

    def begun(self, request: Request) -> None:
        """A save begins; until it has succeeded, the script must not end."""
        self._request = request
        _AT_EXIT[id(self)] = self, self._noting()

    @property
    def succeeded(self) -> Callable[[], object]:
        """To be called when the save that has begun is published, on any thread.

        It does not refer to this object: the saver has it, and this object has the saver.
        """
        return partial(_AT_EXIT.pop, id(self), None)

    def _note(self, outcome: Outcome) -> None:
        note = self._noting()
        assert note is not None, "it lives as long as a save of it may have an outcome"
        note(outcome)

    def failed(self, error: Exception | None) -> None:
        """A save has failed, and the script goes on."""
        self._owed = request = self._request
        if isinstance(error, NotPublished) and request is not None:
            self._drop_written()
            self._written = _Written(request, place(error.directory), error.attempt)

    def told(self) -> None:
        """The script itself is told of the failure, by an exception: it decides."""
        self._owed = self._request = None
        if self._written is None:
            self.succeeded()

    def settle(self) -> None:
        """A save has succeeded: nothing is owed any more."""
        self._owed = self._request = None
        self._drop_written()
        self.succeeded()

    def _drop_written(self) -> None:
        """What is written and not published is of no use any more."""
        written, self._written = self._written, None
        if written is not None and written.attempt is not None:
            withdraw(written.directory, written.attempt.disk)

    # ---- waiting, on all ranks ----

    def finish(self) -> None:
        """At the end of a script: make the last save, if it has failed. Collective.

        Raises:
            DiskFull: There still is no room.
            CommitRefused: It may not be published.
            CheckpointError: It failed otherwise.
        """
        # If an exception ends the script, the other ranks do not come here.
        if sys.exc_info()[0]:
            return
        if self._link.leaving and not self._saver.last_lacked_room:  # it has waited for etcd
            self._owed = None
            self._drop_written()
        written, request = self._written, self._due
        if request is not None and (written is None or request is not written.request):
            self.wait_for_room(request)
        elif written is not None:
            self._wait_for_etcd(written, self._consensus.announce)

    @property
    def _due(self) -> Request | None:
        """The save that is owed, if the state still is the one that was to be saved."""
        request = self._owed
        return request if request and request.step == self._training.cursor.step else None

    def wait_for_room(self, request: Request) -> None:
        """Retry a save until there is room; all ranks retry together, as rank 0 decides.

        Raises:
            DiskFull: There was no room within the limit, or the job wants its workers to leave.
        """
        limit_s = LEAVING_WAIT_S if self._link.leaving else ROOM_WAIT_S
        until_s = time.monotonic() + limit_s
        if self._saver.last_lacked_room:
            self._warn(f"waiting up to {limit_s / 60:.0f} min for room in {request.root}")
        with exit_on_peer_loss(self._link):
            while True:
                began_s = time.monotonic()
                self.begun(request)
                self._saver.begin(request, copy=False)
                outcome = self._saver.wait()
                assert outcome is not None
                self._note(outcome)
                if outcome.error is None:
                    return
                if isinstance(outcome.error, NotPublished):
                    break
                if not isinstance(outcome.error, DiskFull):
                    self.told()
                    raise outcome.error
                self._link.save_waits(request.step, "room", until_s - time.monotonic())
                if not self._consensus.announce(partial(self._may_wait, until_s))["wait"]:
                    self.told()
                    text = f"no room in {request.root} for the checkpoint of step {request.step}"
                    raise DiskFull(f"{text} within {limit_s:g} s; free some")
                self._link.saved(time.monotonic() - began_s)
        assert self._written is not None
        self._wait_for_etcd(self._written, self._consensus.announce)

    def _may_wait(self, until_s: float) -> Record:
        """On rank 0, after a pause: whether to try once more."""
        time.sleep(_PAUSE_S)
        asked = self._link.leave_asked and not self._link.leaving
        return {"wait": time.monotonic() < until_s and not asked}

    def _wait_for_etcd(
        self, written: _Written, announce: Callable[[Callable[[], Record]], Record]
    ) -> None:
        """Publish what is written, as soon as etcd allows it; the agent limits the wait."""
        request = written.request
        self._warn(
            f"waiting for etcd: the checkpoint of step {request.step} is written in "
            f"{written.directory} and not published; the script ends when it is"
        )
        with exit_on_peer_loss(self._link):
            while True:
                began_s = time.monotonic()
                verdict = announce(partial(self._publish, written))
                self._link.saved(time.monotonic() - began_s)
                self._link.heartbeat()  # or its agent would mark it hung
                if verdict.get("written"):
                    continue
                self._written = None  # published, or removed
                self.told()
                raise_problem(verdict)
                self._saver.published(request, written.directory)
                return

    def _publish(self, written: _Written) -> Record:
        """On rank 0: try to publish what is written."""
        request, attempt = written.request, written.attempt
        assert attempt is not None
        samples = attempt.manifest.meta["engine"]["samples"]
        where = str(written.directory)
        fence = self._link.fence(request.step, request.tag, samples, written=where)
        return publish_or_withdraw(attempt, fence)

    def _warn(self, text: str) -> None:
        if self._training.rank == 0:
            _log.warning("%s", text)

    # ---- at the exit of a script that has not waited itself ----

    def at_exit(self) -> str:
        """Make up for the last save as far as this rank can; returns what is missing, or ""."""
        if self._link.leaving or self._link.group_lost.is_set():
            return ""
        if (outcome := self._saver.wait()) is not None:
            self._note(outcome)
        written, request = self._written, self._due
        if written is not None and (request is None or request is written.request):
            try:
                if written.attempt is not None:
                    self._wait_for_etcd(written, lambda make: make())
            except ZeroError as error:
                return str(error)
            return ""  # or rank 0 publishes it
        if request is None:
            return ""
        failed = "found no room" if self._saver.last_lacked_room else "was not saved"
        return f"its last checkpoint, of step {request.step}, {failed} in {request.root}"


@dataclass(frozen=True, slots=True)
class _Written:
    """A save whose files are written, and which is not published."""

    request: Request
    directory: Place
    attempt: Attempt | None
    """To publish it; on rank 0 alone."""


_AT_EXIT: dict[int, tuple[LastSave, object]] = {}
"""The trainings of this process whose last save has not succeeded; they live until it has."""


def _end_unsaved() -> None:
    """At the end of the script: exit with 1 if a last save is missing."""
    missing = [text for each, _ in list(_AT_EXIT.values()) if (text := each.at_exit())]
    if not missing:
        return
    _log.error("the script has ended, and %s: exit code 1", "; ".join(missing))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


atexit.register(_end_unsaved)
os.register_at_fork(after_in_child=_AT_EXIT.clear)  # the save is its parent's
