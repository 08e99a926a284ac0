"""Loops as scripts write them, over one tiny training by `protect` or by the engine.

Every loop consumes random numbers of torch, Python and numpy for each batch, as mixup does.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import zero_engine
import zero_torch
from zero_contract.errors import ZeroError
from zero_contract.worker import ENV_ROUND
from zero_data.ledger import read_ledger, verify

SAMPLES, MICROBATCHES, MICRO_BATCH = 23, 5, 2
"""Steps of 10, 10 and 3 samples."""
STEPS = 24


class Rows(Dataset[Tensor]):
    """Row i is made of i; loading it draws a random number, as augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        row = torch.arange(6, dtype=torch.float32) * 0.1 + index / SAMPLES
        return row + 0.01 * random.random() + 0.01 * float(np.random.rand())


class Net(nn.Module):
    """Returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, rows: Tensor) -> Tensor:
        loss: Tensor = self.down(self.drop(self.up(rows).tanh())).square().mean()
        return loss


def noisy(rows: Tensor) -> Tensor:
    """What a loop does with a batch, with each kind of random number."""
    noise = torch.rand(rows.shape) + random.random() + float(np.random.rand())
    return rows + 0.01 * noise


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


class Protected:
    """By `run.backward` and `run.step`."""

    def __init__(self, root: str, seed: int = 0, workers: int = 0) -> None:
        model = make(seed)
        world = dist.get_world_size()
        self.model = self.wrapped(model)
        self.optimizer = optimizer_of(self.model)
        self.sampler = DistributedSampler(Rows(), num_replicas=world, rank=dist.get_rank())
        loader = DataLoader(
            Rows(), batch_size=MICRO_BATCH, sampler=self.sampler, num_workers=workers
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.run = zero_torch.protect(
            self.model,
            self.optimizer,
            loader,
            microbatches=MICROBATCHES,
            scheduler=self.scheduler,
            config={"elastic": {"sample_ledger": f"{root}/ledger"}},
        )
        self.loader: Any = self.run.loader
        self.directory = f"{root}/checkpoints"

    def wrapped(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model) if dist.get_world_size() > 1 else model

    @property
    def step(self) -> int:
        return self.run.global_step

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    def backward(self, rows: Tensor) -> None:
        self.run.backward(self.model(noisy(rows)))

    def end(self) -> None:
        self.run.step()

    def save(self) -> None:
        self.run.save(self.directory)

    def load(self) -> None:
        self.run.load(self.directory)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def hash(self) -> str:
        return self.run.weight_hash()

    def close(self) -> None:
        self.run.close()


class OwnCalls(Protected):
    """By the script's own calls."""

    def backward(self, rows: Tensor) -> None:
        self.model(noisy(rows)).backward()

    def end(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class Sharded(Protected):
    """By FSDP2."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(model, mesh=mesh)


class Engined:
    """By zero_engine."""

    stage, accumulate = 2, "owner"

    def __init__(self, root: str, seed: int = 0, workers: int = 0) -> None:
        model = make(seed)
        config = {
            "train_batch_size": MICROBATCHES * MICRO_BATCH,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "zero_optimization": {"stage": self.stage},
            "elastic": {"sample_ledger": f"{root}/ledger", "accumulate": self.accumulate},
        }
        self.engine = zero_engine.initialize(
            model,
            training_data=Rows(),
            optimizer=optimizer_of(model),
            config=config,
            num_workers=workers,
        )
        self.loader: Any = self.engine.training_dataloader
        self.directory = f"{root}/checkpoints"

    @property
    def step(self) -> int:
        return self.engine.global_steps

    @property
    def epoch(self) -> int:
        epoch: int = self.loader.epoch
        return epoch

    def backward(self, rows: Tensor) -> None:
        self.engine.backward(self.engine(noisy(rows)))

    def end(self) -> None:
        self.engine.step()

    def save(self) -> None:
        self.engine.save_checkpoint(self.directory)

    def load(self) -> None:
        self.engine.load_checkpoint(self.directory)

    def set_epoch(self, epoch: int) -> None:
        """The engine's loader has no sampler of the script's."""

    def hash(self) -> str:
        return self.engine.weight_hash()

    def close(self) -> None:
        self.engine.destroy()


class Accumulated(Engined):
    """By zero_engine, which adds the gradients of a step before it sends them."""

    stage, accumulate = 0, "local"


KINDS: dict[str, Any] = {"protect": Protected, "own calls": OwnCalls, "engine": Engined}
FURTHER: dict[str, Any] = {"sharded": Sharded, "accumulated": Accumulated}


def ahead(batches: Iterable[Any], depth: int) -> Iterator[Any]:
    """A prefetcher as libraries have them: it draws `depth` batches more than it yields."""
    drawn: deque[Any] = deque()
    for batch in batches:
        drawn.append(batch)
        if len(drawn) > depth:
            yield drawn.popleft()
    yield from drawn


def train(trainer: Any, rows: Tensor) -> None:
    trainer.backward(rows)
    trainer.end()


@contextmanager
def in_round(number: int) -> Iterator[None]:
    """As the worker of a round: a restart of the script is another one."""
    os.environ[ENV_ROUND] = str(number)
    try:
        yield
    finally:
        del os.environ[ENV_ROUND]


class Program:
    """Runs a list of operations over one training; an operation is a name and a number.

    The current loop may draw ahead, and stays from one operation to the next.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._loop: Iterator[Any] | None = None
        self._depth = 0
        self._micro = 0
        """Micro-batches since the step before."""
        self._untrained = False
        """Whether the loop was left with a batch that it had drawn."""

    def do(self, name: str, number: int) -> None:
        getattr(self, name)(number)

    def enter(self, depth: int) -> None:
        """Leave the loop, and begin one that draws ahead."""
        self._loop, self._depth = None, depth

    def run(self, count: int) -> None:
        """Train some micro-batches."""
        for _ in range(count):
            if self.trainer.step < STEPS - 1:
                self._train(self._next())

    def drop(self, count: int) -> None:
        """Leave the loop at its top, before it has trained its batch."""
        del count
        self._next()
        self._loop, self._untrained = None, True

    def zip(self, count: int) -> None:
        """Train over zip(loader, range(count)), which draws one batch more."""
        self._loop, self._depth = None, 0
        for rows, _ in zip(self.trainer.loader, range(count), strict=False):
            if self.trainer.step < STEPS - 1:
                self._train(rows)

    def epoch(self, count: int) -> None:
        """Train the rest of the epoch."""
        del count
        first = self.trainer.epoch
        while self.trainer.epoch == first and self.trainer.step < STEPS - 1:
            self._train(self._next())

    def save(self, count: int) -> None:
        """Save, if it is between two steps."""
        del count
        if not self._micro:
            self.trainer.save()

    def rollback(self, count: int) -> None:
        """Load inside of the loop; one that draws ahead is left."""
        del count
        self.trainer.load()
        self._micro = 0  # also if there is no checkpoint yet: the step begins anew
        if self._depth:
            self._loop = None

    def set_epoch(self, epoch: int) -> None:
        self.trainer.set_epoch(epoch)

    def _train(self, rows: Tensor) -> None:
        before = self.trainer.step
        train(self.trainer, rows)
        self._micro = 0 if self.trainer.step > before else self._micro + 1

    def _next(self) -> Any:
        """The next batch of the current loop, or else of a new one."""
        batch = next(self._loop, None) if self._loop is not None else None
        if batch is None and self._untrained and self._depth:
            # A loop that was left at the top of its drain looks like one that left a batch out.
            with suppress(ZeroError):
                next(iter(self.trainer.loader))
        self._untrained = False
        while batch is None:  # once more behind the end of an epoch at which the run was saved
            self._loop = ahead(self.trainer.loader, self._depth)
            batch = next(self._loop, None)
        return batch

    def settle(self) -> None:
        """Train to the end of a step."""
        while self._micro or not self.trainer.step:
            self._train(self._next())


Operations = list[tuple[str, int]]


def segment(kind: str, root: str, number: int, operations: Operations) -> tuple[int, str]:
    """One life of the script; the step it has come to, and the weights there."""
    with in_round(number):
        seed = 5 if os.path.isdir(f"{root}/checkpoints") else 0  # weights come from where they are
        trainer = (KINDS | FURTHER)[kind](root, seed=seed)
        trainer.load()
        program = Program(trainer)
        for name, count in operations:
            program.do(name, count)
        program.settle()
        result = trainer.step, trainer.hash()
        trainer.close()
    return result


def undisturbed(kind: str, root: str) -> list[str]:
    """The weights after each step, from 0 on, of a loop that nothing happens to."""
    trainer = (KINDS | FURTHER)[kind](root)
    hashes = [trainer.hash()]
    while trainer.step < STEPS:
        for rows in trainer.loader:
            before = trainer.step
            train(trainer, rows)
            hashes += [trainer.hash()] if trainer.step > before else []
    trainer.close()
    return hashes


def ledger_problems(root: str) -> tuple[str, ...]:
    return verify(read_ledger(f"{root}/ledger"), SAMPLES).problems
