"""Turns what an import brought into a checkpoint of ours, by the same save that training uses.

A value that the source lacks is left open in the new checkpoint (None, or no param groups at all),
never guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product

import torch
from torch import Tensor

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.pieces import BUFFER, PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.plain import UNKNOWN_RUN
from zero_checkpoint.saving.commit import save
from zero_checkpoint.saving.housekeeping import Keep, tidy
from zero_checkpoint.state.weight_hash import weight_hash
from zero_checkpoint.tools.conversion.foreign import Foreign

_SHOWN_NAMES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """The dtype of real numbers; None keeps them as they are."""

    trained: torch.dtype | None = torch.float32
    """Parameters. The engine trains fp32 masters, whatever it computes in."""
    computed: torch.dtype | None = None
    """Buffers and frozen parameters: the engine has them in the dtype that it computes in."""


def adopt(
    root: Place, foreign: Foreign, *, source: str, tag: str, step: int | None, dtypes: Dtypes
) -> Place:
    """Save a foreign model under `root`, as its newest checkpoint.

    Without `step` it is at the step that the source names, or 0.

    Returns:
        The committed checkpoint.

    Raises:
        CheckpointError: Nothing was read, or the save failed.
    """
    if not foreign.params:
        raise CheckpointError(f"{source}: there are no parameters in it")
    moments_of = _completed(foreign)
    tensors: dict[TensorId, Tensor] = {}
    for name, data in foreign.params.items():
        dtype = dtypes.computed if name in foreign.frozen else dtypes.trained
        tensors[TensorId(PARAM, name)] = _plain(data, dtype)
        for key, moments in moments_of.items():
            if name in moments:
                tensors[TensorId(key, name)] = _plain(moments[name], None)
    for name, data in foreign.buffers.items():
        tensors[TensorId(BUFFER, name)] = _plain(data, dtypes.computed)
    params = {t.fqn: data for t, data in tensors.items() if t.kind == PARAM}
    run = {**UNKNOWN_RUN, **foreign.run}
    if step is not None:
        run["step"] = step
    engine = run | {"groups": list(foreign.groups), "weight_hash": weight_hash(params.items())}
    state = State(
        tensors={t: TensorInfo(tuple(data.shape), data.dtype) for t, data in tensors.items()},
        pieces=tuple(Piece(t, 0, data.reshape(-1)) for t, data in tensors.items()),
        aliases=dict(foreign.aliases),
        meta={"engine": engine, "client": dict(foreign.client), "imported_from": source},
    )
    # The name gets a round that is not below any that is there: see `generation`.
    committed = save(
        root, state, StoreConsensus.alone(), step=run["step"], tag=tag, round=0, fence=None
    )
    tidy(root, committed, Keep())  # removes what a killed import has left
    return committed


def freeze(foreign: Foreign, patterns: Sequence[str]) -> Foreign:
    """The same model with further parameters frozen: they are not trained, so they are in no group.

    Raises:
        CheckpointError: A pattern matches no parameter.
    """
    frozen = set(foreign.frozen)
    for pattern in patterns:
        matching = {name for name in foreign.params if fnmatchcase(name, pattern)}
        if not matching:
            raise CheckpointError(
                f"--frozen {pattern}: matches no parameter; parameters are: {_some(foreign.params)}"
            )
        frozen |= matching
    groups = [
        {**group, "params": [name for name in group["params"] if name not in frozen]}
        for group in foreign.groups
    ]
    return replace(foreign, groups=groups, frozen=frozenset(frozen))


def unexplained(foreign: Foreign) -> list[str]:
    """Parameters that the optimizer of the source does not train, though they are not frozen."""
    trained = {name for group in foreign.groups for name in group["params"]}
    return sorted(foreign.params.keys() - trained - foreign.frozen) if foreign.groups else []


def tie(foreign: Foreign, ties: Mapping[str, str]) -> Foreign:
    """The same model with further tied parameters, other name -> name that stays.

    Raises:
        CheckpointError: A name is no parameter, or the two differ.
    """
    params, aliases = dict(foreign.params), dict(foreign.aliases)
    for other, name in ties.items():
        if name not in params:
            raise CheckpointError(
                f"--tie {other}={name}: there is no parameter {name!r}; parameters are: "
                f"{_some(params)}"
            )
        known = params.get(aliases.get(other, other))
        if known is not None and not torch.equal(known, params[name]):
            raise CheckpointError(f"--tie {other}={name}: the two differ, so they are not tied")
        params.pop(other, None)
        # What was tied to it is tied to the one that stays: a checkpoint has no other name.
        aliases = {second: name if first == other else first for second, first in aliases.items()}
        aliases[other] = name
    return replace(foreign, params=params, aliases=aliases)


def _some(names: Collection[str]) -> str:
    """The first names, which show how names are written."""
    shown = sorted(names)[:_SHOWN_NAMES]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")


def _plain(data: Tensor, dtype: torch.dtype | None) -> Tensor:
    real = dtype is not None and data.is_floating_point()
    return (data.to(dtype) if real else data).detach().contiguous()


def _completed(foreign: Foreign) -> dict[str, dict[str, Tensor]]:
    """The moments, with zeros for parameters of a group whose others have some."""
    # torch makes no state for a parameter without gradient; its moments would be zero. The engine
    # keeps them for every element that it trains.
    whole = {key: dict(moments) for key, moments in foreign.moments.items()}
    for group in foreign.groups:
        for moments in whole.values():
            dtypes = {moments[name].dtype for name in group["params"] if name in moments}
            for name, dtype in product(group["params"], dtypes):
                if name not in moments and name in foreign.params:
                    moments[name] = torch.zeros(foreign.params[name].shape, dtype=dtype)
    return whole
