"""A directory beside the output, in which an export writes until the output gets its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_checkpoint.errors import CheckpointError
from zero_contract.owned_dir import DirectoryTaken, Taken, claim, clear

_SUFFIX = ".partial"
_WHY = {
    Taken.OWNER_LIVES: ": another export is writing here; wait for it, or write somewhere else",
    Taken.NO_LOCKS: " is there already, and this file system has no locks; if no export is "
    "writing there, remove it",
    Taken.OTHER_KERNEL: ": left by an export on another machine, or before this machine was "
    "restarted; if no export is writing there, remove it",
    Taken.NEVER_OWNED: " is there already, and not left by an export; remove it, or write "
    "elsewhere",
}


@contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """An empty directory on the file system of `out`, for this process alone; removed at the end.

    Files that a dead export has left there are removed first.

    Raises:
        CheckpointError: Another export writes there, the directory there was not made by an
            export, or the path goes through a file.
        OSError: The directory could not be made.
    """
    directory = out.with_name(out.name + _SUFFIX)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(f"{out}: one of the directories in this path is a file") from None
    try:
        owned = claim(directory)
    except DirectoryTaken as taken:
        raise CheckpointError(f"{directory}{_WHY[taken.why]}") from None
    try:
        clear(directory)
        yield directory
    finally:
        owned.remove()
