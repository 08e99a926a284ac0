"""Each library of the engine is of use without the packages above it."""

from __future__ import annotations

from pathlib import Path

from tests.support.alone import run_alone

COMM = """
import os, threading
from datetime import timedelta
import torch, torch.distributed as dist
from zero_comm.worker.agent_link import agent_link
from zero_comm.exchange.collectives import Collectives, wait
from zero_comm.errors import LeavingNow
from zero_comm.sums.buffer_pool import BufferPool
from zero_comm.sums.ordered_sum import OrderedSum
from zero_comm.sums.reduction import OrderedReduction, Turn
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
from zero_data.elastic_loader import ElasticLoader, sampler_of
from zero_data.global_batch import plan_step

dataset = torch.utils.data.TensorDataset(torch.arange(27, dtype=torch.float64).unsqueeze(1))
BATCH = zero_data.BatchShape(microbatches=3, micro_batch=2)

def begin(world, position=(0, 0), round=0, ledger="ledger"):
    ranks = []
    for rank in range(world):
        cursor = zero_data.Cursor(step=position[0], samples=position[1])
        sampler = sampler_of(
            dataset, batch=BATCH, cursor=cursor, rank=rank, world=world, seed=7,
            shuffle=True, drop_last=False,
        )
        record = zero_data.Ledger(ledger, round=round, rank=rank, world=world)
        ranks.append((cursor, ElasticLoader(sampler), record))
    return ranks

def train(weights, ranks, most=None):
    '''The rest of an epoch, or some steps of it, on all ranks in turn; gradients add up.'''
    world, steps = len(ranks), 0
    for batches in zip(*(loader for _, loader, _ in ranks), strict=True):
        for rank, ((inputs,), (cursor, loader, record)) in enumerate(zip(batches, ranks)):
            plan = plan_step(cursor.samples, BATCH, loader.order.epoch_size)
            microbatch, ticket = plan.microbatch(cursor.micro, rank, world), loader.run()
            cursor.micro += 1
            if not microbatch.padding:
                record.consume(microbatch.index, ticket.ids)
                loss = ((inputs / 27) @ weights - 1).square().mean()
                (plan.weight(microbatch) * loss).backward()
        if cursor.micro < plan.micro_steps(world):
            continue
        with torch.no_grad():
            weights -= 0.1 * weights.grad
        weights.grad = None
        for cursor, _, record in ranks:
            cursor.micro, cursor.step = 0, cursor.step + 1
            cursor.samples += plan.samples
            record.end_step(cursor.step)
        steps += 1
        if steps == most:
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
first = begin(2)
train(weights, first, most=3)
cursor = first[0][0]
position = cursor.step, cursor.samples
train(weights.detach().clone().requires_grad_(), first, most=1)  # lost: it was not saved
second = begin(1, position, round=1)
for _ in range(2):
    train(weights, second)
assert abs(weights.item() - one) < 1e-12

for ledger in ("ledger1", "ledger2", "ledger"):
    report = zero_data.verify(zero_data.read_ledger(ledger), len(dataset))
    print(ledger, report.exact, report.steps, report.samples, report.repeated_steps)
"""

