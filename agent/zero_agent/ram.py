"""The node's memory for checkpoints: a directory in /dev/shm that outlives the workers.

Workers freeze their state into files here; when one dies, its last image is still there for the
next round, because the directory belongs to the agent. It is made when a worker first asks for
it, and removed when the agent ends. `ram_server` serves it to the other nodes.

Must always hold: the directory is locked for as long as its agent lives. The kernel drops the
lock with the process, whatever ends it, so `sweep` removes exactly what dead agents have left,
of any job.

Called by the agent's loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_agent.ram_server import RamServer, used_bytes
from zero_orchestrator.contract import RamReply, RamRequest
from zero_orchestrator.events import RamUse
from zero_orchestrator.ram_wire import key_of

log = logging.getLogger("zero")

DIRECTORY = Path("/dev/shm")
_PREFIX = "zero-ram."


class Ram:
    """One agent's memory for checkpoints; nothing is taken before a worker asks."""

    def __init__(
        self,
        job: str,
        node: str,
        address: str,
        directory: Path = DIRECTORY,
        *,
        limit_bytes: int | None = None,
    ) -> None:
        """Remove what dead agents have left.

        Args:
            job: With `node`, what the directory is called: people see whose memory it is.
            node: This agent's.
            address: The node's own; the server listens there and nowhere else.
            directory: A tmpfs.
            limit_bytes: The node gives no more, whatever workers ask for; None: half of the room
                there is, or what they ask for.
        """
        words = (re.sub(r"[^0-9A-Za-z_-]", "-", word)[:64] for word in (job, node))
        self._name = _PREFIX + ".".join(words)
        self._address = address
        self._parent = directory
        self._path: Path | None = None
        self._lock = -1
        self._server: RamServer | None = None
        self._limit_bytes = limit_bytes
        self._half_bytes = 0
        """Half of the room that there was in the beginning."""
        sweep(directory)

    def open(self, request: RamRequest, secret: str) -> RamReply:
        """What a worker needs to know to keep its images here.

        Args:
            request: The worker's; the budget of the last one counts.
            secret: The job's.
        """
        key = key_of(secret)
        try:
            if self._path is None:
                self._half_bytes = _free_bytes(self._parent) // 2  # training needs memory, too
                self._path, self._lock = _make(self._parent, self._name)
                log.info("checkpoints in memory are kept in %s", self._path)
            budget = self._budget_bytes(request.budget_bytes)
            if self._server is None:
                self._server = RamServer(self._path, self._address, key, budget)
            self._server.budget_bytes = budget
        except OSError as error:
            return RamReply(request=request.request, reason=f"{self._parent}: {error.strerror}")
        return RamReply(
            request=request.request,
            directory=str(self._path),
            address=self._server.address,
            key=key,
            budget_bytes=budget,
        )

    @property
    def is_open(self) -> bool:
        """Whether a worker has asked for memory: what it kept there is lost with this agent."""
        return self._path is not None

    def use(self) -> RamUse | None:
        """How much of the node's memory is taken; None if no worker has asked for any."""
        if self._path is None or self._server is None:
            return None
        budget = self._server.budget_bytes
        return RamUse(used_bytes=used_bytes(self._path), budget_bytes=budget)

    def _budget_bytes(self, wanted: int | None) -> int:
        if self._limit_bytes is None:
            return wanted or self._half_bytes
        return min(wanted or self._limit_bytes, self._limit_bytes)

    def close(self) -> None:
        """Stop serving and give the memory back; the workers must be gone."""
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
        self._server = self._path = None


def sweep(directory: Path = DIRECTORY) -> None:
    """Remove the memory of agents that are dead; never raises."""
    with contextlib.suppress(OSError):
        for path in directory.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), _locked(path):  # locked by another: alive
                shutil.rmtree(path, ignore_errors=True)
                log.info("removed %s, left by an agent that died", path)


def _make(parent: Path, name: str) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock."""
    while True:
        path = parent / f"{name}.{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, lock
        except BlockingIOError:
            pass  # a sweep came between the two calls: it removes this one
        os.close(lock)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _free_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize
