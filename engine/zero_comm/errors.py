"""The errors of the exchange between ranks."""

from __future__ import annotations

from zero_contract.errors import PeerLost, ZeroError


class LeavingNow(PeerLost):
    """This rank was asked to leave its group without waiting for anything."""


class Diverged(ZeroError):
    """The ranks wait for each other, because they do not do the same."""
