"""The layout of a run: what is chosen of config, nodes, device and units, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from logging import WARNING
from typing import Any

import pytest

from zero_comm.topology import Topology
from zero_contract.errors import ConfigError
from zero_engine.config import Config, load_config
from zero_engine.config.schema import (
    Bf16,
    Elastic,
    Fp16,
    OffloadOptimizer,
    OffloadParam,
    ZeroOptimization,
)
from zero_engine.layout import Facts, Layout, OptimizerFacts, UnitFacts, refused, resolve

UNITS = [(300, True), (100, False), (100, True)]
"""Of a unit the elements of each rank, and whether it is trained."""


def facts(
    config: Config, nodes: tuple[int, ...] = (2,), device: str = "cpu", *, whole: bool = False
) -> Facts:
    units = [
        UnitFacts(shard=shard, dtype=config.compute if trained else "fp32", trained=trained)
        for shard, trained in UNITS
    ]
    return Facts(
        topology=Topology(nodes=nodes),
        device=device,
        any_order=device == "cpu",
        optimizer=OptimizerFacts(name="SGD", whole=whole),
        units=units,
    )


def short(layout: Layout) -> str:
    """The layout in a line: who adds, between which nodes, in which dtypes, then each unit's
    places: of its state (of its weights), what modules are gathered from."""
    nodes = ",".join(map(str, layout.sums.topology.nodes))
    dtypes = f"{layout.config.compute} {layout.config.master} {layout.config.moments}"
    by = f"backend {layout.native}" if layout.native else f"{layout.sums.where} {layout.sums.block}"
    group = " alone" if layout.alone else ""
    units = [
        f"{'+' if each.offloaded else ''}{each.state}({each.weights}) "
        f"{'replica' if each.replica else each.source}{' int8' if each.rounded else ''}"
        for each in layout.units
    ]
    return f"{by}{group}; {nodes}; {dtypes}; {', '.join(units)}"


CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
BF16 = {"enabled": True}
MASTERS = BF16 | {"bf16_master_weights_and_grads": True}
ALL_16 = MASTERS | {"bf16_optimizer_states": True}

ROWS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # stages, in fp32: below stage 3 the buffer of the model is the master weights
    (
        {},
        {},
        "owner 8; 2; fp32 fp32 fp32; none(none) replica, none(none) replica, none(none) replica",
    ),
    (
        {"zero_optimization": {"stage": 2}},
        {"device": "cuda"},
        "owner 8; 2; fp32 fp32 fp32; none(none) replica, none(none) replica, none(none) replica",
    ),
    (
        {"zero_optimization": {"stage": 3}},
        {},
        "owner 8; 2; fp32 fp32 fp32; none(none) shard, none(none) shard, none(none) shard",
    ),
    # where a device orders its exchanges, gathered weights and sums keep apart
    (
        {"zero_optimization": {"stage": 3}},
        {"device": "cuda", "nodes": (2, 2)},
        "owner 8 alone; 2,2; fp32 fp32 fp32; none(none) shard, none(none) shard, none(none) shard",
    ),
    # 16 bits
    (
        {"zero_optimization": {"stage": 0}, "bf16": BF16},
        {},
        "owner 8; 2; bf16 fp32 fp32; none(none) replica, none(none) replica, none(none) replica",
    ),
    (
        {"zero_optimization": {"stage": 1}, "bf16": BF16},
        {},
        "owner 8; 2; bf16 fp32 fp32; none(none) shard, none(none) replica, none(none) shard",
    ),
    (
        {"zero_optimization": {"stage": 1}, "bf16": MASTERS},
        {},
        "owner 8; 2; bf16 bf16 fp32; none(none) replica, none(none) replica, none(none) replica",
    ),
    (
        {"zero_optimization": {"stage": 3}, "bf16": ALL_16},
        {},
        "owner 8; 2; bf16 bf16 bf16; none(none) shard, none(none) shard, none(none) shard",
    ),
    # offloaded: to host memory beside a GPU, of which there is none on a CPU, and to a disk
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}, "bf16": BF16},
        {"device": "cuda"},
        "owner 8; 2; bf16 fp32 fp32; +cpu(none) buffer, none(none) replica, +cpu(none) buffer",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
        {},
        "owner 8; 2; fp32 fp32 fp32; +cpu(none) replica, none(none) replica, +cpu(none) replica",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
        {"device": "cuda"},
        "owner 8; 2; fp32 fp32 fp32; +cpu(none) buffer, none(none) replica, +cpu(none) buffer",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": NVME | {"ratio": 0.5}}},
        {},
        "owner 8; 2; fp32 fp32 fp32; +nvme(none) copy, none(none) shard, none(none) shard",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME}},
        {},
        "owner 8; 2; fp32 fp32 fp32; +nvme(cpu) copy, cpu(cpu) shard, +nvme(cpu) copy",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": NVME,
                "offload_param": NVME | {"max_in_cpu": 300},
            }
        },
        {"device": "cuda"},
        "owner 8 alone; 2; fp32 fp32 fp32; +nvme(cpu) copy, nvme(nvme) shard, +nvme(nvme) shard",
    ),
    # whole parameters stay where they are stepped
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": CPU}},
        {"device": "cuda", "whole": True},
        "owner 8 alone; 2; fp32 fp32 fp32; none(none) shard, none(none) shard, none(none) shard",
    ),
    # int8 on the way
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        {},
        "owner 8; 2; fp32 fp32 fp32; none(none) shard, none(none) shard int8, none(none) shard",
    ),
    # who adds
    (
        {"elastic": {"accumulate": "local", "reduction_block": 4}},
        {"nodes": (2, 2)},
        "local 4; 2,2; fp32 fp32 fp32; none(none) replica, none(none) replica, none(none) replica",
    ),
    (
        {"elastic": {"accumulate": "node"}},
        {"nodes": (4,)},
        "owner 8; 4; fp32 fp32 fp32; none(none) replica, none(none) replica, none(none) replica",
    ),
    (
        {"elastic": {"accumulate": "local"}},
        {"nodes": (1,)},
        "owner 8; 1; fp32 fp32 fp32; none(none) replica, none(none) replica, none(none) replica",
    ),
    (
        {"elastic": {"reduction": "native"}, "communication_data_type": "bf16", "bf16": BF16},
        {"nodes": (2, 2)},
        "backend bf16 alone; 1,1,1,1; bf16 fp32 fp32; none(none) replica, none(none) replica, "
        "none(none) replica",
    ),
]


@pytest.mark.parametrize(("settings", "given", "expected"), ROWS)
def test_a_run_is_laid_out_as_its_config_and_its_round_say(
    settings: dict[str, Any], given: dict[str, Any], expected: str
) -> None:
    config = load_config(settings)
    assert short(resolve(config, facts(config, **given))) == expected


# ---- every combination ----

OFFLOADS = ["none", "cpu", "nvme"]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": Bf16(enabled=True)},
    "masters": {"bf16": Bf16(enabled=True, bf16_master_weights_and_grads=True)},
    "moments": {"bf16": Bf16(enabled=True, bf16_optimizer_states=True)},
    "all 16": {
        "bf16": Bf16(enabled=True, bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    },
    "both": {"bf16": Bf16(enabled=True), "fp16": Fp16(enabled=True)},
}


def configs() -> Iterator[Config]:
    sums = product([None, "native"], ["owner", "node", "local"], [False, True])
    for stage, state, weights, dtypes, (reduction, where, late) in product(
        range(4), OFFLOADS, OFFLOADS, PRECISIONS.values(), list(sums)
    ):
        yield Config(
            zero_optimization=ZeroOptimization(
                stage=stage,
                offload_optimizer=OffloadOptimizer(device=state, nvme_path="/a"),
                offload_param=OffloadParam(device=weights, nvme_path="/a"),
            ),
            elastic=Elastic(reduction=reduction, accumulate=where, overlap_param_gather=late),
            **dtypes,
        )


ROUNDS = [
    ((1,), "cpu", False),
    ((2, 2), "cuda", False),
    ((3,), "cpu", True),
    ((2, 1), "cuda", True),
]

NAMES = {
    "",
    "an offloaded optimizer at stage 0",
    "local sums of sharded gradients",
    "masters in 16 bits at stage 0",
    "moments below their masters",
    "moments in 16 bits of whole parameters",
    "sums of nodes by the backend",
    "two precisions",
    "weights that arrive later at stage 0",
    "weights that arrive later at stage 3",
}
"""The refusals among these; without one there is a layout."""


def test_every_combination_gives_one_layout_or_one_refusal_with_a_name() -> None:
    found = set()
    for config, (nodes, device, whole) in product(configs(), ROUNDS):
        given = facts(config, nodes, device, whole=whole)
        name = refused(config, given)
        found.add(name)
        if name:
            with pytest.raises(ConfigError):
                resolve(config, given)
            continue
        layout = resolve(config, given)
        assert layout == resolve(config, facts(config, nodes, device, whole=whole))
        assert layout.sums.topology.world == sum(nodes)
        divides = layout.stage.shards_parameters
        for unit in layout.units:
            far = unit.state == "nvme" or (unit.state == "cpu" and device == "cuda")
            assert not (unit.replica and divides)  # stage 3 has no whole weights
            assert unit.replica or layout.stage.shards_optimizer
            assert not unit.replica or unit.source == "shard"
            assert {"copy": divides, "buffer": not divides, "shard": True}[unit.source]
            assert far or unit.source == "shard"  # what is near is not kept twice
    assert found == NAMES


@pytest.mark.parametrize(
    ("dtypes", "settings", "chosen", "reason"),
    [
        (
            {"bfloat16"},
            {},
            "computes in bf16, master weights rest in fp32",
            "the parameters are bf",
        ),
        ({"float16"}, {}, "computes in fp16", "sets no precision, without a loss scale"),
        ({"float16", "float32"}, {}, "computes in fp32", ""),
        ({"bfloat16"}, {"data_types": {"param_dtype": "fp32"}}, "computes in fp32", ""),
    ],
)
def test_the_model_decides_the_precision_where_the_config_does_not(
    dtypes: set[str], settings: dict[str, Any], chosen: str, reason: str
) -> None:
    config = load_config(settings)
    layout = resolve(config, Facts(topology=Topology(nodes=(1,)), dtypes=frozenset(dtypes)))
    (told,) = [choice for choice in layout.choices if choice.what == "precision"]
    assert told.chosen.startswith(chosen)
    assert reason in told.reason
    assert bool(reason) == bool(told.reason)


def test_print_shows_each_choice_with_its_reason() -> None:
    config = load_config(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": NVME,
                "zero_hpz_partition_size": 8,
            },
            "elastic": {"accumulate": "node"},
            "managed_gradient_accumulation": False,
        }
    )
    assert str(resolve(config, facts(config, (2, 2), "cuda"))).splitlines() == [
        "precision: computes in fp32, master weights rest in fp32, the optimizer's state in fp32; "
        "gradients are summed in fp32",
        "stage 3: the optimizer's state, gradients, parameters divided among 4 ranks",
        "sums: in order, by blocks of 8 micro-batches",
        "nodes: gradients are added inside each node before they travel to others (ranks of the "
        "nodes: 2, 2)",
        'elastic.accumulate: "node" acts as "owner" in this round (the script decides where a step '
        "ends (managed_gradient_accumulation: false))",
        "exchanges: sums travel in a group of their own (weights are gathered at the same time)",
        "nvme: the state of 2 and the weights of 0 units, of 3",
        "secondary copies: none (zero_hpz_partition_size 8: 4 ranks are not several such groups)",
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_param": CPU}},
            "zero_optimization.offload_param has no effect at stage 2: only stage 3 divides the "
            "parameters",
        ),
        (
            {"communication_data_type": "float16", "bf16": BF16},
            "gradients are sent in bf16, and not in float16: that would round them",
        ),
    ],
)
def test_what_is_otherwise_than_asked_is_told(settings: dict[str, Any], sentence: str) -> None:
    config = load_config(settings)
    told = [choice for choice in resolve(config, facts(config)).choices if choice.level == WARNING]
    assert [choice.sentence for choice in told] == [sentence]
