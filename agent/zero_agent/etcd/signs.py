"""What the agents of a job's own store leave beside its checkpoints: a sign of life, and its heir.

`zero_orchestrator.store.succession` says what they are for. Must always hold: the file that names
an heir is whole when it appears, and never changes; whatever cannot be read or written here is as
if it were not there, except that a claim which could not be tried is an error. Any of these calls
may hang as long as a file server does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from zero_contract import beside
from zero_contract.decoding import decode, encode
from zero_orchestrator.errors import SpecMismatch
from zero_orchestrator.store.succession import Checkpoint, Heir

T = TypeVar("T")

_CHAIN = 16
"""The most heirs of heirs that are looked for."""


def heir_of(root: str, store: str) -> Heir | None:
    """The heir of a store, as the file names it."""
    return _read(Heir, Path(root, beside.heir_of(store)))


def newest_heir(root: str, store: str) -> Heir | None:
    """The last heir of heirs, where it serves now if it says so; None: the store has none."""
    found = None
    for _ in range(_CHAIN):
        if (heir := heir_of(root, store)) is None:
            break
        found, store = heir, heir.store
    if found is None:
        return None
    endpoints = _read(list[str], Path(root, beside.sign_of(found.store)))
    return replace(found, endpoint=",".join(endpoints)) if endpoints else found


def show_life(root: str, store: str, endpoints: tuple[str, ...]) -> None:
    """Show that a store has a quorum, and where; costs nothing if it cannot be written."""
    sign = Path(root, beside.sign_of(store))
    new = sign.with_name(f"{sign.name}.{secrets.token_hex(4)}")
    try:
        new.write_text(encode(list(endpoints)), encoding="utf-8")
        new.replace(sign)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()


def claim(root: str, store: str, heir: Heir) -> bool:
    """Create the file that names a store's heir; whether this call has, durably.

    A link is made or not, on a file server too; if the answer is lost, the content tells whose.

    Raises:
        OSError: It could not be tried.
    """
    final = Path(root, beside.heir_of(store))
    new = final.with_name(f"{final.name}.{heir.store}")
    with new.open("x", encoding="utf-8") as file:
        file.write(encode(heir))
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(new, final)
        directory = os.open(root, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        new.unlink()
    return heir_of(root, store) == heir


def newest(root: str) -> Checkpoint | None:
    """The newest checkpoint in a directory that has its manifest."""
    names = [path.parent.name for path in Path(root).glob(f"step-*/{beside.MANIFEST}")]
    last_round, step = max(map(beside.age, names), default=(-1, -1))
    return Checkpoint(round=last_round, step=step) if step >= 0 else None


def stamp(root: str, store: str) -> tuple[int, int] | None:
    """Changes whenever a store shows that it lives; None: it never has."""
    with contextlib.suppress(OSError):
        found = os.stat(Path(root, beside.sign_of(store)))
        return found.st_ino, found.st_mtime_ns
    return None


def _read(kind: type[T], path: Path) -> T | None:
    """The content of a file, or None. Who can write here can write checkpoints, too."""
    with contextlib.suppress(OSError, SpecMismatch):
        return decode(kind, path.read_text(encoding="utf-8"), f"{path} is damaged", SpecMismatch)
    return None
