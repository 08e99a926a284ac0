"""DeepSpeed's elasticity section: its batch, at every world size."""

from __future__ import annotations

from typing import Any

import pytest

from zero_contract.errors import ConfigError
from zero_deepspeed import elasticity
from zero_engine.config import load_config
from zero_engine.config.elasticity import Elasticity, choose_batch

# Recomputed with DeepSpeed 0.19.6: micro-batches, maximum, worlds -> batch, number of worlds.
GOLDEN = [
    ((8, 12, 16, 17), 10000, (32, 1500), 9792, 23),
    ((2, 4, 6), 2000, (1, 10000), 1680, 32),
    ((1, 2, 3, 7), 32, (1, 10000), 24, 8),
    ((8, 10, 12), 100, (1, 10000), 96, 7),
    ((1, 2, 4), 64, (1, 8), 60, 6),
    ((6, 9), 100, (2, 8), 72, 5),
]


def section(sizes: tuple[int, ...], limit: int, worlds: tuple[int, int]) -> dict[str, Any]:
    return {
        "enabled": True,
        "max_train_batch_size": limit,
        "micro_batch_sizes": list(sizes),
        "min_gpus": worlds[0],
        "max_gpus": worlds[1],
        "min_time": 20,
        "version": 0.1,
    }


@pytest.mark.parametrize(("sizes", "limit", "worlds", "batch", "count"), GOLDEN)
def test_the_batch_and_its_worlds_are_deepspeeds(
    sizes: tuple[int, ...], limit: int, worlds: tuple[int, int], batch: int, count: int
) -> None:
    chosen = choose_batch(load_config({"elasticity": section(sizes, limit, worlds)}).elasticity)
    assert (chosen.samples, len(chosen.worlds)) == (batch, count)


def test_the_smaller_of_two_batches_is_taken_on_request() -> None:
    sizes: dict[str, Any] = {"micro_batch_sizes": (2, 4), "max_train_batch_size": 6, "max_gpus": 1}
    assert choose_batch(Elasticity(**sizes)).samples == 4
    assert choose_batch(Elasticity(**sizes, prefer_larger_batch=False)).samples == 4
    sizes = {"micro_batch_sizes": (3, 4), "max_train_batch_size": 6, "max_gpus": 1}
    assert choose_batch(Elasticity(**sizes)).samples == 6
    assert choose_batch(Elasticity(**sizes, prefer_larger_batch=False)).samples == 4


def test_a_config_with_the_section_has_that_batch_whatever_the_world() -> None:
    wanted = section((2, 4, 6), 2000, (1, 10000))
    config = load_config({"elasticity": wanted})
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (1680, 6)
    other = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match="elasticity decides the batch: remove train_batch_size"):
        load_config({"elasticity": wanted, **other})
    ignoring = {**wanted, "ignore_non_elastic_batch_info": True}
    assert load_config({"elasticity": ignoring, **other}) == load_config({"elasticity": ignoring})
    assert load_config({"elasticity": {"enabled": False}, **other}).train_batch_size == 8


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"micro_batch_sizes": [0, 2]}, r"micro_batch_sizes\[0\]: 0 is less than 1"),
        ({"micro_batch_sizes": []}, "micro_batch_sizes: give numbers of samples from 1"),
        ({"micro_batch_sizes": 4}, "micro_batch_sizes: 4 is not a list of integers"),
        ({"max_train_batch_size": 5}, "5 is less than the micro-batch size 6"),
        ({"min_gpus": 4, "max_gpus": 2}, "min_gpus 4 and max_gpus 2 are no range"),
        ({"model_parallel_size": 2}, "there is no model parallelism"),
        ({"max_batch": 5}, "elasticity.max_batch: unknown key; did you mean"),
    ],
)
def test_a_section_that_cannot_be_met_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"elasticity": {**section((2, 4, 6), 2000, (1, 9)), **keys}})


PLAN = section((8, 12, 16, 17), 10000, (32, 1500))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"enabled": False}, 'give a section "elasticity" with "enabled": true'),
        ({"micro_batch_sizes": [1, 4, -1]}, "-1 is less than 1"),
        ({"micro_batch_sizes": [2, 0.5]}, "0.5 is not an integer"),
        ({"max_gpus": -1}, "min_gpus 32 and max_gpus -1 are no range"),
        ({"max_train_batch_size": 0}, "is less than the micro-batch size 17"),
        ({"model_parallel_size": 4}, "there is no model parallelism"),
        ({"version": "0.3"}, "elasticity.version: 0.3 is not known; the newest is 0.2"),
    ],
)
def test_a_wrong_section_is_deepspeeds_error(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(elasticity.config.ElasticityError, match=message):
        elasticity.compute_elastic_config({"elasticity": PLAN | changed}, "0.19.6")


def test_the_workers_of_a_job_are_planned_without_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = {"elasticity": PLAN}
    batch, worlds = elasticity.compute_elastic_config(plan, "0.19.6")
    assert (batch, len(worlds), worlds[0]) == (9792, 23, 32)
    assert elasticity.compute_elastic_config(plan, "0.19.6", world_size=64)[2:] == (17,)
    monkeypatch.setenv("WORLD_SIZE", "96")
    found = elasticity.compute_elastic_config(plan, "0.19.6", return_microbatch=True)
    assert found[2:] == (17,)
    with pytest.raises(elasticity.config.ElasticityIncompatibleWorldSize, match="128 ranks do not"):
        elasticity.compute_elastic_config(plan, "0.19.6", world_size=128)
    with pytest.raises(elasticity.config.ElasticityError, match=r"DeepSpeed 0\.2 has none"):
        elasticity.compute_elastic_config(plan, "0.2")
