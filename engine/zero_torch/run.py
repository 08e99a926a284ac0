"""A training loop of the script's own, protected: `protect` returns its `Run`.

Owns the position in a step. Must always hold: a batch of `run.loader` is one micro-batch, and
begins when it is drawn; optimizer, scheduler and loss scaler act at the last micro-batch of a step
and do nothing at the others, whoever calls them; a step counts when the optimizer has acted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from zero_comm.agent_link import exit_on_peer_loss
from zero_comm.collectives import Collectives
from zero_comm.cpu.malloc import keep_freed_memory
from zero_comm.distributed import init_distributed
from zero_comm.node_reduction import apart
from zero_comm.reduction_plan import DEFAULT_BLOCK
from zero_comm.waiting import transport_failures
from zero_contract.errors import ConfigError, ZeroError
from zero_data.elastic_loader import seed_torch
from zero_data.global_batch import BatchShape, StepPlan, mix, plan_step
from zero_data.ledger import Ledger, round_of_start
from zero_torch import hooks_ddp, hooks_fsdp2, hooks_plain, settings
from zero_torch.checkpoints import Checkpoints, makes_state, replace
from zero_torch.gradient_norm import Norm, ShardNorm, WholeNorm, clip
from zero_torch.loader import MicroBatches, in_order
from zero_torch.local_step import local_tensors
from zero_torch.optimizers import (
    check_members,
    check_scheduler,
    check_step,
    step_without_fusion,
    takes_no_metric,
    unwrapped,
)
from zero_torch.ordered_gradients import MicroStep, OrderedGradients
from zero_torch.training import Ordered
from zero_torch.wrapped import (
    Wrapped,
    Wrapper,
    check_gradients,
    check_savable,
    held_bounds,
    local,
    reals_in,
    recognize,
    rows_of,
)

_log = logging.getLogger(__name__)
_FUSED = (
    "{}(fused=True) steps with foreach=True instead: a fused kernel rounds the end of a shard "
    "differently, and the world size decides where shards end"
)


@overload
def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    microbatches: int,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run: ...


@overload
def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Checkpoints: ...


def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any] | None = None,
    *,
    microbatches: int | None = None,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run | Checkpoints:
    """Give a training with stock PyTorch the same bits at every world size. Collective.

    Without a loader it gets checkpoints and recovery alone: data, gradients and steps stay the
    script's own, and the bits depend on the world size.

    Args:
        model: Wrapped in DistributedDataParallel, or sharded by fully_shard; in one process also
            neither. torch.compile may be applied to it, or to parts of it.
        optimizer: Of the model's parameters.
        loader: Its batches are micro-batches. Every rank gives the same dataset.
        microbatches: The micro-batches of a global batch, over all ranks.
        scheduler: `run.step()` steps it, once for each step of the optimizer; but not one that
            needs a metric, such as ReduceLROnPlateau, which the script steps itself.
        scaler: `run.backward()` and `run.step()` scale the loss with it.
        stateful: Further objects by name, with state_dict() and load_state_dict(): every
            checkpoint has their states, and `run.load` restores them. A state must be equal on all
            ranks, but for DTensors.
        config: The sections "elastic" and "checkpoint", see `settings`.

    Raises:
        ConfigError: The model, optimizer or loader cannot be protected; says why.
        PeerLost: A peer is lost.
    """
    if (loader is None) != (microbatches is None):
        absent = "loader" if loader is None else "microbatches"
        raise ConfigError(
            f"protect() got no {absent}: give loader and microbatches, or neither of them for "
            "checkpoints alone"
        )
    if microbatches is not None and microbatches < 1:
        raise ConfigError(f"microbatches={microbatches}: a global batch has at least one")
    chosen = settings.read(config or {})
    init_distributed()
    wrapped = recognize(model)
    optimizer = unwrapped(optimizer)
    check_savable(wrapped)
    check_members(optimizer, wrapped.trained())
    check_scheduler(scheduler)
    if loader is not None:
        check_gradients(wrapped, dist.get_world_size())
        check_step(optimizer, sharded=wrapped.wrapper is Wrapper.FSDP2)
        if step_without_fusion(optimizer) and dist.get_rank() == 0:
            _log.warning("%s", _FUSED.format(type(optimizer).__name__))
    made: Run | Checkpoints
    options = {
        "scheduler": scheduler,
        "scaler": scaler,
        "stateful": dict(stateful or {}),
        "chosen": chosen,
    }
    if loader is None or microbatches is None:
        made = Checkpoints(wrapped, optimizer, **options)
    else:
        made = Run(wrapped, optimizer, loader, microbatches=microbatches, **options)
    made.start()
    return made


class Run(Checkpoints):
    """One training, with its data and gradients in order.

    Attributes:
        loader: The script's loader, in order: iterate over it for the rest of the epoch.
    """

    _in_order = True

    def __init__(
        self,
        wrapped: Wrapped,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        *,
        microbatches: int,
        scheduler: Any,
        scaler: torch.amp.GradScaler | None,
        stateful: Mapping[str, Stateful],
        chosen: settings.Settings,
    ) -> None:
        """Attach to the model; `protect` checks the arguments, and calls `start`."""
        super().__init__(
            wrapped,
            optimizer,
            scheduler=scheduler,
            scaler=scaler,
            stateful=stateful,
            chosen=chosen,
        )
        options = chosen.elastic
        self._batch = BatchShape(microbatches=microbatches, micro_batch=loader.batch_size or 1)
        place = self._rank, self._world, options.seed
        batches = in_order(loader, self._batch, self._cursor, *place)
        self.loader = MicroBatches(batches, self._begin_micro_step, self._end_micro_step)
        self._parameters = wrapped.parameters()
        self._gradients = OrderedGradients(
            self._group_of_gradients(),
            self._parameters,
            options.reduction_block or DEFAULT_BLOCK,
            self._apart(),
            guard=partial(exit_on_peer_loss, self._link),
        )
        self._gradients.changes.append(self._train_others)
        self._norm: Norm | None = None  # a script need not clip
        self._skipped = False
        """Whether this step left the weights as they were: the gradients were not finite."""
        self._steps_scheduler = scheduler is not None and takes_no_metric(scheduler)
        self._rates: list[float] = []
        """The learning rates with which the step has begun."""
        self._read_rates: dict[int, tuple[Tensor, int | None, float]] = {}
        """By `id`, of learning rates that are tensors: the tensor, its version, its value."""
        self._ledger: Ledger | None = None
        if directory := options.sample_ledger:
            start = round_of_start(directory, self._link.round, self._collectives.everybodys)
            self._ledger = Ledger(directory, round=start, rank=self._rank, world=self._world)

    def start(self) -> None:
        """As `Checkpoints.start`."""
        options = self._chosen.elastic
        self._persist(
            Ordered(
                gradients=self._gradients,
                batch=self._batch,
                dataset_size=self.loader.batches.dataset_size,
                seed=options.seed,
                configured_block=options.reduction_block,
            )
        )
        self._attach()
        self._hold()
        if self._device.type == "cpu":
            keep_freed_memory()

    def _group_of_gradients(self) -> Collectives:
        """The group in which gradients travel. Collective.

        Exchanges of one communicator of NCCL follow each other, so FSDP2's gathers of weights have
        the default group to themselves.
        """
        group, fsdp = self._collectives, self._wrapped.wrapper is Wrapper.FSDP2
        if fsdp and self._world > 1 and not group.any_order(self._device):
            return apart(group, self._device, self._link.interrupt)
        return group

    def _apart(self) -> Collectives | None:
        """The group in which sums begin inside of nodes, if that saves anything. Collective."""
        group = self._collectives
        topology = group.find_nodes(os.environ)
        if any(each.dtype == torch.float64 for each in self._parameters.values()):
            return None  # nodes give their partial sums on in fp32
        if not (topology.divides and group.any_order(self._device)):
            return None
        # FSDP2 says which rank has which shard.
        fixed = range(self._world) if self._wrapped.wrapper is Wrapper.FSDP2 else None
        group.lay_out(topology, fixed)
        return apart(group, self._device, self._link.interrupt)

    def _attach(self) -> None:
        called = self._wrapped.called
        if called._compiled_call_impl is None:  # else the hook would be compiled
            called.register_forward_hook(self._end_forward)
        match self._wrapped.wrapper:
            case Wrapper.FSDP2:
                module, guard = self._wrapped.module, partial(exit_on_peer_loss, self._link)
                hooks_fsdp2.attach(module, self._gradients, self._collectives, guard)
            case Wrapper.DDP:
                ddp = cast(DistributedDataParallel, self._wrapped.model)
                hooks_ddp.attach(ddp, self._parameters, self._gradients, self._collectives)
            case Wrapper.PLAIN:
                hooks_plain.attach(self._gradients)

    def _end_forward(self, _: nn.Module, __: object, output: object) -> None:
        """See the begin of a backward that the script calls itself."""
        for each in tree_leaves(output) if self._gradients.now is not None else ():
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._gradients.announce)

    def _train_others(self) -> None:
        """Layers were frozen or unfrozen since the last step."""
        check_members(self._optimizer, self._gradients.trained)
        check_gradients(self._wrapped, self._world)
        self._norm = None

    def _make_norm(self) -> Norm:
        trained, device = self._gradients.trained.values(), self._device
        if self._wrapped.wrapper is not Wrapper.FSDP2:
            lengths = [p.numel() * reals_in(p) for p in trained]
            return WholeNorm(lengths, self._collectives, device)
        bounds = [held_bounds(p, self._world) for p in trained]
        return ShardNorm(bounds, self._collectives, device)

    # ---- a step ----

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
        loss = (loss if loss.dtype == torch.float64 else loss.float()) * now.weight
        if now.number * self._world + self._rank < self._plan().microbatches:
            self._losses.append(loss.detach())  # read at the end of the step: a device is busy
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._gradients.loss_is_weighted = True
        if loss.requires_grad:  # else backward() raises why not
            loss.register_hook(self._gradients.announce)
        try:
            with exit_on_peer_loss(self._link), transport_failures("the backward", of_script=True):
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
                if self._steps_scheduler and not self._skipped:
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
        gradients = [p.grad for p in self._gradients.trained.values()]
        flat = [rows_of(g) for g in gradients if g is not None]
        if len(flat) < len(gradients):
            raise ZeroError("a parameter has no gradient; clip them between backward and step")
        with exit_on_peer_loss(self._link):
            self._norm = self._norm or self._make_norm()
            self.grad_norm, self._everybodys = self._norm(flat, self._notes())
        clip([local(g) for g in gradients if g is not None], self.grad_norm, max_norm)
        return self.grad_norm

    def ledger(self) -> Ledger | None:
        """This rank's record of consumed samples; None without elastic.sample_ledger.

        `zero_data.read_ledger` reads the records of all ranks, and `zero_data.verify` checks them.
        """
        return self._ledger

    def close(self) -> None:
        """Finish a save in the background, and leave the agent; before destroy_process_group."""
        super().close()
        if self._ledger is not None:
            self._ledger.close()

    def _between_steps(self) -> bool:
        if self._gradients.now is not None and not self._in_step:
            return False
        self._end_micro_step()
        return not self._cursor.micro

    def _leave_step(self, what: str) -> None:
        if not self._between_steps():
            raise ZeroError(
                f"{what} in the middle of a step: its gradients cannot be saved; call it after "
                "the step() of the last micro-batch, which returns True"
            )

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
        groups = self._optimizer.param_groups
        rates = [self._rate(group["lr"]) for group in groups if "lr" in group]
        if micro == 0:
            self._optimizer.zero_grad()
            self._rates = rates
        elif rates != self._rates:
            raise ZeroError(
                "the learning rate has changed in the middle of a step, as a scheduler does that "
                "is stepped for every batch: give it to zero_torch.protect(scheduler=...), which "
                "holds it until the last micro-batch of a step"
            )
        self._in_step = False
        ticket = self.loader.batches.last
        if self._ledger is not None and ticket is not None and not microbatch.padding:
            self._ledger.consume(microbatch.index, ticket.ids)
        self._gradients.begin(
            MicroStep(
                number=micro,
                live=plan.live(micro, world),
                last=micro == plan.micro_steps(world) - 1,
                weight=plan.weight(microbatch),
            )
        )
        seed_torch(mix(self._chosen.elastic.seed, cursor.step, microbatch.index))

    def _rate(self, rate: float | Tensor) -> float:
        """A learning rate. A tensor is read when it has changed: the host waits for its device."""
        if not isinstance(rate, Tensor):
            return float(rate)
        _, version, known = self._read_rates.get(id(rate), (rate, None, 0.0))
        if version != rate._version:
            known = float(rate)
            self._read_rates[id(rate)] = rate, rate._version, known
        return known

    def _end_micro_step(self) -> None:
        """End the micro-step, if there is one.

        Raises:
            ZeroError: It was the last one of its step, and the optimizer was not called.
        """
        now = self._gradients.now
        if now is None:
            return
        if now.last and not self._in_step:
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

    def _count_step(self, *, skipped: bool) -> None:
        plan, cursor = self._plan(), self._cursor
        self._in_step, self._skipped = True, skipped
        cursor.step += 1
        cursor.samples += plan.samples
        cursor.skipped += skipped
        cursor.micro = 0
        if self._ledger is not None:
            self._ledger.end_step(cursor.step)

    # ---- calls that are held ----

    def _hold(self) -> None:
        """Let calls of the script do nothing until the last micro-batch of a step."""
        replace(self._optimizer, "step", self._optimizer_step)
        if self.scheduler is not None:
            _derive(self.scheduler, "step", self._if_last)
        if self.scaler is not None:
            replace(self.scaler, "unscale_", self._if_last)
            replace(self.scaler, "step", self._scaler_step)
            replace(self.scaler, "update", self._if_last)

    def _if_last(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = self._gradients.now  # None after run.step(), which ends the micro-step
        acts = not self._cursor.micro if now is None else now.last
        return call(*args, **kwargs) if acts else None

    def _optimizer_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if makes_state(self._optimizer):
            return call(*args, **kwargs)
        if any(each is not None for each in (*args, *kwargs.values())):
            raise ZeroError(
                "optimizer.step(closure) computes the loss again, which cannot be held until the "
                "last micro-batch of a step; call backward() first, and optimizer.step() without "
                "a closure"
            )
        if not self._may_act():
            return None
        with local_tensors(self._optimizer):
            result = call()
        self._count_step(skipped=False)
        return result

    def _scaler_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._may_act():
            return None
        result = call(*args, **kwargs)
        if not self._in_step:  # the gradients were not finite
            self._count_step(skipped=True)
        return result

    def _may_act(self) -> bool:
        """Whether the optimizer acts now.

        Raises:
            ZeroError: There is no micro-batch, or the optimizer has acted in it.
        """
        last = self._now().last
        if last and self._in_step:
            raise ZeroError("the optimizer was stepped twice in one step; step it once")
        if last:
            self._take_back()
        return last


def _derive(owner: Any, name: str, held: Callable[..., Any]) -> None:
    """The same through a derived class: the state_dict of a scheduler has all its attributes."""
    base = type(owner)
    call = getattr(owner, name)

    @wraps(call)
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return held(call, *args, **kwargs)

    owner.__class__ = type(base.__name__, (base,), {name: method})
