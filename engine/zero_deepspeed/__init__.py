"""DeepSpeed's API on the ZeRO engine: `import zero_deepspeed as deepspeed`."""

from typing import TYPE_CHECKING

import zero_contract.needs_torch  # noqa: F401 - says what is not installed
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint, ModelMismatch
from zero_comm.errors import Diverged
from zero_contract.errors import CommitRefused, ConfigError, PeerLost, ZeroError
from zero_contract.errors import ConfigError as DeepSpeedConfigError
from zero_data.ledger import read_ledger, verify
from zero_deepspeed import (
    accelerator,
    checkpointing,
    comm,
    elasticity,
    launcher,
    moe,
    ops,
    profiling,
    runtime,
    utils,
    zero,
)
from zero_deepspeed.absent_names import explain_imports, raising_getattr
from zero_deepspeed.accelerator import get_accelerator
from zero_deepspeed.arguments import add_config_arguments
from zero_deepspeed.comm import init_distributed
from zero_deepspeed.engine import DeepSpeedEngine
from zero_deepspeed.initialize import initialize
from zero_deepspeed.on_device import OnDevice
from zero_deepspeed.utils.logging import log_dist, logger
from zero_deepspeed.version import __version__

__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = None

__all__ = [
    "CheckpointError",
    "CommitRefused",
    "ConfigError",
    "DamagedCheckpoint",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "Diverged",
    "ModelMismatch",
    "OnDevice",
    "PeerLost",
    "ZeroError",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "elasticity",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "profiling",
    "read_ledger",
    "runtime",
    "utils",
    "verify",
    "zero",
]

explain_imports(__name__)
if not TYPE_CHECKING:  # for which every name would be there
    __getattr__ = raising_getattr(__name__)
