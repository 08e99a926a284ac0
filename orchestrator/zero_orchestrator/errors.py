"""The errors of the job level: one tree, each message naming what, where and the remedy."""

from __future__ import annotations

from zero_contract.errors import ZeroError


class SpecError(ZeroError):
    """A job was described wrongly: a flag, a bound, or a specification that differs."""


class SpecMismatch(SpecError):
    """The job runs with another specification, or version of the protocol, than this agent's."""


class StoreError(ZeroError):
    """The key-value store did not do what it was asked."""


class StoreUnavailable(StoreError):
    """The store could not be reached, or did not answer in time; trying again may help."""


class TakenForGone(StoreUnavailable):
    """The store answers, but this node's lease had run out; with a new one it will register."""


class StoreRefused(StoreError):
    """The store answered and said no (login, permission, size); trying again does not help."""


class StoreFull(StoreRefused):
    """The store has no room for what was to be written; it reads, deletes, keeps leases alive."""


class Compacted(StoreError):
    """The history asked for is gone; read the keys afresh and watch from there."""


class LeaseLost(StoreError):
    """The lease ran out: other nodes may already think that this one is gone."""


class StoreReplaced(StoreError):
    """The store has lost what it held: what an agent knows of its job is true no more."""
