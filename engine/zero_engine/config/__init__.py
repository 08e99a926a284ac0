"""The configuration: DeepSpeed's JSON keys, resolved once.

`python -m zero_engine FILE` explains one.
"""

from zero_engine.config.parse import load_config
from zero_engine.config.reading import read_json
from zero_engine.config.schema import Config, OptimizerConfig, SchedulerConfig

__all__ = ["Config", "OptimizerConfig", "SchedulerConfig", "load_config", "read_json"]
