"""Universal checkpoints for any torch script, readable at any world size and ZeRO stage.

`save` and `load` store a plain structure of tensors, see `plain`; they need neither a process group
nor an agent. A training that needs more (background saves, in-memory checkpoints, retention,
leaving with a save) implements `training.Training`. `saving.commit` and `loading.restore` are the
two protocols below both. `find` lists the checkpoints of a directory, and `verify` reads all of
one. `format.pieces` defines the terms for the state itself.
"""

import zero_contract.needs_torch  # noqa: F401 - says what is not installed
from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.loading.candidates import Candidate, Found, Rejected, find
from zero_checkpoint.plain import Part, Restored, load, save
from zero_checkpoint.state.weight_hash import weight_hash
from zero_checkpoint.tools.verify import Damage, verify

__all__ = [
    "Candidate",
    "Damage",
    "Found",
    "Manifest",
    "Part",
    "Rejected",
    "Restored",
    "StoreConsensus",
    "find",
    "load",
    "save",
    "verify",
    "weight_hash",
]
