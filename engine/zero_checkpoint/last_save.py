"""The outcome of each save; the last one must succeed before the script may exit with 0.

A save that fails costs a warning, because the next one may succeed. So the last one to each
directory is owed, and one that was skipped: at the end of the script it is tried again, and without
it the script does not exit with 0. If etcd did not let it be published, its files are written
already, and rank 0 alone publishes them. The votes decide which saves are owed, so all ranks agree.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple
from weakref import ref

from zero_checkpoint.consensus import Record, StoreConsensus
from zero_checkpoint.errors import CheckpointError, DiskFull, OtherRun
from zero_checkpoint.files.place import Place, place
from zero_checkpoint.format.manifest import MANIFEST
from zero_checkpoint.saving.commit import publish_or_withdraw, raise_problem
from zero_checkpoint.saving.publish import Attempt, NotPublished, withdraw
from zero_checkpoint.saving.saver import Request, Saver
from zero_checkpoint.saving.schedule import RETRY_S, Schedule
from zero_checkpoint.saving.staging import Outcome
from zero_checkpoint.training import Training
from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_contract.errors import CommitRefused, ZeroError
from zero_contract.worker import Saved

_log = logging.getLogger(__name__)

ROOM_WAIT_S = 3600.0
"""How long a save waits for room on a full disk (ENOSPC), if the script needs it to succeed."""
LEAVING_WAIT_S = 10.0
"""The same for a worker that leaves: its agent kills it if it takes longer."""
ETCD_WAIT_S = 600.0
"""How long a script waits for etcd at its end under torchrun, whose plug-in has no --etcd-grace:
the default of that flag, by which zero-agent limits the wait."""
_PAUSE_S = 5.0
_SKIPPED = (
    'its last checkpoint, of step {}, was skipped (checkpoint.when_busy is "skip"), as the one '
    "before was being written: close the training at the end of the script (engine.destroy() or "
    "run.close()), or save with blocking=True"
)


class LastSave:
    """The saves of one training on one rank, and above all the last one.

    Attributes:
        began: When the save that has begun last did.
        began_in_memory: The same for in-memory checkpoints.
    """

    def __init__(
        self,
        training: Training,
        link: AgentLink,
        saver: Saver,
        schedule: Schedule,
        consensus: StoreConsensus,
        owner: object,
    ) -> None:
        """Nothing is owed. While a save is owed, `owner`, an object that has this one, lives."""
        self.began = self.began_in_memory = Beginning()
        self._training = training
        self._link = link
        self._saver = saver
        self._schedule = schedule
        self._consensus = consensus
        self._owner = ref(owner)  # which has this object: no cycle
        self._request: Request | None = None
        self._debts: Mapping[Key, Debt] = {}
        self._refused = 0
        """Consecutive saves that were refused for good, so that training saves in vain."""
        self._other_run: OtherRun | None = None  # a refusal that the script does not know yet
        self._skipped: dict[Key, tuple[int, Callable[[], object]]] = {}
        """The steps of saves that were skipped, without a later one; and what makes them."""

    # ---- how a save has ended ----

    def wait(self) -> bool:
        """Wait for the save in flight. See `Engine.wait_for_checkpoint`."""
        outcome = self._saver.wait()
        if outcome is None:
            return not self._saver.last_failed
        self._note(outcome)
        if isinstance(outcome.error, CommitRefused):
            # This worker is stale: its round is over, or its agent is cut off and will make it
            # leave. Until then it may compute, and the existing checkpoints stay as they are.
            self._saver.report(outcome)
        elif outcome.error is not None:
            if not isinstance(outcome.error, DiskFull) and self._request is not None:
                self._told(self._request)
            raise outcome.error
        return outcome.path is not None

    def take(self, outcome: Outcome | None) -> None:
        """Count a save that the script has not waited for, and log its failure."""
        if outcome is not None:
            self._note(outcome)
            self._saver.report(outcome)
            if isinstance(outcome.error, OtherRun):
                self._other_run = outcome.error

    def note_in_memory(self, outcome: Outcome) -> None:
        """An in-memory checkpoint has ended."""
        self._link.saved_file(_report(outcome, self.began_in_memory, in_memory=True))

    def _note(self, outcome: Outcome) -> None:
        self._link.saved_file(_report(outcome, self.began))
        if self._request is not None:
            self._owe(*after(self._debts, self._request, outcome))
        if outcome.path is not None:
            self._schedule.committed(outcome.write_s)
            self._refused, self._request = 0, None
        elif isinstance(outcome.error, DiskFull | NotPublished):
            self._schedule.failed_for_now()
        elif isinstance(outcome.error, CommitRefused):
            self._refused += 1

    def check_refusals(self, directory: Place) -> None:
        """Stop a script whose saves are refused: without a checkpoint all of its work is lost.

        Raises:
            OtherRun: Another run saves there.
            CheckpointError: Two saves in a row were refused.
        """
        error, self._other_run = self._other_run, None
        if error is not None:
            raise error
        if self._refused > 1:
            self._refused = 0  # a script that catches the error may try again
            raise CheckpointError(
                "two saves in a row could not be published, and nothing was written to "
                f"{directory}: what is trained from here on would be lost. The lines above "
                "say why they were refused; look at the zero-agent of this node, and start the job "
                "again: it resumes from the newest checkpoint"
            )

    # ---- what is owed ----

    @property
    def is_owed(self) -> bool:
        """Whether the script may not end yet."""
        return bool(self._debts or self._lacking())

    def _lacking(self) -> list[Callable[[], object]]:
        """What makes the saves that were skipped where the script is; it may go on without one."""
        now = self._training.cursor.step
        return [save for step, save in self._skipped.values() if step == now]

    def skip(self, root: Place, *, aside: bool, save: Callable[[], object]) -> None:
        """A save is skipped, which `save` makes if it is the script's last."""
        self._skipped[str(root.resolve()), aside] = self._training.cursor.step, save
        self._saver.on_published = lambda: None
        _AT_EXIT[id(self)] = self, self._owner()

    def begun(self, request: Request) -> None:
        """A save begins; until it has succeeded, the script must not end."""
        self._request = request
        self._skipped.pop(_key(request), None)
        _AT_EXIT[id(self)] = self, self._owner()
        # Called on the thread of the save: the script may have ended, and never ask how that ended.
        # No bound method: the saver has it, and this object has the saver.
        owes_more = self._debts.keys() - {_key(request)}
        forget = partial(_AT_EXIT.pop, id(self), None)
        self._saver.on_published = (lambda: None) if owes_more else forget

    def _told(self, request: Request) -> None:
        """The script itself is told of the failure, by an exception: it decides."""
        self._request = None
        # What is written may yet be published, at the exit.
        written = self._debts.get(_key(request), Debt()).written
        self._owe({**self._debts, _key(request): Debt(written=written)})

    def _owe(self, debts: Mapping[Key, Debt], of_no_use: Iterable[Written] = ()) -> None:
        """Note what is owed now, and remove files that are not to be published any more."""
        self._debts = {key: debt for key, debt in debts.items() if debt != Debt()}
        for written in of_no_use:
            if written.attempt is not None:
                withdraw(written.directory, written.attempt.disk)
        if not self.is_owed:
            _AT_EXIT.pop(id(self), None)

    # ---- waiting, on all ranks ----

    def finish(self) -> None:
        """At the end of a script: make the last save, if it has failed. Collective.

        Raises:
            DiskFull: There still is no room.
            CommitRefused: It may not be published.
            CheckpointError: It failed otherwise.
        """
        # If an exception ends the script, the other ranks do not come here, and none may wait.
        if sys.exc_info()[0]:
            return
        goes_on = self._link.leaving or self._link.group_lost.is_set()
        for save in [] if goes_on else self._lacking():
            save()
        self._skipped = {}
        self._owe(self._debts)
        if self._link.leaving and not self._saver.last_lacked_room:  # it has waited for etcd
            # The workers leave, and the next round resumes from what is published.
            self._owe({}, [debt.written for debt in self._debts.values() if debt.written])
        step = self._training.cursor.step
        for request, _, written in list(self._debts.values()):
            # Only as long as the state still is the one that was to be saved.
            if request and not _is(request, written) and request.step == step:
                self.wait_for_room(request)
            elif written is not None:
                self._wait_for_etcd(written, self._consensus.announce)
        if (lost := missing(self._debts)) and not self._link.leaving:
            self._owe({})
            raise CheckpointError(
                f"{lost}; training is at step {step}: save at the end of the script"
            )

    def await_saved(self, request: Request, *, may_continue: bool) -> bool:
        """Wait for a save; returns whether it succeeded. Disk full is no error of the script.

        `may_continue`: the script continues without it.
        """
        # A script that calls `checkpoint_due()` continues, and is asked to save again. Any other
        # one relies on a save that returns (and may delete the checkpoint before it).
        try:
            return self.wait()
        except DiskFull as error:
            then = f"training continues, and checkpoint_due() is true again in {RETRY_S:g} s"
            self._warn(
                f"the checkpoint of step {request.step} was not saved; "
                f"{then if may_continue else 'training waits for room'}: {error}; free some room"
            )
            if not may_continue:
                self.wait_for_room(request)
            return not may_continue

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
                # Rank 0 may still evaluate; who waits for its verdict must not count as hung.
                outcome = self._saver.wait(self._link.heartbeat)
                assert outcome is not None
                self._note(outcome)
                if outcome.error is None:
                    return
                # There was room, so the files are written: what is missing is etcd's consent.
                if isinstance(outcome.error, NotPublished):
                    break
                if not isinstance(outcome.error, DiskFull):
                    self._told(request)
                    raise outcome.error
                self._link.save_waits(request.step, "room", until_s - time.monotonic())
                if not self._consensus.announce(partial(self._may_wait, until_s))["wait"]:
                    self._told(request)
                    text = f"no room in {request.root} for the checkpoint of step {request.step}"
                    raise DiskFull(f"{text} within {limit_s:g} s; free some")
                self._link.saved(time.monotonic() - began_s)
        written = self._debts[_key(request)].written
        assert written is not None
        self._wait_for_etcd(written, self._consensus.announce)

    def _may_wait(self, until_s: float) -> Record:
        """On rank 0, after a pause: whether to try once more."""
        time.sleep(_PAUSE_S)
        asked = self._link.leave_asked and not self._link.leaving
        return {"wait": time.monotonic() < until_s and not asked}

    def _wait_for_etcd(
        self, written: Written, announce: Callable[[Callable[[], Record]], Record]
    ) -> None:
        """Publish what is written, as soon as etcd allows it; the agent limits the wait."""
        request = written.request
        until_s = time.monotonic() + ETCD_WAIT_S if self._link.launched else math.inf
        self._warn(
            f"waiting for etcd: the checkpoint of step {request.step} is written in "
            f"{written.directory} and not published; the script ends when it is"
        )
        with exit_on_peer_loss(self._link), self._not_hung():
            while True:
                began_s = time.monotonic()
                verdict = announce(partial(self._publish, written, until_s))
                self._link.saved(time.monotonic() - began_s)
                self._link.heartbeat()  # of rank 0, too
                if verdict.get("written"):
                    continue  # without a pause: the agent has waited for etcd before it answered
                self._owe(without(self._debts, written))  # published, or removed
                raise_problem(verdict)
                self._saver.published(request, written.directory)
                return

    @contextmanager
    def _not_hung(self) -> Iterator[None]:
        """Send heartbeats while this rank waits for rank 0, which may still evaluate."""
        look, due_s = self._consensus.on_wait, 0.0

        def on_wait() -> None:
            nonlocal due_s
            look()
            if time.monotonic() >= due_s:
                self._link.heartbeat()
                due_s = time.monotonic() + _PAUSE_S

        self._consensus.on_wait = on_wait
        try:
            yield
        finally:
            self._consensus.on_wait = look

    def _publish(self, written: Written, until_s: float) -> Record:
        """On rank 0: try to publish what is written."""
        request, attempt = written.request, written.attempt
        assert attempt is not None
        samples = attempt.manifest.meta["engine"]["samples"]
        where, root = str(written.directory), str(request.root.resolve())
        fence = self._link.fence(request.step, request.tag, samples, written=where, root=root)
        verdict = publish_or_withdraw(attempt, fence)
        if verdict.get("written") and time.monotonic() > until_s:
            return {
                "problem": f"the last checkpoint of the script, of step {request.step}, is written "
                f"in {where} and not published, as etcd has not taken it for {ETCD_WAIT_S:g} s: to "
                f"keep it, rename {MANIFEST}.tmp there to {MANIFEST} when nothing of the job runs "
                f"any more; {verdict['problem']}"
            }
        return verdict

    def _warn(self, text: str) -> None:
        if self._training.rank == 0:
            _log.warning("%s", text)

    # ---- at the exit of a script that has not waited itself ----

    def at_exit(self) -> str:
        """Make up for the last save as far as this rank can; returns what is missing, or ""."""
        if self._link.leaving or self._link.group_lost.is_set():
            return ""  # the job goes on: this end of the script is not its last
        if (outcome := self._saver.wait()) is not None:
            self._note(outcome)
        problems = []
        for debt in list(self._debts.values()):
            try:
                # Rank 0 alone: the other ranks may have ended already, and take no verdict.
                if debt.written is not None and debt.written.attempt is not None:
                    self._wait_for_etcd(debt.written, lambda make: make())
            except ZeroError as error:
                problems.append(str(error))
        if self._lacking():
            problems.append(_SKIPPED.format(self._training.cursor.step))
        return "; ".join(filter(None, [*problems, missing(self._debts)]))


