"""Universal checkpoints for any torch script, readable at any world size and ZeRO stage.

`save` and `load` keep a plain structure of tensors, see `plain`; they need neither a process group
nor an agent. What keeps more than that (background saves, checkpoints in memory, retention, leaving
with a save) implements `persistence.Training`. `commit` and `restore` are the two protocols below
both; `find` lists what a directory holds. The words for the state itself are in `format.pieces`.
"""

from zero_checkpoint.candidates import Candidate, Found, Rejected, find
from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.plain import Part, Restored, load, save
from zero_checkpoint.weight_hash import weight_hash

__all__ = [
    "Candidate",
    "Found",
    "Manifest",
    "Part",
    "Rejected",
    "Restored",
    "StoreConsensus",
    "find",
    "load",
    "save",
    "weight_hash",
]
