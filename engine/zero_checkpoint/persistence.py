"""When and where a training is saved and loaded, and how it leaves with a save.

Decides what neither the format nor the state decides: which directory the checkpoints of this run
go to, whether the script has a client_state in them, when they are due, whether this group is being
left. A `Training` gives and takes the state; the engine is one. Must always hold: a checkpoint is
taken between steps; after a load, position, counters and batch are those of the checkpoint; what
all ranks must do alike (leave, save, skip a save) is decided from the consensus of a step, so that
they do it at the same boundary.

`saver` and `memory.tier` do the work.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from zero_checkpoint.client_state import pack, unpack
from zero_checkpoint.commit import Lineage
from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.departure import Departure, choose_departure
from zero_checkpoint.errors import CheckpointError, DiskFull, OtherRun
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import ASIDE
from zero_checkpoint.format.pieces import State
from zero_checkpoint.last_save import LastSave
from zero_checkpoint.memory.tier import InMemoryCheckpoints
from zero_checkpoint.options import SKIP, Checkpoint
from zero_checkpoint.other_engines import BESIDE, Moment, inconsistent
from zero_checkpoint.publish import NotPublished
from zero_checkpoint.restore import Loaded
from zero_checkpoint.retention import is_number
from zero_checkpoint.saver import Request, Saver
from zero_checkpoint.schedule import RETRY_S, Schedule
from zero_checkpoint.staging import Outcome
from zero_checkpoint.training import Loading, Training
from zero_comm.agent_link import BEFORE_FIRST_STEP, AgentLink
from zero_comm.distributed import group_store
from zero_contract.errors import CommitRefused, PeerLost
from zero_contract.worker import Restored, Saved

_log = logging.getLogger(__name__)

ClientSource = Callable[[], Mapping[str, Any]]
"""Returns the current client_state of the script."""
_SCRIPT_ALONE = (
    "client_state is known to the script alone; register it with engine.keep_client_state()"
)
NOTES = 10
"""The number of values that `Persistence.notes` adds to the consensus of a step."""


class Persistence:
    """The checkpoints of one training."""

    def __init__(self, config: Checkpoint, training: Training, link: AgentLink) -> None:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.training = training
        self._config = config
        self._link = link
        self._lineage = Lineage(link.round)
        votes = self._consensus_of("saves", partial(_check_group, link, "written"))
        before = training.before_change
        self.saver = Saver(config, votes, self._lineage, before)
        self.schedule = Schedule(config, restarts, training.rank)
        self.ram: InMemoryCheckpoints | None = None
        if config.ram is not None:
            reply = link.request_peer_memory(config.ram.budget_bytes)
            kept = self._consensus_of("ram", partial(_check_group, link, "kept in memory"))
            self.ram = InMemoryCheckpoints(
                config.ram, kept, self._lineage, reply, link.ram_bytes, before, self._note_in_memory
            )
        self._consensus = self._consensus_of("consensus", partial(link.raise_if_leaving, "loading"))
        self._directory: Place | None = None
        self._memory_root: Place | None = None
        """The directory that this run resumes from: the first that it was loaded from or saved to.
        In-memory checkpoints belong to it, and not to others, such as one for the best so far."""
        self._has_stepped = False
        self.client_source: ClientSource | None = None
        self._script_has_state = False
        self._script_has_saved = False
        self._script_asks = False
        self._saved_step: int | None = None
        self._began = self._began_in_memory = _Beginning()
        self._moment: Moment | None = None
        """The step that was loaded last, and the steps of the other engines in that checkpoint."""
        self._refused = 0
        """Consecutive saves that were refused for good, so that training saves in vain."""
        self._other_run: OtherRun | None = None  # a refusal that the script does not know yet
        self.number = link.add(self)
        self._some_rank_busy = False
        self._some_memory_busy = False
        self._has_logged_metric = False
        self._last = LastSave(training, link, self.saver, self._consensus, self._note)
        self.saver.on_published = self._last.succeeded

    def _consensus_of(self, part: str, on_wait: Callable[[], None]) -> StoreConsensus:
        """Votes of this rank under a prefix: questions of different parts do not mix."""
        store, training = group_store(part), self.training
        return StoreConsensus(
            store, training.rank, training.world, on_wait=on_wait, key=store.votes_key
        )

    # ---- among the trainings of the process ----

    @property
    def leaving(self) -> bool:
        """Whether some rank was asked to leave; known to all ranks since the same step."""
        return self._link.leaving

    def _engines(self) -> list[Persistence]:
        """The engines that train in this process, in the order in which the script made them."""
        return [each for each in self._link.clients.values() if each.training.trains]

    # ---- saving ----

    def save(
        self,
        directory: Place,
        tag: str | None,
        client: Mapping[str, Any],
        *,
        blocking: bool | None = None,
        exclude_frozen: bool = False,
        aside: bool = False,
    ) -> bool:
        """Save at this boundary, then leave if leaving is due. See `Engine.save_checkpoint`."""
        began, step = _Beginning(), self.training.cursor.step
        client = client or self._client_state()
        self._directory, self._memory_root = directory, self._memory_root or directory
        self._script_has_state |= bool(client)
        self._script_has_saved = True
        if self.ram is not None and self._known_to_script_alone:
            self.ram.disown(_SCRIPT_ALONE)
        waits = self.leaving or (not self._config.asynchronous if blocking is None else blocking)
        if self._some_rank_busy and not waits and self._config.when_busy == SKIP:
            if self.training.rank == 0:
                _log.info("no checkpoint of step %d: the one before is still being written", step)
            return False
        self._take_outcome(self.saver.wait_for_room())
        self._began = began
        if not self.leaving:
            self._check_refusals()
        tag = tag or f"global_step{step}"
        hashed = waits if self._config.weight_hash is None else self._config.weight_hash
        state, problem = self._capture(client, exclude_frozen, hashed=hashed, aside=aside)
        request = Request(
            root=directory,
            state=state,
            problem=problem,
            step=step,
            tag=tag,
            fence=self._link.fence(step, tag, self.training.cursor.samples, last=self.leaving),
        )
        saved = self._save(request, waits=waits)
        self._saved_step = step
        self._some_rank_busy = not waits
        stall_s = time.monotonic() - began.begin_s
        self._began = replace(began, stall_s=stall_s)
        self.schedule.begun(stall_s)
        self._link.saved(stall_s)
        self._link.heartbeat()  # this save may be the last thing that the script does
        if self.leaving:
            self._leave_if_all_saved()
        else:
            self._check_refusals()
        return saved

    def _leave_if_all_saved(self) -> None:
        """Leave now, or at the next step, or leave it to the save of another engine."""
        engines = self._engines()
        left = sum(
            each._directory is not None and each._saved_step != each.training.cursor.step
            for each in engines
        )
        if left:
            if self.training.rank == 0:
                _log.info("leaving when %d more engines of this process are saved", left)
        elif self.training.in_library_loop or any(each._directory is None for each in engines):
            # At the next step: first its loop writes its state, or other engines save at all.
            self._link.may_leave = True
        else:
            self.leave()

    def _save(self, request: Request, *, waits: bool) -> bool:
        """Begin a save; return when nothing reads the state any more, or the state is copied."""
        self._last.begun(request)
        try:
            copied = self.saver.begin(request, copy=not waits)
            saved = self._await_saved(request) if waits else True
            if not copied:  # this rank lacked memory: as if its save had been in the background
                self._take_outcome(self.saver.wait())
                if request.problem is not None:
                    raise request.problem
            return saved
        except BaseException:  # Ctrl-C, or another exception of a signal handler
            if self.saver.busy:
                self.training.lend(lambda: self._take_outcome(self.saver.wait_for_room()))
            raise

    def _await_saved(self, request: Request) -> bool:
        """Whether the save succeeded; disk full is no error of the script.

        A script that calls `checkpoint_due()` continues, and is asked to save again. Any other one
        relies on a save that returns (and may delete the checkpoint before): it waits for room.
        """
        try:
            return self.wait()
        except DiskFull as error:
            continues = not self.training.in_library_loop and (self.leaving or self._script_asks)
            then = f"training continues, and checkpoint_due() is true again in {RETRY_S:g} s"
            if self.training.rank == 0:
                _log.warning(
                    "the checkpoint of step %d was not saved; %s: %s; free some room",
                    request.step,
                    then if continues else "training waits for room",
                    error,
                )
            if not continues:
                self._last.wait_for_room(request)
            return not continues

    def close(self) -> None:
        """Finish the saves in flight, and the last save, if it has failed.

        Raises:
            DiskFull: There is still no room.
            CommitRefused: It may not be published.
            CheckpointError: It failed again.
        """
        self.training.settle()
        if self.ram is not None:
            self.ram.close()
        try:
            self._take_outcome(self.saver.wait())
            self._last.finish()
        finally:
            self.saver.close()

    def _check_metric(self, client: Mapping[str, Any]) -> None:
        """Refuse a `keep_best` metric that is no number; without it, the save is not compared."""
        best = self._config.keep_best
        if best is None:
            return
        if best.metric in client and not is_number(client[best.metric]):
            raise CheckpointError(
                f"client_state[{best.metric!r}] is {client[best.metric]!r}; checkpoint.keep_best "
                "compares numbers: give it a float"
            )
        if best.metric not in client and not self._has_logged_metric and self.training.rank == 0:
            self._has_logged_metric = True
            _log.info("no client_state[%r]: this save is not among the best", best.metric)

    def _capture(
        self,
        client: Mapping[str, Any],
        exclude_frozen: bool,
        *,
        hashed: bool,
        aside: bool = False,
    ) -> tuple[State, CheckpointError | None]:
        """The state to save; or why this rank cannot save it, which the save tells all ranks."""
        run: dict[str, Any] = {"elapsed_s": self.schedule.elapsed_s, ASIDE: aside}
        others = [each for each in self._engines() if each is not self]
        if others:
            run[BESIDE] = {str(each.number): each.training.cursor.step for each in others}
        run["weight_hash"] = self.training.weight_hash() if hashed else None
        try:
            self._check_metric(client)
            packed = pack(client)
            return self.training.capture(run, packed, exclude_frozen=exclude_frozen), None
        except CheckpointError as error:
            return State({}, (), meta={"engine": {"step": self.training.cursor.step}}), error

    def wait(self) -> bool:
        """Wait for the save in flight. See `Engine.wait_for_checkpoint`."""
        outcome = self.saver.wait()
        if outcome is None:
            return not self.saver.last_failed
        self._note(outcome)
        if isinstance(outcome.error, CommitRefused):
            # This worker is stale: its round is over, or its agent is cut off and will make it
            # leave. Until then it may compute, and the existing checkpoints stay as they are.
            self.saver.report(outcome)
        elif outcome.error is not None:
            if not isinstance(outcome.error, DiskFull):
                self._last.told()
            raise outcome.error
        return outcome.path is not None

    def _take_outcome(self, outcome: Outcome | None) -> None:
        """Count a save that the script has not waited for, and log its failure."""
        if outcome is not None:
            self._note(outcome)
            self.saver.report(outcome)
            if isinstance(outcome.error, OtherRun):
                self._other_run = outcome.error

    def _note(self, outcome: Outcome) -> None:
        self._link.saved_file(_report(outcome, self._began))
        if outcome.path is not None:
            self.schedule.committed(outcome.write_s)
            self._refused = 0
            self._last.settle()
            return
        self._last.failed(outcome.error)
        if isinstance(outcome.error, DiskFull | NotPublished):
            self.schedule.failed_for_now()
        elif isinstance(outcome.error, CommitRefused):
            self._refused += 1

    def _check_refusals(self) -> None:
        """Stop a script whose saves are refused: without a checkpoint all of its work is lost."""
        error, self._other_run = self._other_run, None
        if error is not None:
            raise error
        if self._refused > 1:
            self._refused = 0  # a script that catches the error may try again
            raise CheckpointError(
                "two saves in a row could not be published, and nothing was written to "
                f"{self._directory}: what is trained from here on would be lost. The lines above "
                "say why they were refused; look at the zero-agent of this node, and start the job "
                "again: it resumes from the newest checkpoint"
            )

    # ---- in memory ----

    def keep_in_memory(self) -> None:
        """At the end of a step: make an in-memory checkpoint, if one is due."""
        root, self._has_stepped = self._memory_root, True
        if self.ram is None or root is None or self.leaving:
            return
        if self._known_to_script_alone:
            self.ram.give_up(_SCRIPT_ALONE)
        if self.ram.due(self.training.cursor.step, some_rank_busy=self._some_memory_busy):
            began = _Beginning()
            state, problem = self._capture(self._client_state(), False, hashed=False)
            fence = partial(self._link.fence, samples=self.training.cursor.samples, in_memory=True)
            self.ram.begin(root, state, self.saver.lay_out, fence, problem)
            stall_s = time.monotonic() - began.begin_s
            self._began_in_memory = replace(began, stall_s=stall_s)
            self._link.saved(stall_s)

    def _note_in_memory(self, outcome: Outcome) -> None:
        self._link.saved_file(_report(outcome, self._began_in_memory, in_memory=True))

    @property
    def _known_to_script_alone(self) -> bool:
        """Whether the script has state that a checkpoint made by the engine alone would lack."""
        return (
            self._script_has_state or self.training.in_library_loop
        ) and self.client_source is None

    def _client_state(self) -> Mapping[str, Any]:
        """The client_state of a checkpoint that the script does not make itself."""
        return self.client_source() if self.client_source is not None else {}

    # ---- loading ----

    def load(
        self, directory: Place, tag: str | None, loading: Loading
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest valid checkpoint. See `Engine.load_checkpoint`."""
        begin_s = time.monotonic()
        self._take_outcome(self.saver.wait_for_room())
        self.saver.staging.settle()  # a save may have failed before its copy ended
        if self.ram is not None:
            self.ram.prepare()
        # Memory is for recovery from a failure; a script that loads after steps wants the disk.
        recovers = tag is None and loading.resumes and not self._has_stepped
        search = self.ram.search() if self.ram is not None and recovers else None
        loaded = loading.read(directory, self._consensus, tag, search)
        self._directory = directory
        if not self.saver.has_laid_out(loading.filled):
            # The layout of the last save does not fit any more: drop it, and its tensors.
            self.saver.forget()
            if self.ram is not None:
                self.ram.forget()
        if self.ram is not None and loading.resumes:
            self._memory_root = directory if recovers else self._memory_root or directory
            step = loaded.manifest.step if loaded is not None else 0
            chosen = loaded.path.name if loaded is not None and loaded.in_memory else None
            self.ram.loaded(self._memory_root, chosen, step)
        if loaded is None:
            return None, {}
        return str(loaded.path), self._resume_from(loaded, loading, begin_s)

    def _resume_from(self, loaded: Loaded, loading: Loading, begin_s: float) -> dict[str, Any]:
        """Finish a load on this rank, which began at `begin_s`; returns the client_state."""
        self._lineage.advance_to(loaded.path.name)
        run = loaded.manifest.meta["engine"]
        loading.adopt(run)
        if loading.takes_position:
            self.schedule.resume_from(run.get("elapsed_s") or 0.0)
        client: dict[str, Any] = unpack(loaded.manifest.meta["client"])
        loading.end()
        if self.training.trains and loading.takes_position:
            beside = run.get(BESIDE) or {}
            self._moment = Moment(number=self.number, step=run["step"], beside=beside)
            others = [each for each in self._engines() if each is not self]
            moments = [each._moment for each in others if each._moment is not None]
            if (problem := inconsistent(self._moment, moments)) and self.training.rank == 0:
                _log.warning("%s", problem)
        self._script_has_state |= bool(client)
        self._script_has_saved = True
        if self.training.rank == 0:
            loading.report(loaded)
            self._link.restored(
                Restored(
                    step=loaded.manifest.step,
                    tag=loaded.manifest.tag,
                    in_memory=loaded.in_memory,
                    load_s=time.monotonic() - begin_s,
                    read_bytes=loaded.bytes_read,
                )
            )
        self._link.preparing(BEFORE_FIRST_STEP)
        return client

    # ---- at the end of a step ----

    def notes(self) -> list[float]:
        """[NOTES] for all ranks: whether to leave, saves in flight, times, the schedule's."""
        in_memory = self.ram is not None and self.ram.busy
        own = [self._link.leave_asked, self.saver.busy, in_memory, *self._link.step_times()]
        return [float(note) for note in (*own, *self.schedule.notes())]

    def take_notes(self, notes: Sequence[Sequence[float]]) -> None:
        """Use the notes of all ranks, [world][NOTES], and report a save that has ended."""
        leave_asked, saves, in_memory = (
            any(column) for column in list(zip(*notes, strict=True))[:3]
        )
        if leave_asked and not self._link.leaving:
            gc.collect()  # no rank waits for engines that the script has dropped
            self._link.leaving = True
        self._some_rank_busy = saves
        self._some_memory_busy = in_memory
        self._link.everyones_times(self.training.cursor.step, [row[3:7] for row in notes])
        self.schedule.take_notes(notes[0][7:])
        self._take_outcome(self.saver.finished())

    def due(self, every_steps: int | None, every_s: float | str | None) -> bool:
        """Whether the script should save now. See `Engine.checkpoint_due`."""
        self._script_asks = True
        due = self.schedule.due(self.training.cursor.step, every_steps, every_s)
        # Scripts call it after every micro-step, and only the last one completes a step.
        return not self.training.cursor.micro and (due or self.leaving)

    # ---- leaving ----

    def depart_if_asked(self) -> None:
        """End of a step: leave on a drain, preemption, join or stop, saving first if needed."""
        if not self.leaving:
            return
        if self._link.may_leave:
            self.leave()
        engines = self._engines()
        departure, reason = choose_departure(
            directory_known=any(each._directory is not None for each in engines),
            script_has_state=any(each._known_to_script_alone for each in engines),
            script_has_saved=any(each._script_has_saved for each in engines),
            script_asks=any(each._script_asks for each in engines),
            engines=len(engines),
        )
        if departure is not self._link.departure:  # waiting for the script may take many steps
            _log.info("asked to leave: %s, because %s", departure, reason)
        self._link.departure = departure
        if departure is Departure.SAVE_AND_LEAVE:
            assert self._directory is not None
            try:
                self.save(self._directory, None, {})
            except (CheckpointError, CommitRefused) as error:
                # The next round resumes from the checkpoint before; staying would not help.
                _log.error("leaving without a new checkpoint: %s", error)
                self.leave()
        elif departure is Departure.LEAVE:
            self.leave()

    def leave(self) -> None:
        """Leave now, after finishing the saves in flight: ends the process."""
        for each in self._engines():
            with suppress(CheckpointError, CommitRefused):  # logged below
                each.close()
            each.saver.log_lost_steps(in_memory=each.ram is not None)
        # Rank 0 may host the store that the others still read the verdict from.
        self.training.meet("leaving")
        self._link.leave(self.saver.last_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Beginning:
    """When a save begins: now."""

    wall_s: float = field(default_factory=time.time)
    begin_s: float = field(default_factory=time.monotonic)
    stall_s: float | None = None
    """Seconds for which training has waited for it; None: it waits to its end."""


def _report(outcome: Outcome, began: _Beginning, *, in_memory: bool = False) -> Saved:
    """What the agent is told of a save that has ended."""
    begin_s, stall_s = began.begin_s, began.stall_s
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
        stall_s=total_s if stall_s is None else stall_s,
        publish_s=whole.took_s if whole is not None else 0.0,
        published_s=whole.ended_s - begin_s if whole is not None else 0.0,
        whole_bytes=whole.size_bytes if whole is not None else 0,
        problem=str(outcome.error or "")[:300],
    )


def _check_group(link: AgentLink, doing: str) -> None:
    if link.group_lost.is_set():
        raise PeerLost(f"the group broke while its checkpoint was being {doing}")
