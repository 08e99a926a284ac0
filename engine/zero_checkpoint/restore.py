"""Loads the newest checkpoint that is whole, on all ranks or on none.

    rank 0 takes the next candidate            announce: its name, digest and manifest
    each rank reads and verifies its weights   exchange: the ranks may begin to pass them on
    and then its others, and meets all ranks   vote: good, damaged, mismatched or failed
    rank 0 takes the worst vote                verdict: done; quarantine and try the one before;
                                               or stop

Must always hold: all ranks end with pieces of the same checkpoint, or all raise the same error.
Damage makes everybody fall back; a checkpoint of another model does not, because the one before
it is of that model too. A root in which every checkpoint is unusable is an error: starting
from scratch there would silently throw the training away. Checkpoints in the memory of the nodes
take their place in the same order; what is lost there is lost with its nodes, and only said.

Called by the engine on every rank, in step.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from zero_checkpoint.candidates import (
    WAS_COMMITTED,
    Candidate,
    Rejected,
    quarantine,
    read_manifest,
    scan,
)
from zero_checkpoint.consensus import COORDINATOR, Record, StoreConsensus
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint, ModelMismatch
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import MANIFEST, Manifest, age
from zero_checkpoint.format.parse import ManifestError, parse
from zero_checkpoint.format.pieces import State
from zero_checkpoint.memory.search import MemoryCheckpoint, MemorySearch
from zero_checkpoint.reader import Copies, fill
from zero_contract.errors import PeerLost

_log = logging.getLogger(__name__)

_MOST_TOLD_BYTES = 1 << 30
"""Of manifests, from rank 0 to all others: beyond that, each of them reads it from storage."""
_InMemory = tuple[MemoryCheckpoint, Manifest]
_Entry = Candidate | Rejected | _InMemory
Wanted = Callable[[Manifest], State]
"""From a manifest to the state whose pieces are to be filled in place."""
Exchange = Callable[[bool], None]
"""Told whether this rank has filled its weights, lets the ranks begin to exchange them."""
Meet = Callable[[str], None]
"""Returns when all ranks have come there, which they name; raises PeerLost if one does not."""


class Outcome(StrEnum):
    """How it went on a rank, or for all of them. Mildest first: the verdict is the worst."""

    GOOD = "good"
    DAMAGED = "damaged"
    """The checkpoint is; an older one may do."""
    MISMATCHED = "mismatched"
    """The model is another one."""
    FAILED = "failed"
    """Neither is to blame: a rank could not read, or did not answer."""


_SEVERITY = list(Outcome)
_ERRORS: dict[Outcome, type[CheckpointError]] = {
    Outcome.DAMAGED: DamagedCheckpoint,
    Outcome.MISMATCHED: ModelMismatch,
    Outcome.FAILED: CheckpointError,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that all ranks loaded."""

    path: Place
    manifest: Manifest
    bytes_read: int = 0
    """By this rank from the files of this checkpoint, edges of blocks included."""
    in_memory: bool = False
    """It was in the memory of the nodes; `path` is this node's part of it."""


def load(
    root: Place,
    consensus: StoreConsensus,
    wanted: Wanted,
    *,
    exchange: Exchange = lambda _: None,
    meet: Meet = lambda _: None,
    tag: str | None = None,
    ram: MemorySearch | None = None,
) -> Loaded | None:
    """Fill the wanted pieces from the newest valid checkpoint; every rank calls it.

    Args:
        root: As given to `save`.
        consensus: The votes of this group, of any size.
        wanted: Called with each manifest that is tried; its pieces are filled in place. After
            an error they hold anything.
        exchange: Called once for each checkpoint that is tried, on every rank: with True when
            the weights among its pieces are filled and verified, before the rest is read; with
            False when they will not be. Must not wait for ranks that have not called it.
        meet: Called after that, on every rank, before it votes: a lost rank is missed at once.
        tag: Only checkpoints of this tag, or the one of this name, as `latest` has it.
        ram: To look into the memory of the nodes as well; on all ranks or on none.

    Returns:
        What was loaded, or None if nothing was ever saved here.

    Raises:
        DamagedCheckpoint: There are checkpoints, and none is usable; names them all.
        ModelMismatch: The newest one is of another model; names the tensors. No rank has read it.
        CheckpointError: No checkpoint has this tag; or a rank could not read, or died.
        PeerLost: The store of the store consensus is gone; or `exchange` or `meet` says so.
    """
    search = _Search(root, tag, ram)
    if ram is not None:
        ram.gather(consensus)
    while True:
        offer = consensus.announce(partial(search.next_offer, consensus.world), voted_on="name")
        if "name" not in offer:
            _raise(offer)
            return None
        offered = _open(root, ram, offer)
        read = partial(_manifest, offered, offer, search)
        attempt = _try(offered, read, wanted, exchange, consensus.rank)
        meet(f"all ranks have read {offered.path.name}")
        verdict = consensus.ask(attempt.vote, partial(search.judge, offered))
        if verdict["outcome"] == Outcome.GOOD:
            assert attempt.loaded is not None
            return attempt.loaded
        if verdict["outcome"] != Outcome.DAMAGED:
            _raise(verdict, attempt.error)


