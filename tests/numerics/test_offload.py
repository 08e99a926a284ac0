"""Offloading moves bytes and changes none: one result with and without it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import make_model, param_groups
from tests.support.training import SUB_GROUP, config, fingerprint, make_engine, train
from tests.support.world import WorldPool, one_result
from zero_contract.errors import ZeroError
from zero_deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from zero_engine.optim.sub_groups import UNDER_WAY
from zero_engine.tiers.nvme import Nvme

STEPS = 4


def offloading(stage: int, where: str, path: str, **more: Any) -> dict[str, Any]:
    """A config by the name of a tier."""
    zero: dict[str, Any] = {"stage": stage}
    optimizer, _, param = where.partition("+")
    if optimizer != "none":
        zero["offload_optimizer"] = {"device": optimizer, "nvme_path": path}
    if param:
        zero["offload_param"] = {"device": param, "nvme_path": path, "max_in_cpu": 0}
    return config(stage, **more) | {"zero_optimization": zero}


Tiers = list[tuple[int, str]]
"""Stages, and where their state rests."""
TIERS: Tiers = [
    (1, "cpu"),
    (2, "cpu"),
    (3, "cpu"),
    (1, "nvme"),
    (2, "nvme"),
    (3, "nvme"),
    (3, "nvme+cpu"),
    (3, "nvme+nvme"),
    (3, "cpu+nvme"),
    (3, "none+nvme"),
]
FEW = [(1, "cpu"), (2, "nvme"), *TIERS[6:]]
"""Each tier, and each stage."""
SOME_OR_ALL = pytest.mark.parametrize(
    "tiers", [FEW, pytest.param(TIERS, marks=pytest.mark.full)], ids=["each", "all"]
)


def train_in_tiers(bf16: bool, tiers: Tiers, path: str) -> list[tuple[Any, ...]]:
    fingerprints = []
    for stage, where in [(0, "none"), *tiers]:
        engine = make_engine(offloading(stage, where, path, bf16=bf16))
        losses = train(engine, STEPS)
        fingerprints.append((*fingerprint(engine), tuple(losses)))
    return fingerprints


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.corners(world=[2], bf16=[True])
@SOME_OR_ALL
def test_every_tier_gives_the_bits_of_no_tier(
    worlds: WorldPool, tmp_path: Path, world: int, bf16: bool, tiers: Tiers
) -> None:
    for rank in worlds.run(world, train_in_tiers, bf16, tiers, str(tmp_path)):
        for tier, result in zip(tiers, rank[1:], strict=True):
            assert result == rank[0], tier
    assert list(tmp_path.iterdir()) == []


# ---- every optimizer, accumulation, part of the state ----


OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "SGD", "params": {"lr": 0.1}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    {"type": "Adagrad", "params": {"lr": 0.01, "initial_accumulator_value": 0.1}},
    {"type": "Lion", "params": {"lr": 1e-3}},
    {"type": "NAdam", "params": {"lr": 1e-3}},
    {"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}},
    {"type": "Lamb", "params": {"lr": 1e-2}},
    {"type": "Muon", "params": {"lr": 1e-2}},
]
"""No state; made late; made with the optimizer; one key; scalars that multiply; three keys; norms
of whole parameters; whole matrices, and other keys for what are none."""


def train_optimizers(path: str) -> list[tuple[str, str]]:
    hashes = []
    for optimizer in OPTIMIZERS:
        pair = []
        for where in ("none", "nvme+nvme"):
            engine = make_engine(offloading(3, where, path, optimizer=optimizer, bf16=True))
            train(engine, 3)
            pair.append(engine.weight_hash())
        hashes.append((pair[0], pair[1]))
    return hashes


@pytest.mark.full
def test_every_optimizer_steps_sub_groups_to_the_same_bits(
    worlds: WorldPool, tmp_path: Path
) -> None:
    hashes = worlds.run(2, train_optimizers, str(tmp_path))[0]
    assert [offloaded for _, offloaded in hashes] == [kept for kept, _ in hashes]
    assert len(set(hashes)) == len(OPTIMIZERS)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_part_of_the_state_can_stay(worlds: WorldPool, tmp_path: Path, ratio: float) -> None:
    kept, (split, offloaded) = worlds.run(1, train_split, str(tmp_path), ratio)[0]
    assert split == kept
    assert offloaded == (0 if ratio == 0 else 2)


def train_split(path: str, ratio: float) -> tuple[str, tuple[str, int]]:
    hashes = []
    for where in ("none", "nvme"):
        settings = offloading(3, where, path)
        if where != "none":
            settings["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
        engine = make_engine(settings)
        train(engine, 3)
        hashes.append(engine.weight_hash())
    trained = [unit for unit in engine._core.units if unit.spec.trained]
    assert len(trained) == 3
    return hashes[0], (hashes[1], sum(unit.tiers.offloaded for unit in trained))


class CountsInGroup(torch.optim.Optimizer):
    """Counts its steps in the options of a param group, as apex and many others do."""

    needs_whole_parameters = False

    def __init__(self, params: Any, how: str = "a number") -> None:
        super().__init__(params, {"lr": 0.01, "how": how})
        for group in self.param_groups:
            kept = {"a number": 0, "a tensor": torch.zeros(()), "a list": [0]}
            group.update({"t": kept[how]} if how in kept else {})

    def count(self, group: dict[str, Any]) -> int:
        match group["how"]:
            case "a tensor":
                group["t"] += 1
            case "a list":
                group["t"][0] += 1
                return int(group["t"][0])
            case _:
                group["t"] = group.get("t", 0) + 1
        return int(group["t"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["how"] == "with parameters" and not group["params"]:
                continue
            rate = group["lr"] / self.count(group)
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                param.add_(mean.mul_(0.9).add_(param.grad), alpha=-rate)


HOWS = ("a number", "a tensor", "a list", "made late", "with parameters")
MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}


def train_counting(how: str, path: str) -> list[tuple[str, list[int]]]:
    """Hashes and counts: without and with offloading, then with master weights in bf16."""
    found = []
    for where, more in [("none", {}), ("nvme+nvme", {}), ("none", {"bf16": MASTERS})]:
        settings = offloading(3, where, path) | more
        del settings["optimizer"]
        model = make_model()
        own = CountsInGroup(param_groups(model), how)
        kept = own.param_groups[0]["t"] if how == "a tensor" else None
        engine = make_engine(settings, model=model, optimizer=own, model_parameters=None)
        train(engine, 3)
        assert kept is None or own.param_groups[0]["t"] is kept
        counts = [group["t"] for group in own.param_groups]
        found.append((engine.weight_hash(), [int(c[0] if how == "a list" else c) for c in counts]))
    return found


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.corners(how=["a tensor", "with parameters"])
def test_an_optimizer_that_counts_in_its_groups_counts_each_step_once(
    worlds: WorldPool, tmp_path: Path, how: str
) -> None:
    plain, offloaded, low = one_result(worlds, train_counting, how, str(tmp_path), sizes=(1, 2, 3))
    assert offloaded == plain != low
    assert plain[1] == low[1] == [3, 3]


def train_fp16(where: str, path: str) -> tuple[Any, ...]:
    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
    engine = make_engine(offloading(3, where, path, fp16=fp16))
    losses = train(engine, 6)
    return (*fingerprint(engine), losses, engine.skipped_steps)


def test_steps_that_overflow_are_skipped_alike(worlds: WorldPool, tmp_path: Path) -> None:
    plain = worlds.run(2, train_fp16, "none", str(tmp_path))
    assert plain[0][-1] > 0
    assert worlds.run(2, train_fp16, "nvme+nvme", str(tmp_path)) == plain


def fail_half_way(path: str) -> list[str]:
    """What is said when the disk fails in the middle of a step, and when the script goes on."""
    engine = make_engine(offloading(3, "nvme", path) | {"train_batch_size": 2})
    train(engine, 2)
    (tier,) = {unit.tiers.state for unit in engine._core.units if unit.spec.trained}
    assert isinstance(tier, Nvme)
    write, left = tier.file._write_at, iter(range(4))

    def write_at(data: memoryview, position: int) -> int:
        if next(left, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(data, position)

    tier.file._write_at = write_at  # type: ignore[method-assign]
    told = []
    engine.backward(engine(next(iter(engine.training_dataloader))))
    for use in (engine.step, engine.step, lambda: engine.save_checkpoint(f"{path}/root")):
        with pytest.raises(ZeroError) as caught:
            use()
        told.append(str(caught.value))
    return told


def test_nothing_is_made_of_a_step_that_failed_half_way(worlds: WorldPool, tmp_path: Path) -> None:
    failed, again, saved = worlds.run(1, fail_half_way, str(tmp_path))[0]
    assert "Input/output error; the disk is failing: name another one as nvme_path" in failed
    half = f"because a step has failed half way: {failed}; load a checkpoint, or start again"
    assert again == f"step(): the state is neither the old one nor that of a checkpoint, {half}"
    assert saved.startswith("save_checkpoint(): the state is neither the old one nor that of")


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.corners(world=[2], name=["Muon"])
@SOME_OR_ALL
def test_what_looks_at_whole_parameters_gives_one_result_in_every_tier(
    worlds: WorldPool, tmp_path: Path, world: int, name: str, tiers: Tiers
) -> None:
    for rank in worlds.run(world, train_whole, name, tiers, str(tmp_path)):
        assert len(set(rank)) == 1


def train_whole(name: str, tiers: Tiers, path: str) -> list[str]:
    hashes = []
    for stage, where in [(0, "none"), *tiers]:
        settings = offloading(stage, where, path, optimizer={"type": name, "params": {"lr": 0.01}})
        if (stage, where) == (3, "nvme"):
            settings["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
        engine = make_engine(settings)
        train(engine, 3)
        hashes.append(engine.weight_hash())
    return hashes


# ---- checkpoints and single parameters ----


def save_and_go_on(root: str, path: str, saves: str, loads: str, name: str) -> tuple[str, str, str]:
    """Train, save in one tier in the background; load in another and train; the hashes."""
    chosen: dict[str, Any] = {"optimizer": {"type": name, "params": {"lr": 1e-2}}, "bf16": True}
    engine = make_engine(offloading(3, saves, path, **chosen, checkpoint={"async": True}))
    train(engine, 2)
    saved = engine.weight_hash()
    engine.save_checkpoint(root)
    train(engine, STEPS)
    assert engine.wait_for_checkpoint()
    other = make_engine(offloading(3, loads, path, **chosen), seed=8)
    other.load_checkpoint(root)
    loaded = other.weight_hash()
    assert loaded == saved
    train(other, STEPS)
    return saved, engine.weight_hash(), other.weight_hash()


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize(
    ("saves", "loads"), [("none", "nvme+nvme"), ("nvme", "none"), ("nvme+nvme", "cpu")]
)
@pytest.mark.corners(optimizer=["AdamW"], saves=["nvme"])
def test_a_checkpoint_loads_in_another_tier_and_training_goes_on_as_if_nothing_had_been(
    worlds: WorldPool, tmp_path: Path, saves: str, loads: str, optimizer: str
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    root = str(tmp_path / "root")
    results = worlds.run(2, save_and_go_on, root, str(scratch), saves, loads, optimizer)
    saved, uninterrupted, resumed = results[0]
    assert resumed == uninterrupted != saved


def save_everywhere(root: str, path: str) -> None:
    for where in ("none", "cpu", "nvme", "nvme+nvme"):
        engine = make_engine(offloading(3, where, path))
        train(engine, 2)
        engine.save_checkpoint(f"{root}/{where}")


def test_a_checkpoint_is_the_same_bytes_in_every_tier(worlds: WorldPool, tmp_path: Path) -> None:
    worlds.run(2, save_everywhere, str(tmp_path / "root"), str(tmp_path))
    found = {where: contents(tmp_path / "root" / where) for where in ("none", "cpu", "nvme")}
    found["both"] = contents(tmp_path / "root" / "nvme+nvme")
    assert [where for where, bytes_ in found.items() if bytes_ != found["none"]] == []
    assert len(found["none"]) == 3


def contents(root: Path) -> dict[str, Any]:
    """The files of the one checkpoint there, without what is different in every save."""
    (directory,) = root.glob("step-*")
    files: dict[str, Any] = {p.name: p.read_bytes() for p in directory.glob("*.safetensors")}
    manifest = json.loads((directory / "MANIFEST.json").read_bytes())
    for changing in ("nonce", "digest", "self_digest", "created", "time"):
        manifest.pop(changing, None)
    manifest["meta"]["engine"].pop("elapsed_s")
    return files | {"MANIFEST.json": manifest}


def look_and_change(where: str, path: str) -> list[Any]:
    engine = make_engine(offloading(3, where, path, bf16=True))
    train(engine, 1)
    seen: list[Any] = []
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        weights = safe_get_full_fp32_param(param)
        moment = safe_get_full_optimizer_state(param, "exp_avg")
        seen.append((name, weights.tolist(), moment.tolist()))
        safe_set_full_fp32_param(param, weights * 1.25)
        safe_set_full_optimizer_state(param, moment * 0.5, "exp_avg")
        seen.append(safe_get_local_fp32_param(param).tolist())
    state = {name: value.tolist() for name, value in engine.module_state_dict().items()}
    train(engine, 3)
    return [seen, state, engine.weight_hash()]


@pytest.mark.corners(where=["nvme"])
@pytest.mark.parametrize("where", ["cpu", "nvme", "nvme+nvme"])
def test_single_parameters_are_seen_and_changed_alike_in_every_tier(
    worlds: WorldPool, tmp_path: Path, where: str
) -> None:
    plain = worlds.run(2, look_and_change, "none", str(tmp_path))
    assert worlds.run(2, look_and_change, where, str(tmp_path)) == plain


# ---- the working set ----


def buffers_of(path: str) -> tuple[int, int]:
    """The most that the disk's buffers took, and what rests on the disk."""
    engine = make_engine(offloading(3, "nvme", path, bf16=True))
    train(engine, 3)
    (tier,) = {unit.tiers.state for unit in engine._core.units if unit.spec.trained}
    assert isinstance(tier, Nvme)
    return tier.buffers.peak_bytes, tier.file.size_bytes


def test_a_step_has_three_sub_groups_in_memory(worlds: WorldPool, tmp_path: Path) -> None:
    peak, on_disk = worlds.run(1, buffers_of, str(tmp_path))[0]
    assert peak == UNDER_WAY * 3 * 4 * SUB_GROUP  # weights and two moments, fp32
    assert on_disk > 3 * peak
