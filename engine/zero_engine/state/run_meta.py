"""A checkpoint's record of the run: its position, and what its result depends on.

Must always hold: a run that resumes from a checkpoint resumes at its position, with its batch if
the config leaves that open, and sums gradients in its order; whatever would change the result is
logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zero_comm.reduction_order import order_of, record_of, record_of_native
from zero_data.global_batch import BatchShape
from zero_engine.accumulation import check_block
from zero_engine.config import Config
from zero_engine.parts import Core, Run

_log = logging.getLogger(__name__)

_ANEW = "begin a new run with load_checkpoint(load_module_only=True)"
_BY_ROUNDING = "from here on the results differ from those of the uninterrupted run by rounding"
_CHANGES = "from here on the results are not those of the uninterrupted run"
_SAME_RESULT = {
    "dataset_size": (
        "the number of samples in training_data",
        "they are drawn in another order, so some are repeated or left out in this epoch; give the "
        f"same dataset, or {_ANEW}",
    ),
    "seed": ("seed", f"order of the samples and dropout change, {_CHANGES}; set seed as it was"),
    "dtype": (
        "the dtype that the model computes in",
        f"{_CHANGES}; set bf16.enabled and fp16.enabled as they were",
    ),
    "master": (
        "the dtype of the master weights",
        f"{_CHANGES}; set bf16_master_weights_and_grads, or fp16_master_weights_and_grads, as it "
        "was",
    ),
    "moments": (
        "the dtype of the optimizer's state",
        f"{_CHANGES}; set bf16_optimizer_states as it was",
    ),
    "optimizer": ("the optimizer", f"{_CHANGES}; give the optimizer that it was"),
    "torch": (
        "the version of torch",
        f"{_BY_ROUNDING}; install the version that it was, if bits count",
    ),
    "threads": (
        "torch's number of threads",
        f"{_BY_ROUNDING}; set OMP_NUM_THREADS as it was, if bits count",
    ),
}
"""What a result depends on, beside the batch, but not on world size and stage: key of the record ->
its name for a user; what a change means for the run, and what to set."""


def describe(config: Config, core: Core, run: Run) -> dict[str, Any]:
    """Counters, batch and environment, as JSON."""
    cursor = run.cursor
    return {
        "step": cursor.step,
        "samples": cursor.samples,
        "skipped": cursor.skipped,
        "tokens": cursor.tokens or None,
        "leaves": run.batch.microbatches,
        "micro_batch": run.batch.micro_batch,
        "summed_over": run.summed_over,
        "reduction": _reduction_of(config, core),
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
        "hardware": [dict(each) for each in core.hardware.records],
    }


def _reduction_of(config: Config, core: Core) -> dict[str, Any] | None:
    """How the run sums gradients; None if it trains nothing."""
    if core.zero is None:
        return None
    if config.elastic.is_native:
        return record_of_native(dist.get_backend(), config.travelling)
    return record_of(core.zero.reduction_block, rounds=_rounds(config))


def _rounds(config: Config) -> bool:
    return config.zero_optimization.zero_quantized_gradients


def adopt(saved: Mapping[str, Any], config: Config, core: Core, run: Run) -> None:
    """Resume at the position in `saved`, the `describe` of the checkpoint; warn of differences.

    Raises:
        ConfigError: The config asks for another order of the gradients' sums, or for the hardware
            that the checkpoint was made on.
    """
    changed = core.hardware.resume(saved) if core.zero is not None else []
    run.hardware_changed = bool(changed)
    if core.zero is not None:
        elastic = config.elastic
        core.zero.reduction_block, change = order_of(
            saved,
            elastic.reduction,
            elastic.reduction_block,
            anew=_ANEW,
            rounds=_rounds(config),
        )
        check_block(core.accumulation, core.zero.reduction_block)
        if change and run.rank == 0:
            _log.warning("%s", change)
    run.loaded_samples = (saved["leaves"] or 0) * (saved["micro_batch"] or 0)
    if run.batch_from_world and saved["leaves"]:
        run.adopt_batch(BatchShape(microbatches=saved["leaves"], micro_batch=saved["micro_batch"]))
    if run.summed_over is not None and saved.get("summed_over") is not None:
        run.summed_over = saved["summed_over"]
    if run.loader is not None and saved["dataset_size"]:
        run.loader.expect(saved["dataset_size"])
    if core.zero is not None:
        lines = differences(describe(config, core, run), saved)
        lines += [f"{each} when the checkpoint was made: {_BY_ROUNDING}" for each in changed]
        for line in lines if run.rank == 0 else ():
            _log.warning("%s", line)
    cursor = run.cursor
    cursor.move(step=saved["step"], samples=saved["samples"])
    cursor.skipped = saved["skipped"]
    cursor.tokens = saved.get("tokens") or 0  # an import, or an older version, has none


def differences(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """What changes the result of a run after a load: one sentence each, with what to set.

    Args:
        ours: `describe` of this run.
        saved: `describe` of the checkpoint. A None is unknown, as after an import; a missing key is
            of an older version.
    """
    found = [_batch_difference(ours, saved)] if saved.get("leaves") else []
    if saved.get("summed_over") is not None and ours["summed_over"] is None:
        found.append(
            'gradient_allreduce_op was "sum" when the checkpoint was made: gradients are now '
            f"{saved['summed_over']} times smaller; set it as it was"
        )
    for key, (what, meaning) in _SAME_RESULT.items():
        if saved.get(key) not in (None, ours[key]):
            then = f"was {saved[key]} when the checkpoint was made"
            found.append(f"{what} is {ours[key]} and {then}: {meaning}")
    return [line for line in found if line]


def _shape(count: int, samples: int) -> str:
    return f"{count} micro-batch{'' if count == 1 else 'es'} of {samples}"


def _batch_difference(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    now, then = ((run["leaves"], run["micro_batch"]) for run in (ours, saved))
    if now == then:
        return ""
    samples, samples_then = now[0] * now[1], then[0] * then[1]
    if samples == samples_then:
        return (
            f"a step of {samples} samples is cut into {_shape(*now)}, and was cut into "
            f"{_shape(*then)} when the checkpoint was made: {_BY_ROUNDING} and by dropout; "
            f"set train_micro_batch_size_per_gpu to {then[1]}"
        )
    return (
        f"a step trains on {samples} samples ({_shape(*now)}), and trained on {samples_then} "
        f"({_shape(*then)}) when the checkpoint was made: schedule, steps per epoch and "
        f"results change from here on; set train_batch_size to {samples_then} and "
        f"train_micro_batch_size_per_gpu to {then[1]}, which any number of ranks can train"
    )
