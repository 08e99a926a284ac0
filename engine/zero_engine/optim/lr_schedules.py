"""DeepSpeed's learning-rate schedules, with DeepSpeed's values, even the odd ones.

Each is a pure function of the number of applied steps, so a checkpoint has one integer of it.
Scripts may make one by hand, with DeepSpeed's arguments.

Source: deepspeed/runtime/lr_schedules.py, of 0.19.8. LRRangeTest and OneCycle are from Smith (arXiv
1803.09820).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta

from zero_contract.errors import ConfigError, ZeroError
from zero_contract.sections import MOST, Finite, take
from zero_engine.config import SchedulerConfig
from zero_engine.config.nearest import check_params

_BETA2 = 0.99  # OneCycle sets the second beta as well, to this
_log = logging.getLogger(__name__)


class Schedule:
    """A learning-rate schedule: `rates` computes the rates of the groups, `step` sets them."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        """Applied steps, less one: -1 before the first."""
        # One that continues finds its rates in the optimizer.
        if last_batch_iteration == -1:
            self._apply()

    def rates(self, iteration: int) -> list[float]:
        """The rate of each group after `iteration` + 1 applied steps."""
        raise NotImplementedError

    def betas(self, _iteration: int) -> list[tuple[float, float]] | None:
        """The betas of each group, if the schedule sets them."""
        return None

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go one step further, or to a given one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def get_lr(self) -> list[float]:
        """The rate of each group, computed for the current iteration."""
        return self.rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The rate of each group, as the last step has set it."""
        return _own_rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The number of the last iteration, which is all of the state."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; the rates of the groups are in the optimizer's state."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _apply(self) -> None:
        betas = self.betas(self.last_batch_iteration)
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self.rates(self.last_batch_iteration), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # in place: compiled steps refer to this tensor
            else:
                group["lr"] = rate
        for group, own in zip(groups, betas or (), strict=False):
            group["betas"] = own


class LRRangeTest(Schedule):
    """Grows without end, to find the largest rate that still trains."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _whole(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """min_lr * (1 + step_rate * intervals)."""
        intervals = (iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [minimum * (1 + self.step_rate * intervals) for minimum in self.min_lr]


class OneCycle(Schedule):
    """Up and down once, the momentum the other way round; then decay."""

    def __init__(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self._min_moms = _per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self._max_moms = _per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        # As in DeepSpeed, which leaves the `momentum` of an SGD as it is.
        self._cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        self._first = float(_whole(cycle_first_step_size, "cycle_first_step_size"))
        self._second = self._first
        if cycle_second_step_size is not None:
            self._second = float(_whole(cycle_second_step_size, "cycle_second_step_size", least=0))
        self.total_size = self._first + self._second
        self.step_ratio = self._first / self.total_size
        self._first_stairs = self._second_stairs = cycle_first_stair_count
        if cycle_second_stair_count is not None:
            self._second_stairs = cycle_second_stair_count
        self._decay_size = decay_step_size
        self._decay_lr, self._decay_mom = decay_lr_rate, decay_mom_rate
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """Min + (max - min) * height in the cycle, then min / (1 + rate * intervals)."""
        if iteration < self.total_size:
            height = self._height(iteration)
            pairs = zip(self.min_lrs, self.max_lrs, strict=True)
            return [low + (high - low) * height for low, high in pairs]
        divisor = 1 + self._decay_lr * self._intervals(iteration)
        return [low / divisor for low in self.min_lrs]

    def betas(self, iteration: int) -> list[tuple[float, float]] | None:
        """The first beta falls as the rate rises."""
        if self._cycles_momentum and iteration < 0:  # so begins DeepSpeed, for one step
            return [(low, _BETA2) for low in self._min_moms]
        return self._cycled(iteration)

    def _cycled(self, iteration: int) -> list[tuple[float, float]] | None:
        if not self._cycles_momentum:
            return None
        if iteration < self.total_size:
            height = self._height(iteration)
            pairs = zip(self._min_moms, self._max_moms, strict=True)
            moms = [high - (high - low) * height for low, high in pairs]
        else:
            factor = 1 + self._decay_mom * self._intervals(iteration)
            moms = [high * factor for high in self._max_moms]
        return [(mom, _BETA2) for mom in moms]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group, computed for the current iteration; None: they do not change.

        Before the first step that is the upper momentum, although the first step has the lower one.
        """
        return self._cycled(self.last_batch_iteration)

    def _intervals(self, iteration: int) -> float:
        """The progress of the decay; 0 for ever if it has no step size."""
        return (iteration - self.total_size + 1) / self._decay_size if self._decay_size else 0.0

    def _height(self, iteration: int) -> float:
        """The height in the cycle, from 0 at its ends to 1 at the peak."""
        done = (iteration + 1) % self.total_size
        rising = done <= self._first
        stairs = self._first_stairs if rising else self._second_stairs
        if stairs > 0:
            climbed = done / self._first if rising else (self.total_size - done) / self._second
            # From whole numbers of steps, so that the peak is not missed by a rounding.
            return math.floor(round(climbed * stairs, 9)) / stairs
        position, peak = done / self.total_size, self.step_ratio
        return position / peak if rising else (position - 1) / (peak - 1)