def _raise(verdict: Record, cause: Exception | None = None) -> None:
    """Raise the error that a verdict or an offer tells of, if any."""
    if "outcome" in verdict:
        raise _ERRORS[Outcome(verdict["outcome"])](verdict["reason"]) from cause


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """A checkpoint on disk, in the words of `MemoryCheckpoint`."""

    path: Place
    copies: Copies | None = None

    def read_manifest(self) -> Manifest:
        return read_manifest(self.path / MANIFEST)


_Offered = _OnDisk | MemoryCheckpoint


def _manifest(offered: _Offered, offer: Record, search: _Search) -> Manifest:
    """The manifest that rank 0 has read: its own, out of the offer, or read once more."""
    if search.manifest is not None:
        return search.manifest
    path = offered.path / MANIFEST
    if isinstance(offered, _OnDisk) and not path.exists():
        raise CheckpointError(
            f"rank {COORDINATOR} sees it, this rank does not; "
            f"put {offered.path.parent} on storage that all nodes share"
        )
    told = offer.get("manifest")
    manifest = parse(told) if told is not None else offered.read_manifest()
    if manifest.digest != offer["digest"]:
        raise DamagedCheckpoint(f"{path}: differs from what rank {COORDINATOR} read")
    return manifest


def _open(root: Place, ram: MemorySearch | None, offer: Record) -> _Offered:
    """What rank 0 offers, as this rank sees it."""
    name = str(offer["name"])
    if "home" not in offer:
        return _OnDisk(root / name)
    assert ram is not None, "rank 0 looks into memory only if all ranks do"
    return ram.open(offer["home"], name, offer["places"])


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What came of one checkpoint on one rank."""

    vote: Record
    loaded: Loaded | None = None
    error: Exception | None = None


def _try(
    offered: _Offered,
    read: Callable[[], Manifest],
    wanted: Wanted,
    exchange: Exchange,
    rank: int,
) -> _Attempt:
    """Fill this rank's pieces from one checkpoint, turning whatever happens into a vote."""
    path = offered.path
    try:
        with _sure_to(exchange) as weights_filled:
            manifest = read()
            state = wanted(manifest)
            count = fill(
                path, manifest, state, copies=offered.copies, weights_filled=weights_filled
            )
        loaded = Loaded(path, manifest, count, isinstance(offered, MemoryCheckpoint))
        return _Attempt({"outcome": Outcome.GOOD}, loaded)
    except PeerLost:
        raise
    except ModelMismatch as error:
        return _Attempt({"outcome": Outcome.MISMATCHED, "reason": str(error)}, error=error)
    except (DamagedCheckpoint, ManifestError) as error:
        return _Attempt({"outcome": Outcome.DAMAGED, "reason": str(error)}, error=error)
    except Exception as error:
        reason = f"rank {rank} could not load {path}: {error or type(error).__name__}"
        return _Attempt({"outcome": Outcome.FAILED, "reason": reason}, error=error)


@contextmanager
def _sure_to(exchange: Exchange) -> Iterator[Callable[[], None]]:
    """What to call when the weights are filled; if nobody does, the exchange begins at the end.

    The other ranks have begun it, or will, and without this one it would never end.
    """
    with ExitStack() as otherwise:
        otherwise.callback(exchange, False)

        def filled() -> None:
            otherwise.pop_all()
            exchange(True)

        yield filled