# ---- what is owed, as pure functions ----

Key = tuple[str, bool]
"""A directory, and whether checkpoints are saved aside there: neither makes up for the other."""


class Written(NamedTuple):
    """A save whose files are written, and which is not published."""

    request: Request
    directory: Place
    attempt: Attempt | None
    """To publish it; on rank 0 alone."""


class Debt(NamedTuple):
    """What a script owes to one directory before it may exit with 0."""

    owed: Request | None = None
    """The newest save, if it has failed, and no exception has told the script so."""
    problem: str = ""
    """How that has failed."""
    written: Written | None = None
    """The newest save that is written, and not published: the same one, or one before."""


def after(
    debts: Mapping[Key, Debt], request: Request, outcome: Outcome
) -> tuple[dict[Key, Debt], list[Written]]:
    """What is owed when a save has ended; and what is written in vain, as a newer one is there."""
    key, error = _key(request), outcome.error
    before = debts.get(key, Debt()).written
    written = None if outcome.path is not None else before
    if isinstance(error, NotPublished):
        written = Written(request, place(error.directory), error.attempt)
    in_vain = [before] if before is not None and before is not written else []
    if outcome.path is None:
        how = "found no room" if isinstance(error, DiskFull) else "was not saved"
        return {**debts, key: Debt(request, f"{how} in {request.root}: {error}", written)}, in_vain
    others = {
        # The work of an earlier step is not lost, wherever it is saved now; but who resumes looks
        # into one directory, so what is written there is to be published all the same.
        other: Debt(written=debt.written)
        if debt.owed is not None and debt.owed.step < request.step and not request.aside
        else debt
        for other, debt in debts.items()
        if other != key
    }
    return others, in_vain


