"""The errors of communication between ranks."""

from __future__ import annotations

from zero_contract.errors import PeerLost, ZeroError


class LeavingNow(PeerLost):
    """This rank was asked to leave its group at once."""


class Diverged(ZeroError):
    """A deadlock: the ranks wait for each other, because they do not run the same exchanges."""
