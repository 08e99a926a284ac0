"""Whether a library is of a version that a plug-in knows.

Must always hold: what a plug-in replaces in a library is there. A version that has renamed it
would call its own method, and train in another way without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from zero_contract.errors import ConfigError

TRIED = {"accelerate": "1.15", "lightning": "2.6", "torchtitan": "0.3", "transformers": "5.24"}
"""The newest version of each with which all tests have passed."""


def check_replaced(library: str, owner: Any, names: Iterable[str]) -> None:
    """Check that an object or class of a library has what a plug-in replaces in it.

    Raises:
        ConfigError: It has not; names the version to install.
    """
    kind = owner if inspect.isclass(owner) else type(owner)
    for name in names:
        if not hasattr(owner, name):
            raise ConfigError(
                f"{library} {version(library)} has no {kind.__name__}.{name}, that a run replaces; "
                f"{TRIED[library]} is the newest version that was tried: install that one"
            )
