"""DeepSpeed's `deepspeed.runtime.config`: names that `engine.optimizer_name()` is compared with."""

from zero_contract.errors import ConfigError as DeepSpeedConfigError

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER",
    "ONEBIT_LAMB_OPTIMIZER",
    "ZERO_ONE_ADAM_OPTIMIZER",
    "DeepSpeedConfigError",
]

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
# Not supported, so no run has them: scripts only compare with these names.
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "onebitadam", "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
