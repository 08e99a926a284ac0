"""The entry point `torchrun.handlers`, which imports next to nothing.

torch loads it with `torch.distributed.elastic`: in torchrun, and in every program that imports
`torch.distributed.checkpoint`. The handler, with what it needs for etcd, is imported when torchrun
asks for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def load() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the factory of handlers."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from zero_torchrun.etcd_handler import create

    return create(params)
