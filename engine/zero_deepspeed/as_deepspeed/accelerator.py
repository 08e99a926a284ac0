"""Other loops of accelerate under an agent: what would go wrong in silence ends with a sentence.

Such a loop saves and loads itself. In a restarted round it may begin again although there is a
checkpoint, or go on with a batch that has changed with the number of ranks. Neither can be put
right from here, so both are refused. The Trainer's loop is guided by `trainer`, and exempt.

Imported when accelerate.accelerator has been; `resuming` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from accelerate.accelerator import Accelerator

from zero_comm.agent_link import committed_step, current_round
from zero_deepspeed.as_deepspeed.resuming import check_loop

_exempt: list[str] = []
"""Who guides the loops of this process, if somebody does."""


def install() -> None:
    """Put it in place; once."""
    original: Callable[..., Any] = Accelerator.backward

    @wraps(original)
    def backward(self: Any, loss: Any, **named: Any) -> Any:
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)
        if wrapped is not None and not _exempt and not getattr(self, "_zero_checked", False):
            self._zero_checked = True
            engine = wrapped.engine
            check_loop(current_round(), committed_step(), engine.loaded_samples, _samples(engine))
        return original(self, loss, **named)

    setattr(Accelerator, backward.__name__, backward)


def exempt(guide: str) -> None:
    """From now on somebody else sees to the loops of this process."""
    _exempt.append(guide)


def _samples(engine: Any) -> int:
    return int(engine.train_batch_size())
