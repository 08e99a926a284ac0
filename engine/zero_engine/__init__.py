"""The ZeRO engine: DeepSpeed's API, one result at every world size and stage."""

from zero_engine import utils, zero
from zero_engine.arguments import add_config_arguments
from zero_engine.assembly import initialize
from zero_engine.distributed import init_distributed
from zero_engine.engine import Engine
from zero_engine.errors import (
    CheckpointError,
    CommitRefused,
    ConfigError,
    DamagedCheckpoint,
    EngineError,
    ModelMismatch,
    PeerLost,
)
from zero_engine.ledger import read_ledger, verify

__all__ = [
    "CheckpointError",
    "CommitRefused",
    "ConfigError",
    "DamagedCheckpoint",
    "Engine",
    "EngineError",
    "ModelMismatch",
    "PeerLost",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "read_ledger",
    "utils",
    "verify",
    "zero",
]
