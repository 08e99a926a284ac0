"""Describe a checkpoint: its tensors, param groups, position and hash, as plain values.

Reads no data unless norms are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zero_checkpoint.format.manifest import QUARANTINE
from zero_checkpoint.format.pieces import BUFFER, PARAM, TensorId
from zero_checkpoint.loading.candidates import Candidate
from zero_checkpoint.tools.listing import engine_meta
from zero_checkpoint.tools.tensors import WIDENED, read_tensors
from zero_checkpoint.tools.verify import Progress, total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor of a checkpoint."""

    kind: str
    """`param`, `buffer`, or a kind of optimizer state such as `exp_avg`."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    norm: float | None = None
    """L2 norm; None: it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A checkpoint."""

    path: str
    quarantined: bool
    step: int
    round: int
    """Round of the job that has saved it."""
    tag: str
    world: int
    """Number of ranks that have saved it."""
    size_bytes: int
    files: int
    digest: str
    """Digest of the manifest, which holds the digest of every block."""
    run: dict[str, Any]
    """The record of the training, by the engine or an import."""
    groups: list[Any]
    """Param groups: the names of their parameters, and their hyperparameters."""
    optimizer_kinds: list[str]
    """Kinds of optimizer state."""
    aliases: dict[str, str]
    """Name of a tied parameter -> the name under which it is stored."""
    client: dict[str, Any]
    """The script's client_state."""
    tensors: list[TensorRow]


def describe(
    checkpoint: Candidate, *, norms: bool, progress: Progress = lambda _: None
) -> Description:
    """Everything worth knowing about a checkpoint.

    With `norms` every tensor is read, and `progress` called with its bytes.

    Raises:
        DamagedCheckpoint: A tensor that was read is not what was saved.
        OSError: A file could not be read.
    """
    manifest, engine = checkpoint.manifest, engine_meta(checkpoint)
    rows: dict[TensorId, TensorRow] = {
        tensor: TensorRow(
            kind=tensor.kind,
            name=tensor.fqn,
            dtype=str(info.dtype).removeprefix("torch."),
            shape=tuple(info.shape),
        )
        for tensor, info in manifest.tensors.items()
    }
    if norms:
        for tensor, data in read_tensors(checkpoint, manifest.tensors):
            rows[tensor] = replace(rows[tensor], norm=l2_norm(data))
            progress(data.numel() * data.element_size())
    return Description(
        path=str(checkpoint.path),
        quarantined=(checkpoint.path / QUARANTINE).exists(),
        step=manifest.step,
        round=manifest.round,
        tag=manifest.tag,
        world=manifest.world,
        size_bytes=total_bytes(manifest),
        files=len(manifest.files),
        digest=manifest.digest,
        run={key: value for key, value in engine.items() if key != "groups"},
        groups=engine.get("groups", []),
        optimizer_kinds=sorted({t.kind for t in manifest.tensors} - {PARAM, BUFFER}),
        aliases=dict(manifest.aliases),
        client=manifest.meta.get("client", {}),
        tensors=list(rows.values()),
    )


def l2_norm(data: Tensor) -> float:
    """The L2 norm."""
    # In float64, in which the squares do not overflow, and small elements are not lost.
    wide = torch.complex128 if data.is_complex() else torch.float64
    squares = (chunk.to(wide).abs().square().sum() for chunk in data.reshape(-1).split(WIDENED))
    return float(sum(squares, torch.zeros((), dtype=torch.float64)).sqrt())
