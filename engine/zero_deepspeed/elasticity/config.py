"""DeepSpeed's `deepspeed.elasticity.config`: names of errors, which are those of all configs."""

from zero_contract.errors import ConfigError as ElasticityConfigError
from zero_contract.errors import ConfigError as ElasticityError
from zero_contract.errors import ConfigError as ElasticityIncompatibleWorldSize

__all__ = ["ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]
