"""The errors of jobs and their store; each message names what was wrong, where, and the remedy."""

from __future__ import annotations

from zero_contract.errors import ZeroError


class SpecError(ZeroError):
    """A flag, a bound or another part of a job's description is wrong."""


class SpecMismatch(SpecError):
    """The job runs with another specification, or version of the protocol, than this agent's."""


class StoreError(ZeroError):
    """A call to the key-value store failed."""


class StoreUnavailable(StoreError):
    """The store could not be reached, or did not answer in time; a retry may help."""


class TakenForGone(StoreUnavailable):
    """This node's lease had ended; it registers again under a new lease."""


class StoreRefused(StoreError):
    """The store refused a call (login, permission, size); a retry does not help."""


class StoreFull(StoreRefused):
    """The store is full: it refuses writes, and still reads, deletes and keeps leases alive."""


class Compacted(StoreError):
    """The requested history was compacted; read the keys afresh and watch from there."""


class LeaseLost(StoreError):
    """The lease has ended: other nodes may already treat this node as lost."""


class StoreReplaced(StoreError):
    """The store has lost its data: what an agent knows of its job is no longer valid."""
