"""The engine's state as checkpoint pieces, and back.

Owns the translation between live buffers and `checkpoint.pieces`. Every rank contributes exactly
its interval of every unit, at every stage (stage 0 saves no more), so that stages 0-3 write the
same atoms.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor

from zero_checkpoint import Manifest
from zero_checkpoint.errors import CheckpointError, ModelMismatch
from zero_checkpoint.format.match import resolve
from zero_checkpoint.format.pieces import BUFFER, OTHER, PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.format.table import Pieces, TensorTable, table_of, uncollected
from zero_checkpoint.state.torch_state import (
    EXTRA_STATE,
    extra_state,
    matched,
    numbers_of,
    persistent_buffers,
    plain,
    restore_extra_state,
    restore_schedule,
    schedule_as_json,
    set_option,
)
from zero_engine.optim.owner_steps import StepByOwners
from zero_engine.parts import Core
from zero_engine.state.optimizer_state import (
    WHOLE,
    OptimizerState,
    StateOfOwners,
    StateOfSegments,
    cut,
)
from zero_engine.state.selection import LoadOptions, Selection, select, without_frozen
from zero_step.record import name_of

_log = logging.getLogger(__name__)


class EngineState:
    """What a checkpoint holds of an engine."""

    def __init__(self, core: Core, scheduler: Any) -> None:
        self.core = core
        self._scheduler = scheduler
        self._kept: dict[str, Any] = {}
        """Tensors and pieces of the last capture, used again while the memory is the same."""

    @property
    def _optimizer(self) -> OptimizerState | None:
        if self.core.zero is None:
            return None
        steps = self.core.zero.steps
        if isinstance(steps, StepByOwners):
            return StateOfOwners(self.core.zero, steps)
        return StateOfSegments(self.core.zero, steps, self.core.collectives)

    @uncollected()
    def capture(
        self, run: Mapping[str, Any], client: Mapping[str, Any], *, exclude_frozen: bool = False
    ) -> State:
        """The state to save; the pieces are views, `meta` is a copy as of now."""
        groups: list[dict[str, Any]] = []
        if self.core.zero is not None and self._optimizer is not None:
            optimizer, records = self.core.zero.optimizer, self._optimizer.records()
            # As torch's state_dict has it.
            if of_none := [key for key in optimizer.state if not isinstance(key, Tensor)]:
                raise CheckpointError(
                    f"optimizer {type(optimizer).__name__} keeps {of_none[0]!r} in its state, "
                    "which belongs to no parameter, so no checkpoint has a place for it: let it be "
                    "an option of the param groups, which are saved, or use another optimizer"
                )
            params = optimizer.param_groups
            for (named, frozen), group, record in zip(self._groups(), params, records, strict=True):
                options = {
                    key: plain(value, f"param group option {key}")
                    for key, value in group.items()
                    if key != "params"
                }
                own = {"params": named, "frozen": list(frozen), "hyperparameters": options}
                groups.append({**own, **record})
        engine = {
            **run,
            "groups": groups,
            "scheduler": schedule_as_json(self._scheduler),
            "loss_scaler": self.core.zero.scale_to_json() if self.core.zero is not None else None,
            "excludes_frozen": exclude_frozen,
            EXTRA_STATE: extra_state(self.core.module),
        }
        state = self._state({"engine": engine, "client": dict(client)})
        return without_frozen(state, self._frozen()) if exclude_frozen else state

    @uncollected()
    def wanted(self, manifest: Manifest, options: LoadOptions, needed: Set[str]) -> Selection:
        """The pieces to fill from a checkpoint, in fresh optimizer state with its keys.

        `needed`: names of parameters that no load may leave out.

        Raises:
            ModelMismatch: The checkpoint is of another model or optimizer, or its parameters are
                grouped in another way. Nothing has been changed.
        """
        weights_only = self.core.zero is None or not options.wants_optimizer
        chosen = partial(
            select,
            manifest=manifest,
            strict=options.strict,
            weights_only=weights_only,
            frozen=self._frozen(),
            needed=needed,
        )
        if not weights_only and self._optimizer is not None:
            self._check_groups(manifest, options)
            if table_of(manifest.tensors).kind_names - {PARAM, BUFFER, OTHER}:
                self._check_optimizer(manifest)
            # If this very table is that of the last capture, and of the state as it is, it fits.
            same_table = self._kept.get("tensors") is manifest.tensors
            if not same_table or self._kept["memory"] != self._memory():
                coming = self._tensors(self._optimizer.tensors_after(manifest))
                resolve(chosen(State(coming, ())).state, manifest)
            self._optimizer.make(manifest)
        return chosen(self._state({}, manifest.tensors))

    def _frozen(self) -> frozenset[str]:
        """The names of the parameters that are not trained."""
        return frozenset(
            s.fqn for u in self.core.units if not u.spec.trained for s in u.layout.slots
        )

    def adopt(self, engine: Mapping[str, Any], options: LoadOptions) -> None:
        """Finish a load whose pieces are filled: everything except weights. Collective."""
        # Rank 0 alone saves them, and has read them.
        for name, buffer in persistent_buffers(self.core.module):
            self.core.collectives.broadcast(buffer, f"buffer {name}")
        absent = restore_extra_state(self.core.module, engine.get(EXTRA_STATE))
        if absent and self.core.collectives.rank == 0:
            _log.warning("the checkpoint has no extra state of %s: it stays", ", ".join(absent))
        if self.core.zero is not None and options.wants_optimizer:
            assert self._optimizer is not None
            records = matched(engine["groups"], self._groups())
            self._optimizer.finish(records)
            for group, record in zip(self.core.zero.optimizer.param_groups, records, strict=True):
                for key, value in record["hyperparameters"].items() if record is not None else ():
                    set_option(group, key, value)
            if engine.get("loss_scaler"):
                self.core.zero.restore_scale(engine["loss_scaler"])
        saved_scheduler = engine["scheduler"] if options.wants_scheduler else None
        if self._scheduler is not None and saved_scheduler is not None:
            restore_schedule(self._scheduler, saved_scheduler)

    # ---- tensors and pieces ----

    def _state(
        self, meta: Mapping[str, Any], same: Mapping[TensorId, TensorInfo] | None = None
    ) -> State:
        """All tensors and this rank's pieces; `same` replaces a table that is equal to it."""
        memory = self._memory()
        if self._kept.get("memory") != memory:
            of_optimizer = self._optimizer.tensors() if self._optimizer is not None else {}
            tensors = self._tensors(of_optimizer)
            pieces: list[Piece] = []
            for unit in self.core.units:
                pieces += cut(unit, PARAM, unit.shard, unit.interval[0], None)
            if self._optimizer is not None:
                pieces += self._optimizer.pieces()
            if self.core.collectives.rank == 0:
                for name, buffer in self._buffers():
                    pieces.append(Piece(TensorId(BUFFER, name), 0, buffer.view(-1)))
            seen = frozenset(p.untyped_storage().data_ptr() for p in self.core.module.parameters())
            self._kept.update(memory=memory, tensors=tensors, pieces=Pieces(pieces), visible=seen)
        if same is not None and self._kept["tensors"].same_as(same):
            self._kept["tensors"] = table_of(same)
        kept = self._kept
        return State(
            kept["tensors"], kept["pieces"], dict(self.core.aliases), meta, visible=kept["visible"]
        )

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Those of a checkpoint: in the middle of a step a forward may have written to its own."""
        held = persistent_buffers(self.core.module)
        return [(name, self.core.writes.before.get(name, buffer)) for name, buffer in held]

    def _memory(self) -> tuple[Any, ...]:
        """Identifies the tensors that the pieces are views of."""
        mark, live = None, [unit.shard for unit in self.core.units]
        if self._optimizer is not None:
            mark = self._optimizer.mark()
            live.extend(self._optimizer.live())
        live.extend(buffer for _, buffer in self._buffers())
        return (mark, *((t.data_ptr(), t.numel(), t.dtype) for t in live))

    def _tensors(self, of_optimizer: Mapping[TensorId, TensorInfo]) -> TensorTable:
        tensors = TensorTable(
            (TensorId(PARAM, slot.fqn), TensorInfo(tuple(slot.shape), unit.shard.dtype))
            for unit in self.core.units
            for slot in unit.layout.slots
        )
        tensors.update(of_optimizer)
        for name, buffer in self._buffers():
            tensors[TensorId(BUFFER, name)] = TensorInfo(tuple(buffer.shape), buffer.dtype)
        return tensors

    # ---- param groups ----

    def _groups(self) -> list[tuple[list[str], Sequence[str]]]:
        """Of each param group the names of its trained and of its frozen parameters."""
        assert self.core.zero is not None
        self.core.as_given.check_groups()
        return [
            *zip(self.core.zero.names_by_group(), self.core.as_given.frozen_by_group, strict=True)
        ]

    def _check_groups(self, manifest: Manifest, options: LoadOptions) -> None:
        records = manifest.meta["engine"]["groups"]
        if not records:  # weights alone, such as imported ones: the optimizer begins afresh
            return
        saved = {frozenset(record["params"]) for record in records} - {frozenset()}
        ours = {frozenset(trained) for trained, _ in self._groups()} - {frozenset()}
        differ = {name for group in saved ^ ours for name in group}
        # The flat optimizer has one count of steps for all that a group trains.
        counts = {
            name
            for record in records
            for name, numbers in numbers_of(record).items()
            if name in record["params"] and numbers != record["state"]
        }
        if not differ and not counts:
            return
        params = {slot.fqn for unit in self.core.units for slot in unit.layout.slots}
        same_model = params == {t.fqn for t in manifest.tensors if t.kind == PARAM}
        # With strict loading another model is refused later, tensor by tensor.
        if differ and (same_model or not options.strict):
            raise ModelMismatch(
                f"checkpoint {manifest.tag}: the parameters are in other param groups or "
                f"trained where they are now frozen (for example {min(differ)}); give the "
                "optimizer the groups that it had, or load with load_optimizer_states=False"
            )
        if counts:
            raise ModelMismatch(
                f"checkpoint {manifest.tag}: the parameters of a param group were not stepped "
                f"equally often (for example {min(counts)}), and the engine steps a group as one; "
                "give it a group of its own from the beginning, or load with "
                "load_optimizer_states=False"
            )

    def _check_optimizer(self, manifest: Manifest) -> None:
        """Refuse the state of an optimizer that the present one cannot continue."""
        assert self.core.zero is not None
        there = manifest.meta["engine"].get("optimizer")
        here = name_of(self.core.zero.optimizer)
        groups = manifest.meta["engine"]["groups"]
        whole = isinstance(self.core.zero.steps, StepByOwners)
        if any(group.get(WHOLE) for group in groups) != whole:
            raise ModelMismatch(
                f"checkpoint {manifest.tag}: optimizer {there or 'another'} was stepped on "
                f"{'shards' if whole else 'whole parameters'}, {here} is stepped on "
                f"{'whole parameters' if whole else 'shards'} here; give the optimizer that it was "
                "saved with, the same in needs_whole_parameters, or load with "
                "load_optimizer_states=False"
            )
        # An optimizer of another name continues only with the same options: those that it lacks
        # would be ignored, further ones would have no state, and the learning rate was chosen for
        # the other one. `Adam` and `AdamW`, and classes derived from them, are the same in this.
        saved = [group["hyperparameters"] for group in groups]
        differing = _options(self.core.zero.optimizer.param_groups) ^ _options(saved)
        if there not in (None, here) and differing:
            raise ModelMismatch(
                f"checkpoint {manifest.tag}: its optimizer state is that of {there}, and only one "
                f"of it and {here} has {', '.join(sorted(differing))}: {here} cannot continue "
                "it; give the optimizer that it was saved with, or load with "
                "load_optimizer_states=False"
            )


_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Options of torch's optimizers that choose a kernel and change no result."""


def _options(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    return {key for group in groups for key in group} - _HOW
