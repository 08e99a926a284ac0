"""The record of a run in its checkpoints: its position, and what its result depends on.

Must always hold: a run that resumes goes on at the position of its checkpoint, and sums gradients
in its order; whatever else changes its result is said, with what to set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zero_comm.determinism import Hardware
from zero_comm.sums.order import order_of
from zero_comm.worker.agent_link import current_round
from zero_data.fingerprint import difference
from zero_data.global_batch import Cursor
from zero_data.position_loader import Feed

_THEN = "when the checkpoint was made"
_BY_ROUNDING = "from here on the results differ from those of the uninterrupted run by rounding"
_CHANGES = "from here on the results are not those of the uninterrupted run"
_NO_POSITION = (
    "the checkpoint does not say which samples its steps have consumed, as it was made without a "
    "loader: the samples begin anew"
)
_SAME_BATCH = ("dataset_size", "seed", "microbatches", "micro_batch")
"""What decides which samples the first micro-batch has."""
_SAME_RESULT = {
    "dataset_size": (
        "the number of samples in {dataset}",
        "they are drawn in another order, so some are repeated or left out in this epoch; give the "
        "same dataset, or {anew}",
    ),
    "seed": ("{seed}", f"order of the samples and dropout change, {_CHANGES}; set it as it was"),
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
"""Causes of another result, beside the batch, but not world size and stage: key of the record ->
its name for a user; what a change means for the run, and what to set. In braces: `Terms`."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a script sets what a result depends on."""

    anew: str
    """How to begin a new run with the weights of a checkpoint."""
    dataset: str
    seed: str
    batch: str
    """With {samples} of a step, its {microbatches}, and the samples of a {micro_batch}."""


def describe(
    cursor: Cursor, hardware: Hardware, *, world: int, optimizer: object, **known: Any
) -> dict[str, Any]:
    """Position, environment and what else is known of a run, as JSON.

    Known are, of the batch, "microbatches" of a step and samples of a "micro_batch"; of the sums,
    "reduction" and "summed_over", a number of ranks; and what else a result depends on.
    """
    return {
        **known,
        "step": cursor.step,
        "samples": cursor.samples,
        "skipped": cursor.skipped,
        "tokens": cursor.tokens or None,
        "loop": cursor.loop,
        "world": world,
        "optimizer": name_of(optimizer) if optimizer is not None else None,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "hardware": [dict(each) for each in hardware.records],
    }


def name_of(optimizer: object) -> str:
    """The name of an optimizer in checkpoints: its class's, or the one that it says itself."""
    # Classes of a peer that compute what torch's do have torch's name as `recorded_as`: checkpoints
    # are the same bytes, and either continues the other's.
    return str(getattr(optimizer, "recorded_as", type(optimizer).__name__))


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """The settings that a run takes over from the record of a checkpoint."""

    block: int
    """Micro-batches that are summed in a tree."""
    hardware_changed: bool
    remarks: tuple[str, ...]
    """The changes: a sentence each."""


def adopt(
    saved: Mapping[str, Any],
    ours: Mapping[str, Any],
    hardware: Hardware,
    terms: Terms,
    *,
    mode: str | None,
    block: int | None,
    rounds: bool = False,
    feed: Feed | None = None,
) -> Adopted:
    """Decide what a run that resumes takes over, beside its position, from its checkpoint.

    Raises:
        ConfigError: The config asks for another order of the gradients' sums, or for the hardware
            that the checkpoint was made on.
    """
    changed = hardware.resume(saved)
    taken, change = order_of(saved, mode, block, anew=terms.anew, rounds=rounds)
    remarks = [change] if change else []
    remarks += differences(ours, saved, terms)
    if feed is not None:
        feed.known_as = saved.get("data")
        # Rank 0 looks where a job begins with a checkpoint: a later round has the script of the
        # first one, and must not wait for a look. Another batch is said already.
        begins = not (feed.order.rank or ours["step"] or current_round() > 1)
        is_same = all(ours.get(key) == saved.get(key) for key in _SAME_BATCH)
        if begins and is_same and feed.known_as is not None:
            found = difference(feed.look, feed.known_as, dataset=terms.dataset, anew=terms.anew)
            remarks += [found] if found else []
    remarks += [f"{each} {_THEN}: {_BY_ROUNDING}" for each in changed]
    return Adopted(block=taken, hardware_changed=bool(changed), remarks=tuple(remarks))


def differences(ours: Mapping[str, Any], saved: Mapping[str, Any], terms: Terms) -> list[str]:
    """The changes that give another result after a load: one sentence each, with what to set.

    Both are from `describe`; a None of the saved one is unknown, as after an import.
    """
    found = []
    now, then = _batch(ours), _batch(saved)
    if now is not None and then is not None and now != then:
        samples, samples_then = now[0] * now[1], then[0] * then[1]
        remedy = terms.batch.format(samples=samples_then, microbatches=then[0], micro_batch=then[1])
        if samples == samples_then:
            found.append(
                f"a step of {samples} samples is cut into {_shape(*now)}, and was cut into "
                f"{_shape(*then)} {_THEN}: {_BY_ROUNDING} and by dropout; {remedy}"
            )
        else:
            found.append(
                f"a step trains on {samples} samples ({_shape(*now)}), and trained on "
                f"{samples_then} ({_shape(*then)}) {_THEN}: schedule, steps per epoch and results "
                f"change from here on; {remedy}, which any number of ranks can train"
            )
    if ours.get("dataset_size") and saved.get("step") and not saved.get("samples"):
        found.append(_NO_POSITION)
    if saved.get("summed_over") is not None and ours.get("summed_over") is None:
        found.append(
            f'gradient_allreduce_op was "sum" {_THEN}: gradients are now '
            f"{saved['summed_over']} times smaller; set it as it was"
        )
    words = vars(terms)
    for key, (what, meaning) in _SAME_RESULT.items():
        if key in ours and saved.get(key) not in (None, ours[key]):
            text = f"{what} is {{now}} and was {{then}} {_THEN}: {meaning}"
            found.append(text.format(now=ours[key], then=saved[key], **words))
    return found


def _batch(run: Mapping[str, Any]) -> tuple[int, int] | None:
    """Micro-batches of a step, and samples of each; None if they are not known."""
    count, size = run.get("microbatches"), run.get("micro_batch")
    return (count, size) if count and size else None


def _shape(count: int, samples: int) -> str:
    return f"{count} micro-batch{'' if count == 1 else 'es'} of {samples}"


def resume(cursor: Cursor, saved: Mapping[str, Any]) -> None:
    """Go to the position of a checkpoint, which `describe` has written."""
    cursor.move(step=saved["step"], samples=saved["samples"])
    cursor.skipped = saved["skipped"]
    cursor.tokens = saved.get("tokens") or 0
    cursor.loop = saved.get("loop")
