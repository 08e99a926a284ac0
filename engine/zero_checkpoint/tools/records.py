"""The records of `zero-ckpt --json`, beside those of `listing` and `describe`."""

from __future__ import annotations

from dataclasses import dataclass

from zero_checkpoint.tools.compare import Difference, Relation
from zero_checkpoint.tools.verify import Damage


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A checkpoint of which every block was read."""

    path: str
    size_bytes: int
    damage: list[Damage]
    """Empty if the checkpoint is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two checkpoints."""

    left: str
    right: str
    counts: dict[Relation, int]
    """How many tensors of each relation."""
    tensors: list[Difference]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The model of a checkpoint, written for another library."""

    checkpoint: str
    tensors: int
    files: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A checkpoint that was made from one of another library."""

    path: str
    parameters: int
    optimizer_kinds: list[str]
    """The kinds of optimizer state that it has; empty: it has weights only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One thing to do, or done."""

    what: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tidied:
    """The deeds in a directory of checkpoints."""

    done: bool
    """Whether it was done; with `--dry-run` it was not."""
    actions: list[Deed]
    notes: list[str]
    """Directories that are left alone, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A command that was not carried out."""

    error: str
    exit_code: int