def without(debts: Mapping[Key, Debt], written: Written) -> dict[Key, Debt]:
    """What is owed when a save that was written has been published, or removed."""
    return {
        key: debt
        if debt.written is not written
        else Debt()
        if _is(debt.owed, written)
        else debt._replace(written=None)
        for key, debt in debts.items()
    }


def missing(debts: Mapping[Key, Debt]) -> str:
    """The saves of which nothing is written, or ""."""
    return "; ".join(
        f"its last checkpoint, of step {debt.owed.step}, {debt.problem}"
        for debt in debts.values()
        if debt.owed is not None and not _is(debt.owed, debt.written)
    )


def _is(request: Request | None, written: Written | None) -> bool:
    return written is not None and written.request is request


def _key(request: Request) -> Key:
    return str(request.root.resolve()), request.aside


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """When a save begins: now."""

    wall_s: float = field(default_factory=time.time)
    begin_s: float = field(default_factory=time.monotonic)
    stall_s: float = 0.0
    """Seconds for which training has waited for it; 0: it waits to its end."""

    def stalled(self) -> Beginning:
        """The same when training goes on: now."""
        return replace(self, stall_s=time.monotonic() - self.begin_s)


def _report(outcome: Outcome, began: Beginning, *, in_memory: bool = False) -> Saved:
    """The message to the agent about a save that has ended."""
    begin_s = began.begin_s
    own, whole, total_s = outcome.own, outcome.whole, outcome.ended_s - begin_s
    return Saved(
        step=outcome.step,
        committed=outcome.path is not None,
        in_memory=in_memory,
        size_bytes=own.size_bytes if own is not None else 0,
        write_s=own.took_s if own is not None else 0.0,
        written_s=own.ended_s - begin_s if own is not None else 0.0,
        total_s=total_s,
        began_s=began.wall_s,
        stall_s=began.stall_s or total_s,
        publish_s=whole.took_s if whole is not None else 0.0,
        published_s=whole.ended_s - begin_s if whole is not None else 0.0,
        whole_bytes=whole.size_bytes if whole is not None else 0,
        problem=str(outcome.error or "")[:300],
    )


_AT_EXIT: dict[int, tuple[LastSave, object]] = {}
"""The trainings of this process whose last save has not succeeded; they live until it has."""


def _end_unsaved() -> None:
    """At the end of the script: exit with 1 if a last save is missing."""
    missing = [text for each, _ in list(_AT_EXIT.values()) if (text := each.at_exit())]
    if not missing:
        return
    _log.error("the script has ended, and %s: exit code 1", "; ".join(missing))
    # A SystemExit that is raised at exit is ignored, and os._exit flushes nothing.
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it is closed, its disk is full, or it is the script's own
            stream.flush()
    os._exit(1)


atexit.register(_end_unsaved)
os.register_at_fork(after_in_child=_AT_EXIT.clear)  # the save is its parent's
