"""The parts of every training, whoever shards it: `zero_engine` and `zero_torch` are built on it.

An independent library: it needs torch and the libraries below it, but no engine and no wrapper.
"""

from zero_step.session import Session

__all__ = ["Session"]
