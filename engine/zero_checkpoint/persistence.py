"""When and where a training is saved, loaded, fallen back from, and left with a save.

Owns what is not the format's and not the state's: where the checkpoints of this run go, whether the
script has state of its own in them, when they are due, whether this group is being left. What is
kept is a `Training`, which gives and takes its state; the engine is one. Must always hold: a
checkpoint is taken between steps; after a load, position, counters and batch are those of the
checkpoint; what all ranks must do alike (leave, save, skip a save) is decided from the consensus of
a step, so that they do it at the same boundary.

`saver` and `memory.tier` do the work.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from zero_checkpoint.client_state import pack, unpack
from zero_checkpoint.commit import Lineage
from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.departure import Departure, choose_departure
from zero_checkpoint.errors import CheckpointError, DiskFull
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.pieces import State
from zero_checkpoint.memory.search import MemorySearch
from zero_checkpoint.memory.tier import InMemoryCheckpoints
from zero_checkpoint.options import SKIP, Checkpoint
from zero_checkpoint.restore import Loaded
from zero_checkpoint.retention import is_number
from zero_checkpoint.saver import Request, Saver
from zero_checkpoint.schedule import RETRY_S, Schedule
from zero_checkpoint.siblings import BESIDE, Moment, inconsistent
from zero_checkpoint.staging import Outcome
from zero_comm.agent_link import AgentLink, exit_on_peer_loss
from zero_comm.distributed import group_store
from zero_contract.errors import CommitRefused, PeerLost, ZeroError

_log = logging.getLogger(__name__)

ClientSource = Callable[[], Mapping[str, Any]]
"""Gives the script's own state as of now."""
_SCRIPT_ALONE = "client_state is known to the script alone; engine.keep_client_state() tells more"
NOTES = 6
"""How many numbers `Persistence.notes` adds to the consensus of a step."""
ROOM_WAIT_S = 3600.0
"""A save that a script relies on waits so long for room on a full disk..."""
LEAVING_WAIT_S = 10.0
"""...and that of a worker that leaves so long, which its agent ends otherwise."""
_PAUSE_S = 5.0


class Training(Protocol):
    """What is kept: a state, and a position in steps. Every rank of a group has one, in step."""

    @property
    def rank(self) -> int:
        """Of this worker."""

    @property
    def world(self) -> int:
        """How many ranks there are."""

    @property
    def step(self) -> int:
        """Steps done."""

    @property
    def samples(self) -> int:
        """Consumed by them."""

    @property
    def micro_step(self) -> int:
        """Micro-steps done of the step under way; 0: between steps, where it can be saved."""

    @property
    def trains(self) -> bool:
        """Whether it does more steps: one for inference does not."""

    @property
    def in_library_loop(self) -> bool:
        """Whether a library's loop runs it, which writes state of its own after each checkpoint."""

    def capture(
        self, run: Mapping[str, Any], client: Mapping[str, Any], *, exclude_frozen: bool
    ) -> State:
        """The state to save, as of now; its pieces are views.

        Args:
            run: Goes into `meta["engine"]`, with "step" and what the training adds.
            client: Goes into `meta["client"]`.
            exclude_frozen: Leave out the parameters that are not trained.
        """

    def weight_hash(self) -> str:
        """See `zero_checkpoint.weight_hash`. Collective."""

    def meet(self, what: str) -> None:
        """Return when all ranks have come here. Collective."""

    def lend(self, until: Callable[[], object]) -> None:
        """A thread reads the state where it is; whoever changes it next calls `until` first."""


class Loading(Protocol):
    """One load into a training, step by step."""

    @property
    def resumes(self) -> bool:
        """Whether all of the state is asked for: the run goes on."""

    @property
    def takes_position(self) -> bool:
        """Whether steps and samples are asked for."""

    @property
    def filled(self) -> State:
        """What was filled from the checkpoint that was tried last."""

    def read(
        self, root: Place, consensus: StoreConsensus, tag: str | None, ram: MemorySearch | None
    ) -> Loaded | None:
        """Fill this rank's share of the state, see `restore.load`. Collective."""

    def adopt(self, run: Mapping[str, Any]) -> None:
        """Take what `capture` said of the run, as far as it was asked for. Collective."""

    def end(self) -> None:
        """The state is that of the checkpoint."""

    def report(self, loaded: Loaded) -> None:
        """On rank 0: say what was loaded, and what was not."""


