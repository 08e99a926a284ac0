"""The interface of a training that `persistence` saves and loads.

`zero_engine.state.training` and `zero_torch.training` answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.pieces import State
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.saving.copiers import BeforeChange


class Position(Protocol):
    """A position in steps."""

    step: int
    """Steps done."""
    samples: int
    """Samples consumed by them."""
    micro: int
    """Micro-steps done of the current step; 0: between steps."""


class Training(Protocol):
    """A state to be saved, at a position in steps. Every rank of a group has one, in step."""

    @property
    def rank(self) -> int:
        """The rank of this worker."""

    @property
    def world(self) -> int:
        """The number of ranks."""

    @property
    def cursor(self) -> Position:
        """Where it is; it can be saved between steps."""

    @property
    def trains(self) -> bool:
        """Whether it does more steps: an engine for inference does not."""

    @property
    def in_library_loop(self) -> bool:
        """Whether a library's loop runs it, which writes its state after each checkpoint."""

    def capture(
        self, run: Mapping[str, Any], client: Mapping[str, Any], *, exclude_frozen: bool
    ) -> State:
        """The state to save, as of now; its pieces are views.

        `run` is stored in `meta["engine"]`, with "step" and the values that the training adds,
        `client` in `meta["client"]`.
        """

    def loading(self) -> Loading:
        """A load of everything."""

    def weight_hash(self) -> str:
        """See `zero_checkpoint.state.weight_hash`. Collective."""

    def settle(self) -> None:
        """At its end: wait for exchanges that a step has left under way, unless a peer is lost."""

    def lend(self, until: Callable[[], object]) -> None:
        """A thread reads the state in place; the next change of the state calls `until` first."""

    @property
    def before_change(self) -> BeforeChange | None:
        """Called before weights or optimizer state change; forward may change buffers.

        None: the script changes them by itself, so that nothing can be called.
        """


class Loading(Protocol):
    """One load into a training, step by step."""

    @property
    def resumes(self) -> bool:
        """Whether all of the state is loaded: the run resumes."""

    @property
    def takes_position(self) -> bool:
        """Whether the counts of steps and samples are loaded."""

    @property
    def options(self) -> Mapping[str, bool]:
        """By name, whether it loads a part of the state: the same on all ranks."""

    @property
    def filled(self) -> State:
        """The state that was filled from the checkpoint that was tried last."""

    def read(
        self, root: Place, consensus: StoreConsensus, tag: str | None, ram: MemorySearch | None
    ) -> Loaded | None:
        """Fill this rank's share of the state, see `restore.load`. Collective."""

    def adopt(self, run: Mapping[str, Any]) -> None:
        """Take over the record of the run from `capture`, as far as it is loaded. Collective."""

    def end(self) -> None:
        """Finish: the state is that of the checkpoint."""

    def report(self, loaded: Loaded) -> None:
        """On rank 0: log which state was loaded, and which was not."""
