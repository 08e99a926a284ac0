"""Other loops of accelerate under an agent: a silent mistake becomes an error.

Such a loop saves and loads by itself. In a restarted round it may begin again although there is a
checkpoint, or resume with a batch that has changed with the number of ranks. Neither can be
corrected from here, so both are refused. What makes the bits of such a loop depend on the number of
ranks is a warning.

Imported after accelerate.accelerator; `resuming` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from accelerate.accelerator import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import parse_flag_from_env
from torch.utils.data import RandomSampler

from zero_comm.worker.agent_link import committed_step, current_round
from zero_deepspeed.as_deepspeed.resuming import (
    OWN_EPOCH,
    OWN_ORDER,
    OWN_SCHEDULE,
    check_loop,
    engine_missing,
)
from zero_libraries.accelerate import check_processes

_log = logging.getLogger(__name__)
_exempt: list[str] = []
"""The guides of the loops of this process, if there are any."""


def install() -> None:
    """Wrap the constructor of `Accelerator` and its `backward`, once."""
    original: Callable[..., Any] = Accelerator.backward
    constructor: Callable[..., None] = Accelerator.__init__
    prepare: Callable[..., Any] = Accelerator.prepare

    @wraps(constructor)
    def init(self: Any, *args: Any, **named: Any) -> None:
        constructor(self, *args, **named)
        made = _has_engine(self)
        if made:
            check_processes(self.num_processes)
        asked = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")  # accelerate sets it for a plugin
        _warn(self, engine_missing(asked=asked, made=made))

    @wraps(prepare)
    def prepared(self: Any, *args: Any, **named: Any) -> Any:
        shuffles = any(isinstance(getattr(one, "sampler", None), RandomSampler) for one in args)
        result = prepare(self, *args, **named)
        if _has_engine(self) and not _exempt:
            if shuffles and not self.use_seedable_sampler:
                _warn(self, OWN_ORDER)
            made = result if isinstance(result, tuple) else (result,)
            if any(
                isinstance(one, AcceleratedScheduler)
                and (one.step_with_optimizer and not one.split_batches)
                for one in made
            ):
                _warn(self, OWN_SCHEDULE)
        return result

    @wraps(original)
    def backward(self: Any, loss: Any, **named: Any) -> Any:
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)
        if wrapped is not None and not _exempt and not getattr(self, "_zero_checked", False):
            self._zero_checked = True  # at its first backward: by then a script has loaded
            engine = wrapped.engine
            samples = int(engine.train_batch_size())
            check_loop(current_round(), committed_step(), engine.loaded_samples, samples)
            if engine.loaded_samples is not None:
                _warn(self, _epoch_of_its_own(self, engine.global_samples))
        return original(self, loss, **named)

    setattr(Accelerator, original.__name__, backward)
    setattr(Accelerator, prepare.__name__, prepared)
    setattr(Accelerator, constructor.__name__, init)


def _has_engine(accelerator: Any) -> bool:
    return getattr(accelerator.state, "deepspeed_plugin", None) is not None


def _epoch_of_its_own(accelerator: Any, consumed: int) -> str:
    """A warning that the loader in use begins with epoch 0, which is over; empty if it does not."""
    loader = accelerator.gradient_state.active_dataloader
    if getattr(loader, "iteration", None) != 0 or not hasattr(loader.dataset, "__len__"):
        return ""
    size = len(loader.dataset)
    return OWN_EPOCH.format(consumed=consumed, size=size) if consumed >= size else ""


def _warn(accelerator: Any, text: str) -> None:
    if text and accelerator.is_main_process:
        _log.warning("%s", text)


def exempt(guide: str) -> None:
    """Exempt the loops of this process, which `guide` guides from now on."""
    _exempt.append(guide)
