"""Loads the newest complete checkpoint, on all ranks or on none.

    rank 0 takes the next candidate            announce: its name, digest and manifest
    each rank reads and verifies its weights   exchange: the ranks may begin to pass them on
    and then its others, and meets all ranks   vote: good, damaged, mismatched or failed
    rank 0 takes the worst vote                verdict: done; try the one before; or stop

All ranks end with tensors of one checkpoint, or all raise the same error. Every rank calls `load`,
in step. A load writes nothing, see `suspects`.
"""

from __future__ import annotations

import heapq
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import chain

from zero_checkpoint.consensus import COORDINATOR, Record, StoreConsensus
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint, ModelMismatch
from zero_checkpoint.files.place import Place, exists, is_dir
from zero_checkpoint.format.manifest import MANIFEST, Manifest, age
from zero_checkpoint.format.parse import ManifestError, parse
from zero_checkpoint.format.pieces import State
from zero_checkpoint.loading import ownership
from zero_checkpoint.loading.candidates import (
    WAS_COMMITTED,
    Candidate,
    Rejected,
    Why,
    committed,
    read_manifest,
    scan,
)
from zero_checkpoint.loading.foreign import hint
from zero_checkpoint.loading.in_memory import MemoryCheckpoint, MemorySearch
from zero_checkpoint.loading.reader import Copies, fill
from zero_checkpoint.loading.suspects import Suspect, suspect
from zero_contract import worker as contract
from zero_contract.errors import PeerLost

_log = logging.getLogger(__name__)

_MOST_TOLD_BYTES = 1 << 30
"""The most bytes of manifests that rank 0 sends to all others; beyond that, each rank reads the
manifest from storage."""
_InMemory = tuple[MemoryCheckpoint, Manifest]
_Entry = Candidate | Rejected | _InMemory
Wanted = Callable[[Manifest], State]
"""From a manifest to the state whose pieces are to be filled in place."""
Exchange = Callable[[bool], None]
"""Called with whether this rank has filled its weights; lets the ranks begin to exchange them."""
Meet = Callable[[str], None]
"""A barrier with a name: returns when all ranks have called it; raises PeerLost if one does not."""


class LoadOutcome(StrEnum):
    """The result of a load on a rank, or on all. Mildest first: the verdict is the worst vote."""

    GOOD = "good"
    DAMAGED = "damaged"
    """The checkpoint is damaged; an older one may be good."""
    MISMATCHED = "mismatched"
    """The checkpoint is of another model."""
    FAILED = "failed"
    """A rank could not read, or did not answer; checkpoint and model are not at fault."""


