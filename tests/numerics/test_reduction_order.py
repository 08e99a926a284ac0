"""The order of the sum, end to end: the weights are those of the expression in plain torch.

The gradients are the samples themselves, times a weight, and all arithmetic is element by element:
so the bits are the same on every machine, and hashes of earlier releases can be compared with.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import zero_deepspeed
from tests.support.plain import summed, to_int8
from tests.support.world import WorldPool, one_result
from zero_comm.sums.plan import most_pending
from zero_contract.errors import ConfigError
from zero_engine.core.engine import Engine

WIDTHS = (5, 1030, 2049)
"""Of the parameters; over the ends of the blocks of the norm."""
COUNT, RATE = 13, 0.5
"""Micro-batches of a step; no multiple of a block or of most worlds."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = (0, 1, 2, 3)
BLOCKS = (1, 4, 8)
STEPS = 2


def numbers(sample: int, width: int) -> Tensor:
    """Between -8 and 8 and of very different sizes, made of integers."""
    mixed = (torch.arange(width) + 1) * (2 * sample + 1) * 40503 % 65521 - 32760
    return (
        mixed.float()
        / 4096
        * torch.tensor([1.0, 2.0**-9, 2.0**-15])[(torch.arange(width) + sample) % 3]
    )


class Samples(Dataset[Tensor]):
    """A short step, of 6, at the end."""

    def __len__(self) -> int:
        return COUNT + 6

    def __getitem__(self, sample: int) -> Tensor:
        return numbers(sample, sum(WIDTHS))


class Product(nn.Module):
    """The loss is the product of weights and sample, so the gradient is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.ones(width) for width in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat(list(self.rows))
        return (weights * x.to(weights.dtype)).sum(dtype=torch.float32)


def make(stage: int, dtype: str, block: int | None = None, **more: Any) -> Engine:
    elastic = {"shuffle": False} | ({} if block is None else {"reduction_block": block})
    config = {
        "train_batch_size": COUNT,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "elastic": elastic,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "loss_scale": 1},
    }
    engine, *_ = zero_deepspeed.initialize(
        model=Product(), training_data=Samples(), config=config | more
    )
    return engine


def train(engine: Engine, steps: int = STEPS) -> list[Tensor]:
    """The weights after so many steps in all."""
    while engine.global_steps < steps:
        for batch in engine.training_dataloader or ():
            engine.backward(engine(batch))
            engine.step()
            if engine.global_steps == steps:
                break
    return [
        zero_deepspeed.utils.safe_get_full_fp32_param(row).clone() for row in engine.module.rows
    ]


def digest(weights: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights)).hexdigest()


STARTS = (0, 64, 64 + 1088)
"""Of the parameters in one flat gradient: each at a multiple of 64."""
PADDED = 13 * 256
"""Its length, with room for whole groups of values that are rounded together."""


def expected(dtype: str, block: int, *, rounds: bool = False) -> list[Tensor]:
    """The same training in plain torch."""
    masters = [torch.ones(width) for width in WIDTHS]
    for samples in (range(COUNT), range(COUNT, COUNT + 6)):
        gradients = []
        for sample in samples:
            model = Product()
            for row, master in zip(model.rows, masters, strict=True):
                row.data = master.to(DTYPES[dtype])
            x = numbers(sample, sum(WIDTHS)).to(DTYPES[dtype])
            (model(x) * (1 / len(samples))).backward()
            gradients.append(torch.zeros(PADDED))
            for start, row in zip(STARTS, model.rows, strict=True):
                assert row.grad is not None
                gradients[-1][start : start + row.numel()] = row.grad.float()
        sums = summed(gradients, block, to_int8 if rounds else None)
        for start, master in zip(STARTS, masters, strict=True):
            master.sub_(sums[start : start + master.numel()], alpha=RATE)
    return masters


def hashes(cases: Sequence[tuple[int, str, int]]) -> list[str]:
    return [digest(train(make(*case))) for case in cases]


def cases(world: int) -> Iterator[tuple[int, str, int]]:
    """Each block, stage and dtype at every world, and most pairs of them at one or the other."""
    for number, case in enumerate(itertools.product(STAGES, DTYPES, BLOCKS)):
        if (number + world) % 7 == 0:
            yield case


def test_the_weights_are_those_of_the_expression_at_every_world_size_and_stage(
    worlds: WorldPool,
) -> None:
    """Worlds 1-4, with padding micro-batches, in fp32, bf16 and fp16, blocks of 1, 4 and 8."""
    wanted = {pair: digest(expected(*pair)) for pair in itertools.product(DTYPES, BLOCKS)}
    assert len(set(wanted.values())) == len(wanted)
    for world in (1, 2, 3, 4):
        chosen = list(cases(world))
        found = worlds.run(world, hashes, chosen)
        assert found == [[wanted[dtype, block] for _, dtype, block in chosen]] * world


@pytest.mark.full
def test_the_weights_are_those_of_the_expression_in_every_case() -> None:
    chosen = list(itertools.product(STAGES, DTYPES, BLOCKS))
    wanted = [digest(expected(dtype, block)) for _, dtype, block in chosen]
    pool = WorldPool(8)
    try:
        for world in range(1, 9):
            assert pool.run(world, hashes, chosen, deadline_s=300) == [wanted] * world
    finally:
        pool.close()


BEFORE = "b8d7309a73ea76d854ff0fcee6035bab10908f35eb35e5233f079d94855068aa"
"""Of the weights of the last release that added one after the other: stage 2, fp32, world 2."""


def test_a_block_of_one_gives_the_bits_of_before(worlds: WorldPool) -> None:
    assert worlds.run(2, hashes, [(2, "fp32", 1)]) == [[BEFORE]] * 2


def train_otherwise() -> list[str]:
    """By offloaded optimizers and masters, accumulated by the script, with failures half way."""
    found = [
        digest(train(make(stage, "bf16", zero_optimization=zero | {"stage": stage})))
        for stage, zero in (
            (2, {"offload_optimizer": {"device": "cpu"}}),
            (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        )
    ]
    return [*found, digest(accumulate(make(1, "bf16"))), digest(fail_half_way(make(2, "bf16")))]


def accumulate(engine: Engine) -> list[Tensor]:
    """Inside `no_sync`, and reading what the gradient has come to, which changes nothing."""
    loader = iter(engine.training_dataloader or ())
    for _ in range(engine.gradient_accumulation_steps() - 1):
        with engine.no_sync():
            engine.backward(engine(next(loader)))
        zero_deepspeed.utils.safe_get_full_grad(engine.module.rows[1])
    engine.backward(engine(next(loader)))
    engine.step()
    return train(engine)


def fail_half_way(engine: Engine) -> list[Tensor]:
    """The first backward of the first step fails, and is made again."""
    batch = next(iter(engine.training_dataloader or ()))

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Tensor:
            raise ArithmeticError("in the middle")

    loss = engine(batch)
    failing = loss + 0 * Failing.apply(engine.module.rows[0]).sum()
    with pytest.raises(ArithmeticError):
        engine.backward(failing)
    engine.backward(engine(batch))
    engine.step()
    return train(engine)


def test_offload_accumulation_and_a_failure_half_way_change_no_bit(worlds: WorldPool) -> None:
    """With the default block."""
    wanted = digest(expected("bf16", 8))
    for world in (1, 3):
        assert worlds.run(world, train_otherwise) == [[wanted] * 4] * world


def quantized_and_whole() -> list[str]:
    """ZeRO++'s gradients, and an optimizer that is given whole parameters."""
    zero = {"stage": 2, "zero_quantized_gradients": True}
    quantized = digest(train(make(2, "fp32", zero_optimization=zero)))
    adafactor = {"type": "Adafactor", "params": {"lr": 0.01}}
    return [quantized, digest(train(make(1, "fp32", optimizer=adafactor)))]


