"""The saves and loads of one training, and how it leaves, whoever owns its state.

Must always hold: what all ranks must do alike (leave, save, skip a save) follows from the notes of
a step, which every rank has of all; a worker leaves between two steps, and with a save of them if
the script lets the training save itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import nn

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import place
from zero_checkpoint.options import Checkpoint
from zero_checkpoint.persistence import NOTES as OF_PERSISTENCE
from zero_checkpoint.persistence import Persistence
from zero_checkpoint.saving.departure import ClientSource, Departure, choose_departure
from zero_checkpoint.training import Loading, Training
from zero_comm.determinism import Hardware
from zero_comm.exchange import left_under_way
from zero_comm.exchange.collectives import Collectives
from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_comm.worker.distributed import found_again, leave_group
from zero_contract.errors import CommitRefused, PeerLost, ZeroError
from zero_contract.worker import ExitCode, Progress
from zero_step.checks import alike
from zero_step.forward_writes import ForwardWrites
from zero_step.staying import Staying
from zero_step.tags import ASKS, CLIENT_STATE, TAG, agree_on_save, text_of

_log = logging.getLogger(__name__)

_STEPPED = (
    "training {0} of this process has stepped within a step of training {1}, and computes with "
    "its new weights there: if {1} is trained through it, as the generator of a GAN is, only the "
    "last micro-batches of a step have these, and how many depends on the number of ranks; call "
    "step() of both after the last backward() of the loop"
)
_CLIENT_STATE = "the script takes its client state from its load, which is not called again"
_BEHIND = "no checkpoint has what the script has done behind its last loop over an epoch"
_UNSAVED = "forwards write to the buffer {}, which no checkpoint has, and the last step is in none"
_SAVE, _LOAD, _CLOSE = "a save", "a load", "the end of the training"
"""Calls of all ranks, as the detector of deadlocks names them."""
NOTES = OF_PERSISTENCE + 2
"""Numbers that a session tells all ranks at the end of a step."""
Directory = str | os.PathLike[str]


class Session:
    """One training, from its first load to its end. Every rank makes the same calls.

    Attributes:
        client_state: The script's own state in the checkpoint that was loaded.
        hardware: What the ranks compute on; None: nobody has compared it.
        writes: Those of forwards; None: the script trains as it likes.
        staying: How it goes on in this process when the ranks change; None: it does not.
    """

    def __init__(
        self,
        config: Checkpoint,
        training: Training,
        collectives: Collectives,
        link: AgentLink,
    ) -> None:
        self.client_state: dict[str, Any] = {}
        self.hardware: Hardware | None = None
        self.writes: ForwardWrites | None = None
        self.staying: Staying | None = None
        self.is_behind = False
        """Whether a step has ended, and the script has not come back since; see `come_back`."""
        self._began_at: tuple[int, int] | None = None
        """The step and the micro-step that have begun last, unless a load has come since."""
        self._may_leave = False
        """Whether this worker could leave when that step ended: all was saved after the last."""
        self._mode = config.tag_validation.lower()
        self._training = training
        self._collectives = collectives
        self._link = link
        self._persistence = Persistence(config, training, link)

    def _leave_step(self, what: str) -> None:
        """End a step that only the call of `what` ends; raises ZeroError in the middle of one."""

    def _saved(self) -> None:
        if self.staying is not None:
            self.staying.saved()

    # ---- saves and loads ----

    def save(
        self,
        directory: Directory,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        blocking: bool | None = None,
    ) -> bool:
        """Save after a step; if the agent has asked this worker to leave, exit afterwards.

        A save in the background returns as soon as the state is copied. If it fails, that is
        logged, and the checkpoints before it stay as they are.

        Args:
            directory: A directory that all ranks share, or a URL: s3://bucket/dir, gs://bucket/dir.
            tag: The name of the checkpoint, or a number as its name; by default global_step<N>.
            client_state: The script's state, which a load returns: numbers, text, tensors and numpy
                arrays of up to 1 MiB each, tuples, lists and dictionaries of them. That of rank 0
                is saved.
            save_latest: False: only a load that names its tag takes this checkpoint, and
                `keep_last` neither counts nor deletes it.
            exclude_frozen_parameters: Leave out parameters that are not trained: a load then keeps
                the weights that the script has given them.
            blocking: Return when the checkpoint is published; None: the opposite of the config's
                checkpoint.async. A worker that leaves always waits.

        Returns:
            Whether the checkpoint was published, or begun in the background. False if this worker's
            round is over or its agent does not answer, if the disk is full and the script asks
            whether a save is due (which is then true again after a minute; other scripts wait here
            for space, up to an hour), if the previous save is in flight and checkpoint.when_busy
            is "skip" (`close` makes the last one), or if the ranks have just changed, and this is
            not where it was loaded from. Then nothing was written, and the reason is logged.

        Raises:
            CheckpointError: A rank failed, the client state has a value of another type, or the
                tags of the ranks differ and checkpoint.tag_validation is "Fail"; nothing was saved.
                Or this is the second save in a row that was not published, though etcd answers.
            ConfigError: A rank gives another argument; nothing was saved.
            ZeroError: It is the middle of a step.
        """
        self._leave_step("save()")
        with exit_on_peer_loss(self._link):
            name, where = text_of(tag), place(directory)
            if self.staying is not None:
                # A newcomer is not in this call of one that has stayed: it begins behind it. And
                # nothing is lost, since the round began with a checkpoint of that step. Nor does a
                # newcomer save before its first step, lest a script that ends there waits for
                # itself.
                saved = str(where) == self.staying.directory
                if self.staying.resumed and (saved or self.staying.has_begun):
                    text = "nothing is written to %s: this round began with step %d, saved in %s"
                    step = self._training.cursor.step
                    _log.warning(text, directory, step, self.staying.directory)
                    return saved
                self.staying.save(whole=not exclude_frozen_parameters)
            script = self._persistence.script
            given = {
                TAG: name,
                "blocking": str(blocking),
                "save_latest": bool(save_latest),
                "exclude_frozen_parameters": bool(exclude_frozen_parameters),
                "keep_client_state()": script.client_source is not None,
                CLIENT_STATE: bool(client_state),
                ASKS: script.asks,
            }
            # First: what ranks exchange in a save, skip, or do at the next departure depends on it.
            first = agree_on_save(given, self._mode, self._collectives, _SAVE)
            script.asks = first[ASKS]
            script.has_state |= first[CLIENT_STATE]
            self._persistence.watch(self._collectives.call(_SAVE))
            saved = self._persistence.save(
                where,
                first[TAG],
                (client_state or {}) if first[CLIENT_STATE] else {},
                blocking=blocking,
                exclude_frozen=exclude_frozen_parameters,
                aside=not save_latest,
            )
            self._leave_if_all_saved()
        self._saved()
        return saved

    def load(
        self,
        directory: Directory,
        tag: str | float | None = None,
        loading: Loading | None = None,
    ) -> str | None:
        """Resume from the newest whole checkpoint, of any world size, stage and wrapper.

        Args:
            directory: As given to `save`.
            tag: Load only checkpoints of this tag, or the one of this name, which the file
                `latest` has; None: the newest whole one.
            loading: What of it is loaded; None: everything.

        Returns:
            The path of the checkpoint; None if there is none yet.

        Raises:
            DamagedCheckpoint: There are checkpoints, and all of them are damaged.
            ModelMismatch: The checkpoint is of another model or optimizer. Nothing has changed,
                unless a damaged checkpoint was tried before.
            CheckpointError: A rank could not read, or no checkpoint has this tag. After this and
                after damage the state may be half loaded.
            ConfigError: A rank loads another tag or something else; nothing has changed.
            ZeroError: It is the middle of a step.
        """
        self._leave_step("load()")
        loading, name = loading or self._training.loading(), text_of(tag)
        where = place(directory)
        if self.staying is not None:
            self.staying.load(str(where), whole=name is None and loading.resumes)
        with exit_on_peer_loss(self._link):
            self._began_at = None
            # First: of other options some ranks would search the memory of the nodes, and others
            # not; and each would train with what it has loaded.
            alike.check({"tag": name, **loading.options}, self._collectives.everybodys, _LOAD)
            self._persistence.watch(self._collectives.call(_LOAD))
            path, self.client_state = self._persistence.load(where, name, loading)
        if self.staying is not None:
            on_disk = path is not None and not self._persistence.is_in_memory
            self.staying.loaded(resumed=on_disk)
        return path

    def due(
        self, every_steps: int | None = None, every_s: float | Literal["auto"] | None = None
    ) -> bool:
        """Whether to save now; the same on all ranks. Also true when this worker is to leave.

        A script that saves whenever this is true can leave at that very boundary.

        Args:
            every_steps: The number of steps between saves.
            every_s: The number of seconds between saves; "auto": from the measured cost of a save
                and the rate of failures. Without either argument the config decides.
        """
        return self._persistence.due(every_steps, every_s)

    def wait(self) -> bool:
        """Wait for the save in flight, if any.

        Returns:
            Whether the last save was published.

        Raises:
            CheckpointError: The save has failed, and nothing has raised that yet.
        """
        with exit_on_peer_loss(self._link):
            return self._persistence.last.wait()

    def keep_client_state(self, source: ClientSource | None) -> None:
        """Register a source of client state, for checkpoints that the script does not make itself.

        Those are the in-memory checkpoints (`checkpoint.ram`), and the one with which a worker
        leaves. A script that saves a `client_state` without this call has no in-memory checkpoints,
        and leaves only after its next save. Call it before the load.

        Args:
            source: Returns a `client_state`; called on every rank at the end of a step, and by a
                save without one. None: there is no client state.
        """
        self._persistence.script.client_source = source

    def close(self) -> None:
        """Finish a save in flight, and leave the agent; before destroy_process_group.

        If the last save has failed, it is made now: it waits for room on the disk for an hour, and
        for etcd as long as the agent does.

        Raises:
            CheckpointError: The last save has failed again.
            CommitRefused: It may not be published.
        """
        self.is_behind = False
        try:
            self._persistence.close()
        finally:
            self._collectives.detector.end(_CLOSE)
            # The last one to be removed closes the connection, over which saves commit: at the exit
            # of the process, too.
            if not self._persistence.last.is_owed:
                self._link.remove(self._persistence.number)

    # ---- leaving ----

    @property
    def lost(self) -> PeerLost | None:
        """How the step under way lost a peer: it has no effect, and `survive` ends it."""
        return self._link.interrupt.lost

    @property
    def leaving(self) -> bool:
        """Whether this worker has been asked to leave; equal on all ranks after each step."""
        return self._link.leaving

    def leave(self) -> None:
        """Exit the process after the checkpoint just saved, as the agent has asked.

        For loops that write more than the checkpoint; otherwise the end of a step exits.

        Raises:
            SystemExit: Always.
            ZeroError: This worker has not been asked to leave.
        """
        if not self.leaving:
            raise ZeroError("asked to leave by nobody; continue training")
        with exit_on_peer_loss(self._link):
            self._end_round()
            self._link.leave(self._persistence.saver.last_step)

    def _end_round(self) -> None:
        """Finish what the ranks do together."""
        for each in self._persistence.engines():
            with suppress(CheckpointError, CommitRefused):  # logged below
                each.close()
            each.saver.log_lost_steps(in_memory=each.ram is not None)
        # Rank 0 may host the store that the others still read the verdict from.
        self._collectives.barrier("leaving")

    def _why_not_stay(self, *, in_step: bool = False) -> str:
        """Why this process cannot go on in the next round; empty: it can, even within a step."""
        if self.staying is None:
            return "elastic.in_place is off"
        why_not = self.staying.reason_against(in_step=in_step)
        if len(self._link.clients) > 1:
            return "it has several engines"
        directory = self._persistence.script.leaves_to
        if not why_not and str(directory) != self.staying.directory:
            return "the script saves elsewhere than it loads from"
        return why_not or ("" if self._link.may_stay else "no zero-agent has started it")

    def _why_not_survive(self) -> str:
        """Why this process cannot go on if a peer is lost in this step; empty: it can."""
        if why_not := self._why_not_stay(in_step=True):
            return why_not
        if not self._persistence.is_in_memory:
            return "no checkpoint is in memory yet; see checkpoint.ram"
        if self._persistence.script.client_source is not None:
            return _CLIENT_STATE
        unsaved = self.writes.unsaved if self.writes is not None else ""
        if unsaved and self._persistence.newest_in_memory < self._training.cursor.step:
            return _UNSAVED.format(unsaved)
        assert self.staying is not None
        return _BEHIND if self.staying.lacks(self._persistence.newest_in_memory) else ""

    def _go_on(self, environ: Mapping[str, str]) -> None:
        """Found the next round's group, and go on with a session in this one's place.

        Raises:
            SystemExit: That does not go as planned; the process is started anew.
        """
        self._link.remove(self._persistence.number)
        step = self._training.cursor.step
        try:
            staying = self.staying
            assert staying is not None
            assert staying.directory is not None
            found_again(environ, staying.meets_within_s)
            left_under_way.forget()  # else the end of the process waits for them
            # It gets another link, with the round: the group is another one.
            session: Session = staying.make_again()
            # What the script has told this session alone: its client state, where it saves.
            session._persistence.script = self._persistence.script
            if session.load(staying.directory) is None:
                raise CheckpointError(f"there is no checkpoint in {staying.directory} any more")
            if staying.lacks():
                raise CheckpointError(_BEHIND)
            # The newest whole checkpoint may be older than what the script has seen: the one with
            # which it left may be damaged since.
            goes_back = session._training.cursor.step < step
            if goes_back and session._persistence.script.client_source is not None:
                raise CheckpointError(_CLIENT_STATE)
            session.staying = staying
            staying.in_step = False
            staying.loaded(resumed=True)
        except Exception as error:  # whatever it is, a new process can join the round
            _log.error(
                "this process cannot stay, and is started anew: %s: %s", type(error).__name__, error
            )
            leave_group()
            # None has a checkpoint to go on from: no peer is lost, whose cause could appear.
            gone = isinstance(error, CheckpointError)
            raise SystemExit(ExitCode.LEFT if gone else ExitCode.PEER_LOST) from error

    def _leave_if_all_saved(self) -> None:
        """After a save: leave or stay now, or at the next step, or with another engine's save."""
        if not self.leaving:
            return
        engines = self._persistence.engines()
        known = [each for each in engines if each.script.places]
        if any(each.script.saved_step != each.training.cursor.step for each in known):
            return
        if self._training.in_library_loop or len(known) < len(engines):
            # At the next step: first its loop writes its state, or other engines save at all.
            self._link.may_leave = True
            return
        if self.staying is None:
            self.leave()
        step, why_not = self._persistence.saver.last_step, self._why_not_stay()
        if not why_not and step != self._training.cursor.step:
            why_not = "its last step is not saved"
        if why_not:
            _log.info("this process is started anew: %s", why_not)
            self.leave()
        # The state is saved: wait here for the next round, and go on in it.
        with exit_on_peer_loss(self._link):
            self._end_round()
            environ = self._link.stay(step)
        self._go_on(environ)

    def _depart_if_asked(self) -> None:
        """Leave on a drain, preemption, join or stop, saving first if needed."""
        if not self.leaving:
            return
        if self._may_leave:
            self.leave()
        engines = self._persistence.engines()
        departure, reason = choose_departure(
            directory_known=any(each.script.places for each in engines),
            script_has_state=any(each.known_to_script_alone for each in engines),
            script_has_saved=any(each.script.has_saved for each in engines),
            script_asks=any(each.script.asks for each in engines),
            in_doubt=any(each.script.places and not each.script.leaves_to for each in engines),
            engines=len(engines),
        )
        if departure is not self._link.departure:  # waiting for the script may take many steps
            _log.info("asked to leave: %s, because %s", departure, reason)
        self._link.departure = departure
        if departure is Departure.SAVE_AND_LEAVE:
            directory = self._persistence.script.leaves_to
            assert directory is not None
            try:
                self._persistence.save(directory, None, {})
                self._leave_if_all_saved()
            except (CheckpointError, CommitRefused) as error:
                # The next round resumes from the checkpoint before; staying would not help.
                _log.error("leaving without a new checkpoint: %s", error)
                self.leave()
        elif departure is Departure.LEAVE:
            self.leave()


