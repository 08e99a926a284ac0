"""DeepSpeed's other loaders: one for evaluation, and one that repeats.

Must always hold: neither depends on the run's position; an evaluation loader starts from its
beginning each time and changes nothing of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from zero_contract.errors import ConfigError
from zero_engine.core.loaders import Collate, pins_memory
from zero_engine.parts import Run


def evaluation_loader(
    run: Run,
    dataset: Dataset[Any],
    batch_size: int | None,
    sampler: Sampler[Any] | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """This rank's share of a dataset, in order; the first samples are repeated to fill it.

    Raises:
        ConfigError: The dataset has no length.
    """
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"deepspeed_io: {type(dataset).__name__} has no length, so there are no shares of it; "
            "evaluate with your own DataLoader"
        )
    shares: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=run.world, rank=run.rank, shuffle=False
    )
    return DataLoader(
        dataset,
        batch_size=batch_size or run.batch.micro_batch,
        sampler=sampler or shares,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pins_memory(),
    )


class RepeatingLoader:
    """Repeats a loader whenever it ends: the engine's loader, epoch after epoch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch; ends only if the loader has none at all."""
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