def test_quantized_gradients_and_whole_parameters_have_one_hash(worlds: WorldPool) -> None:
    assert len(set(one_result(worlds, quantized_and_whole, sizes=(1, 3)))) == 2


def most_kept() -> int:
    engine, most = make(2, "fp32"), 0
    assert engine._core.zero is not None
    for batch in engine.training_dataloader or ():
        engine.backward(engine(batch))
        most = max(most, *(len(list(sums.kept())) for sums in engine._core.zero.sums))
        engine.step()
        if engine.global_steps:
            break
    assert not list(engine._core.zero.sums[0].kept())
    return most


def test_what_is_pending_between_micro_steps_is_what_the_memory_estimate_counts(
    worlds: WorldPool,
) -> None:
    for world in (1, 2, 3, 4):
        assert worlds.run(world, most_kept) == [most_pending(8, world, COUNT)] * world


# ---- the order goes with the run ----


def save_in_blocks(root: str, block: int | None) -> None:
    engine = make(1, "fp32", block)
    train(engine, 1)
    engine.save_checkpoint(root)


def resume(root: str, block: int | None) -> tuple[str, int]:
    engine = make(1, "fp32", block)
    engine.load_checkpoint(root)
    weights = train(engine)
    assert engine._core.zero is not None
    return digest(weights), engine._core.zero.reduction_block


def test_a_run_that_is_resumed_goes_on_in_its_order_whatever_the_default_is(
    worlds: WorldPool, tmp_path: Path
) -> None:
    root = str(tmp_path)
    worlds.run(2, save_in_blocks, root, 4)
    assert worlds.run(3, resume, root, None) == [(digest(expected("fp32", 4)), 4)] * 3


def refused(root: str) -> str:
    with pytest.raises(ConfigError) as error:
        resume(root, 8)
    return str(error.value)


def test_a_resume_in_another_order_is_refused_with_both_orders_and_what_to_set(
    worlds: WorldPool, tmp_path: Path
) -> None:
    worlds.run(1, save_in_blocks, str(tmp_path), 4)
    (said,) = worlds.run(1, refused, str(tmp_path))
    assert said == (
        "elastic.reduction_block is 8, and the run of this checkpoint sums gradients in blocks of "
        "4: another order gives other bits; remove the key or set it to 4, or begin a new run with "
        "load_checkpoint(load_module_only=True)"
    )
