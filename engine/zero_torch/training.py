"""A stock PyTorch training for the checkpoint library: its `Training` and `Loading`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import OTHER, Piece, State
from zero_checkpoint.loading import restore
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.plain import UNKNOWN_RUN
from zero_checkpoint.state.torch_state import (
    EXTRA_STATE,
    restore_schedule,
    schedule_as_json,
    warn_of_unsaved_schedule,
)
from zero_comm.determinism import Hardware
from zero_comm.exchange.collectives import Collectives
from zero_comm.sums.order import NATIVE, ORDERED, record_of, record_of_native
from zero_data.global_batch import BatchShape, Cursor
from zero_data.lanes.order import LaneOrder
from zero_data.position_loader import Feed
from zero_step import record
from zero_step.gradients.accumulation import Accumulation, check_block
from zero_step.lane_states import LaneStates, lanes_of
from zero_torch.ordered_gradients import OrderedGradients
from zero_torch.settings import Elastic
from zero_torch.state.shared_reads import SharedReads
from zero_torch.state.stateful import META
from zero_torch.state.training_state import TrainingState

_log = logging.getLogger(__name__)

_TERMS = record.Terms(
    anew="begin a new run in another directory",
    dataset="the loader's dataset",
    seed="elastic.seed",
    batch="give protect(microbatches={microbatches}) and a loader with batch_size={micro_batch}",
)


_OF_SCRIPT = "of the script"
"""In the place of a dtype: the sums are made by a script without a loader."""


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """The order of data and gradients, on which the bits of a training depend."""

    gradients: OrderedGradients
    batch: BatchShape
    feed: Feed
    sums: Accumulation
    """Where gradients are added."""
    chosen: Elastic
    """The script's own choice of the order."""

    def record(self) -> dict[str, Any]:
        """Under the names of the engine's record."""
        lanes = lanes_of(self.feed)
        return {
            "microbatches": self.batch.microbatches,
            "micro_batch": self.batch.micro_batch,
            "dataset_size": self.feed.order.dataset_size,
            "lanes": lanes.record() if lanes is not None else None,
            "data": self.feed.known_as,
            "seed": self.chosen.seed,
            "reduction": record_of_native(dist.get_backend(), "that of the sums")
            if self.chosen.is_native
            else record_of(self.gradients.block),
        }


def _memory_of(piece: Piece) -> tuple[Any, ...]:
    """Says whether two pieces are of the same elements in the same memory."""
    return piece.id, piece.start, piece.data.data_ptr(), piece.data.numel(), piece.data.dtype


