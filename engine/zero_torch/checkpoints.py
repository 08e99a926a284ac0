"""Checkpoints and recovery of a training whose data and gradients are the script's own.

Owns the end of a step: what all ranks tell each other there, and what follows from it. Must always
hold: a checkpoint is of a state between two steps, at the same step on all ranks. A step ends with
the next call of `save_if_due` or `save`, so with the scheduler stepped, and at the latest before
the optimizer acts again.

`protect` returns it for a script without a loader; `run.Run` adds what a loader makes possible.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from zero_checkpoint.state.weight_hash import weight_hash
from zero_comm.determinism import meet, mode_of
from zero_comm.exchange.collectives import Collectives
from zero_comm.sums.order import NATIVE
from zero_comm.worker.agent_link import agent_link, exit_on_peer_loss
from zero_contract.worker import BEFORE_FIRST_STEP, Progress
from zero_data.global_batch import Cursor, MicroBatch
from zero_step.agree import Agreement
from zero_step.checks import alike
from zero_step.phase import Move, Phase, State
from zero_step.session import NOTES, Session, come_back, end_step, notes_of
from zero_torch import settings
from zero_torch.optimizers.held_calls import replace
from zero_torch.optimizers.others import makes_state
from zero_torch.ordered_gradients import CALLS
from zero_torch.state.stateful import Statefuls
from zero_torch.state.training_state import TrainingState
from zero_torch.training import Training
from zero_torch.wrapped import Wrapped

_log = logging.getLogger(__name__)

_NOT_PROMISED = (
    "zero_torch.protect() got no loader, so it gives checkpoints and recovery alone. Not promised: "
    "the same bits at another world size or after a restart, one global batch at every world size, "
    "and each sample once; keep the position of your data in client_state"
)


class Checkpoints(Session):
    """The checkpoints of one training, and its recovery.

    Attributes:
        grad_norm: The norm of the gradients that `Run` has clipped last, before clipping.
        loss: Of the last step of a `Run`, over all ranks.
        scheduler: As given to `protect`; so is `scaler`.
    """

    _training: Training
    _in_order = False
    """Whether gradients are summed in a fixed order."""

    def __init__(
        self,
        wrapped: Wrapped,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any,
        scaler: torch.amp.GradScaler | None,
        stateful: Mapping[str, Stateful],
        chosen: settings.Settings,
        facts: Mapping[str, Any],
        cursor: Cursor | None = None,
    ) -> None:
        """Join the other ranks, which are given the same `facts`; `protect` calls `start`.

        `cursor`: the position, if the script's loader has it already.
        """
        self.grad_norm: float | None = None
        self.loss = float("nan")
        self.scheduler = scheduler
        self.scaler = scaler
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._has_stateful = bool(stateful)
        self._chosen = chosen
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._cursor = cursor or Cursor()
        link = agent_link(self._rank)
        link.note_schedule(scheduler)
        link.preparing(BEFORE_FIRST_STEP)
        collectives = Collectives(interrupt=link.interrupt, name="zero_torch")
        collectives.meet(wrapped.device)
        # Before any exchange that depends on what the ranks are given.
        alike.check({**alike.of_module(wrapped.module), **facts}, collectives.everybodys)
        self._agreement = Agreement(collectives)
        ordered = self._in_order and not chosen.elastic.is_native
        mode = mode_of(chosen.elastic.deterministic, ordered=ordered)
        self._training = Training(
            state=TrainingState(wrapped, optimizer, self._rank, self._world, Statefuls(stateful)),
            cursor=self._cursor,
            collectives=collectives,
            hardware=meet(mode, wrapped.device, collectives.everybodys, self._rank),
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            weight_hash=self.weight_hash,
        )
        super().__init__(chosen.checkpoint, self._training, collectives, link)
        self.hardware = self._training.hardware
        self._phase = Phase(CALLS)
        self._unsaved = False
        """Whether a step has ended since the last save."""
        self._losses: dict[int, Tensor | None] = {}
        """Of this rank's micro-batches of the step, weighted; on the device; None: not seen."""
        self._tells_unseen_loss = True
        self._tokens: list[float] = []
        """Of this rank's micro-batches of the step: the number of each, or NOT_GIVEN."""
        self._mean_loss = 0.0
        """Of the step, over all ranks, once their notes have come."""
        self._everybodys: Tensor | None = None
        """The notes of all ranks, if they have come already."""

    def start(self) -> None:
        """Begin: from now on the script may load, and train."""
        if self._rank == 0:
            _log.warning("%s", _NOT_PROMISED)
        replace(self._optimizer, "step", self._optimizer_step)

    # ---- what there is ----

    @property
    def global_step(self) -> int:
        """Steps done."""
        return self._cursor.step

    def weight_hash(self) -> str:
        """The hash of all weights, as zero_engine computes it. Collective."""
        if not self._wrapped.is_whole:  # no wait in torch's own exchanges can be interrupted
            self._collectives.barrier("the hash of the weights")
        return weight_hash(self._whole_weights())

    def _whole_weights(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self._wrapped.parameters().items():
            data = parameter.detach()
            yield name, data.full_tensor() if isinstance(data, DTensor) else data

    # ---- loading and saving ----

    def save_if_due(
        self,
        directory: str | os.PathLike[str],
        client_state: Mapping[str, Any] | None = None,
        *,
        every_steps: int | None = None,
        every_s: float | Literal["auto"] | None = None,
    ) -> bool:
        """Save if a save is due, or if the agent has asked this worker to leave.

        Call it after each batch; between two steps it does nothing. For the interval see `due`.

        Returns:
            Whether a checkpoint was saved.
        """
        if not self._between_steps() or not self._unsaved or not self.due(every_steps, every_s):
            return False
        self._unsaved = False
        return self.save(directory, client_state=client_state)

    def due(
        self, every_steps: int | None = None, every_s: float | Literal["auto"] | None = None
    ) -> bool:
        """Whether to save now; the same on all ranks. Also true when this worker is to leave.

        It ends a step whose optimizer has acted, and is False within one.

        Args:
            every_steps: The number of steps between saves.
            every_s: The number of seconds between saves; "auto": the one that loses the least time.
                Without either argument the config decides, and without an interval there, "auto".
        """
        options = self._chosen.checkpoint
        # Nobody has chosen an interval.
        if every_steps is every_s is options.every_steps is options.every_s is None:
            every_s = "auto"
        due = self._between_steps() and super().due(every_steps, every_s)
        if not due and not self._in_order:
            come_back(self)
        return due

    # ---- steps ----

    def _between_steps(self) -> bool:
        """End a step whose optimizer has acted. Returns whether this is between two steps."""
        if self._phase.state is State.STEPPED:
            self._end_step()
        return True

    def _saved(self) -> None:
        super()._saved()
        if not self._in_order:  # else the loop over its loader comes back
            come_back(self)

    def _leave_step(self, what: str) -> None:
        del what
        self._between_steps()

    def _end_step(self) -> None:
        """Tell the other ranks and the agent."""
        self._phase.move(Move.END)
        with exit_on_peer_loss(self._link):
            everybodys, self._everybodys = self._everybodys, None
            if everybodys is None:
                everybodys = self._agreement.reach([], self._notes()).notes
            notes, self.loss = everybodys.tolist(), self._mean_loss
            self._losses.clear()
            self._tokens.clear()
            cursor, self._unsaved = self._cursor, True
            progress = Progress(
                step=cursor.step,
                samples=cursor.samples,
                loss=self.loss if self._training.ordered is not None else None,
                gradient_norm=self.grad_norm,
                tokens=cursor.tokens,
                loss_scale=self.scaler.get_scale() if self.scaler is not None else None,
                reduction=NATIVE if self._in_order and self._chosen.elastic.is_native else "",
            )
            end_step(self, [row[:NOTES] for row in notes], progress)

    def _notes(self) -> Tensor:
        """The notes for all ranks at the end of a step.

        They are NOTES, what the loader tells, then of each micro-step the loss, and the tokens.
        """
        seen = {micro: each for micro, each in self._losses.items() if each is not None}
        # Without one of them the mean is not known.
        losses = dict.fromkeys(range(len(self._tokens)), 0.0) | dict.fromkeys(
            self._losses, math.nan
        )
        if seen:  # the host waits here, once in a step, and can be interrupted
            values = self._collectives.to_host(torch.stack([*seen.values()]), "losses").tolist()
            losses |= dict(zip(seen, values, strict=True))
        notes = [*notes_of(self), *self._of_loader(), *losses.values(), *self._tokens]
        return torch.tensor(notes, dtype=torch.float32, device="cpu")

    def _note_loss(self, microbatch: MicroBatch) -> None:
        """Take the loss of a micro-batch as it is at the end of its backward."""
        loss = self._losses.setdefault(self._cursor.micro, None)
        if microbatch.padding:  # it has no share in the mean
            del self._losses[self._cursor.micro]
        elif loss is None and self._tells_unseen_loss and self._collectives.rank == 0:
            self._tells_unseen_loss = False
            _log.info(
                "loss.backward(): this loss is not seen, so run.loss and its curve are nan; call "
                "run.backward(loss) to have them"
            )

    def _of_loader(self) -> list[int]:
        """The notes of the loader for those of the other ranks; equally many numbers on all."""
        return []

    def _optimizer_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # torch's get_state_dict steps once, to make state: that is no step of the run.
        if makes_state(self._optimizer):
            return call(*args, **kwargs)
        if self._phase.state is State.STEPPED:  # no save has ended the step before
            self._end_step()
        # What the script counts, such as the position of its data, is that of its next step.
        if not self._has_stateful and self._persistence.script.client_source is None:
            come_back(self)
        # A save in the background may still read the weights that this step is about to change.
        self._training.take_back()
        result = call(*args, **kwargs)
        self._cursor.step += 1
        self._phase.move(Move.ACT)
        return result
