"""Saving, loading, and leaving with a save.

Owns what the engine knows about checkpoints: where they go, whether the script has state of its
own in them, whether this group is being left. Must always hold: a checkpoint is taken between
steps; after a load, position, counters and batch are those of the checkpoint; whether to leave
is decided from the consensus of a step, so that all ranks leave at the same boundary.

Called by `engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zero_engine import checkpoint
from zero_engine.checkpoint.manifest import check_json
from zero_engine.config import Config
from zero_engine.distributed import group_store
from zero_engine.elastic import AgentLink, Departure, choose_departure, leave
from zero_engine.engine_state import EngineState
from zero_engine.errors import CheckpointError, CommitRefused, EngineError
from zero_engine.global_batch import BatchShape
from zero_engine.parts import Core, Run

_log = logging.getLogger(__name__)


class Persistence:
    """The checkpoints of one engine."""

    def __init__(
        self, config: Config, core: Core, run: Run, state: EngineState, link: AgentLink
    ) -> None:
        self.state = state
        self.leaving = False
        """Some rank was asked to leave; known to all ranks since the same step."""
        self._config = config
        self._core = core
        self._run = run
        self._link = link
        self._ballot = checkpoint.Ballot(group_store("ballot"), run.rank, run.world)
        self._directory: Path | None = None
        self._script_has_state = False
        self._script_asks = False
        self._saved_step = 0
        self._departure: Departure | None = None

    def save(self, directory: Path, tag: str | None, client: Mapping[str, Any]) -> bool:
        """Save at this boundary, then leave if leaving is due. See `Engine.save_checkpoint`."""
        cursor = self._run.cursor
        check_json(client, "client_state")
        if cursor.micro:
            raise CheckpointError(
                f"micro-step {cursor.micro} of a step: its gradients cannot be saved; call "
                "save_checkpoint() after the step() that ends it"
            )
        self._directory = directory
        self._script_has_state |= bool(client)
        tag = tag or f"global_step{cursor.step}"
        saved = self._publish(directory, tag, client)
        if self.leaving:
            self._leave()
        return saved

    def _publish(self, directory: Path, tag: str, client: Mapping[str, Any]) -> bool:
        cursor = self._run.cursor
        state = self.state.capture(self._run_meta(), client)
        try:
            path = checkpoint.save(
                directory,
                state,
                self._ballot,
                step=cursor.step,
                tag=tag,
                round=self._link.round,
                fence=self._link.fence(cursor.step, tag, cursor.samples),
            )
        except CommitRefused as error:
            # This worker's round is over or its agent is cut off; if so it will be told to
            # leave. Until then it may compute, and the checkpoints there are stay as they are.
            _log.warning("not saved: %s", error)
            return False
        self._saved_step = cursor.step
        if self._run.rank == 0:
            _log.info("saved %s, weights %s", path, state.meta["engine"]["weight_hash"][:16])
        return True

    def load(self, directory: Path, tag: str | None) -> tuple[str | None, dict[str, Any]]:
        """Load the newest valid checkpoint. See `Engine.load_checkpoint`."""
        if self._run.cursor.micro:
            raise EngineError("load_checkpoint() in the middle of a step; call it before training")
        self._directory = directory
        loaded = checkpoint.load(directory, self._ballot, self.state.wanted, tag=tag)
        if loaded is None:
            return None, {}
        meta = loaded.manifest.meta
        self.state.adopt(meta["engine"])
        self._adopt_run(meta["engine"])
        client = dict(meta["client"])
        self._script_has_state |= bool(client)
        if self._run.rank == 0:
            digest = meta["engine"]["weight_hash"][:16]
            _log.info("loaded %s, step %d, weights %s", loaded.path, meta["engine"]["step"], digest)
        return str(loaded.path), client

    # ---- leaving ----

    def due(self, every_steps: int) -> bool:
        """Whether the script should save now. See `Engine.checkpoint_due`."""
        self._script_asks = True
        step = self._run.cursor.step
        return self.leaving or (step > 0 and step % every_steps == 0)

    def depart_if_asked(self) -> None:
        """At the end of a step: leave if it is time, saving first if the script need not."""
        if not self.leaving:
            return
        departure, reason = choose_departure(
            directory_known=self._directory is not None,
            script_has_state=self._script_has_state,
            script_asks=self._script_asks,
        )
        if departure is not self._departure:  # waiting for the script may take many steps
            _log.info("asked to leave: %s, because %s", departure, reason)
        self._departure = departure
        if departure is Departure.SAVE_AND_LEAVE:
            self._save_and_leave()
        elif departure is Departure.LEAVE:
            self._leave()

    def _save_and_leave(self) -> None:
        assert self._directory is not None
        try:
            self.save(self._directory, None, {})
        except CheckpointError as error:
            # The next round goes on from the checkpoint before; staying would help nobody.
            _log.error("leaving without a new checkpoint: %s", error)
            self._leave()

    def _leave(self) -> None:
        # Rank 0 may host the store that the others still read the verdict from.
        self._core.collectives.barrier("leaving")
        leave(self._link, self._saved_step)

    # ---- the run's own meta ----

    def _run_meta(self) -> dict[str, Any]:
        run, core, cursor = self._run, self._core, self._run.cursor
        return {
            "step": cursor.step,
            "samples": cursor.samples,
            "skipped": cursor.skipped,
            "leaves": run.batch.leaves,
            "micro_batch": run.batch.micro_batch,
            "dataset_size": run.loader.sampler.source.size if run.loader is not None else None,
            "seed": self._config.seed,
            "world": run.world,
            "stage": core.stage.number,
            "dtype": str(core.dtype),
            "optimizer": type(core.zero.optimizer).__name__ if core.zero is not None else None,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
        }

    def _adopt_run(self, saved: Mapping[str, Any]) -> None:
        run = self._run
        batch = BatchShape(leaves=saved["leaves"], micro_batch=saved["micro_batch"])
        if run.batch_from_world:
            run.adopt_batch(batch)
        ours = self._run_meta()
        for key in _SAME_RESULT:
            if ours[key] != saved[key]:
                _log.warning(
                    "%s is %s, the checkpoint was made with %s: from here on the results are "
                    "not those of the uninterrupted run",
                    key,
                    ours[key],
                    saved[key],
                )
        cursor = run.cursor
        cursor.step, cursor.samples, cursor.skipped = (
            saved["step"],
            saved["samples"],
            saved["skipped"],
        )


_SAME_RESULT = (
    "leaves",
    "micro_batch",
    "dataset_size",
    "seed",
    "dtype",
    "optimizer",
    "torch",
    "threads",
)
"""What must not change in a run if its result is not to change; world and stage may."""
