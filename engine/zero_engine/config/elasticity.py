"""DeepSpeed's "elasticity" section: a global batch that divides well, from a few micro-batches.

The batch is DeepSpeed's. The worlds that divide it without a remainder are listed, and no world is
refused. Source: DeepSpeed 0.19.6, deepspeed/elasticity, version 0.1 of its solver; removed in
0.19.8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_contract.errors import ConfigError
from zero_contract.sections import Count, Integer, Whole

_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040),
    *(7560, 10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320),
    *(221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
"""Numbers with more divisors than any smaller one: a batch scaled by one fits many worlds."""


@dataclass(frozen=True, kw_only=True)
class Elasticity:
    """A global batch that many world sizes divide, chosen from a few micro-batches."""

    enabled: bool = False
    """Whether this section chooses the batch."""
    max_train_batch_size: Whole = 0
    """The largest global batch that may be chosen. Must be given."""
    micro_batch_sizes: tuple[Count, ...] = ()
    """The micro-batches that may be chosen. Must be given."""
    min_gpus: Integer = 1
    """The smallest world that the batch is chosen for."""
    max_gpus: Integer = 10000
    """The largest world that the batch is chosen for."""
    prefer_larger_batch: bool = True
    """Of batches that equally many worlds divide, choose the larger one."""
    ignore_non_elastic_batch_info: bool = False
    """Ignore the other batch sizes of the config. Otherwise it is an error to give them."""

    def __post_init__(self) -> None:
        if not self.enabled:
            return
        if not self.micro_batch_sizes:
            raise ConfigError("elasticity.micro_batch_sizes: give numbers of samples from 1")
        if max(self.micro_batch_sizes) > self.max_train_batch_size:
            raise ConfigError(
                f"elasticity.max_train_batch_size: {self.max_train_batch_size} is less than the "
                f"micro-batch size {max(self.micro_batch_sizes)}"
            )
        if not 1 <= self.min_gpus <= self.max_gpus:
            raise ConfigError(
                f"elasticity: min_gpus {self.min_gpus} and max_gpus {self.max_gpus} are no range"
            )


@dataclass(frozen=True, slots=True)
class ElasticBatch:
    """A chosen batch."""

    samples: int
    micro_batch: int
    worlds: tuple[int, ...]
    """The worlds in the range whose ranks all get equally many micro-batches of one size."""


def choose_batch(wanted: Elasticity) -> ElasticBatch:
    """The batch that most worlds divide, up to the maximum; the larger (or smaller) of equals."""
    sizes, limit = wanted.micro_batch_sizes, wanted.max_train_batch_size
    bases = [base for base in (*sizes, math.lcm(*sizes)) if base <= limit]
    candidates = sorted(
        {
            base * max(factor for factor in _HIGHLY_COMPOSITE if factor <= limit // base)
            for base in bases
        },
        reverse=wanted.prefer_larger_batch,
    )
    # Of equals `max` takes the first: the order of the candidates decides.
    samples = max(candidates, key=lambda each: len(_worlds(each, wanted)))
    # The largest that divides it, at every world size: the result does not depend on the world.
    micro_batch = max(size for size in sizes if samples % size == 0)
    return ElasticBatch(samples, micro_batch, tuple(_worlds(samples, wanted)))


def _worlds(samples: int, wanted: Elasticity) -> list[int]:
    """The worlds in the range whose ranks all get equally many micro-batches of one size."""
    found: set[int] = set()
    for micro_batch in wanted.micro_batch_sizes:
        count, rest = divmod(samples, micro_batch)
        # Divisors come in pairs, one of which is at most the root.
        for low in range(1, math.isqrt(count) + 1) if rest == 0 else ():
            if count % low == 0:
                found |= {low, count // low}
    return sorted(world for world in found if wanted.min_gpus <= world <= wanted.max_gpus)