@dataclass(slots=True)
class _Search:
    """Rank 0's walk through the candidates, newest first; idle on the other ranks."""

    root: Place
    tag: str | None
    ram: MemorySearch | None
    damaged: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    """Of what was offered last."""
    _entries: Iterator[_Entry] | None = None

    def next_offer(self, world: int) -> Record:
        """The next checkpoint to try; without a name, there is none: with the reason, or {}."""
        try:
            found = self._next_candidate()
        except Exception as error:
            reason = f"rank {COORDINATOR} could not search {self.root}: {error}"
            return {"outcome": Outcome.FAILED, "reason": reason}
        if found is None:
            return self._conclusion()
        where, manifest = found
        self.manifest = manifest
        offer = {**where, "digest": manifest.digest}
        if 1 < world <= _MOST_TOLD_BYTES // len(manifest.text):
            offer["manifest"] = manifest.text
        return offer

    def _next_candidate(self) -> tuple[Record, Manifest] | None:
        """Where it is, as `_open` is told, and its manifest."""
        self._entries = self._entries or _newest_first(self.root, self.ram)
        for entry in self._entries:
            if isinstance(entry, tuple):
                kept, manifest = entry
                return {"name": kept.name, "home": kept.home, "places": kept.places}, manifest
            if isinstance(entry, Rejected):
                self._note(entry)
            elif self.tag in (None, entry.manifest.tag, entry.path.name):
                return {"name": entry.path.name}, entry.manifest
            else:
                self.tags.append(entry.manifest.tag)
        return None

    def _note(self, rejected: Rejected) -> None:
        if rejected.why in WAS_COMMITTED:
            self.rejected.append(rejected)
            _log.warning("checkpoint skipped: %s", rejected.reason)

    def _conclusion(self) -> Record:
        """Why there is nothing (more) to try; {} if nothing was ever saved."""
        unusable = self.damaged + [entry.reason for entry in self.rejected]
        if self.damaged or (unusable and self.tag is None):
            return {
                "outcome": Outcome.DAMAGED,
                "reason": f"no usable checkpoint under {self.root}: {'; '.join(unusable)}. "
                "Restore one of them, or use an empty directory to start from scratch",
            }
        if self.tag is None:
            return {}
        known = ", ".join(repr(tag) for tag in dict.fromkeys(self.tags)) or "none"
        also = f"; not usable: {'; '.join(unusable)}" if unusable else ""
        reason = (
            f"no checkpoint tagged {self.tag!r} under {self.root}; tags there are: {known}{also}"
        )
        return {"outcome": Outcome.FAILED, "reason": reason}

    def judge(self, offered: _Offered, votes: list[Record | None]) -> Record:
        """The worst vote is everybody's; damage is marked for good."""
        verdict = worst(offered.path, votes)
        if verdict["outcome"] == Outcome.DAMAGED:
            _log.warning("falling back to the checkpoint before: %s", verdict["reason"])
            if isinstance(offered, _OnDisk):
                self.damaged.append(verdict["reason"])
                quarantine(offered.path, verdict["reason"])
        return verdict


def _newest_first(root: Place, ram: MemorySearch | None) -> Iterator[_Entry]:
    """Both kinds in one order; of two that are equally new, the one in memory first."""
    in_memory = ram.candidates(root) if ram is not None else iter(())
    return heapq.merge(in_memory, scan(root), key=_age, reverse=True)


def _age(entry: _Entry) -> tuple[int, int]:
    return age(entry[0].name if isinstance(entry, tuple) else entry.path.name)


def worst(path: Place, votes: list[Record | None]) -> Record:
    """The verdict on a load, a pure function: the first of the most severe votes.

    Args:
        path: The checkpoint.
        votes: By rank; None where a rank did not answer.
    """
    for rank, vote in enumerate(votes):
        if vote is None:
            reason = f"rank {rank} did not report on {path} in time: it has died or stalls"
            return {"outcome": Outcome.FAILED, "reason": reason}
    answers = [vote for vote in votes if vote is not None]
    verdict = max(answers, key=lambda vote: _SEVERITY.index(Outcome(vote["outcome"])))
    alike = all(vote["outcome"] == verdict["outcome"] for vote in answers)
    if verdict["outcome"] == Outcome.MISMATCHED and not alike:
        reason = f"the ranks have built different models, build one: {verdict['reason']}"
        return {"outcome": Outcome.FAILED, "reason": reason}
    return verdict
