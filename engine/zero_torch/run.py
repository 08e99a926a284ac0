"""A training loop of the script's own, protected: `protect` returns its `Run`.

Owns the position in a step. Must always hold: a batch of `run.loader` is one micro-batch, and
begins when it is drawn; optimizer, scheduler and loss scaler act at the last micro-batch of a step
and do nothing at the others, whoever calls them; a step counts when the optimizer has acted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from zero_checkpoint.files.place import place
from zero_checkpoint.persistence import Persistence
from zero_checkpoint.weight_hash import weight_hash
from zero_comm.agent_link import agent_link, exit_on_peer_loss
from zero_comm.collectives import Collectives
from zero_comm.cpu.malloc import keep_freed_memory
from zero_comm.distributed import init_distributed
from zero_comm.reduction_plan import DEFAULT_BLOCK
from zero_contract.errors import ConfigError, ZeroError
from zero_contract.worker import Progress
from zero_data.global_batch import BatchShape, Cursor, StepPlan, mix, plan_step
from zero_data.ledger import Ledger
from zero_torch import hooks_ddp, hooks_fsdp2, hooks_plain, settings
from zero_torch.gradient_norm import Norm, ShardNorm, WholeNorm, clip, row_bounds
from zero_torch.loader import MicroBatches, in_order
from zero_torch.ordered_gradients import MicroStep, OrderedGradients
from zero_torch.state import TrainingState
from zero_torch.training import Loading, Training
from zero_torch.wrapped import Wrapped, Wrapper, check_optimizer, local, recognize


def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    microbatches: int,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run:
    """Give a training with stock PyTorch the same bits at every world size. Collective.

    Args:
        model: Wrapped in DistributedDataParallel, or sharded by fully_shard; in one process also
            neither. torch.compile may be applied to it, or to parts of it.
        optimizer: Of the model's parameters.
        loader: Its batches are micro-batches. Every rank gives the same dataset.
        microbatches: The micro-batches of a global batch, over all ranks.
        scheduler: `run.step()` steps it, once for each step of the optimizer.
        scaler: `run.backward()` and `run.step()` scale the loss with it.
        config: The sections "elastic" and "checkpoint", see `settings`.

    Raises:
        ConfigError: The model, optimizer or loader cannot be protected; says why.
        PeerLost: A peer is lost.
    """
    if microbatches < 1:
        raise ConfigError(f"microbatches={microbatches}: a global batch has at least one")
    chosen = settings.read(config or {})
    init_distributed()
    backends = dist.get_backend_config()
    if not backends.startswith("cpu:"):
        raise ConfigError(
            f"the process group reaches no CPUs ({backends}), which the ranks vote through; begin "
            'it with torch.distributed.init_process_group("cpu:gloo,cuda:nccl")'
        )
    wrapped = recognize(model, dist.get_world_size())
    check_optimizer(optimizer, wrapped.trained(), wrapped.wrapper)
    return Run(
        wrapped,
        optimizer,
        loader,
        microbatches=microbatches,
        scheduler=scheduler,
        scaler=scaler,
        chosen=chosen,
    )


class Run:
    """One training.

    Attributes:
        loader: The script's loader, in order: iterate over it for the rest of the epoch.
        grad_norm: The norm of the gradients that were clipped last, before clipping.
        ledger: The record of consumed samples; None without elastic.sample_ledger.
        scheduler: As given to `protect`; so is `scaler`.
        client_state: The script's own state in the checkpoint that was loaded.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        *,
        microbatches: int,
        scheduler: Any,
        scaler: torch.amp.GradScaler | None,
        chosen: settings.Settings,
    ) -> None:
        """Attach to the model; `protect` checks the arguments."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self.grad_norm: float | None = None
        self.client_state: dict[str, Any] = {}
        self._checkpoint = chosen.checkpoint
        self._stepped = False
        """Whether a step has ended since the last save."""
        self._wrapped = wrapped
        self._optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self._seed = seed = chosen.elastic.seed
        self._rank, self._world = rank, world
        self._cursor = Cursor()
        self._batch = BatchShape(microbatches=microbatches, micro_batch=loader.batch_size or 1)
        batches = in_order(loader, self._batch, self._cursor, rank, world, seed)
        self.loader = MicroBatches(batches, self._begin_micro_step, self._end_micro_step)
        self._link = agent_link(rank)
        device = next(iter(wrapped.trained().values())).device
        self._collectives = Collectives(interrupt=self._link.interrupt, name="zero_torch")
        self._collectives.meet(device)
        block = chosen.elastic.reduction_block
        self._gradients = OrderedGradients(
            self._collectives,
            list(wrapped.trained().values()),
            block or DEFAULT_BLOCK,
            guard=partial(exit_on_peer_loss, self._link),
        )
        self._acted = False
        """Whether the optimizer has acted in this micro-step."""
        self._skipped = False
        """Whether it left the weights as they were, because the gradients were not finite."""
        self._rates: list[float] = []
        """The learning rates with which the step has begun."""
        self._loss = 0.0
        """Of this rank's micro-batches of the step, weighted."""
        self._everybodys: Tensor | None = None
        """The notes of all ranks, if they have come with the norm of this step."""
        self._lent: Callable[[], object] | None = None
        """To be called before the state changes."""
        self._norm = self._norm_of(device)
        directory = chosen.elastic.sample_ledger
        self.ledger = (
            Ledger(directory, round=self._link.round, rank=rank, world=world) if directory else None
        )
        self._training = Training(
            state=TrainingState(wrapped, optimizer, rank, world),
            cursor=self._cursor,
            collectives=self._collectives,
            gradients=self._gradients,
            batch=self._batch,
            dataset_size=batches.dataset_size,
            seed=seed,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            configured_block=block,
            hash_weights=self.weight_hash,
            lend_state=self._lend,
        )
        self._persistence = Persistence(chosen.checkpoint, self._training, self._link)
        self._attach()
        self._hold()
        if device.type == "cpu":
            keep_freed_memory()

    def _attach(self) -> None:
        match self._wrapped.wrapper:
            case Wrapper.FSDP2:
                hooks_fsdp2.attach(self._wrapped.module, self._gradients, self._world)
            case Wrapper.DDP:
                ddp = cast(DistributedDataParallel, self._wrapped.model)
                trained = self._wrapped.trained()
                hooks_ddp.attach(ddp, trained, self._gradients, self._collectives)
            case Wrapper.PLAIN:
                hooks_plain.attach(self._wrapped.trained(), self._gradients)

    def _norm_of(self, device: torch.device) -> Norm:
        trained = self._wrapped.trained().values()
        if self._wrapped.wrapper is not Wrapper.FSDP2:
            return WholeNorm([p.numel() for p in trained], self._collectives, device)
        bounds = [row_bounds(p.shape, self._world) for p in trained]
        return ShardNorm(bounds, self._collectives, device)

    # ---- a step ----

    @property
    def global_step(self) -> int:
        """Steps done."""
        return self._cursor.step

    @property
    def samples(self) -> int:
        """Samples consumed by the steps done."""
        return self._cursor.samples

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of this micro-batch's mean loss, with its share of the step.

        Raises:
            ZeroError: There is no micro-batch, or this is its second backward.
        """
        now = self._now()
        loss = loss.float() * now.weight
        if now.number * self._world + self._rank < self._plan().microbatches:
            self._loss += float(loss.detach())
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._gradients.loss_is_weighted = True
        try:
            with exit_on_peer_loss(self._link):
                loss.backward()
        finally:
            self._gradients.loss_is_weighted = False

    def step(self, max_norm: float | None = None) -> bool:
        """End the micro-batch; at the last one of the step, step optimizer and scheduler.

        Args:
            max_norm: The largest norm of all gradients; they are scaled down to it.

        Returns:
            Whether this was the last micro-batch of a step.
        """
        last = self._now().last
        if last:
            with exit_on_peer_loss(self._link):
                if max_norm is not None:
                    self.clip_grad_norm_(max_norm)
                if self.scaler is not None:
                    self.scaler.step(self._optimizer)
                    self.scaler.update()
                else:
                    self._optimizer.step()
                if self.scheduler is not None and not self._skipped:
                    self.scheduler.step()
        self._end_micro_step()
        return last

    def clip_grad_norm_(self, max_norm: float) -> float | None:
        """Scale all gradients down to a norm, in the place of torch.nn.utils.clip_grad_norm_.

        Returns:
            The norm before; None if this is not the last micro-batch of the step.
        """
        if not self._now().last:
            return None
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer)
        gradients = [p.grad for p in self._wrapped.trained().values()]
        flat = [local(g).reshape(-1) for g in gradients if g is not None]
        if len(flat) < len(gradients):
            raise ZeroError("a parameter has no gradient; clip them between backward and step")
        with exit_on_peer_loss(self._link):
            self.grad_norm, self._everybodys = self._norm(flat, self._notes())
        clip([local(g) for g in gradients if g is not None], self.grad_norm, max_norm)
        return self.grad_norm

    def weight_hash(self) -> str:
        """The hash of all weights, as zero_engine computes it. Collective."""
        return weight_hash(self._whole_weights())

    def _whole_weights(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self._wrapped.parameters().items():
            data = parameter.detach()
            yield name, data.full_tensor() if isinstance(data, DTensor) else data

    # ---- checkpoints ----

    def load(self, directory: str | os.PathLike[str], tag: str | None = None) -> str | None:
        """Resume from the newest checkpoint that is whole, of any world size and wrapper.

        Args:
            directory: As given to `save`: a directory that all ranks share, or a URL.
            tag: Only a checkpoint of this name.

        Returns:
            The path of the checkpoint; None if there is none yet.

        Raises:
            DamagedCheckpoint: There are checkpoints, and none is whole.
            ModelMismatch: The newest one is of another model or optimizer.
            CheckpointError: A rank could not read, or no checkpoint has this tag.
            ZeroError: It is the middle of a step.
        """
        self._leave_step("load()")
        with exit_on_peer_loss(self._link):
            path, self.client_state = self._persistence.load(
                place(directory), tag, Loading(self._training)
            )
        return path

    def save(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save after a step; if the agent has asked this worker to leave, exit afterwards.

        Args:
            directory: A directory that all ranks share, or a URL.
            tag: A name to load it by; by default global_step<N>.
            client_state: The script's own state; `load` puts it into `run.client_state`.

        Returns:
            Whether a checkpoint was saved, or is being saved in the background.

        Raises:
            CheckpointError: The save failed on some rank.
            ZeroError: It is the middle of a step.
        """
        self._leave_step("save()")
        with exit_on_peer_loss(self._link):
            return self._persistence.save(place(directory), tag, client_state or {})

    def save_if_due(
        self,
        directory: str | os.PathLike[str],
        client_state: Mapping[str, Any] | None = None,
        *,
        every_steps: int | None = None,
        every_s: float | Literal["auto"] | None = None,
    ) -> bool:
        """Save if a save is due, or if the agent has asked this worker to leave.

        Call it after each batch; between two steps it does nothing. Without an interval here or in
        the config's "checkpoint", the interval is "auto": the one that loses the least time.

        Returns:
            Whether a checkpoint was saved.
        """
        if self._gradients.now is not None and not self._acted:
            return False
        self._end_micro_step()
        options = self._checkpoint
        if every_steps is every_s is options.every_steps is options.every_s is None:
            every_s = "auto"
        if self._cursor.micro or not self._stepped:
            return False
        if not self._persistence.due(every_steps, every_s):
            return False
        self._stepped = False
        return self.save(directory, client_state=client_state)

    @property
    def leaving(self) -> bool:
        """Whether this worker has been asked to leave; equal on all ranks after each step."""
        return self._persistence.leaving

    def close(self) -> None:
        """Finish a save in the background, and leave the agent; before destroy_process_group."""
        self._persistence.close()
        if self.ledger is not None:
            self.ledger.close()
        self._link.remove(self._persistence.number)

    def _leave_step(self, what: str) -> None:
        """End a step whose optimizer has acted; refuse to do `what` in the middle of one."""
        if self._acted:
            self._end_micro_step()
        if self._gradients.now is not None or self._cursor.micro:
            raise ZeroError(
                f"{what} in the middle of a step: its gradients cannot be saved; call it after "
                "the step() of the last micro-batch, which returns True"
            )

    def _lend(self, until: Callable[[], object]) -> None:
        self._lent = until

    # ---- micro-steps ----

    def _now(self) -> MicroStep:
        if self._gradients.now is None:
            raise ZeroError(
                "there is no micro-batch: run.backward(), run.step() and clip_grad_norm_() belong "
                "to a batch of run.loader"
            )
        return self._gradients.now

    def _plan(self) -> StepPlan:
        return plan_step(self._cursor.samples, self._batch, self.loader.batches.epoch_size)

    def _begin_micro_step(self) -> None:
        self._end_micro_step()
        plan, cursor = self._plan(), self._cursor
        micro, world = cursor.micro, self._world
        microbatch = plan.microbatch(micro, self._rank, world)
        rates = [float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group]
        if micro == 0:
            self._optimizer.zero_grad()
            self._rates = rates
        elif rates != self._rates:
            raise ZeroError(
                "the learning rate has changed in the middle of a step, as a scheduler does that "
                "is stepped for every batch: give it to zero_torch.protect(scheduler=...), which "
                "holds it until the last micro-batch of a step"
            )
        self._acted = False
        ticket = self.loader.batches.last
        if self.ledger is not None and ticket is not None and not microbatch.padding:
            self.ledger.consume(microbatch.index, ticket.ids)
        self._gradients.begin(
            MicroStep(
                number=micro,
                live=plan.live(micro, world),
                last=micro == plan.micro_steps(world) - 1,
                weight=plan.weight(microbatch),
            )
        )
        torch.manual_seed(mix(self._seed, cursor.step, microbatch.index))

    def _end_micro_step(self) -> None:
        """End the micro-step, if there is one.

        Raises:
            ZeroError: It was the last one of its step, and the optimizer was not called.
        """
        now = self._gradients.now
        if now is None:
            return
        if now.last and not self._acted:
            raise ZeroError(
                f"step {self._cursor.step + 1} was not taken: call run.step(), or "
                "optimizer.step(), for every batch of run.loader; zero_torch holds it until the "
                "last micro-batch of a step"
            )
        self._gradients.end()
        if now.last:
            self._end_step()
        else:
            self._cursor.micro += 1

    def _end_step(self) -> None:
        """Tell the other ranks and the agent; save into memory, and leave, if that is due."""
        with exit_on_peer_loss(self._link):
            everybodys, self._everybodys = self._everybodys, None
            if everybodys is None:
                everybodys = self._collectives.everybodys(self._notes(), "notes")
            notes = everybodys.tolist()
            self._persistence.take_notes([row[:-1] for row in notes])
            loss, self._loss = sum(row[-1] for row in notes), 0.0
            cursor, self._stepped = self._cursor, True
            progress = Progress(
                step=cursor.step,
                samples=cursor.samples,
                loss=loss,
                gradient_norm=self.grad_norm,
                loss_scale=self.scaler.get_scale() if self.scaler is not None else None,
            )
            self._link.progress(self._persistence.number, progress)
            self._persistence.keep_in_memory()
            self._persistence.depart_if_asked()

    def _notes(self) -> Tensor:
        """What all ranks are told at the end of a step."""
        return torch.tensor([*self._persistence.notes(), self._loss], dtype=torch.float32)

    def _count_step(self, *, skipped: bool) -> None:
        plan, cursor = self._plan(), self._cursor
        self._acted, self._skipped = True, skipped
        cursor.step += 1
        cursor.samples += plan.samples
        cursor.skipped += skipped
        cursor.micro = 0
        if self.ledger is not None:
            self.ledger.end_step(cursor.step)

    # ---- calls that are held ----

    def _hold(self) -> None:
        """Let calls of the script do nothing until the last micro-batch of a step."""
        _replace(self._optimizer, "step", self._optimizer_step)
        if self.scheduler is not None:
            _derive(self.scheduler, "step", self._if_last)
        if self.scaler is not None:
            _replace(self.scaler, "unscale_", self._if_last)
            _replace(self.scaler, "step", self._scaler_step)
            _replace(self.scaler, "update", self._if_last)

    def _if_last(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = self._gradients.now
        return call(*args, **kwargs) if now is None or now.last else None

    def _optimizer_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(each is not None for each in (*args, *kwargs.values())):
            raise ZeroError(
                "optimizer.step(closure) computes the loss again, which cannot be held until the "
                "last micro-batch of a step; call backward() first, and optimizer.step() without "
                "a closure"
            )
        if not self._may_act():
            return None
        result = call()
        self._count_step(skipped=False)
        return result

    def _scaler_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._may_act():
            return None
        result = call(*args, **kwargs)
        if not self._acted:  # the gradients were not finite
            self._count_step(skipped=True)
        return result

    def _may_act(self) -> bool:
        """Whether the optimizer acts now.

        Raises:
            ZeroError: There is no micro-batch, or the optimizer has acted in it.
        """
        last = self._now().last
        if last and self._acted:
            raise ZeroError("the optimizer was stepped twice in one step; step it once")
        if last and self._lent is not None:
            until, self._lent = self._lent, None
            until()
        return last


def _replace(owner: Any, name: str, held: Callable[..., Any]) -> None:
    """Replace a method of one object; torch's schedulers need it to be a bound method."""
    call = getattr(owner, name)

    @wraps(call)
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return held(call, *args, **kwargs)

    setattr(owner, name, MethodType(method, owner))


def _derive(owner: Any, name: str, held: Callable[..., Any]) -> None:
    """The same through a derived class: the state_dict of a scheduler has all its attributes."""
    base = type(owner)
    call = getattr(owner, name)

    @wraps(call)
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return held(call, *args, **kwargs)

    owner.__class__ = type(base.__name__, (base,), {name: method})