STEP = """
import logging, sys
import torch, torch.distributed as dist
from zero_checkpoint import weight_hash
from zero_checkpoint.loading import restore
from zero_checkpoint.format.pieces import PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.options import Checkpoint
from zero_checkpoint.plain import UNKNOWN_RUN
from zero_comm.worker.agent_link import agent_link
from zero_comm.exchange.collectives import Collectives
from zero_comm.determinism import Deterministic, meet
from zero_comm.worker.distributed import init_distributed
from zero_comm.sums.order import record_of
from zero_contract.worker import Progress
from zero_data.global_batch import Cursor
from zero_step import Session, record
from zero_step.session import end_step, notes_of

logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
TERMS = record.Terms(anew="begin anew", dataset="the data", seed="SEED", batch="set BATCH")

class Loop:
    '''A training of one tensor, and its loads.'''

    rank, world, trains, in_library_loop, before_change = 0, 1, True, False, None
    resumes = takes_position = True

    def __init__(self, seed):
        self.cursor, self.weights, self.seed = Cursor(), torch.zeros(3), seed
        self.options = {}
        everybodys = collectives.everybodys
        self.hardware = meet(Deterministic.WARN, torch.device("cpu"), everybodys, 0)
        tensor = TensorId(PARAM, "weights")
        table = {tensor: TensorInfo((3,), torch.float32)}
        self.filled = State(table, (Piece(tensor, 0, self.weights),))

    def describe(self):
        known = {"seed": self.seed, "reduction": record_of(8)}
        return record.describe(self.cursor, self.hardware, world=1, optimizer=None, **known)

    def capture(self, run, client, *, exclude_frozen):
        engine = {**UNKNOWN_RUN, **self.describe(), **run, "groups": []}
        meta = {"engine": engine, "client": dict(client)}
        return State(self.filled.tensors, self.filled.pieces, meta=meta)

    def loading(self): return self
    def weight_hash(self): return weight_hash([("weights", self.weights)])
    def settle(self): pass
    def lend(self, until): until()
    def end(self): pass
    def report(self, loaded): print("loaded", loaded.path.name.partition(".")[0])

    def read(self, root, consensus, tag, ram):
        return restore.load(root, consensus, lambda manifest: self.filled, tag=tag, ram=ram)

    def adopt(self, saved):
        order = {"mode": None, "block": None}
        adopted = record.adopt(saved, self.describe(), self.hardware, TERMS, **order)
        print(*adopted.remarks)
        record.resume(self.cursor, saved)

init_distributed()
collectives = Collectives()
collectives.meet(torch.device("cpu"))

def run(steps, seed):
    loop = Loop(seed)
    session = Session(Checkpoint(every_steps=2), loop, collectives, agent_link(0))
    session.load("checkpoints")
    epoch = session.client_state.get("epoch", 0)
    while loop.cursor.step < steps:
        loop.cursor.step += 1
        loop.weights += loop.cursor.step
        end_step(session, [notes_of(session)], Progress(step=loop.cursor.step, samples=0))
        if session.due():
            session.save("checkpoints", client_state={"epoch": epoch + 1})
    session.close()
    print(loop.cursor.step, epoch, loop.weights.tolist())

run(3, seed=1)
run(4, seed=2)
dist.destroy_process_group()
"""


NORM = """
import math, os
from datetime import timedelta
import torch, torch.distributed as dist
from zero_comm.exchange.collectives import Collectives
from zero_step.agree import Agreement, clipped
from zero_step.gradients.division import chunks, shares

child = os.fork()
rank = int(child == 0)
store = dist.FileStore("store", 2)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
group = Collectives()
group.meet(torch.device("cpu"))

# Rows of one gradient, columns of another, and one that both ranks have whole.
generator = torch.Generator().manual_seed(0)
gradients = [torch.randn(shape, generator=generator) for shape in ((7, 30), (5, 90), (2000,))]
divisions = [chunks((7, 30), 0, 2), chunks((5, 90), 1, 2), shares(2000, 2)]
parts = [gradients[0].chunk(2)[rank], gradients[1].chunk(2, 1)[rank]]
parts = [part.flatten() for part in parts] + [gradients[2][1024 * rank :][:1024]]
agreement = Agreement(group, divisions)
agreed = agreement.reach(parts, torch.tensor([rank + 0.5]), torch.tensor(7))
true = math.sqrt(sum(each.double().square().sum().item() for each in gradients))
assert abs(agreed.norm / true - 1) < 1e-6 and agreed.alike, agreed
assert agreed.notes.tolist() == [[0.5], [1.5]]
assert not agreement.reach(parts, torch.zeros(0), torch.tensor(rank)).alike
norm, factor = clipped(agreed.norm, 0.5, 1.0)
assert (norm, abs(norm * factor / 0.5 - 1) < 1e-5) == (agreed.norm / 2, True), (norm, factor)

parts[1][3 * 45 + 1] = math.inf  # in row 3, of rank 0 column 1, of rank 1 column 46
assert agreement.reach(parts, torch.zeros(0)).norm == math.inf
print("first", agreement.first_not_finite(), flush=True)
if rank == 1:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
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


def test_a_plain_loop_saves_and_resumes_with_zero_step_and_what_it_stands_on(
    tmp_path: Path,
) -> None:
    below = "zero_contract", "zero_comm", "zero_checkpoint", "zero_data"
    told = run_alone(tmp_path, (*below, "zero_step"), STEP)
    assert told.splitlines() == [
        "3 0 [6.0, 6.0, 6.0]",
        "SEED is 2 and was 1 when the checkpoint was made: order of the samples and dropout "
        "change, from here on the results are not those of the uninterrupted run; set it as it was",
        "loaded step-000000002",
        "4 1 [10.0, 10.0, 10.0]",
    ]


def test_shards_of_any_kind_agree_on_their_norm_with_zero_step_alone(tmp_path: Path) -> None:
    packages = ("zero_contract", "zero_comm", "zero_checkpoint", "zero_data", "zero_step")
    told = run_alone(tmp_path, packages, NORM)
    # The block of row 3, column 1, which is element 271 of the second gradient.
    assert told.splitlines() == ["first (1, 256)"] * 2
