"""Between the keys of a DCP state and the tensors of a universal checkpoint.

Where it is clear which keys are a model and its optimizer, their tensors get the names and kinds
that `zero_engine` and `zero_torch` give them, so each loads the checkpoints of the other; all other
tensors keep their keys.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from zero_checkpoint.dcp.layout import GROUPS, STATE, find_layout
from zero_checkpoint.dcp.optimizer import Optimizer
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import BUFFER, OTHER, PARAM, TensorId, TensorInfo
from zero_checkpoint.plain import STRUCTURE, mapped
from zero_checkpoint.state import client_state
from zero_checkpoint.state.client_state import pack, unpack
from zero_checkpoint.state.torch_state import is_buffer, number_from_json, numbers_of

_log = logging.getLogger(__name__)

META = "dcp"
"""The key of what only DCP needs in `meta`: the prefixes, and all values that are no tensors."""
_KERNELS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of an optimizer that a universal checkpoint need not have: they choose a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The form in which a state is saved."""

    ids: Mapping[str, TensorId]
    """Key -> its tensor in the checkpoint."""
    groups: list[dict[str, Any]]
    """The param groups, as the engine writes them."""
    step: int | None
    """The count of steps in the state, if it has one."""
    meta: Mapping[str, Any]
    """Stored under `META`."""


def name_all(
    tensors: Mapping[str, TensorInfo],
    values: Mapping[str, Any],
    paths: Mapping[str, Sequence[str | int]],
) -> Saved:
    """Decide how a state is saved.

    `values` are those of all keys but tensors, and of tensors without dimensions; `paths` those
    that DCP's planner has flattened the state by, if it has.
    """
    reals = {k for k, i in tensors.items() if i.dtype.is_floating_point or i.dtype.is_complex}
    keys = [*tensors, *(key for key in values if key not in tensors)]
    try:
        layout = find_layout(keys, tensors, reals, model_key=None, optimizer_key=None)
    except CheckpointError as error:
        # No error of the save: each tensor keeps its key, by which a `Reader` finds it.
        _log.info("saved for torch.distributed.checkpoint alone: %s", error)
        ids = {key: TensorId(PARAM, key) for key in tensors}
        others = {key: value for key, value in values.items() if key not in tensors}
        return Saved(ids=ids, groups=[], step=None, meta=_meta("", None, others, paths))
    model, optimizer = layout.model, layout.optimizer
    of_state = None if optimizer is None else optimizer + STATE
    ids, of_model = {}, frozenset(layout.tensors)  # of which there may be many
    for key, info in tensors.items():
        if key in of_model:
            name = key.removeprefix(model)
            ids[key] = TensorId(BUFFER if is_buffer(name, info.dtype) else PARAM, name)
        elif of_state is not None and key.startswith(of_state):
            name, _, kind = key.removeprefix(of_state).rpartition(".")
            # A number, such as a count of steps, unless the parameter is one, too.
            owner = tensors.get(model + name)
            number = owner is None or owner.shape != info.shape or kind == "step"
            if key not in values or not number:
                ids[key] = TensorId(kind, name)
        elif key not in values:
            ids[key] = TensorId(OTHER, key)
    rest = {key: value for key, value in values.items() if key not in ids}
    params = {tensor.fqn for tensor in ids.values() if tensor.kind == PARAM}
    # If the keys that count steps disagree, none of them is believed.
    counts = {_count(rest[key]) for key in layout.steps}
    return Saved(
        ids=ids,
        groups=Optimizer.read(rest, rest.__getitem__, optimizer).groups(params),
        step=counts.pop() if len(counts) == 1 else None,
        meta=_meta(model, optimizer, rest, paths),
    )


def _count(value: Any) -> int | None:
    """A count of steps; None if it is none."""
    number = value.item() if isinstance(value, Tensor) else value
    return int(number) if isinstance(number, int | float) else None


def _meta(
    model: str,
    optimizer: str | None,
    values: Mapping[str, Any],
    paths: Mapping[str, Sequence[str | int]],
) -> dict[str, Any]:
    packed = {key: pack(value, key) for key, value in values.items()}
    return {"model": model, "optimizer": optimizer, "values": packed, "paths": dict(paths)}


