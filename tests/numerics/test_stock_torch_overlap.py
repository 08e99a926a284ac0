"""Exchanges under DDP go on during the backward, which waits for none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_torch
from tests.support.waiting import wait_for
from tests.support.world import WorldPool
from zero_comm.topology import ENV_NODE_RANKS

WIDTH = 32
LAYER_MB = 4 * WIDTH * (WIDTH + 1) / 2**20
"""What a layer of WIDTH x WIDTH fills of a bucket."""
MICROBATCHES, STEPS = 4, 3
"""In the first step DDP has one bucket."""
DEADLINE_S = 20.0


def protected(widths: tuple[int, ...], nodes: str, cap_mb: float) -> tuple[Any, zero_torch.Run]:
    """Linear layers under DDP on some nodes; without nodes in one process."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*map(nn.Linear, widths, widths[1:]))
    if nodes:
        model = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    loader = DataLoader(TensorDataset(torch.randn(2 * MICROBATCHES * STEPS, WIDTH)), batch_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_NODE_RANKS, nodes or "1")
        return model, zero_torch.protect(model, optimizer, loader, microbatches=MICROBATCHES)


def train(model: Any, run: zero_torch.Run) -> str:
    for (rows,) in run.loader:
        run.backward(model(rows).square().mean())
        run.step()
    assert run.global_step == STEPS
    return run.weight_hash()


def alone(widths: tuple[int, ...]) -> str:
    return train(*protected(widths, "", 0))


# ---- the hook of a bucket does not wait for the bucket before ----


def one_goes_ahead(widths: tuple[int, ...], nodes: str) -> tuple[str, list[int]]:
    """Rank 0 ends its backward before the others begin theirs.

    Returns:
        The hash, and the reductions under way at the end of each backward of rank 0.
    """
    model, run = protected(widths, nodes, LAYER_MB)
    store, found = dist.distributed_c10d._get_default_store(), list[int]()

    def go_on() -> None:
        found.append(len(run._gradients.pipeline.under_way))
        store.set(f"rank 0 is through step {run.global_step}", "")

    def stay_behind(*_: Any) -> None:
        store.wait([f"rank 0 is through step {run.global_step}"])

    if dist.get_rank() == 0:
        run._gradients.settles.insert(0, go_on)
    else:
        model.register_forward_hook(stay_behind)
    return train(model, run), found


@pytest.mark.corners(nodes=["2,2"])
@pytest.mark.parametrize(("buckets", "nodes"), [(6, "4"), (6, "2,2")])
def test_a_backward_of_ddp_waits_for_no_bucket_until_its_end(
    worlds: WorldPool, buckets: int, nodes: str
) -> None:
    """One has two exchanges, or three where sums travel between nodes; there are more buckets."""
    widths = (WIDTH,) * (buckets + 1)
    (expected,) = worlds.run(1, alone, widths)
    ranks = worlds.run(4, one_goes_ahead, widths, nodes)
    assert ranks == [(expected, [1, buckets, buckets])] + [(expected, [])] * 3


# ---- the sums of a bucket leave before the next one is full ----


def sums_begun(run: zero_torch.Run) -> int:
    """The second exchanges that this rank has begun: of sums, between nodes."""
    begun = run._collectives.detector.begun
    return sum(count for name, count in begun.items() if name.endswith(", sums, 0"))


def half_way(widths: tuple[int, ...]) -> tuple[str, list[int]]:
    """The last layer is a bucket, the others are another.

    Returns:
        The hash, and the sums that have left before the second bucket was full, at each step.
    """
    model, run = protected(widths, "2,2", 2 * LAYER_MB)
    found: list[int] = []

    def arrived() -> bool:
        return all(each.has_arrived() for each in run._gradients.pipeline.under_way)

    def stop(_: torch.Tensor) -> None:
        wait_for(arrived, DEADLINE_S, "the exchange that is under way")

    first, middle, _ = model.module
    middle.weight.register_post_accumulate_grad_hook(stop)
    first.weight.register_post_accumulate_grad_hook(lambda _: found.append(sums_begun(run)))
    return train(model, run), found


@pytest.mark.full
def test_the_sums_of_a_bucket_leave_before_the_next_one_is_full(worlds: WorldPool) -> None:
    widths = (WIDTH, WIDTH, WIDTH, 2 * WIDTH)
    (expected,) = worlds.run(1, alone, widths)
    assert worlds.run(4, half_way, widths) == [(expected, [0, 2, 4])] * 4
