"""A rank holds its shard and one unit at most, while a model is made and while it is exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.fresh import run_module

_STEADY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""Every tensor is mapped by itself, so that freed memory is given back at once."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the ranks took, and the sizes it is to be compared with, all in bytes."""

    ranks: list[dict[str, int]]
    shard: int
    """Of the weights and of the sums of gradients, which an engine holds from the beginning."""
    unit: int


def measured(how: str, width: int, layers: int, save: str, timeout_s: float = 120) -> Measured:
    world = 4
    unit = 4 * width * (width + 1)
    whole = layers * unit
    given: dict[str, Any] = {
        **{"how": how, "width": width, "layers": layers, "world": world, "save": save},
        "limit_bytes": 3 * whole // 4 + (64 << 20),
    }
    found = run_module("tests.numerics.peak_initial", given, _STEADY_MALLOC, timeout_s)
    assert found["codes"] == [0] * world
    return Measured(ranks=found["ranks"], shard=2 * whole // world, unit=unit)


@pytest.mark.full
@pytest.mark.parametrize("save", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("how", ["meta", "init", "load", "again"])
def test_no_rank_holds_more_than_its_shard_and_one_unit(how: str, save: str) -> None:
    found = measured(how, 1024, 19, save)
    buffers = 8 << 20 if how == "load" else 0  # of the reader of checkpoints, for any model
    most = 1.1 * (found.shard + found.unit) + buffers
    assert max(rank["made"] for rank in found.ranks) <= most
    assert max(rank["saved"] for rank in found.ranks) <= 1.25 * found.unit


@pytest.mark.full
def test_rank_0s_mapped_dictionary_is_loaded_by_ranks_that_hold_their_shard_and_one_unit() -> None:
    found = measured("dictionary", 1024, 19, "")
    assert max(rank["anonymous"] for rank in found.ranks) <= 1.1 * (found.shard + found.unit)


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("how", ["meta", "init", "dictionary"])
def test_a_model_of_a_billion_parameters_is_made_and_exported_by_ranks_that_cannot_hold_it(
    how: str,
) -> None:
    found = measured(how, 4096, 60, "model.safetensors", timeout_s=900)
    made = "anonymous" if how == "dictionary" else "made"  # the file is mapped
    assert max(rank[made] for rank in found.ranks) <= 1.1 * (found.shard + found.unit)
    assert max(rank["saved"] for rank in found.ranks) <= 1.1 * found.unit


@pytest.mark.full
def test_pretrained_models_are_loaded_and_saved_by_ranks_that_hold_a_shard_and_a_unit() -> None:
    """Rank 0, which saves, also holds the weights once, in 16 bits."""
    pytest.importorskip("transformers", reason="needs transformers")
    found = run_module("tests.numerics.peak_pretrained", {"world": 4}, _STEADY_MALLOC)
    assert found["codes"] == [0] * 4
    shard, unit = 80 << 20 >> 2, 4 * 3_163_136
    for rank in found["ranks"]:
        assert (rank["divided"], rank["same"], rank["missing"]) == (True, True, [])
        assert rank["spread"] == 0.02
        assert rank["loaded"] <= 1.1 * (shard + unit)
        assert rank["made"] <= 1.1 * (shard + unit)
        assert (rank["same_saved"], rank["experts"]) == (True, 12)
        assert rank["saved"] <= 0.1 * shard + 1.1 * unit + (rank["rank"] == 0) * rank["whole"]
