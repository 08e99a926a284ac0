"""The roots of all errors: each message names what was wrong, where, and the remedy.

Packages subclass these. An error that two independent packages must both recognise, such
as a lost peer or a refused commit, is defined here.
"""

from __future__ import annotations


class ZeroError(Exception):
    """Anything that is reported to a user; a command never shows it as a traceback."""


class ConfigError(ZeroError, ValueError):
    """The configuration is wrong: an unknown key, a value out of bounds, a contradiction."""


class PeerLost(ZeroError):
    """A collective failed because another rank is gone; this rank itself is healthy."""


class CommitRefused(ZeroError):
    """The round of this worker is over, or its agent cannot reach etcd: nothing was published."""

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing
        """Whether the refusal is temporary: etcd does not accept writes, and the agent retries."""


class UsageExit(SystemExit):
    """The end of a program whose command line is wrong: a message, which a restart would repeat."""