class _Warmup(Schedule):
    """What the three warm-ups share: the fraction reached while warming up."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, steps: int, kind: str, last_batch_iteration: int
    ) -> None:
        if kind not in ("log", "linear"):
            _log.warning('scheduler warmup_type: %r is not "linear", and means "log"', kind)
            kind = "log"
        # The Trainer makes 0 of "auto" if its arguments ask for no warm-up. At least 2: it is
        # divided by, and so is its logarithm.
        self.warmup_num_steps = max(2, _whole(steps, "warmup_num_steps", least=0))
        self.warmup_type = kind
        super().__init__(optimizer, last_batch_iteration)

    def _warmed(self, iteration: int) -> float:
        if self.warmup_type == "linear":
            return iteration / self.warmup_num_steps
        # In DeepSpeed's order: a quotient would be rounded otherwise.
        return (1.0 / math.log(self.warmup_num_steps)) * math.log(iteration + 1)


class WarmupLR(_Warmup):
    """From the minimum to the maximum, and there it stays. The default warm-up is logarithmic."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            # Before the base class sets the first rates.
            warmup_max_lr = _own_rates(optimizer)
        self.min_lrs = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _per_group(optimizer, warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """Min + (max - min) * fraction; the minimum before the first step."""
        if iteration < 0:
            return self.min_lrs
        warm = iteration < self.warmup_num_steps
        fraction = self._warmed(iteration) if warm else self._afterwards(iteration)
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * fraction for low, high in pairs]

    def _afterwards(self, _iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR; then in a straight line to the minimum at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_steps = _whole(total_num_steps, "total_num_steps")
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _afterwards(self, iteration: int) -> float:
        left = self.total_steps - iteration
        return max(0.0, left / max(1.0, self.total_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Ratios of each group's own rate: a warm-up, then a cosine down to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_steps = _whole(total_num_steps, "total_num_steps")
        self._warmup_minimum, self._minimum = warmup_min_ratio, cos_min_ratio
        # Before the base class sets the first rates: these are what the ratios are of.
        self._own_rates = _own_rates(optimizer)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """The groups' rates times the ratio; 0 before the first step."""
        ratio = self._ratio(iteration)
        return [rate * ratio for rate in self._own_rates]

    def get_lr_ratio(self) -> float:
        """The ratio of each group's own rate, computed for the current iteration."""
        return self._ratio(self.last_batch_iteration)

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            return self._warmup_minimum + self._warmed(iteration) * (1 - self._warmup_minimum)
        done = iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self._minimum + (1 - self._minimum) * cosine)


BY_NAME: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def make_schedule(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> Schedule | None:
    """The schedule that a config names; None if it names none.

    Raises:
        ConfigError: An unknown name, or params that do not fit.
    """
    if config.type is None:
        return None
    cls = BY_NAME.get(config.type)
    if cls is None:
        raise ConfigError(
            f"scheduler.type: {config.type!r} is unknown; known: {', '.join(BY_NAME)}"
        )
    params = {key: value for key, value in config.params.items() if value != "auto"}
    if config.params.get("warmup_max_lr") == "auto":
        params["warmup_max_lr"] = None  # the optimizer's own rate
    params = check_params("scheduler.params", cls, params)
    try:
        return cls(optimizer, **params)
    except (TypeError, ValueError) as error:
        # It is a ValueError, and names its key already.
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"scheduler.params of {config.type}: {error}") from error


def _per_group(
    optimizer: torch.optim.Optimizer, value: float | Sequence[float], name: str
) -> list[float]:
    groups = len(optimizer.param_groups)
    if isinstance(value, Sequence):
        if len(value) != groups:
            raise ConfigError(
                f"scheduler.params.{name}: {len(value)} values for {groups} param groups"
            )
        rates = [*value]
    else:
        rates = [value] * groups
    for rate in rates:
        take(f"scheduler.params.{name}", rate, Finite)
    return [float(rate) for rate in rates]


def _own_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _whole(value: float, name: str, least: int = 1) -> int:
    return int(take(f"scheduler.params.{name}", value, Annotated[int, Meta(ge=least, le=MOST)]))


def check_call(scheduler: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of `step` before the weights are stepped, which could not be taken back.

    Raises:
        ZeroError: `step` does not take them, or needs others.
    """
    try:
        inspect.signature(scheduler.step).bind(**kwargs)
    except TypeError as error:
        raise ZeroError(
            f"{type(scheduler).__name__}.step(): {error}: give it to engine.step(lr_kwargs={{}}), "
            "or step the scheduler in the script, and do not give it to initialize()"
        ) from error
