"""One load of a checkpoint into an engine's state.

Owns the exchange of the weights that the ranks have read, which runs while they read the rest.
Must always hold:

- Every rank takes part in the exchange for every checkpoint that is tried, whatever it could read.
  Only later do the ranks know whether all have read well; if not, what they received is as
  worthless as what they read, and both are filled again from the checkpoint before, or the load is
  an error.
- Once anything may have been read, the state counts as inconsistent until a load has ended; on all
  ranks or on none, unless one was interrupted.
- Nothing is read into weights that are being exchanged, and no load leaves an exchange behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.errors import CheckpointError, ModelMismatch
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import State
from zero_checkpoint.loading import restore
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.loading.restore import Loaded
from zero_comm.exchange.collectives import Pending
from zero_engine.offload_states import Inconsistency, MovedStates
from zero_engine.sharding.flat_unit import FlatUnit
from zero_engine.state.engine_state import EngineState
from zero_engine.state.selection import LoadOptions, Selection

_log = logging.getLogger(__name__)


class Loading:
    """The steps of a load: `zero_checkpoint.training.Loading`, implemented for an engine.

    Attributes:
        resumes: Whether all of the state is to be loaded.
        takes_position: Whether steps and samples are to be loaded.
    """

    def __init__(
        self,
        state: EngineState,
        moved: MovedStates,
        options: LoadOptions,
        adopt_position: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Prepare a load; nothing is read yet."""
        self.resumes = options.whole
        self.takes_position = not options.module_only
        self._selection = Selection(State({}, ()))
        self._adopt_position = adopt_position
        self._state = state
        self._moved = moved
        self._before = moved.inconsistent
        self._options = options
        self._tried = 0
        self._under_way: list[tuple[FlatUnit, Pending]] = []

    @property
    def filled(self) -> State:
        """The part of the state that the checkpoint tried last has filled."""
        return self._selection.state

    def read(
        self, root: Place, consensus: StoreConsensus, tag: str | None, ram: MemorySearch | None
    ) -> Loaded | None:
        """Fill this rank's share of the state. Collective; see `restore.load`."""
        try:
            loaded = restore.load(
                root,
                consensus,
                self._wanted,
                exchange=self._exchange,
                meet=self._state.collectives.barrier,
                tag=tag,
                ram=ram,
            )
        except CheckpointError as error:
            self._end_exchange()  # the script may continue with these weights
            # Whether any rank may have read into the state; the same on all ranks.
            if self._tried > isinstance(error, ModelMismatch):
                self._tear(f"a load has failed: {error}")
            else:
                self._moved.inconsistent = self._before
            raise
        return loaded

    def adopt(self, run: Mapping[str, Any]) -> None:
        """Finish the load of what has been read: all that is derived from it. Collective."""
        self._end_exchange()
        self._selection.settle(weights=False)
        for unit in self._state.units:
            if unit.tiers.state.far:
                unit.restore()
        self._state.adopt(run, self._options)
        if self.takes_position:
            self._adopt_position(run)

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
        self._moved.inconsistent = Inconsistency(reason, before or self._options.wants_optimizer)

    def _wanted(self, manifest: Manifest) -> State:
        self._end_exchange()
        self._tear("a load was interrupted")
        self._selection = self._state.wanted(manifest, self._options)
        return self._selection.state

    def _exchange(self, filled: bool) -> None:
        """Begin to exchange the weights that rest on the device with the other ranks.

        Weights in a far tier are restored in `adopt`, when all of them have been written.
        """
        self._end_exchange()
        self._tried += 1
        if filled:
            self._selection.settle(weights=True)
        for unit in self._state.units:
            if not unit.tiers.state.far:
                self._under_way.append((unit, unit.begin_restore()))

    def _end_exchange(self) -> None:
        under_way, self._under_way = self._under_way, []
        for unit, pending in under_way:
            unit.end_restore(pending)
