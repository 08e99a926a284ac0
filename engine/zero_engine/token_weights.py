"""Micro-batches with unequal numbers of tokens, each token counting the same.

Owns two factors. The tokens of a whole step are known only when its last micro-batch has run, so
a loss is first weighted as if every sample had NOMINAL tokens, and the sums are corrected in the
step. Must always hold: the weight of a leaf depends on the leaf alone and the correction on all
leaves, so neither depends on the world size; NOMINAL is a power of two, so it rounds nothing.

Called by `engine`.

Source of the problem: averaging per-rank means weighs short sequences more, and differently at
every world size (huggingface/accelerate issue 3780).
"""

from __future__ import annotations

from torch import Tensor

from zero_engine.errors import EngineError
from zero_engine.global_batch import StepPlan

NOMINAL = 256
"""Tokens per sample that weights are relative to; only the loss scale of fp16 notices."""

NOT_GIVEN = -1.0
"""In the place of a count: this loss is weighted by its samples."""

_LARGEST = 1 << 24  # counts travel as fp32


def checked(tokens: int | Tensor) -> int:
    """A number of tokens as an integer.

    Raises:
        EngineError: It is none, or too large.
    """
    count = int(tokens)
    if count != float(tokens) or not 0 <= count <= _LARGEST:
        raise EngineError(
            f"backward(): {float(tokens):g} is not a number of tokens; give a whole number from 0 "
            f"to {_LARGEST}"
        )
    return count


def nominal(plan: StepPlan) -> int:
    """The tokens that a step is taken to have until they are counted."""
    return plan.base * NOMINAL


def correction(counts: Tensor, plan: StepPlan) -> float:
    """What the sums over a step are multiplied with.

    A step that the script ends has as many samples as there are ranks and micro-steps for, but at
    the end of an epoch: the mean over what there is then stands for the mean over full leaves.

    Args:
        counts: [world, micro-steps], the tokens of every leaf, or NOT_GIVEN.
        plan: The step; what is beyond its leaves is ghosts.

    Raises:
        EngineError: Some leaves have a count and some have not.
    """
    leaves = counts.t().flatten()[: plan.leaves].tolist()
    without = leaves.count(NOT_GIVEN)
    if without == len(leaves):
        full = counts.numel() * plan.micro_batch
        return 1.0 if plan.weighed_as is None else full / plan.samples
    if without:
        raise EngineError(
            f"{without} of the {len(leaves)} micro-batches of this step have no number of tokens, "
            "the others have; give it to every backward() or to none"
        )
    total = sum(int(count) for count in leaves)
    return nominal(plan) / total if total else 1.0
