"""The loader of lanes: the rest of an epoch, micro-batch by micro-batch, on one rank."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, default_collate

from zero_contract.errors import ConfigError
from zero_data.draws import Ticket
from zero_data.elastic_loader import BeginWorker, loop_seed, microbatch_seed, unchanged
from zero_data.fingerprint import fingerprint
from zero_data.global_batch import StepPlan, mix
from zero_data.lanes.adapters.indexed import Batches
from zero_data.lanes.order import LaneOrder
from zero_data.lanes.reading import Read, Reading, Start
from zero_data.lanes.source import Source
from zero_data.ledger import Documents
from zero_data.position_loader import PositionLoader, kept

_log = logging.getLogger(__name__)


class LaneLoader(PositionLoader[LaneOrder]):
    """Iterates over the rest of the current epoch in this rank's micro-batches.

    Every rank gets equally many. One that has no lane left for a micro-step runs a copy of another
    batch, as padding.
    """

    def __init__(
        self,
        order: LaneOrder,
        source: Source,
        *,
        seed: int,
        seeds_loop: bool = True,
        seeds_forward: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], object] | None = None,
        **of_workers: Any,
    ) -> None:
        """Read the lanes of `order` from a source; see `MicroBatchSampler` and `ElasticLoader`.

        The processes that read live as long as an iteration.
        """
        super().__init__(order, order.cursor, seed)
        self._source = source
        self._of_reading = seed
        self._seeds_loop, self._seeds_forward = seeds_loop, seeds_forward
        self._collate = collate_fn or default_collate
        self._workers = num_workers
        self._pin = pin_memory
        self._of_workers = {
            **of_workers,
            "persistent_workers": False,
            "worker_init_fn": BeginWorker(worker_init_fn),
        }
        self._padding: Any = None
        """The batch of micro-steps without a lane."""

    def read(self, until: int) -> Iterator[tuple[Ticket, Any]]:
        """The batches from the position to the end of an epoch."""
        while True:
            epoch = self.order.epoch
            yield from self._rest(epoch)
            if epoch >= until:
                return

    def _look(self) -> int | None:
        """See `Feed`; None: the first lane is empty."""
        # The first lane has the first micro-batch of a run, whichever rank reads it.
        anew = replace(self._reading(), epoch=0, starts={0: Start()})
        with kept():
            first = next(anew.read(0))
        return fingerprint(first.batch) if first.size else None

    def _rest(self, epoch: int) -> Iterator[tuple[Ticket, Any]]:
        order, cursor = self.order, self._cursor
        step, position, micro = cursor.step, cursor.samples, cursor.micro
        self._warn(epoch)
        reading = self._reading()
        workers = min(self._workers, len(reading.starts))
        loader: Iterable[Read | None] = reading
        if workers or self._pin:
            loader = DataLoader(
                reading,
                batch_size=None,
                collate_fn=unchanged,  # `default_convert` would make tensors of a batch's arrays
                num_workers=workers,
                pin_memory=self._pin,
                **(self._of_workers if workers else {}),
            )
        coming = _Coming(loader, [*reading.starts], order.own(), step)
        order.coming = coming.sizes
        try:
            # Before `meet`, which may move the mark to the next epoch.
            begins = not any(order.mark().numbers)
            order.meet()
            if begins and order.ends(order.known(step)):
                few = f"lanes do not fill one global batch of {order.batch.samples} samples"
                none = f"no lane of {order.lanes} has a sample in epoch {epoch}"
                raise ConfigError(f"training_data: {none if not any(order.known(step)) else few}")
            starts = order.mark().starts
            while not order.ends(order.known(step)):
                reads, plan = coming.take(), order.plan(step, position)
                starts = {lane: starts[lane].after(reads[lane]) for lane in starts}
                order.pass_step(step, starts)
                for number in range(micro, plan.micro_steps(order.world)):
                    yield self._batch(plan, step, number, reads)
                step, position, micro = step + 1, position + plan.samples, 0
        finally:
            # Not that of a newer iteration: this one may be freed late.
            if order.coming == coming.sizes:
                order.coming = None

    def _batch(
        self, plan: StepPlan, step: int, number: int, reads: dict[int, Read]
    ) -> tuple[Ticket, Any]:
        microbatch = plan.assigned(self.order.assignment, number, self.order.rank)
        first = self.order.number_of(step, microbatch.index)
        ids = tuple(range(first, first + microbatch.size))
        forward = self._of_reading, step, microbatch.index
        seed = of_loop = 0  # where nobody seeds the loop, they are not worth their time
        if self._seeds_loop:
            seed = microbatch_seed(*forward)
            of_loop = mix(*forward) if self._seeds_forward else loop_seed(seed)
        ends = number + 1 == plan.micro_steps(self.order.world)
        documents: tuple[Documents, ...] = ()
        if microbatch.padding:
            if self._padding is None:  # this rank has had no batch: one of any lane
                assert plan.sizes is not None
                # The last one: who opens the first one warns of the data, once in a job.
                lane = max(number for number, size in enumerate(plan.sizes) if size)
                anew = replace(self._reading(), starts={lane: Start()})
                with kept():
                    self._padding = next(anew.read(lane)).batch
            batch = copy.deepcopy(self._padding)  # the script may change what it gets
        else:
            _, batch, _, documents = reads[microbatch.index]
            if self._padding is None:
                self._padding = copy.deepcopy(batch)
        return Ticket(plan.position + microbatch.start, ids, seed, of_loop, documents, ends), batch

    def _reading(self) -> Reading:
        order, mark = self.order, self.order.mark()
        return Reading(
            source=self._source,
            dataset=order.dataset,
            lanes=order.lanes,
            starts=mark.starts,
            epoch=mark.epoch,
            micro_batch=None if isinstance(self._source, Batches) else order.batch.micro_batch,
            collate=self._collate,
            seed=self._of_reading,
        )

    def _warn(self, epoch: int) -> None:
        starts = self.order.mark().starts.values() if self.order.rank == 0 else ()
        again = [start.number - start.at for start in starts]
        if max(again, default=0) and all(start.state is None for start in starts):
            _log.warning(
                "%s has no state: its lanes are found again by reading up to %d samples of each "
                "from the begin of epoch %d; give it state_dict() and load_state_dict()",
                type(self.order.dataset).__name__,
                max(again),
                epoch,
            )


class _Coming:
    """The micro-batches of this rank's lanes, which are read a few steps ahead."""

    # Nothing in here refers to the loader, see `ElasticLoader`.

    def __init__(
        self, loader: Iterable[Read | None], lanes: list[int], own: Sequence[int], step: int
    ) -> None:
        """Begin at a step; `own` are the numbers of this rank's micro-batches, `lanes` or none."""
        self._loader = loader
        self._lanes = lanes
        self._own = own
        self._step = step
        """The step of the first row."""
        self._rows: deque[dict[int, Read]] = deque()
        self._reads: Iterator[Read | None] | None = None

    def take(self) -> dict[int, Read]:
        """The micro-batches of the next step, by lane."""
        self._fill(1)
        self._step += 1
        return self._rows.popleft()

    def sizes(self, step: int) -> list[int]:
        """The samples of each micro-batch of a step that is not taken yet."""
        self._fill(step - self._step + 1)
        row = self._rows[step - self._step]
        return [row[number].size if number in row else 0 for number in self._own]

    def _fill(self, rows: int) -> None:
        if self._reads is None:
            with kept():  # a DataLoader draws a seed
                self._reads = iter(self._loader) if self._lanes else iter(())
        while len(self._rows) < rows:
            row: dict[int, Read] = {}
            while len(row) < len(self._lanes):
                read = next(self._reads)
                if read is not None:  # that process has a lane whose turn it is
                    row[self._lanes[len(row)]] = read
            self._rows.append(row)
