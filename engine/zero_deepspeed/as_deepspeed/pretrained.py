"""`save_pretrained` of transformers on a rank that does not write, with a model that is sharded.

Imported after transformers.modeling_utils.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers.modeling_utils import PreTrainedModel


def install() -> None:
    """Wrap `PreTrainedModel.save_pretrained`, once."""
    original: Callable[..., None] = PreTrainedModel.save_pretrained

    @wraps(original)
    def save_pretrained(
        self: Any,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *more: Any,
        **named: Any,
    ) -> None:
        # Loops of accelerate call it with `accelerator.get_state_dict(engine)`, which is None on
        # the ranks that do not write. transformers then takes the module's own state_dict, of empty
        # tensors, and divides these into the experts of a mixture, which fails.
        sharded = any(hasattr(param, "ds_id") for param in self.parameters())
        if state_dict is None and sharded and not is_main_process:
            state_dict = {}
        original(self, save_directory, is_main_process, state_dict, *more, **named)

    setattr(PreTrainedModel, original.__name__, save_pretrained)