Path = tuple[str | int, ...]
"""Where a value is in a nested state: the names and list positions, from the outermost one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint by the keys of a DCP state."""

    tensors: Mapping[str, TensorId]
    values: Mapping[str, Any]
    paths: Mapping[str, Path]
    """Of each key; DCP's `planner_data`, by which its converters nest a state again."""


def keys_of(manifest: Manifest, model: str, optimizer: str) -> Stored:
    """The keys of a checkpoint.

    `model` and `optimizer` are the keys of the state_dicts, if `zero_engine` or `zero_torch` has
    saved it; "": the names of the model are keys.
    """
    meta = manifest.meta.get(META)
    if meta is None and STRUCTURE in manifest.meta:
        return _of_structure(manifest)
    if meta is None:
        of_model, of_optimizer = (f"{key}." if key else "" for key in (model, optimizer))
        values, paths = _values(manifest.meta["engine"].get("groups", ()), of_optimizer)
    else:
        of_model, of_optimizer = meta["model"], meta["optimizer"] or ""
        values, paths = unpack(meta["values"]), {}
    tensors = {}
    for tensor in manifest.tensors:
        match tensor.kind:
            case "param" | "buffer":
                path = _below(of_model, tensor.fqn)
            case "other":
                path = (tensor.fqn,)
            case kind:
                path = _below(of_optimizer + STATE, tensor.fqn, kind)
        key = ".".join(map(str, path))
        tensors[key], paths[key] = tensor, path
    for other, name in manifest.aliases.items():
        if of_model + name in tensors:
            tensors[of_model + other] = tensors[of_model + name]
            paths[of_model + other] = _below(of_model, other)
    # A checkpoint of DCP says how its state was nested, if its writer knew.
    paths |= {key: (key,) for key in values if key not in paths}
    paths |= {key: tuple(path) for key, path in (meta or {}).get("paths", {}).items()}
    return Stored(tensors=tensors, values=values, paths=paths)


def _below(prefix: str, *names: str | int) -> Path:
    """The path of names below a prefix, which ends with a dot if there is one."""
    return (*prefix.split(".")[:-1], *names)


def _of_structure(manifest: Manifest) -> Stored:
    """The keys of what `zero_checkpoint.save` has stored: DCP's names of the same structure."""
    # A tensor, because DCP goes into a list only if one is in it; known by its identity.
    placeholder = torch.empty(0, device="meta")
    structure = mapped(
        unpack(manifest.meta[STRUCTURE]),
        "",
        lambda value, _: placeholder if type(value) is client_state.Stored else value,
    )
    flat, paths = flatten_state_dict(structure)
    tensors = {tensor.fqn: tensor for tensor in manifest.tensors}

    def has_tensor(value: Any) -> bool:  # in a tuple, which DCP does not look into
        found: list[bool] = []
        mapped(value, "", lambda inner, _: found.append(inner is placeholder))
        return any(found)

    return Stored(
        tensors={key: tensors[key] for key, value in flat.items() if value is placeholder},
        values={key: value for key, value in flat.items() if not has_tensor(value)},
        paths=paths,
    )


def _values(
    groups: Collection[Mapping[str, Any]], prefix: str
) -> tuple[dict[str, Any], dict[str, Path]]:
    """The numbers and options of an optimizer under the keys of both forms of its state_dict."""
    nested: dict[Path, Any] = {}
    flattened: dict[str, Any] = {}
    for number, group in enumerate(groups):
        options = {
            **_KERNELS,
            **{
                key: tuple(value) if isinstance(value, list) else value  # JSON has no tuples
                for key, value in group["hyperparameters"].items()
            },
        }
        names = [*group["params"], *group.get("frozen", ())]
        for key, value in {"params": names, **options}.items():
            nested[_below(prefix + GROUPS, number, key)] = value
        flattened |= {f"{prefix}{GROUPS}{n}.{k}": v for n in names for k, v in options.items()}
        for name, numbers in numbers_of(group).items():
            for key, value in numbers.items():
                number_of_state = number_from_json(value, torch.device("cpu"))
                nested[_below(prefix + STATE, name, key)] = number_of_state
    # The flattened form has no paths: a state that is nested again has one form, that of torch.
    paths = {".".join(map(str, path)): path for path in nested}
    return dict(zip(paths, nested.values(), strict=True)) | flattened, paths
