"""ZeRO (stages 0-3) with one result at every world size and stage."""

import zero_contract.needs_torch  # noqa: F401 - says what is not installed
from zero_engine.core.engine import Engine
from zero_engine.core.initialize import initialize

__all__ = ["Engine", "initialize"]