# ---- for who owns the state: a step that loses a peer ----


@contextmanager
def outlived(session: Session, *, goes_on: bool = False) -> Iterator[None]:
    """Note in `Session.lost` that a peer is lost, if this process can go on in the next round.

    What was begun within this has no effect: `survive` ends it, when the script comes back. With
    `goes_on` it runs to its end all the same, with zeros for what it does not get: a forward, which
    has to return something.

    Raises:
        SystemExit: A peer is lost, and the process cannot go on; see `exit_on_peer_loss`.
        PeerLost: A peer is lost, and there is no agent.
    """
    link = session._link
    # Within another; or the script's backward runs a forward again, and goes on behind it.
    if link.outlives or (goes_on and link.interrupt.fills):
        yield
        return
    why_not = session._why_not_survive()
    with exit_on_peer_loss(link):
        link.interrupt.fills_forward, link.interrupt.fills_backward = goes_on and not why_not, False
        link.outlives = not (goes_on or why_not)
        link.why_anew = (why_not or "it cannot go on") if session.staying is not None else ""
        try:
            yield
        except PeerLost as error:
            if not link.outlives:
                raise
            link.interrupt.lost = error
        finally:
            link.interrupt.fills_forward = link.outlives = False
        link.why_anew = ""  # not in `finally`: the exit because of a loss logs it


