"""What is given as data: a dataset, or a DataLoader, which says more than that.

Must always hold: whatever a DataLoader says (samples, their order, how they are loaded) is done, or
it is refused by name. Whether samples are shuffled is what it says; which rank runs which of them
is what `zero_data` says. Classes are compared exactly: what derives from one of torch has another
order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from zero_contract.errors import ConfigError
from zero_data.lanes.adapters.find import reads_lanes, source_of
from zero_data.lanes.adapters.indexed import Batches, Drawn
from zero_data.lanes.source import Source

_log = logging.getLogger(__name__)

_AS_GIVEN = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
)
"""The options of a DataLoader that its batches are loaded with."""


_SEQUENTIAL = ("torch.utils.data.sampler.SequentialSampler",)
_RANDOM = (
    "torch.utils.data.sampler.RandomSampler",
    "torchdata.stateful_dataloader.sampler.RandomSampler",
    "accelerate.data_loader.SeedableRandomSampler",
)
_DISTRIBUTED = (
    "torch.utils.data.distributed.DistributedSampler",
    "torchdata.stateful_dataloader.sampler.StatefulDistributedSampler",
)
_ITERATES_AS_TORCH = ("torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader",)
"""Loaders with an iteration of their own that yields what torch's would."""
_NO_POSITION = (
    "load_state_dict() of the DataLoader was called, and its position would be left out: a run has "
    "the position in its own checkpoints; leave that call out"
)
_EXACTLY = "give shuffle=True or shuffle=False and no sampler"
_DRAWING = (
    "torch.utils.data.sampler.RandomSampler",
    "torch.utils.data.sampler.SubsetRandomSampler",
    "torch.utils.data.sampler.WeightedRandomSampler",
)
"""Samplers that draw with their generator alone."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """The samples of a run, and how they are loaded."""

    dataset: Any
    source: Source | None
    """What lanes read; None: samples have numbers, which `elastic_loader` orders."""
    micro_batch: int | None = None
    """The samples of a micro-batch; None: the DataLoader that says it was not given."""
    shuffle: bool | None = None
    """Whether samples that have numbers are shuffled; None, as above."""
    drop_last: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """The arguments of `ElasticLoader` and `LaneLoader` that it says."""

    def batch_size(self, wanted: int | None, key: str) -> int:
        """The samples of a micro-batch, which `key` may say as well.

        Raises:
            ConfigError: Neither says it, or they differ.
        """
        size = self.micro_batch if wanted is None else wanted
        if size is None or self.micro_batch not in (None, size):
            said = f"the DataLoader has batch_size={self.micro_batch}; give one number to both"
            why = "give the samples of a micro-batch" if size is None else said
            raise ConfigError(f"{key}={wanted}: {why}")
        return size


def given_by(data: Any, seed: int, exchange: Callable[[Tensor], Tensor]) -> Given:
    """The samples of a dataset or a DataLoader. Collective, where that has a batch sampler.

    `seed`: of the order, where a sampler draws one. `exchange`: see `Lanes`.

    Raises:
        ConfigError: It cannot be done at any number of ranks; says why.
    """
    if not isinstance(data, DataLoader):
        return Given(dataset=data, source=source_of(data) if reads_lanes(data) else None)
    check_loader(data)
    # From now on its position is that of the run, which no other state may move.
    if hasattr(data, "load_state_dict"):
        vars(data)["load_state_dict"] = _refuse_position
    loader = plain(data)
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler
    micro_batch = loader.batch_size
    source: Source | None = None
    shuffle = None
    if micro_batch is None:
        batches = source = Batches(dataset, loader.batch_sampler, seed)
        micro_batch = batches.check(exchange)
    elif reads_lanes(dataset):
        source = source_of(dataset)
    # All but those that draw each sample once: that order is one of ours.
    elif _name(sampler) in _DRAWING and not (
        _name(sampler) in _RANDOM and not sampler.replacement and len(sampler) == len(dataset)
    ):
        source = Drawn(dataset, sampler, seed)
    else:
        shuffle = shuffles(loader)
    return Given(
        dataset=dataset,
        source=source,
        micro_batch=micro_batch,
        shuffle=shuffle,
        drop_last=loader.drop_last,
        options=_options(loader),
    )


def check_loader(loader: DataLoader[Any]) -> None:
    """Check that a DataLoader forms batches, does nothing with them, and is at its begin.

    Raises:
        ConfigError: It does not, or does more than that, or has been given a position.
    """
    if loader.batch_sampler is None:
        raise ConfigError(
            "the DataLoader has neither batch_size nor batch_sampler, so its samples are not "
            "batched; give batch_size, the samples of a micro-batch"
        )
    own = any(
        getattr(type(loader), name) is not getattr(DataLoader, name)
        for name in ("__iter__", "_get_iterator")
    )
    if own and _name(loader) not in _ITERATES_AS_TORCH:
        raise ConfigError(
            f"{_name(loader)} has an iteration of its own, which would be left out: what is taken "
            "of a DataLoader is its dataset, its order, collate_fn and worker processes; do what "
            "it does to a batch in collate_fn or in the loop, and give a DataLoader of torch"
        )
    if getattr(loader, "next_iter_state", None) is not None:
        raise ConfigError(_NO_POSITION)


def _refuse_position(state_dict: object) -> None:
    """Refuse a state, in the place of a loader's own method, from the begin of a run on."""
    raise ConfigError(_NO_POSITION)


