"""Does a checkpoint belong to this model? A pure comparison of two tables of tensors.

Every wanted tensor must be stored with the wanted shape and dtype, and every stored tensor wanted
or listed in `State.spare`; anything else would silently train a different model.
"""

from __future__ import annotations

import numpy as np

from zero_checkpoint.errors import ModelMismatch
from zero_checkpoint.format.fragments import Ints
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import BUFFER, OTHER, PARAM, State, TensorId, TensorInfo
from zero_checkpoint.format.table import table_of

_SHOWN = 5


def resolve(state: State, manifest: Manifest) -> Ints:
    """[wanted tensors], the position of the stored tensor that each is read from.

    Raises:
        ModelMismatch: Names the first missing, extra and reshaped tensors, and counts them.
    """
    table = table_of(manifest.tensors)
    if table.same_as(state.tensors):
        return np.arange(len(table))
    stored = {t: stored_id(t, manifest) for t in state.tensors}
    missing = [t for t, source in stored.items() if source not in manifest.tensors]
    used = set(stored.values())
    extra = [
        t for t in manifest.tensors if t.kind != OTHER and t not in used and t not in state.spare
    ]
    reshaped = [
        f"{wanted} is {_show(manifest.tensors[source])} in the checkpoint, "
        f"{_show(state.tensors[wanted])} in the model"
        for wanted, source in stored.items()
        # A dtype that differs counts as another shape: bytes are read in place and never cast.
        if source in manifest.tensors and manifest.tensors[source] != state.tensors[wanted]
    ]
    if missing or extra or reshaped:
        listed = []
        for what, names in (
            ("missing in the checkpoint", [str(t) for t in missing]),
            ("extra in the checkpoint", [str(t) for t in extra]),
            ("reshaped", reshaped),
        ):
            if names:
                more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                listed.append(f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}")
        raise ModelMismatch(
            f"{manifest.directory} (tag {manifest.tag!r}) was saved by another model: "
            f"{'; '.join(listed)}. "
            "Build the model it was saved with, or load another tag or directory"
        )
    return np.array([table.index[source] for source in stored.values()], dtype=np.int64)


def stored_id(wanted: TensorId, manifest: Manifest) -> TensorId:
    """The tensor of a checkpoint that a name means: its own, or the one that it is tied to."""
    if wanted in manifest.tensors:
        return wanted
    name = manifest.aliases.get(wanted.fqn, wanted.fqn)
    # A state_dict does not say which of its tensors are buffers, and a module has no name twice.
    kinds = (PARAM, BUFFER) if wanted.kind in (PARAM, BUFFER) else ()
    either = (TensorId(kind, name) for kind in kinds if TensorId(kind, name) in manifest.tensors)
    return next(either, TensorId(wanted.kind, name))


def _show(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