_SEVERITY = list(LoadOutcome)
_ERRORS: dict[LoadOutcome, type[CheckpointError]] = {
    LoadOutcome.DAMAGED: DamagedCheckpoint,
    LoadOutcome.MISMATCHED: ModelMismatch,
    LoadOutcome.FAILED: CheckpointError,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that all ranks loaded."""

    path: Place
    manifest: Manifest
    bytes_read: int = 0
    """Bytes that this rank read from the files of this checkpoint, edges of blocks included."""
    in_memory: bool = False
    """Whether it was in the memory of the nodes; `path` is then this node's part of it."""


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
        meet: Called after that, on every rank, before it votes: a lost rank is detected at once.
        tag: Only checkpoints of this tag, or the one with this directory name, as in `latest`.
        ram: The search in the memory of the nodes; on all ranks or on none.

    Returns:
        The checkpoint that was loaded, or None if nothing was ever saved here.

    Raises:
        DamagedCheckpoint: There are checkpoints, and none is usable; names them all.
        ModelMismatch: The newest one is of another model; names the tensors. No rank has read it.
        CheckpointError: No checkpoint has this tag; or a rank could not read, or died.
        PeerLost: The store of the votes is gone; or raised by `exchange` or `meet`.
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
        # Damage alone leads to the next candidate: all ranks go round once more. After a mismatch
        # they do not, because the checkpoint before is of that other model, too.
        if verdict["outcome"] == LoadOutcome.GOOD:
            assert attempt.loaded is not None
            return attempt.loaded
        if verdict["outcome"] != LoadOutcome.DAMAGED:
            _raise(verdict, attempt.error)


def _raise(verdict: Record, cause: Exception | None = None) -> None:
    """Raise the error of a verdict or an offer, if there is one."""
    if "outcome" in verdict:
        raise _ERRORS[LoadOutcome(verdict["outcome"])](verdict["reason"]) from cause


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """A checkpoint on disk, with the interface of `MemoryCheckpoint`."""

    path: Place
    copies: Copies | None = None

    def read_manifest(self) -> Manifest:
        return read_manifest(self.path / MANIFEST)


_Offered = _OnDisk | MemoryCheckpoint


def _manifest(offered: _Offered, offer: Record, search: _Search) -> Manifest:
    """The manifest that rank 0 has read: on rank 0 itself; from the offer; or read once more."""
    if search.manifest is not None:
        return search.manifest
    path = offered.path / MANIFEST
    if isinstance(offered, _OnDisk) and not exists(path):
        raise CheckpointError(
            f"rank {COORDINATOR} sees it, this rank does not; "
            f"put {offered.path.parent} on storage that all nodes share"
        )
    text = offer.get("manifest")
    manifest = parse(text) if text is not None else offered.read_manifest()
    # Storage that is not coherent may show this rank another file under the same name.
    if manifest.digest != offer["digest"]:
        raise DamagedCheckpoint(f"{path}: differs from what rank {COORDINATOR} read")
    return manifest


def _open(root: Place, ram: MemorySearch | None, offer: Record) -> _Offered:
    """The checkpoint that rank 0 offers, as this rank sees it."""
    name = str(offer["name"])
    if "home" not in offer:
        return _OnDisk(root / name)
    assert ram is not None, "rank 0 looks into memory only if all ranks do"
    return ram.open(offer["home"], name, offer["places"])


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The result of one checkpoint on one rank."""

    vote: Record
    loaded: Loaded | None = None
    error: Exception | None = None


def _try(
    offered: _Offered, read: Callable[[], Manifest], wanted: Wanted, exchange: Exchange, rank: int
) -> _Attempt:
    """Fill this rank's pieces from one checkpoint, and turn the result or the error into a vote."""
    path = offered.path
    try:
        with ExitStack() as otherwise:
            # Even if the weights are never filled, the exchange begins, at the end: the other ranks
            # begin it as well, and without this rank they would wait for ever.
            otherwise.callback(exchange, False)

            def weights_filled() -> None:
                otherwise.pop_all()
                exchange(True)

            manifest = read()
            state = wanted(manifest)
            count = fill(
                path,
                manifest,
                state,
                copies=offered.copies,
                weights_filled=weights_filled,
                log_progress=rank == COORDINATOR,
            )
        loaded = Loaded(path, manifest, count, isinstance(offered, MemoryCheckpoint))
        return _Attempt({"outcome": LoadOutcome.GOOD}, loaded)
    except PeerLost:  # the end of the group, and no outcome of a load
        raise
    except ModelMismatch as error:
        return _Attempt({"outcome": LoadOutcome.MISMATCHED, "reason": str(error)}, error=error)
    except (DamagedCheckpoint, ManifestError) as error:
        where = getattr(error, "where", None)
        vote = {"outcome": LoadOutcome.DAMAGED, "reason": str(error), "where": where}
        return _Attempt(vote, error=error)
    except Exception as error:  # whatever it is: without this vote all would wait for the timeout
        reason = f"rank {rank} could not load {path}: {str(error) or type(error).__name__}"
        return _Attempt({"outcome": LoadOutcome.FAILED, "reason": reason}, error=error)


@dataclass(slots=True)
class _Search:
    """Rank 0's walk through the candidates, newest first; idle on the other ranks."""

    root: Place
    tag: str | None
    ram: MemorySearch | None
    damaged: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    """The manifest of the checkpoint that was offered last."""
    _present: tuple[str, ...] = ()
    """The checkpoints on disk when the search began."""
    _entries: Iterator[_Entry] | None = None

    def next_offer(self, world: int) -> Record:
        """The next checkpoint to try; if there is none, a record without a name: why, or {}."""
        try:
            found = self._next_candidate()
        except Exception as error:  # told to the other ranks, which wait for an offer
            reason = f"rank {COORDINATOR} could not search {self.root}: {error}"
            return {"outcome": LoadOutcome.FAILED, "reason": reason}
        if found is None:
            return self._conclusion()
        where, manifest = found
        self.manifest = manifest
        offer = {**where, "digest": manifest.digest}
        # So a thousand ranks do not all read one file at once; alone there is nobody to tell.
        if 1 < world <= _MOST_TOLD_BYTES // len(manifest.text):
            offer["manifest"] = manifest.text
        return offer

    def _next_candidate(self) -> tuple[Record, Manifest] | None:
        """Its part of an offer, from which `_open` finds it, and its manifest."""
        if self._entries is None:
            # As of the begin: what another run publishes during this load is not known to this run.
            self._present = tuple(path.name for path in committed(self.root))
            self._entries = _newest_first(self.root, self.ram)
        for entry in chain(self._entries, self._quarantined()):
            if isinstance(entry, tuple):
                kept, manifest = entry
                return {"name": kept.name, "home": kept.home, "places": kept.places}, manifest
            if isinstance(entry, Rejected):
                if entry.why in WAS_COMMITTED:
                    self.rejected.append(entry)
                    _log.warning("checkpoint skipped: %s", entry.reason)
            elif self.tag is None and entry.manifest.is_aside:
                self.aside.append(entry.manifest.tag)
            elif self.tag in (None, entry.manifest.tag, entry.path.name):
                return {"name": entry.path.name}, entry.manifest
            else:
                self.tags.append(entry.manifest.tag)
        return None

    def _quarantined(self) -> Iterator[Candidate]:
        """The checkpoints that an earlier run has marked, newest first."""
        # The fault may have been its disk; each is offered once.
        again = [each for each in self.rejected if each.why is Why.QUARANTINED]
        for each in again:
            with suppress(OSError, ManifestError):  # perhaps the manifest is what is damaged
                found = Candidate(each.path, read_manifest(each.path / MANIFEST))
                _log.warning("nothing else is left, verified once more: %s", each.reason)
                self.rejected.remove(each)
                yield found

    def _conclusion(self) -> Record:
        """Why there is no further checkpoint to try; {} if nothing was ever saved."""
        unusable = self.damaged + [entry.reason for entry in self.rejected]
        # An error: starting from scratch here would silently throw the training away.
        if self.damaged or (unusable and self.tag is None):
            return {
                "outcome": LoadOutcome.DAMAGED,
                "reason": f"no usable checkpoint under {self.root}: {'; '.join(unusable)}. "
                "Restore one of them, or use an empty directory to start from scratch",
            }
        root = str(self.root.resolve())
        if not (self.tag or self.aside) and root == os.environ.get(contract.ENV_COMMITTED_ROOT):
            return {
                "outcome": LoadOutcome.FAILED,
                "reason": f"{self.root} has no checkpoint any more, and this job has published one "
                "there: mount or restore it on the node of rank 0; to start from scratch, start "
                "the job under another --rdzv-id, or give another directory",
            }
        foreign = ""
        with suppress(OSError):  # this is no reason to fail
            foreign = hint(self.root) if is_dir(self.root) else ""
        if self.tag is None:
            if foreign:  # the run starts from nothing, which its user may not expect
                _log.warning("%s: there are no checkpoints here%s", self.root, foreign)
            if self.aside:
                named = ", ".join(dict.fromkeys(self.aside))
                text = "%s: all checkpoints here were saved aside; to load one, name its tag: %s"
                _log.warning(text, self.root, named)
            ownership.loaded(self.root, self._present, ())
            return {}
        known = ", ".join(repr(tag) for tag in dict.fromkeys(self.tags)) or "none"
        also = f"; not usable: {'; '.join(unusable)}" if unusable else ""
        reason = (
            f"no checkpoint tagged {self.tag!r} under {self.root}; tags there are: {known}{also}"
            f"{foreign}"
        )
        return {"outcome": LoadOutcome.FAILED, "reason": reason}

    def judge(self, offered: _Offered, votes: list[Record]) -> Record:
        """The verdict of all ranks: the worst vote."""
        verdict = worst(offered.path, votes)
        if verdict["outcome"] == LoadOutcome.DAMAGED:
            _log.warning("falling back to the checkpoint before: %s", verdict["reason"])
            if isinstance(offered, _OnDisk):
                # One in memory is not among the unusable: it is lost with its nodes, which is no
                # fault of the root.
                self.damaged.append(verdict["reason"])
                if verdict.get("where") is not None:
                    file, block = verdict["where"]
                    reason = verdict["reason"]
                    suspect(Suspect(path=offered.path, reason=reason, file=file, block=block))
        elif verdict["outcome"] == LoadOutcome.GOOD:
            assert self.manifest is not None
            ownership.loaded(self.root, self._present, self.manifest.runs)
        return verdict


def _newest_first(root: Place, ram: MemorySearch | None) -> Iterator[_Entry]:
    """Checkpoints in memory and on disk in one order."""
    in_memory = ram.candidates(root) if ram is not None else iter(())

    def age_of(entry: _Entry) -> tuple[int, int]:
        return age(entry[0].name if isinstance(entry, tuple) else entry.path.name)

    # It is stable: of equal age, the one in memory comes first.
    return heapq.merge(in_memory, scan(root), key=age_of, reverse=True)


def worst(path: Place, votes: list[Record]) -> Record:
    """The verdict on a load, a pure function: the first of the most severe votes, by rank."""
    for rank, vote in enumerate(votes):
        if "problem" in vote:
            reason = f"rank {rank} did not report on {path} in time: it has died or stalls"
            return {"outcome": LoadOutcome.FAILED, "reason": reason}
    verdict = max(votes, key=lambda vote: _SEVERITY.index(LoadOutcome(vote["outcome"])))
    alike = all(vote["outcome"] == verdict["outcome"] for vote in votes)
    if verdict["outcome"] == LoadOutcome.MISMATCHED and not alike:
        reason = f"the ranks have built different models, build one: {verdict['reason']}"
        return {"outcome": LoadOutcome.FAILED, "reason": reason}
    return verdict
