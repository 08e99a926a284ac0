"""Sums that the backend makes: the same training within rounding, at every stage."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_deepspeed
from tests.numerics.test_reduction_order import STAGES, digest, expected, make, train
from tests.numerics.test_stock_torch import batches, protected
from tests.support import queued
from tests.support.world import WorldError, WorldPool
from zero_contract.errors import ConfigError, ZeroError
from zero_engine.core.engine import Engine

NATIVE = {"shuffle": False, "reduction": "native"}
ROUNDING = {"fp32": 1e-5, "bf16": 1e-5, "summed in bf16": 0.1}
"""Of weights up to 50."""


def native(stage: int, dtype: str, elastic: dict[str, Any] = NATIVE, **more: Any) -> Engine:
    if dtype == "summed in bf16":
        dtype, more = "bf16", {"communication_data_type": "bf16", **more}
    return make(stage, dtype, elastic=elastic, **more)


def counted(stage: int, dtype: str, accumulate: str) -> tuple[list[Tensor], int]:
    """The weights, and the bytes that this rank has sent of gradients."""
    engine = native(stage, dtype, elastic=NATIVE | {"accumulate": accumulate})
    weights, reducer = train(engine), engine._core.reducer
    assert reducer is not None
    return weights, reducer.pipeline.reduction.collectives.bytes_sent["reduce"]


def trained(cases: list[tuple[int, str]]) -> list[list[Tensor]]:
    return [train(native(*case)) for case in cases]


def check(
    worlds: WorldPool, world: int, cases: list[tuple[int, str]], backend: str = "gloo"
) -> None:
    found = worlds.run(world, trained, cases, backend=backend)
    for number, (_, dtype) in enumerate(cases):
        wanted = expected(dtype.rpartition(" ")[2], 8)
        for rank in range(world):
            for ours, theirs in zip(found[rank][number], wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING[dtype] * 50)
    assert all(digest(w) == digest(f) for f, *rest in zip(*found, strict=True) for w in rest)


def test_the_backends_sums_train_the_same_weights_within_rounding(worlds: WorldPool) -> None:
    """All stages, with padding micro-batches; every rank has the same bits."""
    check(worlds, 3, [(0, "bf16"), (1, "summed in bf16"), (2, "fp32"), (3, "bf16")])


def test_they_do_over_a_backend_like_nccl(worlds: WorldPool) -> None:
    """It matches exchanges by their order alone."""
    check(worlds, 3, [(0, "fp32"), (3, "bf16")], queued.BACKEND)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_backends_sums_train_the_same_weights_in_every_case(
    worlds: WorldPool, world: int
) -> None:
    check(worlds, world, list(itertools.product(STAGES, ROUNDING)))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.corners(stage=[0, 1], dtype=["bf16"])
def test_at_stages_0_and_1_gradients_may_be_exchanged_once_in_a_step(
    worlds: WorldPool, stage: int, dtype: str
) -> None:
    """Steps of 13 and of 6 micro-batches: five and two micro-steps of three ranks."""
    wanted = expected(dtype.rpartition(" ")[2], 8)
    found = worlds.run(3, counted, stage, dtype, "local")
    for weights, sent in found:
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING[dtype] * 50)
        assert digest(weights) == digest(found[0][0])
        assert sent == found[0][1]
    (_, in_every), *_ = worlds.run(3, counted, stage, dtype, "owner")
    assert in_every * 2 == found[0][1] * (5 + 2)


def replace() -> tuple[list[float], str]:
    """At stage 0, where every rank has all of a sum."""
    engine = native(0, "fp32")
    row = engine.module.rows[1]
    for batch in engine.training_dataloader or ():
        engine.backward(engine(batch))
        if engine.is_gradient_accumulation_boundary():
            break
        engine.step()
    gradient = zero_deepspeed.utils.safe_get_full_grad(row)
    assert gradient is not None
    try:
        zero_deepspeed.utils.safe_set_local_grad(row, torch.zeros(1))
        told = ""
    except ZeroError as error:
        told = str(error)
    zero_deepspeed.utils.safe_set_full_grad(row, torch.full_like(gradient, 3.0))
    engine.step()
    return zero_deepspeed.utils.safe_get_full_fp32_param(row).unique().tolist(), told


def test_a_gradient_that_every_rank_has_is_replaced_on_all_or_refused(worlds: WorldPool) -> None:
    """The rate is 0.5."""
    for weights, told in worlds.run(2, replace):
        assert weights == [1 - 3 * 0.5]
        assert told.endswith("call safe_set_full_grad on all ranks")


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def move(root: str) -> tuple[list[dict[str, Any]], list[str], str]:
    """A step in order, one by the backend, one in order again; what is recorded, said, refused."""
    heard, ordered = Heard(), {"shuffle": False, "reduction": "ordered"}
    logging.getLogger("zero_engine").addHandler(heard)
    for step, elastic in enumerate((ordered, NATIVE, ordered), start=1):
        engine = make(2, "fp32", elastic=elastic)
        if step > 1:
            engine.load_checkpoint(root)
        train(engine, step)
        engine.save_checkpoint(root)
        if elastic is NATIVE:
            with pytest.raises(ConfigError) as refused:
                make(2, "fp32").load_checkpoint(root)
    logging.getLogger("zero_engine").removeHandler(heard)
    records = [json.loads(each.read_text()) for each in Path(root).glob("step-*/MANIFEST.json")]
    by_step = sorted((each["meta"]["engine"] for each in records), key=lambda each: each["step"])
    return [run["reduction"] for run in by_step], heard.lines, str(refused.value)


def test_a_checkpoint_moves_between_the_orders_only_when_the_config_says_so(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (recorded, said, refused), _ = worlds.run(2, move, str(tmp_path))
    tree = {"order": "tree", "version": 1, "norm": 1, "block": 8}
    by_gloo = {
        "order": "native",
        "version": 1,
        "norm": 1,
        "backend": "gloo",
        "dtype": "fp32",
    }
    assert recorded == [tree, by_gloo, tree]
    about = [line.partition(":")[0] for line in said if line.startswith("elastic.reduction")]
    assert about == [
        'elastic.reduction is "native"',
        'elastic.reduction is "native", and was "ordered" when the checkpoint was made',
        'elastic.reduction is "ordered", and was "native" when the checkpoint was made',
    ]
    assert 'set elastic.reduction to "native" to continue like that, or to "ordered"' in refused


# ---- stock PyTorch ----


def stock(wrapper: str, elastic: dict[str, Any], directory: str = "") -> tuple[str, list[Tensor]]:
    model, _, run = protected(wrapper, config={"elastic": elastic})
    if directory:
        run.load(directory)
    for tokens in batches(run):
        run.backward(model(tokens))
        run.step(1.0)
    weights = [each.detach().clone() for _, each in run._whole_weights()]
    if directory:
        run.save(directory)
    found = run.weight_hash(), weights
    run.close()
    return found


@pytest.mark.parametrize(("wrapper", "world"), [("ddp", 3), ("fsdp2", 3), ("hsdp", 4), ("ddp", 1)])
@pytest.mark.corners(wrapper=["fsdp2"])
def test_under_stock_pytorch_the_backends_sums_train_the_same_weights_within_rounding(
    worlds: WorldPool, wrapper: str, world: int
) -> None:
    """Five micro-batches, so that the last micro-step has padding ones."""
    ((_, ordered),) = worlds.run(1, stock, "plain", {})
    found = worlds.run(world, stock, wrapper, {"reduction": "native"})
    assert len({digest for digest, _ in found}) == 1
    for ours, theirs in zip(found[0][1], ordered, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.full
def test_a_stock_run_goes_on_with_the_backends_sums_if_it_names_them(
    worlds: WorldPool, tmp_path: Path
) -> None:
    worlds.run(2, stock, "ddp", {"reduction": "native"}, str(tmp_path))
    with pytest.raises(WorldError, match=r'set elastic\.reduction to "native" to continue'):
        worlds.run(2, stock, "ddp", {}, str(tmp_path))
    worlds.run(2, stock, "fsdp2", {"reduction": "native"}, str(tmp_path))
    worlds.run(2, stock, "fsdp2", {"reduction": "ordered"}, str(tmp_path))
