"""Temporary directories, removed with their process, or by the next one if it was killed."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

from zero_agent.node.signals import held
from zero_contract import owned_dir

_SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket."""


class Scratch:
    """A temporary directory of this process."""

    def __init__(self, prefix: str, *, socket: str = "") -> None:
        """Remove what dead processes of this user have left under this prefix, and make one.

        It is in /tmp if the path of the Unix socket of this name would be too long elsewhere.
        """
        parent = Path(tempfile.gettempdir())
        # Slurm and test runners make long TMPDIRs.
        if len(os.fsencode(parent / f"{prefix}{'0' * 16}" / socket)) > _SOCKET_PATH_BYTES:
            parent = Path("/tmp")
        owned_dir.sweep(parent, f"{prefix}*")
        with held():  # no signal comes between the making and the note of it
            owned = owned_dir.make(parent, prefix)
            self.close = weakref.finalize(self, owned.remove)
            """Remove the directory and its contents; safe to call twice."""
        self.path = owned.path
