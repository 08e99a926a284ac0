"""What a checkpoint says about the run: where it is, and what its result depends on.

Must always hold: a run that goes on from a checkpoint goes on at its position, with its batch if
the config leaves that open; what would change the result is said.

Called by `persistence`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from zero_engine.config import Config
from zero_engine.parts import Core, Run
from zero_engine.samples.global_batch import BatchShape

_log = logging.getLogger(__name__)

_SAME_RESULT = (
    "leaves",
    "micro_batch",
    "summed_over",
    "dataset_size",
    "seed",
    "dtype",
    "master",
    "moments",
    "optimizer",
    "torch",
    "threads",
)
"""What must not change in a run if its result is not to change; world and stage may."""


def describe(config: Config, core: Core, run: Run) -> dict[str, Any]:
    """Counters, batch and environment, as JSON."""
    cursor = run.cursor
    return {
        "step": cursor.step,
        "samples": cursor.samples,
        "skipped": cursor.skipped,
        "leaves": run.batch.leaves,
        "micro_batch": run.batch.micro_batch,
        "summed_over": run.summed_over,
        "dataset_size": run.loader.dataset_size if run.loader is not None else None,
        "seed": config.seed,
        "world": run.world,
        "stage": core.stage.number,
        "dtype": str(core.dtype),
        "master": config.master,
        "moments": config.moments,
        "optimizer": type(core.zero.optimizer).__name__ if core.zero is not None else None,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def adopt(saved: Mapping[str, Any], config: Config, core: Core, run: Run) -> None:
    """Go on from what `describe` said when the checkpoint was made."""
    run.loaded_samples = (saved["leaves"] or 0) * (saved["micro_batch"] or 0)
    if run.batch_from_world and saved["leaves"]:
        run.adopt_batch(BatchShape(leaves=saved["leaves"], micro_batch=saved["micro_batch"]))
    if run.summed_over is not None and saved.get("summed_over") is not None:
        run.summed_over = saved["summed_over"]
    if run.loader is not None and saved["dataset_size"]:
        run.loader.expect(saved["dataset_size"])
    if core.zero is not None:
        _warn_of_differences(describe(config, core, run), saved)
    cursor = run.cursor
    cursor.step, cursor.samples, cursor.skipped = saved["step"], saved["samples"], saved["skipped"]


def _warn_of_differences(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for key in _SAME_RESULT:
        # None: nobody knows, as after an import; missing: it was not written yet.
        if saved.get(key) not in (None, ours[key]):
            _log.warning(
                "%s is %s, the checkpoint was made with %s: from here on the results are "
                "not those of the uninterrupted run",
                key,
                ours[key],
                saved[key],
            )