def fill_in(session: Session, runs: bool) -> None:
    """Have a backward that the script runs go on with zeros if it loses a peer, as a forward does.

    `runs`: whether one does. Within `outlived` this does nothing.
    """
    if session._link.outlives:
        return
    # Autograd passes on what its hooks raise: the script would see the loss.
    link, why_not = session._link, session._why_not_survive() if runs else ""
    link.interrupt.fills_backward = runs and not why_not
    told = runs and session.staying is not None
    link.why_anew = (why_not or "it cannot go on") if told else ""


def survive(session: Session) -> bool:
    """After the loss of a peer go on in the next round, after its newest checkpoint.

    Returns whether the step under way has lost one; then it has ended here.
    """
    link, lost = session._link, session.lost
    if lost is None:
        return False
    _log.warning("this process waits for the next round: %s", lost)
    link.group_lost.set()
    if session.writes is not None:  # no checkpoint gives back what a forward wrote to some buffers
        session.writes.drop(0)
    with suppress(CheckpointError, CommitRefused, PeerLost):  # what was in flight has no effect
        session._persistence.close()
    session._go_on(link.stay(session._training.cursor.step, str(lost)))
    return True


# ---- for who owns the state: the end of a step ----


def notes_of(session: Session) -> list[float]:
    """[NOTES] for all ranks: of the persistence, the hardware, and the forwards' writes."""
    hardware, writes = (
        each.note() if each is not None else 0 for each in (session.hardware, session.writes)
    )
    return [*session._persistence.notes(), hardware, writes]


