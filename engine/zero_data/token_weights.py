"""Token weights: each token has the same weight in micro-batches of unequal lengths.

Owns two factors. The tokens of a whole step are known only when its last micro-batch has run, so a
loss is first weighted as if every sample had NOMINAL tokens, and the sums are corrected at the end
of the step. Must always hold: the weight of a micro-batch depends on the micro-batch alone and the
correction on all micro-batches, so neither depends on the world size; NOMINAL is a power of two, so
it rounds nothing.

Source of the problem: averaging per-rank means weighs short sequences more, and differently at
every world size (huggingface/accelerate issue 3780).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zero_contract.errors import ZeroError
from zero_data.global_batch import Assignment, StepPlan

NOMINAL = 256
"""The assumed tokens per sample; it matters only to the loss scale of fp16."""

NOT_GIVEN = -1.0
"""Instead of a count: the loss is weighted by its samples."""
BY_SCRIPT = -2.0
"""Instead of a count: the script has divided the loss by its micro-steps."""

_LARGEST = 1 << 24  # counts are sent as fp32


def checked(tokens: int | Tensor) -> float:
    """A number of tokens that the host knows.

    Raises:
        ZeroError: The number is negative, not whole, or too large.
    """
    count = int(tokens)
    if count != float(tokens) or not 0 <= count <= _LARGEST:
        raise ZeroError(
            f"backward(): {float(tokens):g} is not a number of tokens; give a whole number from 0 "
            f"to {_LARGEST}"
        )
    return float(count)


def none_of(tokens: float | Tensor) -> float:
    """The tokens of a micro-batch without samples, if those of others are counted as `tokens`."""
    return 0.0 if isinstance(tokens, Tensor) or tokens >= 0 else tokens


def unread(tokens: Tensor) -> Tensor:
    """A number of tokens that a device knows, in fp64: to read it here, the host would wait.

    One that is negative, not whole, or too large becomes NaN, which `correction` refuses.
    """
    count = tokens.detach().reshape(()).double()
    is_count = (count >= 0) & (count <= _LARGEST) & (count == count.floor())
    return torch.where(is_count, count, math.nan)


def in_order(notes: Tensor, plan: StepPlan, assignment: Assignment) -> Tensor:
    """The notes of the micro-batches in their order, from those by [world, micro-step]."""
    return notes.t().flatten()[assignment.places(plan.microbatches)]


def counted(counts: Tensor, plan: StepPlan, assignment: Assignment) -> int:
    """The tokens of a step, from [world, micro-steps]; 0 if the script does not count them."""
    return sum(int(count) for count in in_order(counts, plan, assignment).tolist() if count > 0)


def nominal(plan: StepPlan) -> int:
    """The assumed tokens of a step, until they are counted."""
    return plan.base * NOMINAL


def correction(counts: Tensor, plan: StepPlan, assignment: Assignment) -> float:
    """The factor that corrects the sums over a step.

    `counts` [world, micro-steps] are the tokens of every micro-batch, or NOT_GIVEN, or BY_SCRIPT.
    What is beyond the micro-batches of the plan is padding.

    Raises:
        ZeroError: Not all micro-batches are weighted in the same way, or a number is none.
    """
    microbatches = in_order(counts, plan, assignment).tolist()
    if any(map(math.isnan, microbatches)):
        raise ZeroError(
            "backward(): a tensor of tokens= in this step is not a number of tokens; give a whole "
            f"number from 0 to {_LARGEST}"
        )
    without = sum(count < 0 for count in microbatches)
    if without == len(microbatches):
        if len(set(microbatches)) > 1:
            raise ZeroError(
                "scale_wrt_gas is true in some micro-batches of this step and false in others; "
                "give the same to every backward()"
            )
        # A script that divides by micro-steps and ranks assumes that all micro-batches are full:
        # the factor turns its mean into the mean over the samples that there are.
        full = counts.numel() * plan.micro_batch / plan.samples
        return full if BY_SCRIPT in microbatches or plan.weighed_as is not None else 1.0
    if without:
        raise ZeroError(
            f"{without} of {len(microbatches)} micro-batches of this step have no token count, "
            "the others have; give it to every backward() or to none"
        )
    total = sum(int(count) for count in microbatches)
    return nominal(plan) / total if total else 1.0


def taken_together(
    notes: Tensor, plan: StepPlan, assignment: Assignment
) -> tuple[float, int, float]:
    """The `correction` of a step, its tokens, and its mean loss, the same at every number of ranks.

    From notes [world, 2 * micro-steps]: the weighted losses, then the numbers of tokens.

    Raises:
        ZeroError: See `correction`.
    """
    losses, counts = notes.chunk(2, dim=1)
    factor = correction(counts, plan, assignment)
    loss = sum(in_order(losses, plan, assignment).double().tolist()) * factor
    return factor, counted(counts, plan, assignment), loss
