"""DeepSpeed's `deepspeed.OnDevice`: a model is made on a device, in a dtype."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """A context in which constructors make parameters of `dtype` on `device`.

    On "meta" they take no memory: `initialize` gives them values unit by unit.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._enabled = dtype, enabled
        self._device = torch.device(device)
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *details: Any) -> None:
        if self._enabled:
            self._device.__exit__(*details)
            torch.set_default_dtype(self._before)
