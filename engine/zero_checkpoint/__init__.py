"""Universal checkpoints: one format, readable at any world size and ZeRO stage.

`save` and `load` are called by every rank of a group, with a `Ballot` to agree through; `find`
lists what a directory holds. The words for the state itself are in `pieces`.
"""

from zero_checkpoint.candidates import Candidate, Found, Rejected, find
from zero_checkpoint.commit import own_layout, save
from zero_checkpoint.consensus import Ballot
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.restore import Loaded, load

__all__ = [
    "Ballot",
    "Candidate",
    "Found",
    "Loaded",
    "Manifest",
    "Rejected",
    "find",
    "load",
    "own_layout",
    "save",
]