def shuffles(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader shuffles its samples, each of them once in an epoch.

    Raises:
        ConfigError: Its order is another one; says which, and what to give instead.
    """
    sampler: Any = loader.sampler
    name, kind = _name(sampler), type(sampler).__name__
    if name not in (*_SEQUENTIAL, *_RANDOM, *_DISTRIBUTED):
        raise ConfigError(
            f"the DataLoader has a {kind} ({name}), whose order cannot be divided over any "
            f"number of ranks; {_EXACTLY}, or batch_sampler=BatchSampler(sampler, batch_size, "
            "drop_last) if its order follows from its seed and the epoch"
        )
    # A sampler may have been made of another dataset, whose numbers it gives.
    source = sampler.dataset if name in _DISTRIBUTED else sampler.data_source
    whole = len(loader.dataset)  # type: ignore[arg-type]
    drawn = sampler.num_samples if name in _RANDOM else len(source)
    if len(source) != whole or drawn != whole:
        raise ConfigError(
            f"the {kind} draws {min(drawn, len(source))} of the {whole} samples of the dataset; "
            "give the DataLoader Subset(dataset, indices) of those, and no sampler"
        )
    return bool(sampler.shuffle) if name in _DISTRIBUTED else name in _RANDOM


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def warn_of_seeds(data: Any, seed: int, key: str, *more: str) -> None:
    """Name the seeds of a script that change nothing; five of them would be five equal runs.

    `seed` is what counts, `key` its name and how it is given; `more` are further sentences.
    """
    found = [*more]
    if isinstance(data, DataLoader):
        loader = plain(data)
        sampler: Any = loader.sampler
        # Those of accelerate and torchdata may have a generator that no script has given.
        given = _name(sampler) == _RANDOM[0] and sampler.generator is not None
        if given or loader.generator is not None:
            found.append("the generator of the DataLoader has no effect")
        if getattr(sampler, "seed", seed) not in (0, seed):
            found.append(f"the seed of the sampler, {sampler.seed}, has no effect")
    if found:
        _log.warning(
            "%s: the order of samples, augmentation and the random numbers of the loop come from "
            "%s",
            "; ".join(found),
            key,
        )


def plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same with batch_size, where torch's own batch sampler draws from a known sampler."""
    # torch makes the one of the other by itself.
    batches = loader.batch_sampler
    if loader.batch_size is not None or type(batches) is not BatchSampler:
        return loader
    if _name(batches.sampler) not in (*_SEQUENTIAL, *_RANDOM, *_DISTRIBUTED, *_DRAWING):
        return loader
    return DataLoader(
        loader.dataset,
        batches.batch_size,
        sampler=batches.sampler,
        drop_last=batches.drop_last,
        generator=loader.generator,
        **_options(loader),
    )


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _AS_GIVEN}
