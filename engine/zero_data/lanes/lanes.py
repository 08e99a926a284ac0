"""`Lanes`: any data at any world size, in a training loop of the script's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_contract.errors import ConfigError, ZeroError
from zero_data.fingerprint import difference
from zero_data.global_batch import BatchShape, Cursor
from zero_data.lanes.adapters.indexed import Indexed
from zero_data.lanes.adapters.loaders import given_by, warn_of_seeds
from zero_data.lanes.loader import LaneLoader
from zero_data.lanes.order import LaneOrder
from zero_data.ledger import Ledger

_log = logging.getLogger(__name__)


class Lanes:
    """The micro-batches of this rank, of data that lanes read; iterate for the rest of an epoch.

    A global batch has one micro-batch of each lane. Their samples and order depend on the data and
    the number of lanes alone, whatever the number of ranks is now and was before. All ranks iterate
    in step, and get equally many batches.

    Attributes:
        weight: Of the batch handed out last: its share of the samples of its global batch. 0: it is
            padding, which this rank runs along with the others.
        last: Whether that batch is the last one of this rank's for its global batch.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        lanes: int,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        exchange: Callable[[Tensor], Tensor] | None = None,
        ledger: Ledger | None = None,
        **of_loader: Any,
    ) -> None:
        """Divide data among lanes, and those among ranks.

        Args:
            dataset: What `zero_data.lanes.adapters.source_of` takes; or a DataLoader, in whose
                order samples are read, and whose options stand for what is not given here.
            batch_size: The samples of a micro-batch.
            lanes: Their number; the micro-batches of a global batch. It belongs to the job.
            drop_last: End an epoch before the first global batch that is not full.
            seed: Of the random numbers with which lanes read, and of the order of samples that have
                numbers.
            rank: By default that of torch.distributed, if it is initialized, as is `world`.
            world: The number of ranks.
            exchange: All-gathers [n] int64 on the CPU to [world, n]; by default by
                torch.distributed.
            ledger: Gets what each step has consumed.
            **of_loader: As for torch's DataLoader: collate_fn, num_workers (the processes that read
                all lanes of this rank), pin_memory, and how those processes are started.

        Raises:
            ConfigError: The dataset cannot be begun again, or the DataLoader says what cannot be
                done; or `batch_size` or `lanes` is none.
        """
        there = dist.is_available() and dist.is_initialized()
        self._rank = (dist.get_rank() if there else 0) if rank is None else rank
        self._world = (dist.get_world_size() if there else 1) if world is None else world
        self._exchange = exchange or partial(_gathered, self._world)
        given = given_by(dataset, seed, self._exchange)
        size = given.batch_size(batch_size, "batch_size of Lanes")
        if size < 1 or lanes < 1:
            raise ConfigError(f"batch_size={size} and lanes={lanes}: give at least 1 of each")
        if self._rank == 0:
            warn_of_seeds(dataset, seed, "seed of Lanes")
        self._cursor = Cursor()
        self._ledger = ledger
        self._order = LaneOrder(
            given.dataset,
            batch=BatchShape(microbatches=lanes, micro_batch=size),
            cursor=self._cursor,
            rank=self._rank,
            world=self._world,
            drop_last=drop_last or given.drop_last,
            exchange=self._exchange,
        )
        self._loader = LaneLoader(
            self._order,
            given.source or Indexed(given.dataset, given.shuffle is not False, seed),
            seed=seed,
            seeds_loop=False,
            **{**given.options, **of_loader},
        )
        self.weight = 0.0
        self.last = False

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to; counts from 0."""
        return self._order.epoch

    @property
    def step(self) -> int:
        """Global batches handed out."""
        return self._cursor.step

    @property
    def samples(self) -> int:
        """Their samples."""
        return self._cursor.samples

    def __iter__(self) -> Iterator[Any]:
        """The batches from here to the end of the epoch. Collective."""
        cursor, order = self._cursor, self._order
        moves, plan = cursor.moves, None
        for ticket, batch in self._loader.read(self.epoch):
            plan = plan or order.plan(cursor.step, cursor.samples)
            self._loader.note(ticket, batch)
            self.weight = len(ticket.ids) / plan.base
            if self._ledger is not None and ticket.ids:
                number = order.assignment.number(cursor.micro, self._rank, order.lanes)
                self._ledger.consume(number, ticket.ids, ticket.documents)
            cursor.micro += 1
            self.last = cursor.micro == plan.micro_steps(self._world)
            # Before the batch is handed out: state_dict() in the loop is the position behind it.
            if self.last:
                own = torch.tensor(order.notes(), device="cpu")
                order.hear(self._exchange(own).tolist())
                cursor.step, cursor.samples = cursor.step + 1, cursor.samples + plan.samples
                cursor.micro, plan = 0, None
                if self._ledger is not None:
                    self._ledger.end_step(cursor.step)
            yield batch
            if cursor.moves != moves:
                raise ZeroError("load_state_dict() inside of a loop over Lanes: leave the loop")

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch handed out, with the states of all lanes. Collective.

        Raises:
            ZeroError: It is inside of a global batch.
        """
        if self._cursor.micro:
            raise ZeroError(
                "state_dict() inside of a global batch, which is trained whole; call it after a "
                "batch with which it ends (lanes.last is True)"
            )
        order, lanes = self._order, self._order.lanes
        states = torch.zeros(lanes, order.row_bytes, dtype=torch.uint8, device="cpu")
        if order.row_bytes:
            # Ranks send equally much: a micro-step without a lane has a blank row.
            rows, blank = order.rows(), bytes(order.row_bytes)
            own = b"".join(rows.get(lane, blank) for lane in order.own())
            words = torch.frombuffer(bytearray(own), dtype=torch.int64)
            everybodys = self._exchange(words).view(torch.uint8).view(self._world, -1)
            by_step = everybodys.view(self._world, -1, order.row_bytes).transpose(0, 1)
            states = by_step.flatten(0, 1)[order.assignment.places(lanes)]
        known = self._exchange(torch.tensor([self._loader.known_as or 0], device="cpu"))
        position = {"step": self._cursor.step, "samples": self._cursor.samples}
        # Rank 0 has handed out the first micro-batch of the run.
        return {**position, "data": int(known[0]), "lanes": order.record(), "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`, which any number of ranks has made.

        Before the first batch, rank 0 reads one to compare the data, and warns of others.

        Raises:
            ConfigError: It has another number of lanes.
        """
        self._order.check(state["lanes"])
        known = self._loader.known_as = state.get("data") or None
        if known is not None and not self._cursor.step and not self._rank:
            words = {"dataset": "the data", "anew": "begin a new run"}
            if other := difference(self._loader.look, known, **words):
                _log.warning("%s", other)
        self._cursor.move(step=state["step"], samples=state["samples"])
        rows = {lane: bytes(row.tolist()) for lane, row in enumerate(state["states"])}
        self._order.resume(state["lanes"], rows)


def _gathered(world: int, own: Tensor) -> Tensor:
    """[world, n] from the [n] of each rank, by torch.distributed."""
    if world == 1:
        return own.view(1, -1)
    # NCCL gathers from device to device only.
    device = "cuda" if "cuda" in str(dist.get_backend()) or dist.get_backend() == "nccl" else "cpu"
    everybodys = [torch.empty_like(own, device=device) for _ in range(world)]
    dist.all_gather(everybodys, own.to(device))
    return torch.stack(everybodys).cpu()
