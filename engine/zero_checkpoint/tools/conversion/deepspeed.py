"""DeepSpeed's own checkpoints, ZeRO stages 1, 2 and 3, without DeepSpeed.

The layouts (a directory per tag, `latest` names one):

    stage 1, 2   mp_rank_00_model_states.pt, and per rank [bf16_]zero_pp_rank_R_.._optim_states.pt:
                 a flat fp32 partition per param group; `param_slice_mappings` says which
                 elements of which parameter lie where
    stage 3      the same per rank; each parameter is cut into equal parts, one per rank, the
                 last padded, and the parts follow each other in the order of `param_shapes`

Source of the layouts: deepspeed/utils/zero_to_fp32.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.state.client_state import pack
from zero_checkpoint.state.torch_state import group_record
from zero_checkpoint.tools.conversion.foreign import Foreign
from zero_checkpoint.tools.conversion.pickles import load_torch
from zero_checkpoint.tools.locate import absence

_INERT = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_(?:model|optim)_states\.pt$")
_MASTER = "param"
_NO_PLACE = ("data_sampler", "random_ltd")
"""State of DeepSpeed's features that this engine does not have."""
_DEEPSPEEDS = frozenset(
    {
        *("buffer_names", "checkpoint_parallel_dimensions", "dp_world_size", "ds_config"),
        *("ds_version", "frozen_param_fragments", "frozen_param_shapes", "global_samples"),
        *("global_steps", "lr_scheduler", "module", "mp_world_size", "optimizer", "param_shapes"),
        *("shared_params", "skipped_steps", "sparse_tensor_module_names"),
        *("universal_checkpoint_info", *_NO_PLACE),
    }
)
"""Keys that DeepSpeed writes into a model file; the other keys are the script's."""
_COMPUTE = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


