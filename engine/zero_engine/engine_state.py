"""The engine's state as checkpoint pieces, and back.

Owns the translation between live buffers and `checkpoint.pieces`. Must always hold: every rank
contributes exactly its interval of every unit, at every stage (stage 0 pretends to own no
more), so that stages 0-3 write the same atoms; what is loaded is bit-equal to what was saved,
for parameters trained or not, tied or not, optimizer state, hyperparameters of every group,
buffers, scheduler and loss scale.

Called by `engine`, which adds the counters and the client's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.checkpoint import Manifest
from zero_engine.checkpoint.pieces import BUFFER, PARAM, Piece, State, TensorId, TensorInfo
from zero_engine.collectives import Collectives, wait
from zero_engine.errors import CheckpointError, ModelMismatch
from zero_engine.flat_unit import FlatUnit, overlap
from zero_engine.segments import Segment, elementwise_keys
from zero_engine.selection import LoadOptions, Selection, select, without_frozen
from zero_engine.weights import persistent_buffers
from zero_engine.zero_optimizer import ZeroOptimizer

_SCALAR_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64)}


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """The parts of an engine that a checkpoint holds."""

    module: nn.Module
    units: Sequence[FlatUnit]
    zero: ZeroOptimizer | None
    collectives: Collectives
    scheduler: Any
    aliases: Mapping[str, str]
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Tensors and pieces of the last capture: the same again while the memory is the same."""

    def capture(
        self, run: Mapping[str, Any], client: Mapping[str, Any], *, exclude_frozen: bool = False
    ) -> State:
        """The state to save; the pieces are views.

        Args:
            run: Counters, batch and environment, from the engine.
            client: The script's own JSON.
            exclude_frozen: Leave out the parameters that are not trained.
        """
        engine = {
            **run,
            "groups": self._groups(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "loss_scaler": self.zero.scale_to_json() if self.zero is not None else None,
            "excludes_frozen": exclude_frozen,
        }
        state = self._state({"engine": engine, "client": dict(client)})
        return without_frozen(state, self._frozen()) if exclude_frozen else state

    def wanted(self, manifest: Manifest, options: LoadOptions) -> Selection:
        """The pieces to fill from a checkpoint, in a fresh optimizer state made to its measure.

        Raises:
            ModelMismatch: The parameters are grouped in another way.
        """
        weights_only = self.zero is None or not options.wants_optimizer
        if not weights_only:
            self._check_groups(manifest, options)
            self._make_optimizer_state(manifest)
        return select(
            self._state({}),
            manifest,
            strict=options.strict,
            weights_only=weights_only,
            frozen=self._frozen(),
        )

    def _frozen(self) -> frozenset[str]:
        """The parameters that nothing trains."""
        return frozenset(s.fqn for u in self.units if not u.trained for s in u.layout.slots)

    def adopt(self, engine: Mapping[str, Any], loaded: Selection, options: LoadOptions) -> None:
        """Finish a load whose pieces are filled: everything derived from them. Collective."""
        loaded.settle()
        for name, buffer in persistent_buffers(self.module):
            self.collectives.broadcast(buffer, f"buffer {name}")
        for unit in self.units:
            unit.restore()
        if self.zero is not None and options.wants_optimizer:
            self._gather_replicated_state(self.zero)
            self._adopt_groups(self.zero, engine["groups"])
            if engine.get("loss_scaler"):
                self.zero.restore_scale(engine["loss_scaler"])
        saved_scheduler = engine["scheduler"] if options.wants_scheduler else None
        if self.scheduler is not None and saved_scheduler is not None:
            self.scheduler.load_state_dict(saved_scheduler)

    # ---- tensors and pieces ----

    def _state(self, meta: Mapping[str, Any]) -> State:
        memory = tuple((t.data_ptr(), t.numel(), t.dtype) for t in self._live())
        if self._kept.get("memory") != memory:
            pieces = tuple(self._pieces())
            self._kept.update(memory=memory, tensors=self._tensors(), pieces=pieces)
        return State(self._kept["tensors"], self._kept["pieces"], dict(self.aliases), meta)

    def _live(self) -> Iterator[Tensor]:
        """All that the pieces are views of, in one order."""
        for unit in self.units:
            yield unit.shard
        if self.zero is not None:
            for segment in self.zero.segments:
                state = self.zero.optimizer.state.get(segment.param, {})
                yield from (state[key] for key in elementwise_keys(segment, state))
        yield from (buffer for _, buffer in persistent_buffers(self.module))

    def forget(self) -> None:
        """Let go of the memory of the last capture: a load makes new optimizer state."""
        self._kept.clear()

    def _tensors(self) -> dict[TensorId, TensorInfo]:
        tensors: dict[TensorId, TensorInfo] = {}
        kinds = self._kinds()
        for unit in self.units:
            for slot in unit.layout.slots:
                tensors[TensorId(PARAM, slot.fqn)] = TensorInfo(tuple(slot.shape), unit.shard.dtype)
                for key, dtype in kinds.get(slot.group, {}).items():
                    tensors[TensorId(key, slot.fqn)] = TensorInfo(tuple(slot.shape), dtype)
        for name, buffer in persistent_buffers(self.module):
            tensors[TensorId(BUFFER, name)] = TensorInfo(tuple(buffer.shape), buffer.dtype)
        return tensors

    def _pieces(self) -> Iterator[Piece]:
        for unit in self.units:
            yield from _cut(unit, PARAM, unit.shard, unit.interval[0], None)
        if self.zero is not None:
            for segment in self.zero.segments:
                state = self.zero.optimizer.state.get(segment.param, {})
                for key in elementwise_keys(segment, state):
                    yield from _cut(segment.unit, key, state[key], segment.start, segment.group)
        if self.collectives.rank == 0:
            for name, buffer in persistent_buffers(self.module):
                yield Piece(TensorId(BUFFER, name), 0, buffer.view(-1))

    def _kinds(self) -> dict[int | None, dict[str, torch.dtype]]:
        """Param group -> its per-element optimizer keys; the same on every rank."""
        if self.zero is None:
            return {}
        kinds: dict[int | None, dict[str, torch.dtype]] = {}
        for segment in self.zero.segments:
            state = self.zero.optimizer.state.get(segment.param, {})
            kinds[segment.group] = {k: state[k].dtype for k in elementwise_keys(segment, state)}
        return kinds

    # ---- param groups ----

    def _names_by_group(self) -> list[list[str]]:
        assert self.zero is not None
        names: list[list[str]] = [[] for _ in self.zero.optimizer.param_groups]
        for unit in self.units:
            for slot in unit.layout.slots:
                if slot.group is not None:
                    names[slot.group].append(slot.fqn)
        return names

    def _groups(self) -> list[dict[str, Any]]:
        if self.zero is None:
            return []
        state = self.zero.optimizer.state
        return [
            {
                "params": names,
                "hyperparameters": {
                    key: _plain(value, f"param group option {key}")
                    for key, value in group.items()
                    if key != "params"
                },
                "state": _scalars(segments[0], state.get(segments[0].param, {})) if names else {},
            }
            for names, (group, segments) in zip(
                self._names_by_group(), self.zero.segments_by_group(), strict=True
            )
        ]

    def _check_groups(self, manifest: Manifest, options: LoadOptions) -> None:
        saved = {frozenset(group["params"]) for group in manifest.meta["engine"]["groups"]}
        if not saved:  # weights alone, such as imported ones: the optimizer begins afresh
            return
        ours = {frozenset(names) for names in self._names_by_group()}
        params = {slot.fqn for unit in self.units for slot in unit.layout.slots}
        same_model = params == {t.fqn for t in manifest.tensors if t.kind == PARAM}
        # With strict loading another model is refused later, tensor by tensor.
        if saved != ours and (same_model or not options.strict):
            name = min(frozenset().union(*(saved ^ ours)))
            raise ModelMismatch(
                f"checkpoint {manifest.tag}: the parameters are in other param groups or "
                f"trained where they are now frozen (for example {name}); give the optimizer the "
                "groups that it had, or load with load_optimizer_states=False"
            )

    def _make_optimizer_state(self, manifest: Manifest) -> None:
        assert self.zero is not None
        optimizer = self.zero.optimizer
        before = dict(optimizer.state)
        optimizer.state.clear()
        # What rested in 16 bits is fp32 to the optimizer; `make_state` knows what it rests in here.
        narrow = manifest.meta["engine"].get("moments", "fp32") != "fp32"
        dtypes = {
            (t.fqn, t.kind): torch.float32
            if narrow and info.dtype == torch.bfloat16
            else info.dtype
            for t, info in manifest.tensors.items()
        }
        kinds = sorted({t.kind for t in manifest.tensors} - {PARAM, BUFFER})
        for names, (_, segments) in zip(
            self._names_by_group(), self.zero.segments_by_group(), strict=True
        ):
            present = {k: dtypes[n, k] for k in kinds for n in names if (n, k) in dtypes}
            for segment in segments if present else ():
                optimizer.state[segment.param] = self.zero.steps.make_state(
                    segment, present, before.get(segment.param, {})
                )

    def _gather_replicated_state(self, zero: ZeroOptimizer) -> None:
        """Where every rank steps all of a unit, bring in what the others have loaded."""
        for segment in zero.segments:
            if segment.unit.master.numel() != segment.unit.padded or self.collectives.world == 1:
                continue
            state = zero.optimizer.state.get(segment.param, {})
            for key in elementwise_keys(segment, state):
                whole = state[key].new_zeros(segment.unit.padded)
                part = whole[segment.start : segment.stop]
                part.copy_(state[key])
                wait(self.collectives.all_gather(whole, f"loaded {key} of {segment.unit.name}"))
                state[key].copy_(part)

    def _adopt_groups(self, zero: ZeroOptimizer, saved: Sequence[Mapping[str, Any]]) -> None:
        if not saved:
            return
        by_names = {frozenset(record["params"]): record for record in saved}
        for names, (group, segments) in zip(
            self._names_by_group(), zero.segments_by_group(), strict=True
        ):
            record = by_names[frozenset(names)]
            for key, value in record["hyperparameters"].items():
                group[key] = _like(group.get(key), value)
            for segment in segments if record["state"] else ():
                state = zero.optimizer.state[segment.param]
                for key, value in record["state"].items():
                    state[key] = _unpack(value, group, segment)


def _cut(
    unit: FlatUnit, kind: str, data: Tensor, origin: int, group: int | None
) -> Iterator[Piece]:
    """The pieces of `data`, which begins at element `origin` of the unit.

    Only what lies in this rank's interval; with a group, only the group's parameters.
    """
    low, high = max(origin, unit.interval[0]), min(origin + data.numel(), unit.interval[1])
    for slot in unit.layout.slots:
        start, stop = overlap(slot.start, slot.stop, low, high)
        if stop > start and group in (None, slot.group):
            part = data[start - origin : stop - origin]
            yield Piece(TensorId(kind, slot.fqn), start - slot.start, part)


# ---- scalars in JSON ----


def _scalars(segment: Segment, state: Mapping[str, Any]) -> dict[str, Any]:
    keys = state.keys() - set(elementwise_keys(segment, state))
    return {key: _pack(state[key], f"optimizer state {key}") for key in sorted(keys)}


def _pack(value: Any, what: str) -> Any:
    if not isinstance(value, Tensor):
        return _plain(value, what)
    if value.numel() != 1 or str(value.dtype) not in _SCALAR_DTYPES:
        raise CheckpointError(
            f"{what} has shape {tuple(value.shape)} and dtype {value.dtype}: neither one value "
            "per element nor one number, so it cannot be divided among ranks"
        )
    return {"tensor": value.item(), "dtype": str(value.dtype), "shape": list(value.shape)}


def _unpack(value: Any, group: Mapping[str, Any], segment: Segment) -> Any:
    if not isinstance(value, Mapping):
        return value
    # torch keeps step counts beside the weights for kernels that read them there, else on the CPU.
    beside = group.get("fused") or group.get("capturable")
    device = segment.param.device if beside else torch.device("cpu")
    tensor = torch.tensor(value["tensor"], dtype=_SCALAR_DTYPES[value["dtype"]], device=device)
    return tensor.reshape(value["shape"])


def _plain(value: Any, what: str) -> Any:
    """A hyperparameter as JSON."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.numel() == 1:
            return value.item()
        case list() | tuple():
            return [_plain(inner, what) for inner in value]
        case _:
            raise CheckpointError(f"{what} is a {type(value).__name__}, which JSON cannot hold")


def _like(current: Any, value: Any) -> Any:
    """A hyperparameter from JSON, in the form that the optimizer has it in now."""
    if isinstance(current, Tensor):
        return current.fill_(value)
    return tuple(value) if isinstance(value, list) else value
