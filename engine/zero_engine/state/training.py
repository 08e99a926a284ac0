"""An engine for the checkpoint library: its `Training` and its `Loading`, implemented.

Owns the exchange of the weights that the ranks have read, which runs while they read the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint, ModelMismatch
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import BUFFER, PARAM, State
from zero_checkpoint.loading import restore
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.state.torch_state import warn_of_unsaved_schedule
from zero_checkpoint.state.weight_hash import weight_hash
from zero_comm.exchange.collectives import Pending
from zero_comm.sums.order import record_of, record_of_native
from zero_data.global_batch import BatchShape
from zero_engine.offload_states import Inconsistency, MovedStates
from zero_engine.parts import Core, Run
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.sharding.partition import DTYPES
from zero_engine.sharding.weights import whole_weights
from zero_engine.state.engine_state import EngineState
from zero_engine.state.selection import LoadOptions, Selection
from zero_step import record
from zero_step.gradients.accumulation import check_block
from zero_step.lane_states import LaneStates, lanes_of

_log = logging.getLogger(__name__)
_TERMS = record.Terms(
    anew="begin a new run with load_checkpoint(load_module_only=True)",
    dataset="training_data",
    seed="seed",
    batch="set train_batch_size to {samples} and train_micro_batch_size_per_gpu to {micro_batch}",
)
_WHOLE = LoadOptions()


class Loading:
    """The steps of a load: `zero_checkpoint.training.Loading`, implemented for an engine.

    Attributes:
        resumes: Whether all of the state is to be loaded.
        takes_position: Whether steps and samples are to be loaded.
        options: What a script chooses, by its names for it, but for what ranks may do differently.
    """

    def __init__(
        self, state: EngineState, moved: MovedStates, options: LoadOptions, training: EngineTraining
    ) -> None:
        """Prepare a load; nothing is read yet."""
        self.resumes = options.whole
        self.takes_position = not options.module_only
        self.options = {
            "load_module_only": options.module_only,
            "load_optimizer_states": options.wants_optimizer,
            "load_lr_scheduler_states": options.wants_scheduler,
        }
        self._selection = Selection(State({}, ()))
        self._training = training
        self._filled = State({}, ())
        self._state = state
        self._moved = moved
        self._before = moved.inconsistent
        self._batch = training.batch
        self._awaited = frozenset(self._before.params if self._before is not None else ())
        # Also what a damaged checkpoint has left: a later load may leave out none of it.
        self._needed = {*self._awaited}
        self._options = options
        self._tried = 0
        self._under_way: list[tuple[FlatUnit, Pending]] = []

    @property
    def filled(self) -> State:
        """The part of the state that the checkpoint tried last has filled."""
        return self._filled

    def read(
        self, root: Place, consensus: StoreConsensus, tag: str | None, ram: MemorySearch | None
    ) -> Loaded | None:
        """Fill this rank's share of the state. Collective; see `restore.load`."""
        loaded = None
        try:
            loaded = restore.load(
                root,
                consensus,
                self._wanted,
                exchange=self._exchange,
                meet=self._state.core.collectives.barrier,
                tag=tag,
                ram=ram,
            )
        except CheckpointError as error:
            self._end_exchange()  # the script may continue with these weights
            # Whether any rank may have read into the state; the same on all ranks. A checkpoint of
            # another model is tried as well, and not read.
            if self._tried > (1 if isinstance(error, ModelMismatch) else 0):
                self._tear(f"a load has failed: {error}")
            else:
                self._moved.inconsistent = self._before
            raise
        finally:
            if loaded is None:
                self._training.take_batch(self._batch)
        return loaded

    def adopt(self, run: Mapping[str, Any]) -> None:
        """Finish the load of what has been read: all that is derived from it. Collective."""
        self._end_exchange()
        self._selection.settle(weights=False)
        for unit in self._state.core.units:
            if unit.tiers.state.far:
                unit.restore()
        self._state.adopt(run, self._options)
        if self.takes_position:
            self._training.adopt(run)

    def end(self) -> None:
        """Note that the state is consistent: it is that of the checkpoint, as far as requested."""
        before = self._before
        mended = before is None or self._options.wants_optimizer or not before.optimizer
        self._moved.inconsistent = None if mended else before

    def report(self, loaded: Loaded) -> None:
        """Log what was loaded, and what was not."""
        for remark in self._selection.remarks:
            _log.info("%s", remark)
        engine = loaded.manifest.meta["engine"]
        digest = engine.get("weight_hash")
        weights = f", weights {digest[:16]}" if digest else ""
        _log.info("loaded %s, step %d%s", loaded.path, engine["step"], weights)

    def _tear(self, reason: str) -> None:
        before = self._before is not None and self._before.optimizer
        optimizer = before or self._options.wants_optimizer
        self._moved.inconsistent = Inconsistency(reason, optimizer, self._needed)

    def _wanted(self, manifest: Manifest) -> State:
        # Nothing is read into weights that are being exchanged.
        self._end_exchange()
        self._training.take_batch(self._batch)  # the checkpoint before had another, perhaps
        if self.takes_position:
            self._training.check(manifest)
        # From here on anything may have been read, until a load has ended.
        self._tear("a load was interrupted")
        selection = self._state.wanted(manifest, self._options, self._awaited)
        # Damage, not a mismatch: one that is older still may have all of them.
        if lost := sorted(_of_module(self._filled) - _of_module(selection.state)):
            raise DamagedCheckpoint(
                f"{manifest.directory} (tag {manifest.tag!r}) does not have {len(lost)} tensors of "
                f"the module, first {lost[0]}, which hold what a damaged checkpoint has left"
            )
        self._selection = selection
        self._needed |= _of_module(selection.state)
        self._filled = self._selection.state
        if self.takes_position:
            self._filled = self._training.beside(self._filled, manifest)
        return self._filled

    def _exchange(self, filled: bool) -> None:
        """Begin to exchange the weights that rest on the device with the other ranks."""
        self._end_exchange()
        self._tried += 1
        if filled:
            self._selection.settle(weights=True)
        # Every rank takes part, whatever it could read: only later do the ranks know whether all
        # have read well. If not, both what was read and what was received is filled again, or the
        # load is an error.
        for unit in self._state.core.units:
            if not unit.tiers.state.far:  # far weights are restored in `adopt`
                self._under_way.append((unit, unit.begin_restore()))

    def _end_exchange(self) -> None:
        under_way, self._under_way = self._under_way, []
        for unit, pending in under_way:
            unit.end_restore(pending)


