"""The one way to look inside of a training, that of the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.inside import persistence_of

__all__ = ["persistence_of"]
