"""What lanes must know of the libraries whose datasets they read, none of which is imported here.

A `Library` answers for one of them: into how many parts its dataset can be divided, how a copy
becomes one part of an epoch, and whether its state is whole; `Library` answers for all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch.utils.data import DataLoader

from zero_contract.errors import ConfigError
from zero_data.global_batch import mix


class Library:
    """Iterables of nobody in particular, which may divide themselves by `get_worker_info()`."""

    def check(self, dataset: Any) -> None:
        """Raise ConfigError if lanes cannot read it."""

    def remark(self, dataset: Any) -> str:
        """A remark for its user; empty: none."""
        return ""

    def parts(self, dataset: Any, lanes: int) -> int | None:
        """Into how many parts it can be divided, at most `lanes`; None: it must be tried."""
        return lanes if not hasattr(dataset, "__iter__") else None

    def part(self, own: Any, part: int, parts: int, epoch: int) -> Any:
        """One part of an epoch, from a copy that may be changed; it is read as that worker."""
        if hasattr(own, "set_epoch"):
            own.set_epoch(epoch)
        return own

    def lossy(self, dataset: Any) -> bool:
        """Whether its state leaves something out."""
        return False


class _HuggingFace(Library):
    """Streams of `datasets`, which divide their files among workers."""

    def check(self, dataset: Any) -> None:
        if getattr(dataset, "_distributed", None) is not None:
            raise ConfigError(
                "training_data: the dataset is divided by split_dataset_by_node, and lanes divide "
                "it themselves; give the dataset from before"
            )

    def remark(self, dataset: Any) -> str:
        return next(
            (_REMARK.format(*why) for name, why in _LOSSY.items() if name in _steps(dataset)), ""
        )

    def parts(self, dataset: Any, lanes: int) -> int | None:
        return min(lanes, int(dataset.num_shards))

    def lossy(self, dataset: Any) -> bool:
        return not _LOSSY.keys().isdisjoint(_steps(dataset))


_REMARK = (
    "the state of {} leaves {} out: a resume reads each lane of the epoch again up to its "
    "position; {}"
)
_LOSSY = {
    "BufferShuffled": (
        ".shuffle(buffer_size=...)",
        "its buffer",
        "give the dataset without it to zero_data.lanes.Shuffle, whose state has the buffer",
    ),
    "Formatted Arrow": (
        "this version of datasets",
        "the rows of a table that are not read yet",
        "install datasets 5 or newer",
    ),
}
"""Steps of a stream, by name; and what their state leaves out, with the remedy."""


def _steps(dataset: Any) -> Iterator[str]:
    """The steps of a stream, whatever it is made of, and each with the one that it reads."""
    steps = [dataset._prepare_ex_iterable_for_iteration()]
    while steps:
        step = steps.pop()
        name, below = _kind(step), getattr(step, "ex_iterable", None)
        yield from (name, f"{name} {_kind(below)}")
        steps += getattr(step, "ex_iterables", None) or []
        steps += [step.ex_iterable] if hasattr(step, "ex_iterable") else []


class _WebDataset(Library):
    """Pipelines of WebDataset, which divide their archives among workers."""

    def check(self, dataset: Any) -> None:
        if isinstance(dataset.pipeline[0], DataLoader):
            raise ConfigError(
                "training_data: a WebLoader forms batches in processes of its own, and lanes read "
                "samples; give the WebDataset"
            )

    def parts(self, dataset: Any, lanes: int) -> int | None:
        first = dataset.pipeline[0]
        resampled = not hasattr(first, "__len__")  # an endless draw of archives, one per worker
        return lanes if resampled else min(lanes, len(first))

    def part(self, own: Any, part: int, parts: int, epoch: int) -> Any:
        # Left alone, these steps take their seed from the clock, or the dataset draws one.
        drawn = getattr(own, "seed", None)
        for step in own.pipeline:
            if hasattr(step, "deterministic"):
                step.deterministic = True
            if hasattr(step, "epoch"):
                step.epoch = epoch - 1  # it counts up before it reads
            if getattr(step, "seed", None) == drawn is not None:
                step.seed = 0
            shuffles = getattr(getattr(step, "f", None), "__name__", "") == "_shuffle"
            if shuffles and step.kw.get("rng") is None:
                given = step.kw.get("seed")
                seed = 0 if given in (None, drawn) else given
                step.kw = {**step.kw, "seed": mix(seed, epoch, part)}
        return own


class _Grain(Library):
    """Datasets of Grain, whose elements are divided at their sources."""

    def parts(self, dataset: Any, lanes: int) -> int | None:
        return lanes

    def part(self, own: Any, part: int, parts: int, epoch: int) -> Any:
        # A MapDataset has another order in each repetition: the epoch is the last one of so many.
        if hasattr(own, "to_iter_dataset"):
            size = len(own)
            elements = slice(epoch * size + part, (epoch + 1) * size, parts)
            return own.repeat(epoch + 1).slice(elements).to_iter_dataset()
        _slice(own, slice(part, None, parts))
        return own


def _kind(step: Any) -> str:
    return type(step).__name__.removesuffix("ExamplesIterable")


def _slice(dataset: Any, elements: slice) -> None:
    if hasattr(dataset, "set_slice"):
        dataset.set_slice(elements)
        return
    if not dataset.parents:
        raise ConfigError(f"training_data: {type(dataset).__name__} of Grain cannot be sliced")
    for parent in dataset.parents:
        _slice(parent, elements)


_PLAIN = Library()
_LIBRARIES = {"datasets": _HuggingFace(), "grain": _Grain(), "webdataset": _WebDataset()}


def home_of(dataset: Any, known: Collection[str]) -> str | None:
    """The first of these packages that its class, or one that it extends, is from."""
    homes = (kind.__module__.partition(".")[0] for kind in type(dataset).__mro__)
    return next((home for home in homes if home in known), None)


def library_of(dataset: Any) -> Library:
    """Who answers for a dataset."""
    return _LIBRARIES.get(home_of(dataset, _LIBRARIES) or "", _PLAIN)