class Persistence:
    """The checkpoints of one training."""

    def __init__(self, config: Checkpoint, training: Training, link: AgentLink) -> None:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.training = training
        self._config = config
        self._link = link
        self._lineage = Lineage(link.round)
        votes = self._consensus_of("saves", partial(_check_group, link, "written"))
        self.saver = Saver(config, votes, self._lineage)
        self.schedule = Schedule(config, restarts, training.rank)
        self.ram = self._in_memory_checkpoints()
        self._consensus = self._consensus_of("consensus", partial(link.raise_if_leaving, "loading"))
        self._directory: Place | None = None
        self._memory_root: Place | None = None
        """The directory that this run goes on from: the first that it was loaded from or saved to.
        Others that it writes, the best so far for one, are not to be mixed with what is newest."""
        self._has_stepped = False
        self.client_source: ClientSource | None = None
        self._script_has_state = False
        self._script_has_saved = False
        self._script_asks = False
        self._saved_step: int | None = None
        self._moment: Moment | None = None
        """What was loaded last, and where the other engines of the process were then."""
        self._refused = 0
        """Saves in a row that were not published, with nobody to see to it."""
        self.number = link.add(self)
        self._some_rank_busy = False
        self._some_memory_busy = False
        self._told_of_metric = False
        self._owed: Request | None = None
        """The last save, if it has found no room: a script must not end without it."""

    def _consensus_of(self, part: str, on_wait: Callable[[], None]) -> StoreConsensus:
        """Votes of their own: what is asked in one of them is not heard in another."""
        store, training = group_store(part), self.training
        key = self._link.votes_key(store.path)
        return StoreConsensus(store, training.rank, training.world, on_wait=on_wait, key=key)

    def _in_memory_checkpoints(self) -> InMemoryCheckpoints | None:
        if (config := self._config.ram) is None:
            return None
        reply = self._link.request_peer_memory(config.budget_bytes)
        votes = self._consensus_of("ram", partial(_check_group, self._link, "kept in memory"))
        return InMemoryCheckpoints(config, votes, self._lineage, reply, self._link.ram_bytes)

    # ---- among the trainings of the process ----

    @property
    def leaving(self) -> bool:
        """Whether some rank was asked to leave; known to all ranks since the same step."""
        return self._link.leaving

    def _engines(self) -> list[Persistence]:
        """Those that train in this process, in the order in which the script has made them."""
        return [each for each in self._link.clients.values() if each.training.trains]

    def _beside(self) -> dict[str, int]:
        return {
            str(each.number): each.training.step for each in self._engines() if each is not self
        }

    def _to_save(self) -> int:
        """Of how many engines the newest step is not saved yet, though they have a directory."""
        known = [each for each in self._engines() if each._directory is not None]
        return sum(each._saved_step != each.training.step for each in known)

    # ---- saving ----

    def save(
        self,
        directory: Place,
        tag: str | None,
        client: Mapping[str, Any],
        *,
        blocking: bool | None = None,
        exclude_frozen: bool = False,
    ) -> bool:
        """Save at this boundary, then leave if leaving is due. See `Engine.save_checkpoint`."""
        begin_s, step = time.monotonic(), self.training.step
        if micro := self.training.micro_step:
            raise CheckpointError(
                f"micro-step {micro} of a step: its gradients cannot be saved; call "
                "save_checkpoint() after the step() that ends it"
            )
        client = client or self._client_state()
        packed = pack(client)
        self._check_metric(client)
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
        self._tell(self.saver.wait_for_room())
        if not self.leaving:
            self._check_refusals()
        tag = tag or f"global_step{step}"
        hashed = waits if self._config.weight_hash is None else self._config.weight_hash
        request = Request(
            root=directory,
            state=self._capture(packed, exclude_frozen, hashed=hashed),
            step=step,
            tag=tag,
            fence=self._link.fence(step, tag, self.training.samples, last=self.leaving),
        )
        saved = self._save(request, waits=waits)
        self._saved_step = step
        self._some_rank_busy = not waits
        self.schedule.begun(time.monotonic() - begin_s)
        if not self.leaving:
            self._check_refusals()
        elif left := self._to_save():
            if self.training.rank == 0:
                _log.info("leaving when %d more engines of this process are saved", left)
        elif self.training.in_library_loop or any(
            each._directory is None for each in self._engines()
        ):
            # At the next step: now comes what its loop has to write, or the first save of others.
            self._link.may_leave = True
        else:
            self._leave()
        return saved

    def _save(self, request: Request, *, waits: bool) -> bool:
        """Begin it; return when nothing reads the state any more, or what was read is copied."""
        try:
            copied = self.saver.begin(request, copy=not waits)
            saved = self._await_saved(request) if waits else True
            if not copied:  # for want of room, on this rank alone: as if it had been in background
                self._tell(self.saver.wait())
            return saved
        except BaseException:  # Ctrl-C, or whatever a signal handler raises
            if self.saver.busy:
                self.training.lend(lambda: self._tell(self.saver.wait_for_room()))
            raise

    def _await_saved(self, request: Request) -> bool:
        """Whether it was saved; a full disk is no fault of the script's.

        A script that asks `checkpoint_due()` goes on, and is told to save again. Any other takes a
        save that returns for one that is there (and may delete the one before): it waits for room.
        """
        try:
            return self.wait()
        except DiskFull as error:
            self._owe(request)
            goes_on = not self.training.in_library_loop and (self.leaving or self._script_asks)
            then = f"training goes on, and checkpoint_due() is true again in {RETRY_S:g} s"
            self._warn(
                f"the checkpoint of step {request.step} was not saved; "
                f"{then if goes_on else 'training waits for room'}: {error}; free some room"
            )
            if not goes_on:
                self._wait_for_room(request, self._room_wait_s)
            return not goes_on

    def close(self) -> None:
        """Finish the saves in flight, and the last one, if it has found no room.

        Raises:
            DiskFull: There still is none.
        """
        if self.ram is not None:
            self.ram.close()
        try:
            self._save_what_is_owed()
        finally:
            self.saver.close()

    # ---- a full disk ----

    def _owe(self, request: Request) -> None:
        if self._owed is None:
            atexit.register(self._end_unsaved)
        self._owed = request

    def _settle(self) -> None:
        if self._owed is not None:
            atexit.unregister(self._end_unsaved)
        self._owed = None

    def _save_what_is_owed(self) -> None:
        """Try again the save of this very step, until there is room: after it the script ends."""
        request = self._owed
        # Where an exception ends the script, the other ranks do not come here.
        if request is None or request.step != self.training.step or sys.exc_info()[0]:
            return
        self._wait_for_room(request, self._room_wait_s)

    @property
    def _room_wait_s(self) -> float:
        return LEAVING_WAIT_S if self.leaving else ROOM_WAIT_S

    def _wait_for_room(self, request: Request, limit_s: float) -> None:
        """Try a save again and again; all ranks do so together, as rank 0 decides.

        Raises:
            DiskFull: There was no room for so long, or the job wants its workers to leave.
        """
        until_s = time.monotonic() + limit_s
        self._warn(f"waiting up to {limit_s / 60:.0f} min for room in {request.root}")
        with exit_on_peer_loss(self._link):
            while not self._try_again(request):
                self._link.heartbeat()  # or its agent would take it for hung
                if not self._consensus.announce(partial(self._may_wait, until_s))["wait"]:
                    self._settle()
                    text = f"no room in {request.root} for the checkpoint of step {request.step}"
                    raise DiskFull(f"{text} within {limit_s:g} s; free some")

    def _may_wait(self, until_s: float) -> dict[str, bool]:
        """On rank 0, a pause later: whether to try once more."""
        time.sleep(_PAUSE_S)
        asked = self._link.leave_asked and not self.leaving
        return {"wait": time.monotonic() < until_s and not asked}

    def _warn(self, text: str) -> None:
        if self.training.rank == 0:
            _log.warning("%s", text)

    def _try_again(self, request: Request) -> bool:
        self.saver.begin(request, copy=False)
        outcome = self.saver.wait()
        assert outcome is not None
        if isinstance(outcome.error, DiskFull):
            return False
        if outcome.error is not None:
            self._settle()
            raise outcome.error
        self._note(outcome)
        return True

    def _end_unsaved(self) -> None:
        """The script has ended: what exits with 0 has saved what it wanted to save."""
        request = self._owed
        leaves = self.leaving or self._link.group_lost.is_set()
        if request is None or request.step != self.training.step or leaves:
            return
        _log.error(
            "the script has ended, and its last checkpoint, of step %d, found no room in %s: "
            "exit code 1",
            request.step,
            request.root,
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def _check_metric(self, client: Mapping[str, Any]) -> None:
        """The metric of `keep_best` is a number, or left out: then this save is not compared."""
        best = self._config.keep_best
        if best is None:
            return
        if best.metric in client and not is_number(client[best.metric]):
            raise CheckpointError(
                f"client_state[{best.metric!r}] is {client[best.metric]!r}; checkpoint.keep_best "
                "compares numbers: give it a float"
            )
        if best.metric not in client and not self._told_of_metric and self.training.rank == 0:
            self._told_of_metric = True
            _log.info("no client_state[%r]: this save is not among the best", best.metric)

    def _capture(self, client: Mapping[str, Any], exclude_frozen: bool, *, hashed: bool) -> State:
        run: dict[str, Any] = {"elapsed_s": self.schedule.elapsed_s}
        if beside := self._beside():
            run[BESIDE] = beside
        run["weight_hash"] = self.training.weight_hash() if hashed else None
        return self.training.capture(run, client, exclude_frozen=exclude_frozen)

    def wait(self) -> bool:
        """Wait for the save in flight. See `Engine.wait_for_checkpoint`."""
        outcome = self.saver.wait()
        if outcome is None:
            return not self.saver.last_failed
        self._note(outcome)
        if isinstance(outcome.error, CommitRefused):
            # This worker's round is over or its agent is cut off; if so it will be told to
            # leave. Until then it may compute, and the checkpoints there are stay as they are.
            self.saver.report(outcome)
        elif outcome.error is not None:
            raise outcome.error
        return outcome.path is not None

    def _tell(self, outcome: Outcome | None) -> None:
        """Take note of a save that nobody has asked about, and say so if it has failed."""
        if outcome is not None:
            self._note(outcome)
            self.saver.report(outcome)

    def _note(self, outcome: Outcome) -> None:
        if outcome.path is not None:
            self.schedule.committed(outcome.write_s)
            self._refused = 0
            self._settle()
        elif isinstance(outcome.error, DiskFull):
            self.schedule.found_no_room()
        elif isinstance(outcome.error, CommitRefused) and not outcome.error.passing:
            self._refused += 1

    def _check_refusals(self) -> None:
        """A script that goes on without a single checkpoint loses all of its work in the end."""
        if self._refused > 1:
            self._refused = 0  # whoever goes on all the same may try again
            raise CheckpointError(
                "two saves in a row could not be published, and nothing was written to "
                f"{self._directory}: what is trained from here on would be lost. The lines above "
                "say why they were refused; look at the zero-agent of this node, and start the job "
                "again: it resumes from the newest checkpoint"
            )

    # ---- in memory ----

    def keep_in_memory(self) -> None:
        """At the end of a step: keep it in memory, if that is due."""
        root, self._has_stepped = self._memory_root, True
        if self.ram is None or root is None or self.leaving:
            return
        if self._known_to_script_alone:
            self.ram.give_up(_SCRIPT_ALONE)
        if self.ram.due(self.training.step, some_rank_busy=self._some_memory_busy):
            client = pack(self._client_state())
            state = self._capture(client, exclude_frozen=False, hashed=False)
            fence = partial(self._link.fence, samples=self.training.samples, in_memory=True)
            self.ram.begin(root, state, self.saver.lay_out, fence)

    @property
    def _known_to_script_alone(self) -> bool:
        """Whether the script has state that a checkpoint of the engine's own would lack."""
        return (
            self._script_has_state or self.training.in_library_loop
        ) and self.client_source is None

    def _client_state(self) -> Mapping[str, Any]:
        """What the script wants in a checkpoint that it does not make itself."""
        return self.client_source() if self.client_source is not None else {}

    # ---- loading ----

    def load(
        self, directory: Place, tag: str | None, loading: Loading
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest valid checkpoint. See `Engine.load_checkpoint`."""
        if self.training.micro_step:
            raise ZeroError("load_checkpoint() in the middle of a step; call it before training")
        self._tell(self.saver.wait_for_room())
        if self.ram is not None:
            self.ram.prepare()
        # Memory is for going on after a failure; who has trained and loads wants what is on disk.
        recovers = tag is None and loading.resumes and not self._has_stepped
        search = self.ram.search() if self.ram is not None and recovers else None
        loaded = loading.read(directory, self._consensus, tag, search)
        self._directory = directory
        if not self.saver.has_laid_out(loading.filled):
            # The next save is laid out like the last one, or lets go of its tensors.
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
        return str(loaded.path), self._go_on_from(loaded, loading)

    def _go_on_from(self, loaded: Loaded, loading: Loading) -> dict[str, Any]:
        """Finish a load on this rank; the client state."""
        self._lineage.advance_to(loaded.path.name)
        run = loaded.manifest.meta["engine"]
        loading.adopt(run)
        if loading.takes_position:
            self.schedule.go_on_from(run.get("elapsed_s") or 0.0)
        client: dict[str, Any] = unpack(loaded.manifest.meta["client"])
        loading.end()
        if self.training.trains and loading.takes_position:
            self._check_moment(run)
        self._script_has_state |= bool(client)
        self._script_has_saved = True
        if self.training.rank == 0:
            loading.report(loaded)
        return client

    def _check_moment(self, saved: Mapping[str, Any]) -> None:
        """Say so if what was loaded never was beside what other engines of the process have."""
        beside = saved.get(BESIDE) or {}
        self._moment = Moment(number=self.number, step=saved["step"], beside=beside)
        others = [each for each in self._engines() if each is not self]
        moments = [each._moment for each in others if each._moment is not None]
        if (problem := inconsistent(self._moment, moments)) and self.training.rank == 0:
            _log.warning("%s", problem)

    # ---- at the end of a step ----

    def notes(self) -> list[float]:
        """[NOTES] for all ranks: whether to leave, which saves are in flight, the schedule's."""
        in_memory = self.ram is not None and self.ram.busy
        own = [self._link.leave_asked, self.saver.busy, in_memory, *self.schedule.notes()]
        return [float(note) for note in own]

    def hear(self, notes: Sequence[Sequence[float]]) -> None:
        """Take everybody's notes [world][NOTES], and tell of a save that has ended."""
        leave_asked, saves, in_memory = (
            any(column) for column in list(zip(*notes, strict=True))[:3]
        )
        if leave_asked and not self._link.leaving:
            gc.collect()  # engines that the script has let go of are waited for on no rank
            self._link.leaving = True
        self._some_rank_busy = saves
        self._some_memory_busy = in_memory
        self.schedule.hear(notes[0][3:])
        self._tell(self.saver.finished())

    def due(self, every_steps: int | None, every_s: float | str | None) -> bool:
        """Whether the script should save now. See `Engine.checkpoint_due`."""
        self._script_asks = True
        due = self.schedule.due(self.training.step, every_steps, every_s)
        # Scripts ask after every micro-step, and only after the last one is there a step to save.
        return not self.training.micro_step and (due or self.leaving)

    # ---- leaving ----

    def depart_if_asked(self) -> None:
        """At the end of a step: leave if it is time, saving first if the script need not."""
        if not self.leaving:
            return
        if self._link.may_leave:
            self._leave()
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
            self._save_and_leave()
        elif departure is Departure.LEAVE:
            self._leave()

    def leave(self) -> None:
        """Leave now, with the checkpoint that the script has just made: ends the process."""
        self._leave()

    def _save_and_leave(self) -> None:
        assert self._directory is not None
        try:
            self.save(self._directory, None, {})
        except (CheckpointError, CommitRefused) as error:
            # The next round goes on from the checkpoint before; staying would help nobody.
            _log.error("leaving without a new checkpoint: %s", error)
            self._leave()

    def _leave(self) -> None:
        for each in self._engines():
            with suppress(DiskFull):  # said below
                each.close()
            each.saver.tell_lost(in_memory=each.ram is not None)
        # Rank 0 may host the store that the others still read the verdict from.
        self.training.meet("leaving")
        self._link.leave(self.saver.last_step)


def _check_group(link: AgentLink, doing: str) -> None:
    if link.group_lost.is_set():
        raise PeerLost(f"the group broke while its checkpoint was being {doing}")
