"""ZeRO++: quantization has bits of its own, the same at every world size; hpZ has no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import DIVIDED, config, fingerprint, make_engine, train
from tests.support.world import GROUP_TIMEOUT_S, WorldPool
from zero_comm.exchange.collectives import node_exchanges
from zero_deepspeed.zero import GatheredParameters

STEPS = 4
WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
FROZEN = {"zero_quantized_nontrainable_weights": True}
WIRES: list[dict[str, bool]] = [{}, FROZEN, WEIGHTS, GRADIENTS, WEIGHTS | GRADIENTS]


def quantizing(stage: int, wire: dict[str, bool], **more: Any) -> dict[str, Any]:
    return config(stage, **more) | {"zero_optimization": DIVIDED | {"stage": stage, **wire}}


def train_every_wire(bf16: bool) -> list[tuple[Any, ...]]:
    results = []
    for wire in WIRES:
        engine = make_engine(quantizing(3, wire, bf16=bf16))
        losses = train(engine, STEPS)
        results.append((*fingerprint(engine), tuple(losses)))
    return results


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.full
def test_every_world_size_gives_the_same_bits(worlds: WorldPool, bf16: bool) -> None:
    alone = worlds.run(1, train_every_wire, bf16)[0]
    for world in (2, 3):
        assert worlds.run(world, train_every_wire, bf16) == [alone] * world
    assert len({result[0] for result in alone}) == len(WIRES)
    plain = alone[0][-1]
    for result in alone[1:]:
        assert result[-1] == pytest.approx(plain, rel=2e-3)


def train_every_stage(_: None) -> list[str]:
    hashes = []
    for stage in (0, 1, 2, 3):
        engine = make_engine(quantizing(stage, GRADIENTS, bf16=True))
        train(engine, STEPS)
        hashes.append(engine.weight_hash())
    return hashes


def test_quantized_gradients_give_one_result_at_every_stage(worlds: WorldPool) -> None:
    assert len({digest for rank in worlds.run(2, train_every_stage, None) for digest in rank}) == 1


def bytes_on_the_wire(wire: dict[str, bool]) -> dict[str, int]:
    engine = make_engine(quantizing(3, wire))
    train(engine, 1)
    engine._core.collectives.bytes_sent.clear()
    train(engine, 2)
    return dict(engine._core.collectives.bytes_sent)


def test_weights_travel_as_a_quarter_of_the_bytes(worlds: WorldPool) -> None:
    plain = worlds.run(2, bytes_on_the_wire, {})[0]
    quantized = worlds.run(2, bytes_on_the_wire, WEIGHTS)[0]
    assert quantized["gather"] == pytest.approx(plain["gather"] / 4, rel=0.1)  # norms, too


def changed_by_gathering(wire: dict[str, bool]) -> dict[str, bool]:
    """Whether the weights that a module computes with are others than those that are stored."""
    engine = make_engine(quantizing(3, wire))
    stored = engine.get_fp32_state_dict()
    params = dict(engine.module.named_parameters())
    with GatheredParameters(list(params.values())):
        return {name: not torch.equal(p.detach().cpu(), stored[name]) for name, p in params.items()}


def test_only_weights_that_nothing_trains_are_quantized_if_those_are_asked_for(
    worlds: WorldPool,
) -> None:
    for changed in worlds.run(2, changed_by_gathering, FROZEN):
        assert {name for name, differs in changed.items() if differs} == {
            "blocks.0.scale",
            "blocks.1.scale",
        }
    assert worlds.run(2, changed_by_gathering, WEIGHTS)[0]["blocks.0.qkv.weight"]


def overflow(wire: dict[str, bool]) -> tuple[int, float]:
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    engine = make_engine(quantizing(3, wire, fp16=fp16))
    train(engine, 2)
    return engine.skipped_steps, engine._core.zero.scale


def test_an_overflow_is_seen_as_without(worlds: WorldPool) -> None:
    plain = worlds.run(2, overflow, {})
    assert plain[0][0] > 0
    assert worlds.run(2, overflow, GRADIENTS) == plain


def change_one(root: str) -> tuple[int, str, str]:
    """Change one element in the gathered weights; how many elements have changed in fp32."""
    engine = make_engine(quantizing(3, WEIGHTS, bf16=True))
    train(engine, 1)
    before = engine.get_fp32_state_dict()["norm.weight"]
    param = dict(engine.module.named_parameters())["norm.weight"]
    with GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param[3] = 17.0
    after = engine.get_fp32_state_dict()["norm.weight"]
    assert after[3] == 17
    engine.save_checkpoint(root)
    other = make_engine(quantizing(1, {}, bf16=True), seed=8)
    other.load_checkpoint(root)
    return int((before != after).sum()), engine.weight_hash(), other.weight_hash()


def test_what_is_stored_is_not_quantized(worlds: WorldPool, tmp_path: Path) -> None:
    changed, saved, loaded = worlds.run(2, change_one, str(tmp_path))[0]
    assert changed == 1
    assert loaded == saved


# ---- hpZ ----


def train_in_nodes(size: int, wire: dict[str, bool]) -> tuple[Any, ...]:
    engine = make_engine(quantizing(3, wire | {"zero_hpz_partition_size": size}, bf16=True))
    losses = train(engine, STEPS)
    engine.eval()
    with torch.no_grad():
        evaluated = [float(engine(torch.ones(2, 13, dtype=torch.long))) for _ in range(2)]
    engine.train()
    losses += train(engine, STEPS + 1)
    node, reducer = engine._core.units[0].wire._node, engine._core.reducer
    assert reducer is not None
    between = (
        engine._core.collectives.bytes_sent | reducer.pipeline.reduction.collectives.bytes_sent
    )
    sent = dict(between), dict(node.bytes_sent) if node else {}
    return (*fingerprint(engine), losses, evaluated), sent


@pytest.mark.parametrize("wire", [{}, WEIGHTS], ids=["plain", "quantized"])
@pytest.mark.corners(wire=[WEIGHTS])
def test_gathering_within_a_node_changes_where_bytes_travel_and_no_bit(
    worlds: WorldPool, wire: dict[str, bool]
) -> None:
    plain = worlds.run(4, train_in_nodes, 1, wire)
    in_pairs = worlds.run(4, train_in_nodes, 2, wire)
    assert [result for result, _ in in_pairs] == [result for result, _ in plain]
    (everywhere, _), (between, within) = plain[0][1], in_pairs[0][1]
    assert between["gradients"] == everywhere["gradients"]
    assert between["gather"] < everywhere["gather"] * 0.6  # backward's gathers stay in the node
    assert within["gather"] > 0


def patience_s() -> float:
    return node_exchanges(2).timeout_s


def test_the_ranks_of_a_node_wait_for_each_other_as_long_as_those_of_the_group(
    worlds: WorldPool,
) -> None:
    assert worlds.run(4, patience_s) == [GROUP_TIMEOUT_S] * 4


def test_a_world_that_is_not_several_nodes_gives_the_bits_all_the_same(worlds: WorldPool) -> None:
    alone = worlds.run(1, train_in_nodes, 2, {})[0][0]
    for world in (3,):
        assert [result for result, _ in worlds.run(world, train_in_nodes, 2, {})] == [alone] * world
