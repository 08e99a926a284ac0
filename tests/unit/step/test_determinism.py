"""Which hardware is the same, in the words of the log; and the bits that a self-test compares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_comm.determinism import Deterministic, Hardware, changes, mixture, mode_of
from zero_contract.errors import ConfigError
from zero_step.checks.self_test import gradients_differ, output_differs, remedy

CPU: dict[str, Any] = {
    "processor": "Xeon",
    "instructions": "AVX512",
    "device": None,
    "libraries": "MKL 1",
    "kernels": "deterministic",
    "torch": "2.13.0",
    "threads": 1,
}
GPU = CPU | {"device": "H200"}


@pytest.mark.parametrize(
    ("value", "ordered", "mode"),
    [
        (None, True, Deterministic.WARN),
        (None, False, Deterministic.OFF),
        (Deterministic.ERROR, False, Deterministic.ERROR),
        (Deterministic.OFF, True, Deterministic.OFF),
    ],
)
def test_without_a_setting_a_run_in_a_fixed_order_warns(
    value: Deterministic | None, ordered: bool, mode: Deterministic
) -> None:
    assert mode_of(value, ordered=ordered) is mode


@pytest.mark.parametrize(
    ("by_rank", "says"),
    [
        ([CPU, CPU], ""),
        ([CPU, CPU | {"threads": 2}], "torch's number of threads is 1 on rank 0, 2 on rank 1"),
        (
            [CPU, CPU | {"processor": "EPYC", "instructions": "AVX2"}],
            "the processor is Xeon on rank 0, EPYC on rank 1; "
            "the vector instructions is AVX512 on rank 0, AVX2 on rank 1",
        ),
        ([GPU, GPU | {"processor": "EPYC"}], ""),
        ([GPU, GPU | {"device": "H100"}], "the device is H200 on rank 0, H100 on rank 1"),
        (
            [CPU | {"threads": 1 + (rank == 7)} for rank in range(9)],
            "torch's number of threads is 1 on ranks 0, 1, 2, 3 and 4 more, 2 on rank 7",
        ),
    ],
)
def test_what_differs_among_ranks_is_named_with_the_ranks(
    by_rank: list[dict[str, Any]], says: str
) -> None:
    assert mixture(by_rank) == says


@pytest.mark.parametrize(
    ("ours", "saved", "says"),
    [
        ([CPU], [CPU], []),
        ([CPU], [], []),  # an older checkpoint
        ([CPU | {"kernels": "any"}], [CPU], ["the choice of kernels is any and was deterministic"]),
        ([GPU | {"processor": "EPYC"}], [GPU], []),
        ([GPU], [GPU, GPU | {"device": "H100"}], ["the device is H200 and was H100 or H200"]),
    ],
)
def test_what_differs_from_a_checkpoint_is_named(
    ours: list[dict[str, Any]], saved: list[dict[str, Any]], says: list[str]
) -> None:
    assert changes(ours, saved) == says


def test_a_resume_on_another_version_of_torch_is_refused_if_the_setting_says_so() -> None:
    saved = {"hardware": [CPU], "torch": "2.12.0", "threads": 1}
    found = Hardware(Deterministic.WARN, torch.device("cpu"))
    found.records = (CPU,)
    assert found.resume(saved) == []
    found.mode = Deterministic.ERROR
    with pytest.raises(ConfigError, match=r"the version of torch is 2\.13\.0 and was 2\.12\.0\. "):
        found.resume(saved)


def test_the_module_whose_output_differs_first_is_that_of_the_first_turn_of_any_rank() -> None:
    assert output_differs([(4, "head"), None, (2, "blocks.1.attn")]) == (
        "the output of module 'blocks.1.attn' differs first, on rank 2"
    )
    assert output_differs([(4, ""), None]).startswith("the output of the whole module, and of none")
    assert output_differs([None]) == (
        "the output of forward differs, though not in two more forwards"
    )


def test_the_gradient_that_differs_first_is_that_of_the_first_turn_of_any_rank() -> None:
    assert gradients_differ([[(9, "a")], [(2, "c"), (9, "a")], []]) == (
        "outputs are equal, and 2 gradients differ, in the order of backward first that of 'c'"
    )


def test_on_a_gpu_the_remedy_is_the_setting_with_which_attention_repeats_itself() -> None:
    """With "warn" only GPUs run the self-test, where the fused attention does not repeat itself."""
    assert 'scaled_dot_product_attention, set elastic.deterministic to "error"' in remedy(
        Deterministic.WARN
    )
    assert remedy(Deterministic.ERROR).endswith('set elastic.deterministic to "off"')
