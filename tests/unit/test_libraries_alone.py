"""Each library of the engine is of use without the packages above it."""

from __future__ import annotations

from pathlib import Path

from tests.support.alone import run_alone

COMM = """
import os, threading
from datetime import timedelta
import torch, torch.distributed as dist
from zero_comm.agent_link import agent_link
from zero_comm.collectives import Collectives, wait
from zero_comm.errors import LeavingNow
from zero_comm.buffer_pool import BufferPool
from zero_comm.ordered_sum import OrderedSum
from zero_comm.reduction import OrderedReduction, Turn
from zero_comm.waiting import Interrupt

ready, done = os.pipe(), os.pipe()
child = os.fork()
rank = int(child == 0)
store = dist.FileStore("store", 2)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
interrupt = Interrupt()
group = Collectives(interrupt=interrupt)
group.meet(torch.device("cpu"))

# Three micro-batches on two ranks: the last one beside a padding micro-batch of NaN.
gradients = [torch.full((8,), value) for value in (1e8, 1.0, -1e8, float("nan"))]
reduction = OrderedReduction(group, BufferPool(torch.device("cpu")))
sums = OrderedSum(torch.empty(4), block=1)
for begin, live in ((0, 2), (2, 1)):
    turn = Turn(live=live, first=begin == 0)
    reduction.start(gradients[begin + rank].clone(), f"micro-step {begin}", sums, turn).finish()
sums.settle()
whole = group.everybodys(sums.total, "sums").flatten()
assert torch.equal(whole, (gradients[0] + gradients[1]) + gradients[2]), whole
assert not agent_link(rank).present

if rank == 1:  # never begins what rank 0 waits for
    os.read(ready[0], 1)
    os._exit(0)
threading.Timer(0.1, interrupt.request, ["the node is drained"]).start()
try:
    group.barrier("the end of the epoch")
except LeavingNow as leaving:
    print(leaving)
os.write(ready[1], b"1")
assert os.waitpid(child, 0)[1] == 0
print("sums", whole[0].item())
"""

DATA = """
import torch
import zero_data

dataset = torch.utils.data.TensorDataset(torch.arange(27, dtype=torch.float64).unsqueeze(1))

def begin(world, state=None, round=0, ledger="ledger"):
    ranks = [
        zero_data.Samples(
            dataset, global_batch=6, micro_batch=2, rank=rank, world=world, seed=7,
            ledger=zero_data.Ledger(ledger, round=round, rank=rank, world=world),
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.load_state_dict(state or rank.state_dict())
    return ranks

def train(weights, ranks, most=None):
    '''The rest of an epoch, or some steps of it, on all ranks in turn; gradients add up.'''
    for number, steps in enumerate(zip(*(rank.steps() for rank in ranks), strict=True), 1):
        for step in steps:
            for (inputs,), weight in step:
                (weight * ((inputs / 27) @ weights - 1).square().mean()).backward()
        with torch.no_grad():
            weights -= 0.1 * weights.grad
        weights.grad = None
        for step in steps:
            step.commit()
        if number == most:
            return

def two_epochs(world):
    weights = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    ranks = begin(world, ledger=f"ledger{world}")
    for _ in range(2):
        train(weights, ranks)
    return weights.item()

one, two = two_epochs(1), two_epochs(2)
assert abs(one - two) < 1e-12 < abs(one), (one, two)

weights = torch.zeros(1, dtype=torch.float64, requires_grad=True)
first = begin(2, ledger="ledger")
train(weights, first, most=3)
state = first[0].state_dict()
train(weights.detach().clone().requires_grad_(), first, most=1)  # lost: it was not saved
second = begin(1, state, round=1, ledger="ledger")
for _ in range(2):
    train(weights, second)
assert abs(weights.item() - one) < 1e-12

for ledger in ("ledger1", "ledger2", "ledger"):
    report = zero_data.verify(zero_data.read_ledger(ledger), len(dataset))
    print(ledger, report.exact, report.steps, report.samples, report.repeated_steps)
"""


def test_a_group_sums_in_order_and_leaves_a_wait_with_zero_comm_alone(tmp_path: Path) -> None:
    told = run_alone(tmp_path, ("zero_contract", "zero_comm"), COMM)
    assert told.splitlines() == [
        "the end of the epoch: asked to leave: the node is drained",
        "sums 0.0",
    ]


def test_a_plain_loop_consumes_every_sample_once_with_zero_data_alone(tmp_path: Path) -> None:
    told = run_alone(tmp_path, ("zero_contract", "zero_data"), DATA)
    assert told.splitlines() == [
        "ledger1 True 10 54 0",
        "ledger2 True 10 54 0",
        "ledger True 10 54 1",
    ]
