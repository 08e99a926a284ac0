"""ZeRO (stages 0-3) with one result at every world size and stage."""

from zero_engine.core.engine import Engine
from zero_engine.core.initialize import initialize

__all__ = ["Engine", "initialize"]
