"""Checkpoints that a load has found damaged: they are marked only by a run that saves.

A reader harms nobody: its disk or its memory may be what is wrong, and the checkpoint good for all
others. Rank 0 marks a checkpoint (`QUARANTINE`) after a commit of its own in the same directory.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

import xxhash

from zero_checkpoint.files.place import Place, exists, open_again
from zero_checkpoint.format.manifest import MANIFEST
from zero_checkpoint.format.parse import ManifestError
from zero_checkpoint.loading.candidates import quarantine, read_manifest
from zero_checkpoint.loading.reader import DAMAGE, span

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A checkpoint with a block whose digest was wrong in two reads by some rank."""

    path: Place
    reason: str
    file: int
    """The number of the file in the manifest."""
    block: int


_suspects: dict[Place, list[Suspect]] = {}


def suspect(found: Suspect) -> None:
    """Remember a checkpoint until `mark`."""
    _suspects.setdefault(found.path.parent, []).append(found)


def mark(root: Place) -> None:
    """Quarantine the suspects of a directory that are damaged; never raises."""
    # Each once: the next load that reads such a block suspects its checkpoint again.
    for each in _suspects.pop(root, []):
        try:
            damaged = _is_damaged(each)
        except (ManifestError, OSError) as error:
            _log.warning("%s is not quarantined, as it could not be read: %s", each.path, error)
            continue
        if damaged:
            quarantine(each.path, each.reason)
        else:
            _log.warning(
                "%s is not quarantined: %s reads it as it was saved; another host did not: %s",
                each.path,
                socket.gethostname(),
                each.reason,
            )


def _is_damaged(found: Suspect) -> bool:
    # Read again, past the page cache: it must be damaged for this rank as well, and still be there.
    manifest = read_manifest(found.path / MANIFEST)
    file = manifest.files[found.file]
    begin, length = span(manifest, file, range(found.block, found.block + 1))
    block = bytearray(length)
    try:
        with open_again(found.path / file.name) as source:
            missing = source.read_into([memoryview(block)], begin)
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        # A missing file is damage, unless the whole checkpoint has been deleted meanwhile.
        return exists(found.path)
    return bool(missing) or xxhash.xxh3_64_intdigest(block) != file.digests[found.block]