def _of_module(state: State) -> set[str]:
    return {t.fqn for t in state.tensors if t.kind in (PARAM, BUFFER)}


class EngineTraining:
    """One engine's state and position."""

    def __init__(self, core: Core, run: Run, state: EngineState) -> None:
        self.rank = run.rank
        self.world = run.world
        self.cursor = run.cursor
        self._core = core
        self._run = run
        self._state = state
        self._lanes = LaneStates()

    @property
    def trains(self) -> bool:
        """Whether the engine has an optimizer, and no other engine has taken its module."""
        return self._core.zero is not None and not self._core.moved.given_away

    @property
    def in_library_loop(self) -> bool:
        """Whether a library declares before each micro-step whether it ends a step."""
        return self._run.declared

    def capture(
        self, run: Mapping[str, Any], client: Mapping[str, Any], *, exclude_frozen: bool
    ) -> State:
        """The state to save, with counters, batch and environment."""
        self._core.moved.take_writes()
        whole = {**self._describe(), **run}
        state = self._state.capture(whole, client, exclude_frozen=exclude_frozen)
        kept = client or self.in_library_loop or state.meta["engine"]["scheduler"] is not None
        if self._core.zero is not None and self._run.rank == 0 and not kept:
            warn_of_unsaved_schedule(self._core.zero.optimizer)
        return self._lanes.saved(state, lanes_of(self._run.loader))

    def weight_hash(self) -> str:
        """The hash of all parameters. Collective."""
        return weight_hash(whole_weights(self._core.units))

    def settle(self) -> None:
        """Wait for the weights of the last step, which others may read from here."""
        self._core.overlap.end()

    def lend(self, until: Callable[[], object]) -> None:
        """Let a thread read the state in place; the next user of the state calls `until` first."""
        self._core.moved.lend(until)

    @property
    def before_change(self) -> list[Callable[[], object]]:
        """Functions that are called before weights or optimizer state change."""
        return self._core.moved.before_change

    def loading(self, options: LoadOptions = _WHOLE) -> Loading:
        """A load into this engine."""
        self._core.writes.drop(0)  # there may have been a forward, and no backward
        return Loading(self._state, self._core.moved, options, self)

    @property
    def batch(self) -> BatchShape:
        """The global batch."""
        return self._run.batch

    def take_batch(self, batch: BatchShape) -> None:
        """Continue with another global batch."""
        self._run.adopt_batch(batch)

    def check(self, manifest: Manifest) -> None:
        """Refuse a checkpoint of other lanes; raises ModelMismatch."""
        if not self._run.batch_from_world:  # else its batch is taken over
            self._lanes.check(manifest, lanes_of(self._run.loader))

    def beside(self, state: State, manifest: Manifest) -> State:
        """A state to load, with the lanes of a checkpoint, and its batch if the config has none."""
        run, saved = self._run, manifest.meta["engine"]
        if run.batch_from_world and saved["microbatches"]:
            count, size = saved["microbatches"], saved["micro_batch"]
            self.take_batch(BatchShape(microbatches=count, micro_batch=size))
        return self._lanes.wanted(state, manifest, lanes_of(run.loader))

    # ---- the record of the run ----

    def _describe(self) -> dict[str, Any]:
        core, run, config = self._core, self._run, self._core.layout.config
        lanes = lanes_of(run.loader)
        return record.describe(
            run.cursor,
            core.hardware,
            world=run.world,
            optimizer=core.zero.optimizer if core.zero is not None else None,
            microbatches=run.batch.microbatches,
            micro_batch=run.batch.micro_batch,
            summed_over=run.summed_over,
            reduction=self._reduction(),
            dataset_size=run.loader.order.dataset_size if run.loader is not None else None,
            lanes=lanes.record() if lanes is not None else None,
            data=run.loader.known_as if run.loader is not None else None,
            seed=config.seed,
            stage=core.stage.number,
            dtype=str(DTYPES[config.compute]),
            master=config.master,
            moments=config.moments,
        )

    def _reduction(self) -> dict[str, Any] | None:
        """The record of how the run sums gradients; None if it trains nothing."""
        zero, layout = self._core.zero, self._core.layout
        if zero is None:
            return None
        if layout.native:
            return record_of_native(dist.get_backend(), layout.native)
        return record_of(zero.reduction_block, rounds=layout.sums.rounds)

    def adopt(self, saved: Mapping[str, Any]) -> None:
        """Resume at a position; raises as `record.adopt`."""
        run = self._run
        run.loaded_samples = (saved["microbatches"] or 0) * (saved["micro_batch"] or 0)
        if run.loader is not None and saved["dataset_size"]:
            run.loader.order.expect(saved["dataset_size"])
        core, elastic = self._core, self._core.layout.config.elastic
        if core.zero is not None:
            # Gradients are summed as the checkpoint says.
            adopted = record.adopt(
                saved,
                self._describe(),
                core.hardware,
                _TERMS,
                mode=elastic.reduction,
                block=elastic.reduction_block,
                rounds=core.layout.sums.rounds,
                feed=run.loader,
            )
            run.hardware_changed = adopted.hardware_changed
            core.zero.reduction_block = adopted.block
            check_block(core.layout.sums, adopted.block)
            for line in adopted.remarks if self.rank == 0 else ():
                _log.warning("%s", line)
        if run.summed_over is not None and saved.get("summed_over") is not None:
            run.summed_over = saved["summed_over"]
        record.resume(run.cursor, saved)
        self._lanes.adopt(saved, lanes_of(run.loader))
        if run.loader is not None:
            run.loader.seed_step()
