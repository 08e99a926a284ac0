"""Other loops of accelerate under an agent: a silent mistake becomes an error.

Such a loop saves and loads by itself. In a restarted round it may begin again although there is a
checkpoint, or resume with a batch that has changed with the number of ranks. Neither can be
corrected from here, so both are refused. The Trainer's loop is exempt: `trainer` guides it.
An Accelerator that counts fewer processes than there are is refused as well.

Imported after accelerate.accelerator; `resuming` decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from accelerate.accelerator import Accelerator

from zero_comm.agent_link import committed_step, current_round
from zero_deepspeed.as_deepspeed.resuming import check_loop, check_processes

_exempt: list[str] = []
"""The guides of the loops of this process, if there are any."""


def install() -> None:
    """Wrap the constructor of `Accelerator` and its `backward`, once."""
    original: Callable[..., Any] = Accelerator.backward
    constructor: Callable[..., None] = Accelerator.__init__

    @wraps(constructor)
    def init(self: Any, *args: Any, **named: Any) -> None:
        constructor(self, *args, **named)
        if getattr(self.state, "deepspeed_plugin", None) is not None:
            check_processes(self.num_processes, int(os.environ.get("WORLD_SIZE", "1")))

    @wraps(original)
    def backward(self: Any, loss: Any, **named: Any) -> Any:
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)
        if wrapped is not None and not _exempt and not getattr(self, "_zero_checked", False):
            self._zero_checked = True
            engine = wrapped.engine
            samples = int(engine.train_batch_size())
            check_loop(current_round(), committed_step(), engine.loaded_samples, samples)
        return original(self, loss, **named)

    setattr(Accelerator, backward.__name__, backward)
    setattr(Accelerator, init.__name__, init)


def exempt(guide: str) -> None:
    """Exempt the loops of this process, which `guide` guides from now on."""
    _exempt.append(guide)
