"""The parts of every training, whoever shards it: `zero_engine` and `zero_torch` are built on it.

An independent library: it needs torch and the libraries below it, but no engine and no wrapper.
"""

import zero_contract.needs_torch  # noqa: F401 - says what is not installed
from zero_step.session import Session

__all__ = ["Session"]
