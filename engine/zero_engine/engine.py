"""The engine: forward, backward, step, save, load, with DeepSpeed's names.

Owns the order of things within a step. Must always hold: position, step count and scheduler
move together, at the end of a step and nowhere else; what every rank must decide alike (skip,
leave) is decided from numbers that every rank has; the mean loss, the norm and the weights of a
step are the same at every world size and stage.

Made by `assembly.initialize`; scripts call it. An attribute that the engine does not have is
looked up in the module.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_engine.config import Config
from zero_engine.data import Ticket
from zero_engine.distributed import local_rank
from zero_engine.elastic import AgentLink, peers_may_vanish
from zero_engine.engine_state import EngineState
from zero_engine.errors import EngineError
from zero_engine.global_batch import Leaf, StepPlan, mix
from zero_engine.parts import Core, Run
from zero_engine.persistence import Persistence
from zero_engine.weights import module_state_dict, weight_hash
from zero_engine.zero_optimizer import StepOutcome

_log = logging.getLogger(__name__)


class Engine:
    """Trains a module; one per process and module.

    Raises (`__call__`, `backward`, `step`, `save_checkpoint`, `load_checkpoint`, `weight_hash`):
        PeerLost: A peer is gone. Under an agent the process ends instead, as it asks.
    """

    def __init__(
        self, config: Config, core: Core, run: Run, scheduler: Any, link: AgentLink
    ) -> None:
        self.module = core.module
        self.optimizer = core.zero.optimizer if core.zero is not None else None
        self.lr_scheduler = scheduler
        self.training_dataloader = run.loader
        self.device = core.device
        self.local_rank = local_rank()
        self.global_rank = run.rank
        self.world_size = run.world
        self.micro_steps = 0
        """Micro-steps that this process has run."""
        self.mean_loss = float("nan")
        """The mean loss of the last global batch; equal on all ranks."""
        self._config = config
        self._core = core
        self._run = run
        self._link = link
        self._last: StepOutcome | None = None
        self._losses: list[Tensor] = []
        self._awaits_step = False
        self._warned = False
        state = EngineState(
            module=core.module,
            units=core.units,
            zero=core.zero,
            collectives=core.collectives,
            scheduler=scheduler,
            aliases=core.aliases,
        )
        self._persistence = Persistence(config, core, run, state, link)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not set yet: looking it up in itself would never end
            raise AttributeError(name)
        return getattr(self.module, name)

    # ---- a step ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. In training, from this leaf's own random state."""
        with peers_may_vanish(self._link):
            if self.module.training:
                leaf = self._run.leaf()
                torch.manual_seed(mix(self._config.seed, self._run.cursor.step, leaf.index))
            return self.module(*args, **kwargs)

    forward = __call__

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute and reduce the gradients of one micro-step.

        Args:
            loss: The mean loss of this micro-batch, a scalar.
            retain_graph: As for Tensor.backward.
            scale_wrt_gas: Weight the loss by the micro-batch's share of the global batch; False
                if the script has done so.

        Returns:
            The loss as it was differentiated.
        """
        core, run = self._core, self._run
        if core.reducer is None:
            raise EngineError("backward(): nothing is trained; give initialize() an optimizer")
        if self._awaits_step:
            raise EngineError("backward() twice in one micro-step; call engine.step() after each")
        plan, leaf = run.plan(), run.leaf()
        share = loss * plan.weight(leaf) if scale_wrt_gas else loss
        with peers_may_vanish(self._link):
            core.coordinator.begin_backward()
            core.reducer.begin(plan.live(run.cursor.micro, run.world))
            share.backward(retain_graph=retain_graph)
            core.reducer.finish()
            core.coordinator.end_backward()
        self._losses.append(share.detach().float())
        self._note_samples(leaf)
        self._awaits_step = True
        return share

    def step(self) -> None:
        """End a micro-step; at the boundary, the step: update weights, scheduler and position.

        If this worker has been asked to leave, the process may end here with a fresh checkpoint.
        """
        if not self._awaits_step:
            raise EngineError("step() without backward(); call engine.backward(loss) first")
        at_boundary = self.is_gradient_accumulation_boundary()
        self._awaits_step = False
        self.micro_steps += 1
        if not at_boundary:
            self._run.cursor.micro += 1
            return
        with peers_may_vanish(self._link):
            self._end_step()
            self._persistence.depart_if_asked()

    def _end_step(self) -> None:
        assert self._core.zero is not None
        plan, cursor = self._run.plan(), self._run.cursor
        outcome = self._core.zero.step(self._notes())
        self._losses.clear()
        self._last = outcome
        self.mean_loss = _in_leaf_order(outcome.notes[:, 1:], plan)
        if outcome.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        cursor.step, cursor.samples, cursor.micro = cursor.step + 1, plan.position + plan.samples, 0
        if not outcome.applied:
            self._report_skip(outcome)
        if self._run.ledger is not None:
            self._run.ledger.end_step(cursor.step)
        self._persistence.leaving |= bool(outcome.notes[:, 0].any())
        self._link.progress(cursor.step, cursor.samples, self.mean_loss)
        self._print_step(outcome)

    def _notes(self) -> Tensor:
        """[1 + micro-steps]: whether to leave, then the weighted loss of each micro-step."""
        asked = torch.tensor(float(self._link.leave_asked), device=self.device)
        return torch.stack([asked, *self._losses])

    def _report_skip(self, outcome: StepOutcome) -> None:
        self._run.cursor.skipped += 1
        _log.warning(
            "step %d skipped: the gradient norm is %s; %d skipped so far",
            self._run.cursor.step,
            outcome.norm,
            self._run.cursor.skipped,
        )

    def _print_step(self, outcome: StepOutcome) -> None:
        every, step = self._config.steps_per_print, self._run.cursor.step
        if every and self.global_rank == 0 and step % every == 0:
            rates = ", ".join(f"{rate:g}" for rate in self.get_lr())
            _log.info(
                "step %d: loss %.6g, norm %.4g, lr %s", step, self.mean_loss, outcome.norm, rates
            )

    def _note_samples(self, leaf: Leaf) -> None:
        """Write the samples that this micro-step really consumed into the ledger."""
        loader, cursor = self._run.loader, self._run.cursor
        ticket = loader.last if loader is not None else None
        if ticket is not None and (ticket.step, ticket.micro) != (cursor.step, cursor.micro):
            self._warn_of_stale_batch(ticket)
        if self._run.ledger is not None and not leaf.ghost:
            if ticket is None:
                raise EngineError("sample_ledger: the batch is not from the engine's own loader")
            self._run.ledger.consume(ticket.leaf, ticket.ids)

    def _warn_of_stale_batch(self, ticket: Ticket) -> None:
        if not self._warned:
            _log.warning(
                "the batch is that of step %d, micro-step %d, but the engine is at step %d, "
                "micro-step %d: samples repeat or get lost; call backward() and step() once per "
                "batch of the loader",
                ticket.step,
                ticket.micro,
                self._run.cursor.step,
                self._run.cursor.micro,
            )
        self._warned = True

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        client_sd: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save at this step's boundary; every rank calls it.

        Args:
            save_dir: On storage that all ranks share.
            tag: A name; by default global_step<N>.
            client_state: The script's own JSON, given back by `load_checkpoint`.
            client_sd: The name that DeepSpeed's tutorials use for it.

        Returns:
            Whether it was published; False if this worker's round is over.

        Raises:
            CheckpointError: A rank failed, or the client state is not JSON; nothing was saved.
        """
        if self._awaits_step:
            raise EngineError("save_checkpoint() between backward() and step(); call step() first")
        with peers_may_vanish(self._link):
            return self._persistence.save(Path(save_dir), tag, client_state or client_sd or {})

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest valid checkpoint, made at any world size and stage.

        Returns:
            Its path and the client state, or (None, {}) if there is none yet.

        Raises:
            DamagedCheckpoint: There are checkpoints, and none is whole.
            ModelMismatch: It is another model's.
        """
        with peers_may_vanish(self._link):
            return self._persistence.load(Path(load_dir), tag)

    def checkpoint_due(self, every_steps: int) -> bool:
        """Whether to save now: every so many steps, and when this worker is asked to leave.

        A script that saves when told so leaves at that very boundary.
        """
        return self._persistence.due(every_steps)

    def weight_hash(self) -> str:
        """SHA-256 of the weights: the same at every world size and stage. Every rank calls it."""
        with peers_may_vanish(self._link):
            return weight_hash(self._core.units)

    def module_state_dict(self) -> dict[str, Tensor]:
        """The module's whole state_dict on the CPU, at any stage. Every rank calls it."""
        with peers_may_vanish(self._link):
            core = self._core
            return module_state_dict(core.module, core.units, core.aliases)

    def destroy(self) -> None:
        """Close the ledger and the connection to the agent."""
        if self._run.ledger is not None:
            self._run.ledger.close()
        self._link.close()

    # ---- DeepSpeed's accessors ----

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training or evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode."""
        return self.train(False)

    @property
    def global_steps(self) -> int:
        """Optimizer steps since the run began, skipped ones included."""
        return self._run.cursor.step

    @property
    def global_samples(self) -> int:
        """Samples consumed by those steps."""
        return self._run.cursor.samples

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because the gradient norm was not finite."""
        return self._run.cursor.skipped

    def train_batch_size(self) -> int:
        """Samples per full step; the same at every world size."""
        return self._run.batch.samples

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per leaf."""
        return self._run.batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of a full step at this world size."""
        return -(-self._run.batch.leaves // self.world_size)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-step under way is the last of its step."""
        return self._run.cursor.micro + 1 == self._run.plan().micro_steps(self.world_size)

    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights."""
        return self._last is not None and self._last.applied

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [float(group["lr"]) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping; None before the first step."""
        return self._last.norm if self._last is not None else None

    def zero_optimization_stage(self) -> int:
        """0, 1, 2 or 3."""
        return self._core.stage.number

    def zero_grad(self) -> None:
        """Nothing to do: gradients are cleared by `step`. Here for scripts that call it."""


def _in_leaf_order(losses: Tensor, plan: StepPlan) -> float:
    """The sum of [world, micro-steps] weighted losses, ghosts left out, in leaf order."""
    return sum(losses.t().flatten()[: plan.leaves].double().tolist())
