"""A training loop of the script's own, protected: `protect` returns its `Run`.

Owns the position in a step. Must always hold: a batch of `run.loader` is one micro-batch, and
begins when it is drawn; optimizer, scheduler and loss scaler act at the last micro-batch of a step
and do nothing at the others, whoever calls them; a step counts when the optimizer has acted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from zero_checkpoint.weight_hash import weight_hash
from zero_comm.agent_link import agent_link, exit_on_peer_loss
from zero_comm.collectives import Collectives
from zero_comm.distributed import init_distributed
from zero_comm.reduction_plan import DEFAULT_BLOCK
from zero_contract.errors import ConfigError, ZeroError
from zero_data.global_batch import BatchShape, Cursor, StepPlan, mix, plan_step
from zero_torch import hooks_ddp, hooks_fsdp2, hooks_plain
from zero_torch.gradient_norm import ShardNorm, clip, row_bounds, whole_norm
from zero_torch.loader import MicroBatches, in_order
from zero_torch.ordered_gradients import MicroStep, OrderedGradients
from zero_torch.wrapped import Wrapped, Wrapper, check_optimizer, local, recognize

DEFAULT_SEED = 42
"""As zero_engine's."""


def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    microbatches: int,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = DEFAULT_SEED,
    reduction_block: int = DEFAULT_BLOCK,
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
        seed: The seed of the order of samples, of augmentation and of dropout.
        reduction_block: Micro-batches that are summed in a tree, a power of two; the bits of every
            sum depend on it.

    Raises:
        ConfigError: The model, optimizer or loader cannot be protected; says why.
        PeerLost: A peer is lost.
    """
    if microbatches < 1:
        raise ConfigError(f"microbatches={microbatches}: a global batch has at least one")
    if reduction_block < 1 or reduction_block & (reduction_block - 1):
        raise ConfigError(f"reduction_block={reduction_block} is no power of two; 8 is the default")
    init_distributed()
    wrapped = recognize(model, dist.get_world_size())
    check_optimizer(optimizer, wrapped.trained(), wrapped.wrapper)
    return Run(
        wrapped,
        optimizer,
        loader,
        microbatches=microbatches,
        scheduler=scheduler,
        scaler=scaler,
        seed=seed,
        reduction_block=reduction_block,
    )


class Run:
    """One training.

    Attributes:
        loader: The script's loader, in order: iterate over it for the rest of the epoch.
        grad_norm: The norm of the gradients that were clipped last, before clipping.
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
        seed: int,
        reduction_block: int,
    ) -> None:
        """Attach to the model; `protect` checks the arguments."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self.grad_norm: float | None = None
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scaler = scaler
        self._seed = seed
        self._rank, self._world = rank, world
        self._cursor = Cursor()
        self._batch = BatchShape(microbatches=microbatches, micro_batch=loader.batch_size or 1)
        batches = in_order(loader, self._batch, self._cursor, rank, world, seed)
        self.loader = MicroBatches(batches, self._begin_micro_step, self._end_micro_step)
        self._link = agent_link(rank)
        device = next(iter(wrapped.trained().values())).device
        self._collectives = Collectives(interrupt=self._link.interrupt, name="zero_torch")
        self._collectives.meet(device)
        self._gradients = OrderedGradients(self._collectives, device, reduction_block)
        self._acted = False
        """Whether the optimizer has acted in this micro-step."""
        self._norm = self._norm_of(device)
        self._attach()
        self._hold()

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

    def _norm_of(self, device: torch.device) -> Callable[[list[Tensor]], float]:
        if self._wrapped.wrapper is not Wrapper.FSDP2:
            return whole_norm
        bounds = [row_bounds(p.shape, self._world) for p in self._wrapped.trained().values()]
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
        loss = loss.float() * self._now().weight
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
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
                if self._scaler is not None:
                    self._scaler.step(self._optimizer)
                    self._scaler.update()
                else:
                    self._optimizer.step()
                if self._scheduler is not None:
                    self._scheduler.step()
        self._end_micro_step()
        return last

    def clip_grad_norm_(self, max_norm: float) -> float | None:
        """Scale all gradients down to a norm, in the place of torch.nn.utils.clip_grad_norm_.

        Returns:
            The norm before; None if this is not the last micro-batch of the step.
        """
        if not self._now().last:
            return None
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        gradients = [p.grad for p in self._wrapped.trained().values()]
        flat = [local(g).reshape(-1) for g in gradients if g is not None]
        if len(flat) < len(gradients):
            raise ZeroError("a parameter has no gradient; clip them between backward and step")
        self.grad_norm = self._norm(flat)
        clip([local(g) for g in gradients if g is not None], self.grad_norm, max_norm)
        return self.grad_norm

    def weight_hash(self) -> str:
        """The hash of all weights, as zero_engine computes it. Collective."""
        return weight_hash(self._whole_weights())

    def _whole_weights(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self._wrapped.parameters().items():
            data = parameter.detach()
            yield name, data.full_tensor() if isinstance(data, DTensor) else data

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
        if micro == 0:
            self._optimizer.zero_grad()
        self._acted = False
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
        if not now.last:
            self._cursor.micro += 1

    def _count_step(self, *, skipped: bool) -> None:
        plan, cursor = self._plan(), self._cursor
        self._acted = True
        cursor.step += 1
        cursor.samples += plan.samples
        cursor.skipped += skipped
        cursor.micro = 0

    # ---- calls that are held ----

    def _hold(self) -> None:
        """Let calls of the script do nothing until the last micro-batch of a step."""
        _replace(self._optimizer, "step", self._optimizer_step)
        if self._scheduler is not None:
            _replace(self._scheduler, "step", self._if_last)
        if self._scaler is not None:
            _replace(self._scaler, "unscale_", self._if_last)
            _replace(self._scaler, "step", self._scaler_step)
            _replace(self._scaler, "update", self._if_last)

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
        return last


def _replace(owner: Any, name: str, held: Callable[..., Any]) -> None:
    """Replace a method of one object; torch's schedulers need it to be a bound method."""
    call = getattr(owner, name)

    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return held(call, *args, **kwargs)

    setattr(owner, name, MethodType(method, owner))
