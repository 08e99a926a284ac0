"""What the agents of a job's own store leave beside its checkpoints: a sign of life, and its heir.

`zero_orchestrator.store.succession` says what they are for. Whatever cannot be read or written here
is as if it were not there, except that a claim which could not be tried is an error. Any of these
calls may hang as long as a file server does: who cannot wait for that calls it by `within`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from zero_contract import beside
from zero_contract.clock import wait_until
from zero_contract.decoding import decode, encode
from zero_orchestrator.errors import SpecMismatch
from zero_orchestrator.store.succession import WATCH_S, Checkpoint, Heir

T = TypeVar("T")

HUNG_S = 20.0
"""A file server that has not answered for so long is as good as none."""
_POLL_S = 0.2
_CHAIN = 16
"""The most heirs of heirs that are looked for."""


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of a call that may hang, on a thread that then ends with the process.

    Raises:
        TimeoutError: It did not end in time.
        OSError: As the call.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="file-server", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not done.done():
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:.0f} s")
    return done.result()


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
    endpoints = places(root, found.store)
    return replace(found, endpoint=",".join(endpoints)) if endpoints else found


def places(root: str, store: str) -> list[str]:
    """The endpoints at which a store has shown last that it lives."""
    return _read(list[str], Path(root, beside.sign_of(store))) or []


def show_life(root: str, store: str, endpoints: tuple[str, ...]) -> None:
    """Show that a store has a quorum, and where; costs nothing if it cannot be written."""
    sign = Path(root, beside.sign_of(store))
    # A new file each time: `stamp` sees the change by its number, whatever the server's clock is.
    new = sign.with_name(f"{sign.name}.{secrets.token_hex(4)}")
    try:
        new.write_text(encode(list(endpoints)), encoding="utf-8")
        new.replace(sign)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()


def claim(root: str, store: str, heir: Heir) -> bool:
    """Create the file that names a store's heir; whether this call has, durably.

    Raises:
        OSError: It could not be tried.
    """
    final = Path(root, beside.heir_of(store))
    new = final.with_name(f"{final.name}.{heir.store}")
    try:
        # Whole, and on the disk, before it has the name that others read.
        with new.open("x", encoding="utf-8") as file:
            file.write(encode(heir))
            file.flush()
            os.fsync(file.fileno())
        # A link is made or not, on a file server too. If the answer is lost, and the call is
        # repeated, it fails: the content tells whose it is.
        with contextlib.suppress(FileExistsError):
            os.link(new, final)
        directory = os.open(root, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        with contextlib.suppress(OSError):  # a call that is repeated finds it gone
            new.unlink()
    return heir_of(root, store) == heir


def newest(root: str) -> Checkpoint | None:
    """The newest checkpoint in a directory that has its manifest."""
    names = list[str]()
    with contextlib.suppress(OSError):
        names = [path.parent.name for path in Path(root).glob(f"step-*/{beside.MANIFEST}")]
    last_round, step = max(map(beside.age, names), default=(-1, -1))
    return Checkpoint(round=last_round, step=step) if step >= 0 else None


def stamp(root: str, store: str) -> tuple[int, int] | None:
    """Changes whenever a store shows that it lives; None: it never has."""
    with contextlib.suppress(OSError):
        found = os.stat(Path(root, beside.sign_of(store)))
        return found.st_ino, found.st_mtime_ns
    return None


def lives(root: str, store: str) -> bool:
    """Whether a store shows that it lives, within a while that ends when it has an heir."""
    before = stamp(root, store)

    def shown() -> bool:
        return stamp(root, store) not in (before, None)

    wait_until(lambda: shown() or heir_of(root, store) is not None, WATCH_S, _POLL_S)
    return shown()


def _read(kind: type[T], path: Path) -> T | None:
    """The content of a file, or None."""
    # Nothing is signed: who can write here can write checkpoints, too.
    with contextlib.suppress(OSError, UnicodeDecodeError, SpecMismatch):
        return decode(kind, path.read_text(encoding="utf-8"), f"{path} is damaged", SpecMismatch)
    return None
