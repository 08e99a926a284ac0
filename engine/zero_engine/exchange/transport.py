"""What a transport says when a peer is gone: told from mistakes of the program, and put in short.

Used by `collectives` and `distributed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from zero_contract.errors import PeerLost

# How gloo (a plain RuntimeError) and NCCL say that a connection, not the program, is broken.
_SIGNS = (
    "application timeout caused pair closure",
    "broken pipe",
    "connection closed",
    "connection refused",
    "connection reset",
    "connect timeout",
    "network error",
    "remote process exited",
    "socket closed",
    "socket timeout",
    "timed out waiting",
)
_NOISE = re.compile(r"\[\S+\.(cc|h|cpp):\d+\] |\. This is typically caused by.*", re.DOTALL)
"""Where in gloo's source it happened, and its advice: to look at logs of a worker that is gone."""


@contextmanager
def transport_failures(what: str) -> Iterator[None]:
    """Raise PeerLost, which names what was being done, for a broken connection."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(sign in text for sign in _SIGNS):
            raise
        raise PeerLost(f"{what}: a peer is gone: {_NOISE.sub('', str(error))}") from error
