"""The order of samples for a plain training loop: without engine and process group.

Owns the way from a dataset to steps, and the one rule of such a loop: a step counts only when it is
committed. Must always hold: the samples are a function of the position alone, so a run that resumes
from a `state_dict` at another world size consumes every sample exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset

from zero_contract.errors import ConfigError, ZeroError
from zero_data.elastic_loader import ElasticLoader, MicroBatchSampler, make_source
from zero_data.global_batch import Cursor, StepPlan, plan_step, resolve_batch
from zero_data.ledger import Ledger


class Samples:
    """The steps of one rank.

    The global batch is cut into micro-batches of a fixed size: the world size decides which rank
    runs one, never what is in it. A rank without a micro-batch runs a padding micro-batch of weight
    0, so that all ranks run the same exchanges.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        """Begin at the first sample; `load_state_dict` sets another position.

        Args:
            dataset: A map-style dataset, with a length.
            global_batch: The samples of a step, over all ranks.
            micro_batch: The samples of a micro-batch; divides `global_batch`.
            rank: This rank.
            world: The number of ranks.
            seed: The seed of the order and of random augmentation; the same on all ranks.
            shuffle: Shuffle each epoch differently.
            collate_fn: As for torch's DataLoader.
            num_workers: As for torch's DataLoader.
            ledger: The record of consumed samples.

        Raises:
            ConfigError: The dataset has no length or is too small, or the numbers contradict.
        """
        if not 0 <= rank < world:
            raise ConfigError(
                f"rank {rank} is not one of a world of {world}: give 0 to {world - 1}"
            )
        self._batch, _ = resolve_batch(global_batch, micro_batch, None, world, first_round=False)
        source = make_source(dataset, self._batch, shuffle=shuffle, seed=seed, drop_last=False)
        self.cursor = Cursor()
        """The position: steps and samples that have been committed."""
        self._rank = rank
        self._world = world
        sampler = MicroBatchSampler(
            source=source, batch=self._batch, cursor=self.cursor, rank=rank, world=world, seed=seed
        )
        self._loader = ElasticLoader(sampler, collate_fn=collate_fn, num_workers=num_workers)
        self._order = {"dataset_size": source.size, "shuffle_key": source.shuffle_key}
        self.ledger = ledger

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to; counts from 0."""
        return self._loader.epoch

    def steps(self) -> Iterator[Step]:
        """The steps from the position to the end of its epoch.

        Raises:
            ZeroError: The next step was requested before this one was committed.
        """
        until, batches = self.epoch, iter(self._loader)
        while self.epoch <= until:
            plan = plan_step(self.cursor.samples, self._batch, self._loader.epoch_size)
            moves = self.cursor.moves
            yield Step(self, plan, batches)
            if self.cursor.moves != moves:
                until = max(until, self.epoch)
            elif self.cursor.samples == plan.position:
                raise ZeroError(
                    "the next step is asked for before this one counts: call step.commit() when "
                    "the optimizer has stepped"
                )

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint; the same on all ranks, and for any world size."""
        return {"step": self.cursor.step, "samples": self.cursor.samples, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; `steps` under way go on there.

        Raises:
            ZeroError: The position is in another order of samples.
        """
        for key, value in self._order.items():
            if state.get(key) != value:
                raise ZeroError(
                    f"the checkpoint's position is in another order of samples: {key} was "
                    f"{state.get(key)}, now it is {value}; give the dataset, seed and shuffle of "
                    "then"
                )
        self.cursor.move(step=state["step"], samples=state["samples"])
        if self.ledger is not None:
            self.ledger.forget()

    def _run(self, plan: StepPlan, batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
        for micro in range(plan.micro_steps(self._world)):
            batch, microbatch = next(batches), plan.microbatch(micro, self._rank, self._world)
            ticket = self._loader.run()
            assert ticket is not None
            if self.ledger is not None and not microbatch.padding:
                self.ledger.consume(microbatch.index, ticket.ids)
            yield batch, 0.0 if microbatch.padding else plan.weight(microbatch)


class Step:
    """One step of one rank: iterate it once, step the optimizer, commit it."""

    def __init__(self, samples: Samples, plan: StepPlan, batches: Iterator[Any]) -> None:
        self._samples = samples
        self._plan = plan
        self._batches: Iterator[tuple[Any, float]] = samples._run(plan, batches)
        self._run = False

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        """This rank's micro-batches, each with its share of the global batch.

        Gradients of the losses times these shares, summed over micro-batches and ranks, are those
        of the mean loss of the global batch.
        """
        yield from self._batches
        self._run = True

    def commit(self) -> None:
        """Count the samples as consumed, on every rank, when the optimizer has stepped.

        Raises:
            ZeroError: Not all micro-batches have run, or the step was committed before.
        """
        cursor = self._samples.cursor
        if not self._run or cursor.samples != self._plan.position:
            raise ZeroError(
                "step.commit(): run all micro-batches of the step first, and commit it once"
            )
        cursor.step += 1
        cursor.samples += self._plan.samples
        if self._samples.ledger is not None:
            self._samples.ledger.end_step(cursor.step)