@dataclass(kw_only=True)
class Training:
    """One training: `zero_checkpoint.training.Training`, implemented."""

    state: TrainingState
    cursor: Cursor
    collectives: Collectives
    hardware: Hardware
    hardware_changed: bool = False
    """Whether the loaded checkpoint was made on other hardware."""
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    weight_hash: Callable[[], str]
    ordered: Ordered | None = None
    """None: data and gradients are the script's own."""
    trains: bool = True
    in_library_loop: bool = False
    before_change: None = None
    """A script may write to its parameters at any time."""
    captured: tuple[Piece, ...] = ()
    """The pieces of the last capture."""
    lent: Callable[[], object] | None = None
    """Waits for whoever reads the state."""
    lanes: LaneStates = field(default_factory=LaneStates)

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self.collectives.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.collectives.world

    def capture(
        self, run: Mapping[str, Any], client: Mapping[str, Any], *, exclude_frozen: bool
    ) -> State:
        """The state to save, as of now."""
        engine = {
            **UNKNOWN_RUN,
            **self._describe(),
            **run,
            "groups": self.state.groups(),
            EXTRA_STATE: self.state.extra_state(),
            "scheduler": schedule_as_json(self.scheduler),
            # The engine's; that of torch follows.
            "loss_scaler": None,
            "grad_scaler": self.scaler.state_dict() if self.scaler else None,
            "excludes_frozen": exclude_frozen,
        }
        state = self.state
        if self.scheduler is None and not (client or state.statefuls or self.rank):
            warn_of_unsaved_schedule(self.optimizer)
        meta = {"engine": engine, "client": dict(client), META: state.statefuls.take()}
        captured = State(state.tensors(), self._kept(state.owned()), state.aliases(), meta)
        state.statefuls.drop()  # the pieces keep the copies until they are written
        return self.lanes.saved(captured, self.order)

    @property
    def order(self) -> LaneOrder | None:
        """The order of the lanes; None without lanes."""
        return lanes_of(self.ordered.feed) if self.ordered is not None else None

    def _kept(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The pieces of the last capture, if these are the same: their layout is known."""
        # Copies of the script's objects must not outlive their save.
        if any(piece.id.kind == OTHER for piece in pieces):
            return pieces
        if [*map(_memory_of, pieces)] != [*map(_memory_of, self.captured)]:
            self.captured = pieces
        return self.captured

    def _describe(self) -> dict[str, Any]:
        native = {"reduction": record_of_native(dist.get_backend(), _OF_SCRIPT)}
        known = self.ordered.record() if self.ordered is not None else native
        return record.describe(
            self.cursor, self.hardware, world=self.world, optimizer=self.optimizer, **known
        )

    def loading(self) -> Loading:
        """A load of everything."""
        return Loading(self)

    def lend(self, until: Callable[[], object]) -> None:
        """A thread reads the state in place; `take_back` calls `until` before the next change."""
        self.lent = until

    def take_back(self) -> None:
        """Wait until nobody reads the state: it is about to change."""
        if self.lent is not None:
            until, self.lent = self.lent, None
            until()

    def settle(self) -> None:
        """Nothing is left under way: a step of torch waits for all of its exchanges."""

    def adopt(self, run: Mapping[str, Any]) -> None:
        """Resume where a checkpoint was made; warn of what changes the result.

        Raises:
            ConfigError: The script asks for another order of the gradients' sums, or for the
                hardware of the checkpoint.
        """
        ordered = self.ordered
        mode: str | None = NATIVE
        if ordered is not None:
            mode = ordered.chosen.reduction
            # A loader alone brings order to what had none.
            if mode is None and (run.get("reduction") or {}).get("dtype") == _OF_SCRIPT:
                mode = ORDERED
        adopted = record.adopt(
            run,
            self._describe(),
            self.hardware,
            _TERMS,
            mode=mode,
            block=ordered.chosen.reduction_block if ordered is not None else None,
            feed=ordered.feed if ordered is not None else None,
        )
        if ordered is not None:
            check_block(ordered.sums, adopted.block)
            ordered.gradients.block = adopted.block
        self.hardware_changed = adopted.hardware_changed
        for line in adopted.remarks if self.rank == 0 else ():
            _log.warning("%s", line)
        self.state.adopt(run["groups"])
        absent = self.state.statefuls.restore()
        absent += self.state.restore_extra_state(run.get(EXTRA_STATE))
        if absent and self.rank == 0:
            _log.warning("the checkpoint has no state of %s: it stays as it is", ", ".join(absent))
        if self.scheduler is not None and run.get("scheduler") is not None:
            restore_schedule(self.scheduler, run["scheduler"])
        if self.scaler is not None and run.get("grad_scaler"):
            self.scaler.load_state_dict(run["grad_scaler"])
        record.resume(self.cursor, run)
        self.lanes.adopt(run, self.order)
        if ordered is not None:
            # What the script draws before its next batch follows from the step, which is another.
            ordered.feed.seed_step()


class Loading:
    """One load: `zero_checkpoint.training.Loading`, implemented.

    What several ranks have alike, one reads and gives to the others after all ranks have agreed
    that what they have read is good.
    """

    def __init__(self, training: Training) -> None:
        """Prepare a load of everything."""
        self.resumes = True
        self.takes_position = True
        self.options: dict[str, bool] = {}
        self.filled = State({}, ())
        self._reads: SharedReads | None = None
        self._training = training

    def read(
        self, root: Place, consensus: StoreConsensus, tag: str | None, ram: MemorySearch | None
    ) -> Loaded | None:
        """Fill this rank's share of the state. Collective; see `restore.load`."""
        training = self._training
        training.captured = ()  # of memory that is about to be replaced
        loaded = restore.load(
            root, consensus, self._wanted, meet=training.collectives.barrier, tag=tag, ram=ram
        )
        if loaded is not None and self._reads is not None:
            self._reads.exchange(training.collectives)
        return loaded

    def _wanted(self, manifest: Manifest) -> State:
        training = self._training
        # First: a checkpoint that is refused has changed nothing.
        training.lanes.check(manifest, training.order)
        filled, self._reads = training.state.wanted(manifest)
        self.filled = training.lanes.wanted(filled, manifest, training.order)
        return self.filled

    def adopt(self, run: Mapping[str, Any]) -> None:
        """Take over everything that is not a tensor."""
        self._training.adopt(run)

    def end(self) -> None:
        """Do nothing: the state has no parts that are derived from it."""

    def report(self, loaded: Loaded) -> None:
        """Log what was loaded."""
        _log.info("loaded %s, step %d", loaded.path, loaded.manifest.step)
