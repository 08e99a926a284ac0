"""ZeRO (stages 0-3) with one result at every world size and stage."""

from typing import TYPE_CHECKING

from zero_engine.core.engine import Engine
from zero_engine.core.initialize import initialize
from zero_engine.former_names import explain_imports, raising_getattr

__all__ = ["Engine", "initialize"]

explain_imports(__name__)
if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
