"""Which tensors of an engine are saved to a checkpoint, and which are loaded from one.

Pure functions on tensor ids and pieces. A tensor that is not selected stays as it is in memory. The
options and their meaning are those of DeepSpeed's `save_checkpoint` and `load_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero_checkpoint import Manifest
from zero_checkpoint.errors import ModelMismatch
from zero_checkpoint.format.match import stored_id
from zero_checkpoint.format.pieces import BUFFER, PARAM, Piece, State, TensorId
from zero_checkpoint.format.table import table_of

_MODULE = frozenset({PARAM, BUFFER})
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What to take from a checkpoint."""

    strict: bool = True
    """The module's tensors must be those of the checkpoint."""
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    """Neither optimizer nor scheduler nor position."""

    @property
    def wants_optimizer(self) -> bool:
        """Whether to load optimizer state."""
        return self.optimizer and not self.module_only

    @property
    def wants_scheduler(self) -> bool:
        """Whether to load the scheduler's state."""
        return self.scheduler and not self.module_only

    @property
    def whole(self) -> bool:
        """Whether to load everything: the run resumes."""
        return self.wants_optimizer and self.wants_scheduler


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors and pieces to fill, and the conversions afterwards."""

    state: State
    staged: tuple[tuple[Piece, Tensor], ...] = ()
    """(target, filled) of each piece whose dtype differs in the checkpoint, to be copied."""
    remarks: tuple[str, ...] = ()
    """Sentences about what is not loaded, or rounded."""

    def settle(self, *, weights: bool) -> None:
        """Copy what was staged to its target: the weights, or everything else."""
        for target, filled in self.staged:
            if (target.id.kind == PARAM) == weights:
                target.data.copy_(filled)


def without_frozen(state: State, frozen: Set[str]) -> State:
    """A state to save, without the parameters of these names and their other names."""
    return replace(
        _only(state, [t for t in state.tensors if t.fqn not in frozen or t.kind == BUFFER]),
        aliases={other: name for other, name in state.aliases.items() if name not in frozen},
    )


def select(
    state: State,
    manifest: Manifest,
    *,
    strict: bool,
    weights_only: bool,
    frozen: Set[str],
    needed: Set[str],
) -> Selection:
    """The part of a state to fill from a checkpoint.

    `weights_only`: without optimizer state; `frozen`: names of parameters that are not trained;
    `needed`: names of parameters and buffers that have no values.

    Raises:
        ModelMismatch: The checkpoint would leave one without values.
    """
    if not weights_only and table_of(manifest.tensors).same_as(state.tensors):
        return Selection(state)
    if weights_only:
        state = _only(state, [t for t in state.tensors if t.kind in _MODULE])
    missing = {t for t in state.tensors if stored_id(t, manifest) not in manifest.tensors}
    excludes_frozen = manifest.meta.get("engine", {}).get("excludes_frozen", False)
    excused = {
        t
        for t in missing
        if (not strict and t.kind in _MODULE)
        # They were left out when it was saved, see `without_frozen`.
        or (excludes_frozen and t.kind == PARAM and t.fqn in frozen)
    }
    if lacking := sorted(t.fqn for t in excused if t.fqn in needed):
        raise ModelMismatch(
            f"checkpoint {manifest.tag} does not have {len(lacking)} parameters that have no "
            f"values here, first {lacking[0]}; they were on the meta device, or a load into them "
            "has failed: save without exclude_frozen_parameters, or load all weights before, with "
            "engine.load_state_dict(), or make the model with values"
        )
    chosen = _only(state, [t for t in state.tensors if t not in excused])
    used = {stored_id(t, manifest) for t in state.tensors}
    extra = {t for t in manifest.tensors if t not in used}
    spare = {t for t in extra if not strict or (weights_only and t.kind not in _MODULE)}
    remarks = [
        *_remark("not in the checkpoint, so they stay as they are", excused),
        *_remark("in the checkpoint alone, so they are not loaded", spare if not strict else ()),
    ]
    chosen = replace(chosen, spare=frozenset(spare))
    # Beside optimizer state only what the optimizer steps is converted, which may rest in fp32 or
    # in 16 bits; all else must fit.
    stepped = {t for t in chosen.tensors if t.kind != BUFFER and t.fqn not in frozen}
    selection = _converted(chosen, manifest, set(chosen.tensors) if weights_only else stepped)
    conversions = {(filled.dtype, target.data.dtype) for target, filled in selection.staged}
    remarks += [
        f"weights or optimizer state in {_short(there)} are rounded to {_short(here)}"
        for there, here in sorted(conversions, key=str)
        if torch.promote_types(there, here) != here
    ]
    return replace(selection, remarks=tuple(remarks))


def _converted(state: State, manifest: Manifest, which: Set[TensorId]) -> Selection:
    """The state with a staged copy of each of these pieces that has another dtype there."""
    stored = {t: manifest.tensors.get(stored_id(t, manifest)) for t in which}
    tensors = {
        t: info._replace(dtype=(stored.get(t) or info).dtype) for t, info in state.tensors.items()
    }
    pieces, staged = [], []
    for piece in state.pieces:
        dtype, filled = tensors[piece.id].dtype, piece
        if piece.data.dtype != dtype:
            filled = Piece(piece.id, piece.start, torch.empty_like(piece.data, dtype=dtype))
            staged.append((piece, filled.data))
        pieces.append(filled)
    return Selection(replace(state, tensors=tensors, pieces=tuple(pieces)), tuple(staged))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _only(state: State, tensors: Iterable[TensorId]) -> State:
    kept: Mapping[TensorId, object] = dict.fromkeys(tensors)
    return replace(
        state,
        tensors={t: info for t, info in state.tensors.items() if t in kept},
        pieces=tuple(piece for piece in state.pieces if piece.id in kept),
    )


def _remark(what: str, tensors: Iterable[TensorId]) -> list[str]:
    names = sorted(f"{t.kind}/{t.fqn}" for t in tensors)
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} tensors are {what}: {', '.join(names[:_SHOWN])}{more}"] if names else []
