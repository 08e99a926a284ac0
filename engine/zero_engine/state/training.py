"""An engine for the checkpoint library: `zero_checkpoint.training.Training`, implemented."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from zero_checkpoint.format.pieces import State
from zero_checkpoint.state.weight_hash import weight_hash
from zero_comm.sums.order import record_of, record_of_native
from zero_data.global_batch import BatchShape
from zero_engine.accumulation import check_block
from zero_engine.parts import Core, Run
from zero_engine.sharding.partition import DTYPES
from zero_engine.sharding.weights import whole_weights
from zero_engine.state.engine_state import EngineState
from zero_engine.state.loading import Loading
from zero_engine.state.selection import LoadOptions
from zero_step import record

_log = logging.getLogger(__name__)

_TERMS = record.Terms(
    anew="begin a new run with load_checkpoint(load_module_only=True)",
    dataset="training_data",
    seed="seed",
    batch="set train_batch_size to {samples} and train_micro_batch_size_per_gpu to {micro_batch}",
)
_WHOLE = LoadOptions()


class EngineTraining:
    """One engine's state and position."""

    def __init__(self, core: Core, run: Run, state: EngineState) -> None:
        self.rank = run.rank
        self.world = run.world
        self.cursor = run.cursor
        self._core = core
        self._run = run
        self._state = state

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
        whole = {**self._describe(), **run}
        return self._state.capture(whole, client, exclude_frozen=exclude_frozen)

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
        """What is called before weights or optimizer state change."""
        return self._core.moved.before_change

    def loading(self, options: LoadOptions = _WHOLE) -> Loading:
        """A load into this engine."""
        return Loading(self._state, self._core.moved, options, self._adopt)

    # ---- the record of the run ----

    def _describe(self) -> dict[str, Any]:
        core, run, config = self._core, self._run, self._core.layout.config
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
            seed=config.seed,
            stage=core.stage.number,
            dtype=str(DTYPES[config.compute]),
            master=config.master,
            moments=config.moments,
        )

    def _reduction(self) -> dict[str, Any] | None:
        """How the run sums gradients; None if it trains nothing."""
        zero, layout = self._core.zero, self._core.layout
        if zero is None:
            return None
        if layout.native:
            return record_of_native(dist.get_backend(), layout.native)
        return record_of(zero.reduction_block, rounds=layout.sums.rounds)

    def _adopt(self, saved: Mapping[str, Any]) -> None:
        """Resume at a position, with its batch if the config leaves it open; raises as `adopt`."""
        run, count, size = self._run, saved["microbatches"], saved["micro_batch"]
        run.loaded_samples = (count or 0) * (size or 0)
        if run.batch_from_world and count:
            run.adopt_batch(BatchShape(microbatches=count, micro_batch=size))
        if run.loader is not None and saved["dataset_size"]:
            run.loader.order.expect(saved["dataset_size"])
        self._adopt_order(saved)
        if run.summed_over is not None and saved.get("summed_over") is not None:
            run.summed_over = saved["summed_over"]
        record.resume(run.cursor, saved)

    def _adopt_order(self, saved: Mapping[str, Any]) -> None:
        """Sum gradients as a checkpoint says; warn of what changes the result."""
        core, elastic = self._core, self._core.layout.config.elastic
        if core.zero is None:
            return
        adopted = record.adopt(
            saved,
            self._describe(),
            core.hardware,
            _TERMS,
            mode=elastic.reduction,
            block=elastic.reduction_block,
            rounds=core.layout.sums.rounds,
        )
        self._run.hardware_changed = adopted.hardware_changed
        core.zero.reduction_block = adopted.block
        check_block(core.layout.sums, adopted.block)
        for line in adopted.remarks if self.rank == 0 else ():
            _log.warning("%s", line)
