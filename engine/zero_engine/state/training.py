"""An engine for the checkpoint library: `zero_checkpoint.persistence.Training`, implemented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero_checkpoint.format.pieces import State
from zero_checkpoint.weight_hash import weight_hash
from zero_engine.config import Config
from zero_engine.parts import Core, Run
from zero_engine.sharding.weights import whole_weights
from zero_engine.state import run_meta
from zero_engine.state.engine_state import EngineState
from zero_engine.state.loading import Loading
from zero_engine.state.selection import LoadOptions


class EngineTraining:
    """One engine's state and position."""

    def __init__(self, config: Config, core: Core, run: Run, state: EngineState) -> None:
        self.rank = run.rank
        self.world = run.world
        self._config = config
        self._core = core
        self._run = run
        self._state = state

    @property
    def step(self) -> int:
        """Steps completed."""
        return self._run.cursor.step

    @property
    def samples(self) -> int:
        """Samples consumed by the completed steps."""
        return self._run.cursor.samples

    @property
    def micro_step(self) -> int:
        """Micro-steps completed in the current step."""
        return self._run.cursor.micro

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
        whole = {**run_meta.describe(self._config, self._core, self._run), **run}
        return self._state.capture(whole, client, exclude_frozen=exclude_frozen)

    def weight_hash(self) -> str:
        """The hash of all parameters. Collective."""
        return weight_hash(whole_weights(self._core.units))

    def meet(self, what: str) -> None:
        """A barrier of all ranks."""
        self._core.collectives.barrier(what)

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

    def loading(self, options: LoadOptions) -> Loading:
        """A load into this engine."""

        def adopt_position(saved: Mapping[str, Any]) -> None:
            run_meta.adopt(saved, self._config, self._core, self._run)

        return Loading(self._state, self._core.moved, options, adopt_position)