def begin_micro_step(session: Session) -> None:
    """A micro-step begins, or one of its further forwards."""
    cursor = session._training.cursor
    if cursor.micro == 0:
        session._persistence.begin_step()
    # In a block that a script opens around its loop, the casts of a forward before are those of
    # older weights, and FSDP2 gets no gradients through them. Those of one micro-step are shared:
    # the gradients of several forwards meet in 16 bits, as in stock PyTorch.
    if (at := (cursor.step, cursor.micro)) != session._began_at:
        session._began_at = at
        torch.clear_autocast_cache()
    if session.staying is not None:
        session.staying.begin()


def see_forward(session: Session, module: nn.Module) -> None:
    """A forward of the script: warn once if weights change within a step of another training."""
    # One without gradients leaves no casts of weights, see `begin_micro_step`.
    if not torch.is_grad_enabled():
        torch.clear_autocast_cache()
    if not module.training or len(session._link.clients) < 2:
        return
    persistence = session._persistence
    if (other := persistence.stepped_within()) is not None:
        persistence.has_told_of_step = True
        if session._training.rank == 0:
            _log.warning("%s", _STEPPED.format(persistence.number, other))


def end_step(session: Session, notes: Sequence[Sequence[float]], progress: Progress) -> None:
    """Take the notes of all ranks, which are [world][NOTES]; the agent is told `progress`.

    Raises:
        ConfigError: See `Hardware.compare`.
    """
    persistence, link = session._persistence, session._link
    with exit_on_peer_loss(link):
        persistence.take_notes([row[:OF_PERSISTENCE] for row in notes])
        if session.hardware is not None and len({row[OF_PERSISTENCE] for row in notes}) > 1:
            group = session._collectives
            session.hardware.compare_again(group.everybodys, group.rank)
        link.progress(persistence.number, progress)
        if session.staying is not None:
            session.staying.end_step()
    session.is_behind, session._may_leave = True, link.may_leave


def come_back(session: Session, *, calls: bool = False) -> None:
    """The script comes back from what it does behind a step; the process may exit here.

    `calls`: only to save, to load or to ask.
    """
    if survive(session) or calls or not session.is_behind:
        return
    session.is_behind = False
    # Here, and not at the end of the step: behind it the script may have changed weights or
    # averages, or saved the best so far, which a restart would lack.
    with exit_on_peer_loss(session._link):
        if session.staying is not None:
            session.staying.come_back()
        session._persistence.keep_in_memory()
        session._depart_if_asked()
        if session.staying is not None:
            session.staying.end_step()
