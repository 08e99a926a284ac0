"""A loader for loops that count steps: one batch of it is a global batch.

So what the loop counts (steps, epochs, the length of an epoch) does not depend on the number of
ranks, and its accumulation is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

import zero_torch
from zero_contract.errors import ZeroError
from zero_data.lanes.adapters import reads_lanes


class GlobalBatches:
    """A batch is the list of this rank's micro-batches of a step.

    Attributes:
        given: The loader of the script.
        begin: Returns the run; called when the first step is drawn, and the library has made the
            model and the optimizer by then.
    """

    def __init__(self, given: DataLoader[Any], microbatches: int) -> None:
        self.given = given
        self.dataset = given.dataset
        self.begin: Callable[[], zero_torch.Run] = _too_early
        self._samples = microbatches * (given.batch_size or 1)

    def __len__(self) -> int:
        """The steps of a whole epoch; TypeError for a stream."""
        if reads_lanes(self.dataset):
            raise TypeError("a stream has no length")
        if self.given.batch_size is None:
            # Of a batch sampler, each of whose batches is a micro-batch.
            batches: Any = self.given.batch_sampler
            return math.ceil(len(batches) / self._samples)
        sampler: Any = self.given.sampler
        # A DistributedSampler counts the samples of one rank.
        whole: Any = self.dataset if isinstance(sampler, DistributedSampler) else sampler
        size = len(whole)
        return size // self._samples if self.given.drop_last else math.ceil(size / self._samples)

    def __iter__(self) -> Iterator[list[Any]]:
        """The rest of an epoch, step by step."""
        loader, step = self.begin().loader, []
        # A loop that counts epochs takes one without a batch for an error.
        loader.leave()
        # All of a step are drawn before any of them is run, which a run allows.
        for batch in loader:
            step.append(batch)
            if loader.last is not None and loader.last.ends_step:
                yield step
                step = []


def _too_early() -> zero_torch.Run:
    raise ZeroError(
        "the first samples are drawn before the library has made the optimizer: do not ask for "
        "the number of steps of a stream while it is made; give the number of steps itself"
    )