def read_deepspeed(source: Path, *, allow_pickle: bool) -> Foreign:
    """A checkpoint directory of DeepSpeed, or one tag in it: optimizer, schedule, client state.

    Raises:
        CheckpointError: The directory is no DeepSpeed checkpoint, has a layout that is not
            supported, or lacks files; the message names which, and the remedy.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source}: {absence(source)}; give the directory of a checkpoint")
    latest = source / "latest"
    if latest.is_file():
        source = source / latest.read_text(errors="replace").strip()
    if (source / "zero").is_dir():
        raise CheckpointError(
            f"{source}: a universal checkpoint; import the checkpoint that it was converted from"
        )
    if not source.is_dir() or not list(source.glob("*model_states.pt")):
        raise CheckpointError(
            f"{source}: no *_model_states.pt in it; give the directory of a DeepSpeed "
            "checkpoint, or one of its tags"
        )
    for pattern, what in (("*mp_rank_01_*", "tensor parallel"), ("*expert*", "mixture of experts")):
        if list(source.glob(pattern)):
            raise CheckpointError(f"{source}: {what} checkpoints cannot be imported")
    try:
        return _read(_Parts(source, allow_pickle))
    # A pickle may have anything at any place: its layout is seen only as it is used.
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{source}: not laid out as DeepSpeed 0.19 does it ({type(error).__name__}: "
            f"{error}); load and save it with DeepSpeed 0.19, or import its weights --from torch"
        ) from error


def _read(parts: _Parts) -> Foreign:
    flats = dict(parts.whole())
    model = parts.models[0]
    shared = {str(other): str(name) for other, name in model.get("shared_params", {}).items()}
    kinds = dict.fromkeys(kind for kind, _ in flats)
    params = {name: data for (kind, name), data in flats.items() if kind == _MASTER}
    elsewhere = {*params, *shared, *model["buffer_names"]}
    # Masters and moments come from the optimizer files; what is not trained is in the model files
    # alone.
    frozen = parts.frozen(elsewhere)
    client: dict[str, Any] = {}
    left_out = [name for name in _NO_PLACE if model.get(name)]
    for name in model.keys() - _DEEPSPEEDS:  # the script's own state
        try:
            client[str(name)] = pack(model[name])
        except CheckpointError:
            left_out.append(str(name))
    if model.get("lr_scheduler") is not None and _schedule(model) is None:
        left_out.append("lr_scheduler")
    return Foreign(
        params=params | frozen,
        buffers={name: model["module"][name] for name in model["buffer_names"]},
        aliases=shared,
        moments={
            kind: {n: d for (k, n), d in flats.items() if k == kind}
            for kind in kinds
            if kind != _MASTER
        },
        groups=parts.groups(),
        frozen=frozenset(frozen),
        run=parts.run(),
        client=client,
        left_out=sorted(left_out),
    )


def _schedule(model: Mapping[str, Any]) -> Any:
    """The state of the learning-rate schedule, if it is plain JSON: ours has the same keys."""
    state = model.get("lr_scheduler")
    try:
        return state if pack(state) == state else None
    except CheckpointError:
        return None


@dataclass(frozen=True)
class _Parts:
    """The files of one tag, loaded at their first use; tensors stay mapped."""

    directory: Path
    allow_pickle: bool

    def _load(self, pattern: str) -> list[Any]:
        def rank_of(path: Path) -> int:
            found = _RANK.search(path.name)
            return int(found[1]) if found else 0

        # By number: as text, rank 10 comes before rank 2.
        paths = sorted(self.directory.glob(pattern), key=rank_of)
        return [
            load_torch(path, str(path), allow_pickle=self.allow_pickle, inert=_INERT)
            for path in paths
        ]

    @cached_property
    def models(self) -> list[Mapping[str, Any]]:
        return self._load("*model_states.pt")

    @cached_property
    def optimizers(self) -> list[Mapping[str, Any]]:
        found = [content["optimizer_state_dict"] for content in self._load("*optim_states.pt")]
        if not found:
            raise CheckpointError(
                f"{self.directory}: no *_optim_states.pt: not made with ZeRO; import its weights: "
                "--from torch --key module " + str(self.directory / "mp_rank_00_model_states.pt")
            )
        counts = found[0]["partition_count"]  # of each param group, or of all
        expected = max(counts) if isinstance(counts, list) else counts
        if expected != len(found):
            raise CheckpointError(
                f"{self.directory}: {len(found)} of {expected} *_optim_states.pt are there; "
                "copy the missing ones from the other nodes"
            )
        return found

    @property
    def is_stage3(self) -> bool:
        return "fp32_flat_groups" in self.optimizers[0]

    @cached_property
    def shapes(self) -> list[Mapping[str, Sequence[int]]]:
        """By sub-group: the shapes of its parameters, in their order in the flat vector."""
        shapes: list[Mapping[str, Sequence[int]]] = self.models[0]["param_shapes"]
        return shapes

    def base(self, rank: int) -> Mapping[str, Any]:
        """The wrapped optimizer's own state_dict."""
        optimizer = self.optimizers[rank]
        key = "optimizer_state_dict" if self.is_stage3 else "base_optimizer_state"
        base: Any = optimizer[key]
        if not isinstance(base, Mapping):
            raise CheckpointError(
                f"{self.directory}: an elastic checkpoint of an old DeepSpeed; load and save it "
                "with a newer DeepSpeed first"
            )
        return base

    def vectors(self, rank: int, sub_group: int) -> dict[str, Tensor]:
        """The flat fp32 masters and moments of one rank and sub-group."""
        optimizer = self.optimizers[rank]
        key = "fp32_flat_groups" if self.is_stage3 else "single_partition_of_fp32_groups"
        master = optimizer[key][sub_group]
        state = self.base(rank)["state"].get(sub_group, {})
        # Without dimensions, a tensor is the number of steps.
        moments = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}
        return {_MASTER: master, **moments}

    def whole(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """((kind, name), data) of every trained parameter and its moments."""
        for number, shapes in enumerate(self.shapes):
            vectors = [self.vectors(rank, number) for rank in range(len(self.optimizers))]
            for name, runs in self._runs(number).items():
                for kind in vectors[0]:
                    parts = [vectors[rank][kind][a:b] for rank, a, b in runs]
                    yield (kind, name), self._join(name, parts, tuple(shapes[name]))

    def _runs(self, number: int) -> dict[str, list[tuple[int, int, int]]]:
        """Where each parameter of a sub-group is: (rank, begin, end) in order."""
        shapes = self.shapes[number]
        runs: dict[str, list[tuple[int, int, int]]] = {name: [] for name in shapes}
        if self.is_stage3:
            # Every rank holds an equal part of each parameter; the last one is padded.
            world, at = len(self.optimizers), 0
            for name, shape in shapes.items():
                size = -(-math.prod(shape) // world)
                runs[name] = [(rank, at, at + size) for rank in range(world)]
                at += size
            return runs
        for rank, optimizer in enumerate(self.optimizers):
            if "param_slice_mappings" not in optimizer:
                raise CheckpointError(
                    f"{self.directory}: written by a DeepSpeed too old to record where each "
                    "parameter is; import its weights, made with zero_to_fp32.py, --from torch"
                )
            for name, at in optimizer["param_slice_mappings"][number].items():
                runs[name].append((rank, at.start, at.start + at.numel))
        return runs

    def _join(self, name: str, parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        whole = torch.cat(parts) if parts else torch.empty(0)
        needed = math.prod(shape)
        if len(whole) < needed:
            raise CheckpointError(
                f"{self.directory}: {name} has {needed} elements, {len(whole)} are in its files"
            )
        # The last part of a parameter is padded, so that all ranks have equal ones.
        return whole[:needed].reshape(shape)

    def frozen(self, elsewhere: Collection[str]) -> dict[str, Tensor]:
        """Parameters that are not trained: whole in stages 1 and 2, in equal parts in stage 3.

        `elsewhere` are names that are no frozen parameters.
        """
        if not self.is_stage3:
            module = self.models[0]["module"]
            return {name: data for name, data in module.items() if name not in elsewhere}
        frozen = {}
        for name, shape in (self.models[0].get("frozen_param_shapes") or {}).items():
            parts = [model["frozen_param_fragments"][name].reshape(-1) for model in self.models]
            frozen[name] = self._join(name, parts, tuple(shape))
        return frozen

    def groups(self) -> list[dict[str, Any]]:
        """The param groups, by name; a group may have been cut into several sub-groups."""
        base = self.base(0)
        return [
            group_record(
                [name for number in group["params"] for name in self.shapes[number]],
                group,
                base["state"].get(group["params"][0], {}) if group["params"] else {},
            )
            for group in base["param_groups"]
        ]

    def run(self) -> dict[str, Any]:
        """The counters, and the batch in the engine's terms."""
        model = self.models[0]
        config = model.get("ds_config") or {}
        world = len(self.optimizers)
        micro = _int(config.get("train_micro_batch_size_per_gpu"))
        accumulation = _int(config.get("gradient_accumulation_steps"))
        blocks = ((config.get(key), str(computed)) for key, computed in _COMPUTE.items())
        enabled = (d for b, d in blocks if isinstance(b, Mapping) and b.get("enabled") is True)
        return {
            "step": int(model["global_steps"]),
            "samples": int(model["global_samples"]),
            "skipped": int(model["skipped_steps"]),
            "world": world,
            "stage": _int(config.get("zero_optimization", {}).get("stage")),
            "microbatches": world * accumulation if micro and accumulation else None,
            "micro_batch": micro if accumulation else None,
            "scheduler": _schedule(model),
            "dtype": next(enabled, None),
        }


def _int(value: object) -> int | None:
    """A number of a config; None for the word "auto", which DeepSpeed allows as well."""
    return value if isinstance(value, int) else None
