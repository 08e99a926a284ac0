"""The errors of the engine, each message naming what, where and the remedy."""

from __future__ import annotations

from zero_contract.errors import ZeroError


class TierError(ZeroError):
    """State could not be moved to or from the place where it rests between uses."""
