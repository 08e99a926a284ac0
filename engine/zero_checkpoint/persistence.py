"""When and where a training is saved and loaded.

Decides what neither the format nor the state decides: which directory the checkpoints of this run
go to, whether the script has a client_state in them, when they are due. A `Training` gives and
takes the state; `saving.saver` and `saving.in_memory` do the work, and `last_save` knows what
becomes of it.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import ASIDE
from zero_checkpoint.format.pieces import State
from zero_checkpoint.last_save import Beginning, LastSave
from zero_checkpoint.loading import ownership
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.options import SKIP, Checkpoint
from zero_checkpoint.saving.commit import Lineage
from zero_checkpoint.saving.departure import Script
from zero_checkpoint.saving.in_memory import InMemoryCheckpoints
from zero_checkpoint.saving.retention import is_number
from zero_checkpoint.saving.saver import Request, Saver
from zero_checkpoint.saving.schedule import Schedule
from zero_checkpoint.state.client_state import pack, unpack
from zero_checkpoint.training import Loading, Training
from zero_comm.worker.agent_link import AgentLink
from zero_comm.worker.distributed import group_store
from zero_contract.errors import PeerLost
from zero_contract.worker import BEFORE_FIRST_STEP, Restored

_log = logging.getLogger(__name__)

_SCRIPT_ALONE = "client_state is known to the script alone; register it with keep_client_state()"
_OF_ANOTHER = (
    "training {} of this process saves to {}, and so would training {}: each would load and delete "
    "the checkpoints of the other; give each a directory of its own, such as {}/NAME. One that "
    "continues the other loads its checkpoint from there before it saves, or the other is closed"
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
        self._consensus = self._consensus_of("consensus", partial(link.raise_if_leaving, "loading"))
        self.last = LastSave(training, link, self.saver, self.schedule, self._consensus, self)
        self.ram: InMemoryCheckpoints | None = None
        if config.ram is not None:
            self.ram = InMemoryCheckpoints(
                config.ram,
                self._consensus_of("ram", partial(_check_group, link, "kept in memory")),
                self._lineage,
                link.request_peer_memory(config.ram.budget_bytes),
                link.ram_bytes,
                before,
                self.last.note_in_memory,
                self._place(),
            )
        self.script = Script()
        self._memory_root: Place | None = None
        """The directory that this run resumes from: the first that it was loaded from or saved to.
        In-memory checkpoints belong to it, and not to others, such as one for the best so far."""
        self._saved_to: set[str] = set()
        """The directories whose newest checkpoints are this one's, as far as this process knows."""
        self._begun_beside: dict[int, int] = {}
        """The step of each engine when the step under way has begun."""
        self.has_told_of_step = False
        """Whether the script knows what `stepped_within` finds."""
        self._has_stepped = False
        self._moment: Moment | None = None
        """The step that was loaded last, and the steps of the other engines in that checkpoint."""
        self._some_rank_busy = self._some_memory_busy = False
        self._overtakes = True
        """Whether steps in memory may be newer than the save in flight: a load finds either."""
        self._has_logged_metric = False
        self.number = link.add(self)

    def _place(self) -> int:
        """The first place that no living engine of this process has; equal on all ranks."""
        if self._link.clients:
            gc.collect()  # one that the script has dropped is gone, on all ranks
        taken = {each.ram.place for each in self._link.clients.values() if each.ram is not None}
        return next(place for place in itertools.count() if place not in taken)

    def _consensus_of(self, part: str, on_wait: Callable[[], None]) -> StoreConsensus:
        """The votes of this rank on one part of its work."""
        # Under a prefix of its own: each part asks at any time, and a question is but a number.
        store, training = group_store(part), self.training
        return StoreConsensus(
            store, training.rank, training.world, on_wait=on_wait, key=store.votes_key
        )

    def engines(self) -> list[Persistence]:
        """Those that train in this process, in the order in which the script made them."""
        return [each for each in self._link.clients.values() if each.training.trains]

    def _others(self) -> list[Persistence]:
        return [each for each in self.engines() if each is not self]

    # ---- a step, beside those of other engines ----

    def begin_step(self) -> None:
        """A step begins."""
        self._begun_beside = {each.number: each.training.cursor.step for each in self.engines()}

    def stepped_within(self) -> int | None:
        """The number of an engine in the middle of a step since whose begin this one has stepped.

        None as well if the script has been told of one.
        """
        # What that engine computes with the weights of this one depends on where in its step it is.
        if any(each.has_told_of_step for each in self.engines()):
            return None
        for each in self._others():
            begun = each._begun_beside.get(self.number)
            if begun not in (None, self.training.cursor.step):
                return each.number
        return None

    # ---- calls of all ranks ----

    def watch(self, look: Callable[[], object]) -> None:
        """Call `look` while this rank waits for the others, in this call or for its save."""
        raise_if_leaving = partial(self._link.raise_if_leaving, "loading")

        def on_wait() -> None:
            raise_if_leaving()
            look()

        self.saver.look, self._consensus.on_wait = look, on_wait

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
        """Save at this boundary. See `Engine.save_checkpoint`."""
        began, step, script = Beginning(), self.training.cursor.step, self.script
        leaving = self._link.leaving
        self._take(directory)
        client = client or script.client_state()
        self._memory_root = self._memory_root or directory
        script.saves(directory)
        script.has_state |= bool(client)
        script.has_saved = True
        # What is in memory lacks the state that the script has just named: no load may take it.
        if self.ram is not None and self.known_to_script_alone:
            self.ram.disown(_SCRIPT_ALONE)
        waits = leaving or (not self._config.asynchronous if blocking is None else blocking)
        # From the notes of the last step, so that all ranks skip it, or none.
        if self._some_rank_busy and not waits and self._config.when_busy == SKIP:
            if self.training.rank == 0:
                _log.info("no checkpoint of step %d: the one before is still being written", step)
            given: Any = {"exclude_frozen": exclude_frozen, "aside": aside}
            save = partial(self.save, directory, tag, client, blocking=True, **given)
            self.last.skip(directory, aside=aside, save=save)
            return False
        self.last.take(self.saver.wait_for_room())
        # Not before: the report of the save before has its own beginning.
        self.last.began = began
        if not leaving:
            self.last.check_refusals(directory)
        tag = tag or f"global_step{step}"
        hashed = waits if self._config.weight_hash is None else self._config.weight_hash
        state, problem = self._capture(client, exclude_frozen, hashed=hashed, aside=aside)
        request = Request(
            root=directory,
            state=state,
            problem=problem,
            step=step,
            tag=tag,
            aside=aside,
            fence=self._link.fence(
                step,
                tag,
                self.training.cursor.samples,
                last=leaving,
                root=self._resumed_root(directory),
            ),
        )
        saved = self._save(request, waits=waits)
        if not aside and script.leaves_to in (None, directory):
            script.saved_step = step
        # Until the notes of the next step: all ranks have begun this save, or waited for its end.
        self._some_rank_busy = not waits
        self._overtakes = not aside and directory == self._memory_root
        self.last.began = began = began.stalled()
        self.schedule.begun(began.stall_s)
        self._link.saved(began.stall_s)
        self._link.heartbeat()  # this save may be the last thing that the script does
        if not leaving:
            self.last.check_refusals(directory)
        return saved

    def _resumed_root(self, directory: Place) -> str:
        """What the job resumes from, if it has a checkpoint with the next one in `directory`."""
        home = self.script.leaves_to or self._memory_root
        assert home is not None
        root = str(home.resolve())
        return root if directory == home or root in self.saver.roots else ""

    def _take(self, directory: Place) -> None:
        """Take a directory for this training; raises CheckpointError if another one saves to it."""
        key = str(directory.resolve())
        if self._owners(key):
            gc.collect()  # one that the script has dropped is gone, on all ranks
        for other in self._owners(key):
            raise CheckpointError(
                _OF_ANOTHER.format(other.number, directory, self.number, directory)
            )
        self._saved_to.add(key)

    def _owners(self, key: str) -> list[Persistence]:
        return [each for each in self._others() if key in each._saved_to]

    def _save(self, request: Request, *, waits: bool) -> bool:
        """Begin a save; return when nothing reads the state any more, or the state is copied."""
        self.last.begun(request)
        continues = self._link.leaving or self.script.asks
        try:
            copied = self.saver.begin(request, copy=not waits)
            saved = not waits or self.last.await_saved(
                request, may_continue=continues and not self.training.in_library_loop
            )
            if not copied:  # this rank lacked memory: as if its save had been in the background
                self.last.take(self.saver.wait())
                if request.problem is not None:
                    raise request.problem
            return saved
        except BaseException:  # Ctrl-C, or another exception of a signal handler
            if self.saver.busy:
                self.training.lend(lambda: self.last.take(self.saver.wait_for_room()))
            raise

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
            self.last.take(self.saver.wait())
            self.last.finish()
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
        self, client: Mapping[str, Any], exclude_frozen: bool, *, hashed: bool, aside: bool = False
    ) -> tuple[State, CheckpointError | None]:
        """The state to save; or why this rank cannot save it, which the save tells all ranks."""
        run: dict[str, Any] = {"elapsed_s": self.schedule.elapsed_s, ASIDE: aside}
        if others := self._others():
            run[BESIDE] = {str(each.number): each.training.cursor.step for each in others}
        run["weight_hash"] = self.training.weight_hash() if hashed else None
        try:
            self._check_metric(client)
            packed = pack(client)
            return self.training.capture(run, packed, exclude_frozen=exclude_frozen), None
        except CheckpointError as error:
            return State({}, (), meta={"engine": {"step": self.training.cursor.step}}), error

    # ---- in memory ----

    def keep_in_memory(self) -> None:
        """At the end of a step: make an in-memory checkpoint, if one is due."""
        root = self._memory_root
        if self.ram is None or root is None or self._link.leaving:
            return
        if self.known_to_script_alone:
            self.ram.give_up(_SCRIPT_ALONE)
        # The best so far would be lost with a rank if a later step were kept before it.
        busy = self._some_memory_busy or (self._some_rank_busy and not self._overtakes)
        if self.ram.due(self.training.cursor.step, some_rank_busy=busy):
            began = Beginning()
            state, problem = self._capture(self.script.client_state(), False, hashed=False)
            samples = self.training.cursor.samples
            fence = partial(self._link.fence, samples=samples, in_memory=True)
            self.ram.begin(root, state, self.saver.lay_out, fence, problem)
            self.last.began_in_memory = began = began.stalled()
            self._link.saved(began.stall_s)

    @property
    def is_in_memory(self) -> bool:
        """Whether a checkpoint of this run is in memory, as far as this rank knows."""
        return self.ram is not None and self.ram.kept_step is not None

    @property
    def newest_in_memory(self) -> int:
        """The newest step of which the ranks have begun to keep one; 0: none."""
        return 0 if self.ram is None else self.ram.begun_step

    @property
    def known_to_script_alone(self) -> bool:
        """Whether the script has state that a checkpoint made by the engine alone would lack."""
        script = self.script
        in_loop = self.training.in_library_loop
        return (script.has_state or in_loop) and script.client_source is None

    # ---- loading ----

    def load(
        self, directory: Place, tag: str | None, loading: Loading
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest valid checkpoint. See `Engine.load_checkpoint`."""
        begin_s = time.monotonic()
        # A step under way ends here: what was computed in it belongs to other weights.
        self._begun_beside = {}
        self.last.take(self.saver.wait_for_room())
        self.saver.staging.settle()  # a save may have failed before its copy ended
        if self.ram is not None:
            self.ram.prepare()
        # Memory is for recovery from a failure; a script that loads after steps wants the disk.
        recovers = tag is None and loading.resumes and not self._has_stepped
        search = self.ram.search() if self.ram is not None and recovers else None
        loaded = loading.read(directory, self._consensus, tag, search)
        self.script.saved_step = None
        if loading.takes_position and not self._has_stepped:
            is_own = loaded is None or ownership.is_own(loaded.manifest)
            self.script.resumes(directory, is_own=is_own and tag is None)
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
        if not loaded.in_memory:
            self.saver.roots.add(str(directory.resolve()))
        for other in self._owners(str(directory.resolve())):  # this one continues that one
            other._saved_to.discard(str(directory.resolve()))
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
            moments = [each._moment for each in self._others() if each._moment is not None]
            if (problem := inconsistent(self._moment, moments)) and self.training.rank == 0:
                _log.warning("%s", problem)
        self.script.has_state |= bool(client)
        self.script.has_saved = True
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
        """[NOTES] for all ranks: exit code or 0, saves in flight, times, the schedule's."""
        # What all ranks must do alike (save, skip a save, leave) is decided from these, at one
        # boundary.
        in_memory = self.ram is not None and self.ram.busy
        own = [self._link.leave_asked, self.saver.busy, in_memory, *self._link.step_times()]
        return [float(note) for note in (*own, *self.schedule.notes())]

    def take_notes(self, notes: Sequence[Sequence[float]]) -> None:
        """Use the notes of all ranks, [world][NOTES], and report a save that has ended."""
        self._begun_beside, self._has_stepped = {}, True
        leaves_with, saves, in_memory = (
            max(column) for column in list(zip(*notes, strict=True))[:3]
        )
        if leaves_with and not self._link.leaving:
            gc.collect()  # no rank waits for engines that the script has dropped
            self._link.leaves_with = int(leaves_with)
        self._some_rank_busy = saves > 0
        self._some_memory_busy = in_memory > 0
        self._link.everyones_times(self.training.cursor.step, [row[3:7] for row in notes])
        self.schedule.take_notes(notes[0][7:])
        self.last.take(self.saver.finished())

    def due(self, every_steps: int | None, every_s: float | str | None) -> bool:
        """Whether the script should save now. See `Engine.checkpoint_due`."""
        self.script.asks = True
        due = self.schedule.due(self.training.cursor.step, every_steps, every_s)
        # Scripts call it after every micro-step, and only the last one completes a step.
        return not self.training.cursor.micro and (due or self._link.leaving)


def _check_group(link: AgentLink, doing: str) -> None:
    if link.group_lost.is_set():
        raise PeerLost(f"the group broke while its checkpoint was being {doing}")


# ---- several engines in one process ----
# A script with several (a GAN, actor and critic) saves them one after the other at one point of its
# loop. If a node is lost in between, some checkpoints are newer than others. Each checkpoint
# therefore records the steps of the other engines.

BESIDE = "beside"
"""The key of `Moment.beside` in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The steps of a process's engines when a checkpoint of one of them was made."""

    number: int
    """The engine's number, in the order in which the script makes them."""
    step: int
    beside: Mapping[str, int]
    """Number of each other engine that trains -> its step then. Text, because JSON has no other
    keys."""


def inconsistent(mine: Moment, others: list[Moment]) -> str:
    """Why the checkpoints that engines resume from are inconsistent, or ""."""
    # Two are consistent if the later one was made while the other engine was at the step from which
    # it resumes. Which one was later is unknown, so it is enough if either of them records it.
    for other in others:
        seen, was_seen = mine.beside.get(str(other.number)), other.beside.get(str(mine.number))
        unknown = seen is None and was_seen is None
        if not unknown and seen != other.step and was_seen != mine.step:
            return (
                f"training {other.number} of this process resumes from step {other.step} and "
                f"training {mine.number} from step {mine.step}, but training {other.number} was at "
                f"step {seen if seen is not None else 'unknown'} when the latter was saved: if "
                "one is trained on the output of the other, the results are from here on not those "
                "of the uninterrupted run; to resume from a common point, load checkpoints of one "
                "point of your loop by their tags, and leave out checkpoint.ram"
            )
    return ""
