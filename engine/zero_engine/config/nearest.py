"""What somebody probably meant: an unknown key, and the known one that is nearest to it.

Called by `parse`, and by those who read the free params of optimizers and schedules.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from zero_engine.errors import ConfigError


def unknown_key(
    where: str, known: Collection[str], *, told: Collection[str] | None = None
) -> ConfigError:
    """The error for an unknown key.

    Args:
        where: Its whole path.
        known: The keys that are possible in its place.
        told: Those that are listed if none is near; by default all.
    """
    near = difflib.get_close_matches(where.rpartition(".")[2], known, n=1)
    listed = ", ".join(sorted(known if told is None else told))
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {listed}"
    return ConfigError(f"{where}: unknown config key{hint}")


def check_params(where: str, make: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Check params that become the arguments of `make`, after its first one.

    Raises:
        ConfigError: One that it does not have, or one missing that it needs.
    """
    _, *arguments = inspect.signature(make).parameters.values()
    known = {argument.name for argument in arguments}
    for name in params:
        if name not in known:
            raise unknown_key(f"{where}.{name}", known)
    for argument in arguments:
        if argument.default is inspect.Parameter.empty and argument.name not in params:
            raise ConfigError(f'{where}.{argument.name}: missing, or "auto": give a value')
