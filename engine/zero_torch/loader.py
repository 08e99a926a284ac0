"""The script's DataLoader in the order of this project: each sample once, at any world size.

Must always hold: whether samples are shuffled is what the DataLoader says; which rank runs which of
them is what `zero_data` says. A DataLoader that says anything else is refused by name: classes are
compared exactly, because what derives from one of torch has another order.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from zero_contract.errors import ConfigError
from zero_data.elastic_loader import ElasticLoader, sampler_of
from zero_data.global_batch import BatchShape, Cursor
from zero_data.lanes.adapters import source_of
from zero_data.lanes.adapters.indexed import Batches, Drawn
from zero_data.lanes.loader import LaneLoader, reads_lanes
from zero_data.lanes.order import Exchange, LaneOrder
from zero_data.lanes.source import Source

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
_EXACTLY = "give shuffle=True or shuffle=False and no sampler"
_DRAWING = (
    "torch.utils.data.sampler.RandomSampler",
    "torch.utils.data.sampler.SubsetRandomSampler",
    "torch.utils.data.sampler.WeightedRandomSampler",
)
"""Samplers that draw with their generator alone."""
_WAYS_OUT = (
    "protect(model, optimizer) without a loader keeps checkpoints, and your script the position "
    "of its data in client_state"
)

OTHER_THREAD = (
    "run.loader is iterated in another thread than the one that trains, which begins micro-steps "
    "here: give the DataLoader num_workers and prefetch_factor instead"
)
PASSED_OVER = (
    "a batch of run.loader was drawn and not trained, and the next one was drawn: its samples "
    "would be lost. Call backward() for every batch; let a bad one contribute 0 * its loss"
)
NOT_ITS_TURN = (
    "this is not the batch whose turn it is: run the batches of run.loader in the order in which "
    "they are drawn, each once"
)
"""Mistakes of a loop over it, and their remedies."""


def check_loader(loader: object) -> None:
    """Check that a loader says which samples there are, and how they are loaded.

    Raises:
        ConfigError: It does not, or does more than that.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"protect() got a {type(loader).__name__} as its loader, which is no DataLoader of "
            "torch: its samples have no numbers, so they cannot be divided over any number of "
            f"ranks. Give DataLoader(dataset, batch_size=...), also of an IterableDataset; or "
            f"{_WAYS_OUT}"
        )
    if loader.batch_sampler is None:
        raise ConfigError(
            "the DataLoader has neither batch_size nor batch_sampler, so its samples are not "
            "batched; give batch_size, the samples of a micro-batch"
        )
    own = type(loader).__iter__ is not DataLoader.__iter__
    if own and _name(loader) not in _ITERATES_AS_TORCH:
        raise ConfigError(
            f"{_name(loader)} has an iteration of its own, which zero_torch would leave out: it "
            "takes dataset, collate_fn and worker processes of a DataLoader; do what it does to a "
            "batch in collate_fn or in the loop, and give a DataLoader of torch"
        )


def shuffles(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader shuffles its samples, each of them once in an epoch.

    Raises:
        ConfigError: Its order is another one; says which, and what to give instead.
    """
    sampler: Any = loader.sampler
    name, kind = _name(sampler), type(sampler).__name__
    if name not in (*_SEQUENTIAL, *_RANDOM, *_DISTRIBUTED):
        raise ConfigError(
            f"the DataLoader has a {kind} ({name}), whose order zero_torch cannot divide over any "
            f"number of ranks; {_EXACTLY}, or batch_sampler=BatchSampler(sampler, batch_size, "
            "drop_last) if its order follows from its seed and the epoch"
        )
    source = sampler.dataset if name in _DISTRIBUTED else sampler.data_source
    whole = len(loader.dataset)  # type: ignore[arg-type]
    drawn = sampler.num_samples if name in _RANDOM else len(source)
    if len(source) != whole or drawn != whole:
        raise ConfigError(
            f"the {kind} draws {min(drawn, len(source))} of the {whole} samples of the dataset; "
            "give the DataLoader Subset(dataset, indices) of those, and no sampler"
        )
    return bool(sampler.shuffle) if name in _DISTRIBUTED else name in _RANDOM


def _draws(loader: DataLoader[Any]) -> bool:
    """Whether the sampler draws other samples than each one once, in an order of its generator."""
    sampler: Any = loader.sampler
    if _name(sampler) not in _DRAWING:
        return False
    size, whole = len(sampler), len(loader.dataset)  # type: ignore[arg-type]
    return not (_name(sampler) in _RANDOM and not sampler.replacement and size == whole)


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def without_effect(loader: DataLoader[Any], seed: int, torch_seed: int) -> list[str]:
    """The seeds of a script that change nothing: a sentence for each.

    From 2**32 on `torch_seed` is torch's own or this project's.
    """
    loader = plain(loader)
    sampler: Any = loader.sampler
    found = []
    if torch_seed < 1 << 32 and torch_seed != seed:
        found.append(f"torch.manual_seed({torch_seed}) seeds the initial weights alone")
    given = _name(sampler) == _RANDOM[0] and sampler.generator is not None
    if given or loader.generator is not None:
        found.append("the generator of the DataLoader has no effect")
    if getattr(sampler, "seed", seed) not in (0, seed):
        found.append(f"the seed of the sampler, {getattr(sampler, 'seed', None)}, has no effect")
    return found


def plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same with batch_size, where torch's own batch sampler draws from a sampler of the tables.

    torch makes the one of the other by itself.
    """
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


def in_order(
    loader: DataLoader[Any],
    microbatches: int,
    cursor: Cursor,
    rank: int,
    world: int,
    seed: int,
    exchange: Exchange,
) -> ElasticLoader | LaneLoader:
    """`run.loader`: this rank's micro-batches of a DataLoader, from the position of `cursor` on.

    Raises:
        ConfigError: See `shuffles`; or the dataset is too small.
    """
    check_loader(loader)
    loader = plain(loader)
    dataset, options = loader.dataset, _options(loader)
    source: Source | None = None
    micro_batch = loader.batch_size
    if micro_batch is None:
        batches = source = Batches(dataset, loader.batch_sampler, seed)
        micro_batch = batches.check(exchange)
    elif reads_lanes(dataset):
        source = source_of(dataset)
    elif _draws(loader):
        source = Drawn(dataset, loader.sampler, seed)
    batch = BatchShape(microbatches=microbatches, micro_batch=micro_batch)
    where: dict[str, Any] = {"batch": batch, "cursor": cursor, "rank": rank, "world": world}
    if source is None:
        sampler = sampler_of(
            dataset,
            seed=seed,
            shuffle=shuffles(loader),
            drop_last=loader.drop_last,
            seeds_forward=True,
            **where,
        )
        return ElasticLoader(sampler, **options)
    order = LaneOrder(dataset, drop_last=loader.drop_last, exchange=exchange, **where)
    return LaneLoader(order, source, seed=seed, seeds_forward=True, **options)
