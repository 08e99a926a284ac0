"""Temporary directories that go with their process, or, if that was killed, with the next.

Who calls it: the agent, and `local_etcd`.
"""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path

from zero_agent.node.signals import held
from zero_contract import owned_dir


class Scratch:
    """A temporary directory of this process."""

    def __init__(self, prefix: str) -> None:
        """Remove what dead processes of this user have left under this prefix, and make one."""
        parent = Path(tempfile.gettempdir())
        owned_dir.sweep(parent, f"{prefix}*")
        with held():  # from then on it goes with this object, however far that has come
            owned = owned_dir.make(parent, prefix)
            self.close = weakref.finalize(self, owned.remove)
            """Remove it, with all that is in it; safe to call twice."""
        self.path = owned.path
