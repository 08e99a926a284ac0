"""What a load says of a run that is not as it was: in the user's terms, with what to set."""

from __future__ import annotations

from typing import Any

import pytest

from zero_comm.sums.order import order_of, record_of, record_of_native
from zero_contract.errors import ConfigError
from zero_step.record import Terms, differences

RUN: dict[str, Any] = {
    "microbatches": 2,
    "micro_batch": 2,
    "summed_over": None,
    "dataset_size": 23,
    "seed": 42,
    "dtype": "torch.float32",
    "master": "fp32",
    "moments": "fp32",
    "optimizer": "AdamW",
    "torch": "2.13.0",
    "threads": 1,
    "step": 3,
    "samples": 12,
}
TERMS = Terms(
    anew="begin a new run",
    dataset="the data",
    seed="a.seed",
    batch="give {samples} samples, {microbatches} of {micro_batch}",
)


@pytest.mark.parametrize(
    ("ours", "saved", "begins", "says"),
    [
        (
            {"microbatches": 1},
            {},
            "a step trains on 2 samples (1 micro-batch of 2), and trained on 4 (2 micro-batches of "
            "2) when the checkpoint was made: ",
            "give 4 samples, 2 of 2, which any number of ranks can train",
        ),
        (
            {"microbatches": 1, "micro_batch": 4},
            {},
            "a step of 4 samples is cut into 1 micro-batch of 4, and was cut into 2 micro-batches ",
            "by rounding and by dropout; give 4 samples, 2 of 2",
        ),
        ({}, {"summed_over": 3}, 'gradient_allreduce_op was "sum" when', "3 times smaller"),
        (
            {"dataset_size": 20},
            {},
            "the number of samples in the data is 20 and was 23",
            "give the same dataset, or begin a new run",
        ),
        ({"seed": 1}, {}, "a.seed is 1 and was 42 when the checkpoint was made: order", "set it"),
        ({}, {"samples": 0}, "the checkpoint does not say which samples", "begin anew"),
        (
            {"dtype": "torch.bfloat16"},
            {},
            "the dtype that the model computes in is",
            "bf16.enabled",
        ),
        (
            {"optimizer": "SGD"},
            {},
            "the optimizer is SGD and was AdamW",
            "give the optimizer that it was",
        ),
        ({"threads": 4}, {}, "torch's number of threads is 4 and was 1", "set OMP_NUM_THREADS"),
        ({"torch": "2.14.0"}, {}, "the version of torch is 2.14.0 and was 2.13.0", "by rounding"),
    ],
)
def test_what_has_changed_is_said_with_its_meaning_and_what_to_set(
    ours: dict[str, Any], saved: dict[str, Any], begins: str, says: str
) -> None:
    (line,) = differences({**RUN, **ours}, {**RUN, **saved}, TERMS)
    assert line.startswith(begins)
    assert says in line.removeprefix(begins)


def test_what_nobody_knows_is_no_difference() -> None:
    assert differences(RUN, RUN, TERMS) == []
    assert differences(RUN, {}, TERMS) == []
    assert differences({}, RUN, TERMS) == []
    assert differences(RUN, dict.fromkeys(RUN), TERMS) == []


# ---- the order of the sum ----

TREE = {"order": "tree", "version": 1, "norm": 1}


@pytest.mark.parametrize(
    ("saved", "configured", "block"),
    [
        ({"reduction": None}, None, 8),  # imported
        ({"reduction": None}, 2, 2),
        ({"reduction": {**TREE, "block": 4}}, None, 4),
        ({"reduction": {**TREE, "block": 4}}, 4, 4),
    ],
)
def test_a_resumed_run_sums_in_the_order_of_its_checkpoint(
    saved: dict[str, Any], configured: int | None, block: int
) -> None:
    found = order_of(saved, None, configured, anew="begin anew")
    assert found == (block, "")


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"reduction": {**TREE, "block": 4}}, "remove the key or set it to 4"),
        (
            {"reduction": {**TREE, "version": 2, "block": 8}},
            "release does not know",
        ),
        (
            {"reduction": {**TREE, "version": 2, "block": 8, "quantized": "otherwise"}},
            "release does not know",
        ),
        ({"reduction": {**TREE, "norm": 2, "block": 8}}, "release does not know"),
    ],
)
def test_an_order_that_would_change_is_refused(saved: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        order_of(saved, None, 8, anew="begin anew")


NATIVE = record_of_native("nccl", "fp32")


@pytest.mark.parametrize(
    ("saved", "mode", "block", "said"),
    [
        (NATIVE, "native", 1, ""),
        (NATIVE, "ordered", 8, 'elastic.reduction is "ordered", and was "native"'),
        ({**TREE, "block": 4}, "native", 1, 'elastic.reduction is "native", and was "ordered"'),
        ({**TREE, "block": 4}, "ordered", 4, ""),
        (None, "native", 1, ""),
    ],
)
def test_a_resumed_run_changes_to_the_backends_sums_and_back_and_says_so(
    saved: dict[str, Any] | None, mode: str, block: int, said: str
) -> None:
    chosen, told = order_of({"reduction": saved}, mode, None, anew="begin anew")
    assert (chosen, told[: len(said)], bool(told)) == (block, said, bool(said))


def test_a_run_of_the_backends_sums_is_not_resumed_in_order_without_a_word() -> None:
    with pytest.raises(ConfigError, match=r'set elastic.reduction to "native" to'):
        order_of({"reduction": NATIVE}, None, None, anew="begin anew")


@pytest.mark.parametrize(
    ("was", "rounds", "said"),
    [
        (True, True, ""),
        (False, False, ""),
        (False, True, "zero_optimization.zero_quantized_gradients is true, and the run of this"),
        (True, False, "zero_optimization.zero_quantized_gradients was true when the checkpoint"),
    ],
)
def test_a_resumed_run_that_begins_or_ends_to_round_says_so_and_keeps_its_blocks(
    was: bool, rounds: bool, said: str
) -> None:
    saved = {"reduction": record_of(4, rounds=was)}
    chosen, told = order_of(saved, None, None, anew="begin anew", rounds=rounds)
    assert (chosen, told[: len(said)], bool(told)) == (4, said, bool(said))


def test_an_older_release_does_not_resume_a_run_that_rounds() -> None:
    """It knows version 1."""
    assert record_of(4, rounds=True) == {
        "order": "tree",
        "version": 2,
        "quantized": "blocks",
        "norm": 1,
        "block": 4,
    }
    assert record_of(4) == {**TREE, "block": 4}
