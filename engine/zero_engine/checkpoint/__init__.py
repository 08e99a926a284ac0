"""Universal checkpoints: one format, readable at any world size and ZeRO stage.

`save` and `load` are called by every rank of a group, with a `Ballot` to agree through; `find`
lists what a directory holds. The words for the state itself are in `pieces`.
"""

from zero_engine.checkpoint.ballot import Ballot
from zero_engine.checkpoint.candidates import Candidate, Found, Rejected, find
from zero_engine.checkpoint.commit import own_layout, save
from zero_engine.checkpoint.format.manifest import Manifest
from zero_engine.checkpoint.restore import Loaded, load

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
