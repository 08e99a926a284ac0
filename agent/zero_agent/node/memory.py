"""In-memory checkpoints of a node: a directory in /dev/shm that outlives the workers.

Workers write snapshots of their state into files here, of which the last is still there for the
next round. The directory is made when a worker first asks for it, and removed when the agent ends;
one that a crashed agent has left is adopted by the next agent of that machine in the same run of
the job. `MemoryServer` serves ranges of the files to other nodes, and receives replicas; the
protocol is `zero_contract.peer_memory`. The files never take more than the budget.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

import xxhash

from zero_agent.node.network import ANY_PORT, PatientServer, first_free
from zero_contract import handshake, owned_dir, peer_memory
from zero_contract.handshake import StrangerError, WireError
from zero_contract.owned_dir import OwnedDir
from zero_contract.peer_memory import FILE, Get, Put, Reply
from zero_contract.signing import Key, Purpose, Secret, derive
from zero_contract.worker import PeerMemoryReply, PeerMemoryRequest
from zero_orchestrator.addresses import host_port
from zero_orchestrator.observe.events import MemoryUse

log = logging.getLogger("zero")

DIRECTORY = Path("/dev/shm")
_PREFIX = "zero-ram."
GRACE_S = 60.0
"""How long other agents spare the memory of a crashed agent, which may be started again."""


class NodeMemory:
    """One agent's in-memory checkpoints; no memory is allocated before a worker asks for it."""

    def __init__(
        self,
        job: str,
        node: str,
        address: str,
        directory: Path = DIRECTORY,
        *,
        limit_bytes: int | None = None,
        ports: range = ANY_PORT,
        advertised: str = "",
    ) -> None:
        """Remove what dead agents have left, except what a successor may still adopt.

        By `node`, an id or the name of its machine, a successor finds its own. The server listens
        at `address` alone, on the first free port; others reach it as `advertised`.
        """
        # Dots divide the parts of a name: the pattern of job `a` must not match what is of `a.b`.
        job, node = (re.sub(r"[^0-9A-Za-z_-]", "-", word)[:64] for word in (job, node))
        self._name = f"{job}.{node}"
        self._address, self._ports = address, ports
        self._reached_at = advertised or address
        self._parent = directory
        self._memory: OwnedDir | None = None
        self._server: MemoryServer | None = None
        self._limit_bytes = limit_bytes
        self._half_bytes = 0
        """Half of the space that was free in the beginning."""
        self._of_job = f"{job}.*"
        sweep(directory, spare=f"{self._name}.*", grace_s=GRACE_S)

    def open(self, request: PeerMemoryRequest, secret: Secret) -> PeerMemoryReply:
        """Give a worker memory, or the reason why there is none; the last budget counts."""
        key = derive(secret, Purpose.PEER_MEMORY)
        try:
            if self._memory is None:
                name = f"{self._name}.{derive(secret, Purpose.MEMORY_NAME)[:8]}"
                # What earlier runs of the job have left has another secret in its name.
                sweep(self._parent, f"{self._name}.*", spare=f"{name}.*")
                # What a crashed agent of this run has left; readers verify its checksums, as ever.
                for left in sorted(self._parent.glob(f"{_PREFIX}{name}.*")):
                    with contextlib.suppress(OSError):  # that agent lives
                        self._memory = owned_dir.claim(left, only_left=True)
                        log.info("the agent before this one crashed; its memory is adopted")
                        break
                else:
                    self._memory = owned_dir.make(self._parent, f"{_PREFIX}{name}.")
                room = os.statvfs(self._parent)
                room_bytes = room.f_bavail * room.f_frsize + used_bytes(self._memory.path)
                self._half_bytes = room_bytes // 2  # training needs memory, too
                log.info("checkpoints in memory are kept in %s", self._memory.path)
            path = self._memory.path
            # The config's, but no more than --ram-budget, which is the node's owner's.
            budget = request.budget_bytes or self._limit_bytes or self._half_bytes
            if self._limit_bytes is not None:
                budget = min(budget, self._limit_bytes)
            if self._server is None:
                self._server = MemoryServer(path, self._address, key, budget, self._ports)
            self._server.budget_bytes = budget
        except OSError as error:
            return PeerMemoryReply(
                request=request.request, reason=f"{self._parent}: {error.strerror}"
            )
        return PeerMemoryReply(
            request=request.request,
            directory=str(path),
            address=host_port(self._reached_at, self._server.port),
            key=key,
            budget_bytes=budget,
        )

    @property
    def is_open(self) -> bool:
        """Whether a worker has asked for memory: its snapshots are lost with this agent."""
        return self._memory is not None

    def use(self) -> MemoryUse | None:
        """How much memory the snapshots take; None if no worker has asked for any."""
        if self._memory is None or self._server is None:
            return None
        budget = self._server.budget_bytes
        return MemoryUse(used_bytes=used_bytes(self._memory.path), budget_bytes=budget)

    def close(self) -> None:
        """Stop serving and give the memory back; the workers must be gone."""
        if self._server is not None:
            self._server.close()
        if self._memory is not None:
            self._memory.remove()
        self._server = self._memory = None
        # Also what was spared for a successor: this agent ends, and has not needed it.
        sweep(self._parent, self._of_job)


def sweep(directory: Path, names: str = "*", *, spare: str = "", grace_s: float = 0.0) -> None:
    """Remove what dead agents left, if it was not used for `grace_s` seconds; never raises."""
    spare = _PREFIX + spare if spare else ""
    for path in owned_dir.sweep(directory, _PREFIX + names, spare=spare, grace_s=grace_s):
        log.info("removed %s, left by an agent that died", path)


_DIGEST_CHARACTERS = 16
_BLOCK_LIMIT_BYTES = 64 << 20
"""The largest block of a replica: one block is held in memory while it is verified."""
_CHUNK_BYTES = 1 << 20
"""Bytes that are received, verified and written at once, because blocks may be short."""


class MemoryServer(PatientServer):
    """Serves one directory on daemon threads until it is closed."""

    def __init__(
        self, directory: Path, address: str, key: Key, budget_bytes: int, ports: range = ANY_PORT
    ) -> None:
        """Listen on the first free one of `ports` at the node's own address.

        Raises:
            OSError: It cannot listen there.
        """
        self.directory, self.key = directory, key
        self.budget_bytes = budget_bytes
        """How many bytes all files of the directory may take together."""
        self.taking = threading.Lock()
        """Held while space is reserved: two clients must not reserve the same bytes."""
        # `super()` finds no object within a lambda.
        listen = super().__init__
        first_free(ports, lambda port: listen((address, port), _Caller))
        self.port = int(self.server_address[1])
        self.address = host_port(address, self.port)
        threading.Thread(target=self.serve_forever, name="zero-ram-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening; returns at once."""
        # `shutdown` waits up to half a second for the server's thread.
        threading.Thread(target=self.shutdown, daemon=True).start()
        self.server_close()


class _Caller(socketserver.BaseRequestHandler):
    """One worker's connection."""

    server: MemoryServer
    request: socket.socket

    def handle(self) -> None:
        connection = self.request
        try:
            session = self._session = peer_memory.serve(connection, self.server.key)
        except StrangerError as error:
            log.warning("memory: refused %s: %s", self.client_address[0], error)
            return
        with suppress(EOFError):
            while True:
                record = session.receive()
                match record:
                    case Get():
                        try:
                            file = self._path(record.path).open("rb")
                        except (OSError, WireError) as error:
                            session.send(Reply(ok=False, reason=str(error)))
                            continue
                        with file:
                            there = max(os.fstat(file.fileno()).st_size - record.offset, 0)
                            length = min(record.length, there)
                            session.send(Reply(ok=True, length=length))
                            if length:
                                connection.sendfile(file, record.offset, length)
                    case Put():
                        self._take(record)
                    case Reply():
                        raise WireError("a reply without a request")

    def _take(self, wish: Put) -> None:
        """Receive a replica into a hidden file; rename it once every checksum is right."""
        with ExitStack() as opened:
            try:
                path, digests = self._path(wish.path), _digests(wish)
                file, incoming = opened.enter_context(self._reserved(path, wish.size_bytes))
            except (OSError, WireError) as error:  # the sender has sent no byte of it yet
                self._session.send(Reply(ok=False, reason=str(error)))
                return
            self._session.send(Reply(ok=True))
            problem = self._receive(file, wish, digests)
            # Only now under its name: a loader never sees half a replica, or a damaged one.
            if not problem:
                incoming.replace(path)
        self._session.send(Reply(ok=not problem, reason=problem))

    @contextmanager
    def _reserved(self, path: Path, size_bytes: int) -> Iterator[tuple[int, Path]]:
        """A hidden file of this size beside `path`, open, which is removed unless it is renamed.

        Raises:
            WireError: It would exceed the budget.
            OSError: It cannot be made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        incoming = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with ExitStack() as made:
            with self.server.taking:
                used, budget = used_bytes(self.server.directory), self.server.budget_bytes
                if used + size_bytes > budget:
                    raise WireError(
                        f"{size_bytes >> 20} MiB more than the {used >> 20} MiB in use exceed "
                        f"the budget of {budget >> 20} MiB (checkpoint.ram.budget_bytes, "
                        "--ram-budget)"
                    )
                file = os.open(incoming, flags, 0o600)
                made.callback(incoming.unlink, missing_ok=True)
                made.callback(os.close, file)
                # Within the lock: `used_bytes` counts it from here on. Pages come as it is written.
                os.truncate(file, size_bytes)
            yield file, incoming

    def _receive(self, descriptor: int, wish: Put, digests: list[int]) -> str:
        """Write all blocks to the file; the first problem in words, empty if there is none."""
        size = wish.block_bytes
        chunk_bytes = max(_CHUNK_BYTES // size, 1) * size
        buffer = memoryview(bytearray(min(chunk_bytes, wish.size_bytes)))
        problem = ""
        for begin in range(0, wish.size_bytes, chunk_bytes):
            chunk = buffer[: min(chunk_bytes, wish.size_bytes - begin)]
            handshake.receive_into(self.request, chunk)
            for at in range(0, len(chunk), size):
                number = (begin + at) // size
                # The rest is received as well: the reply follows it.
                if xxhash.xxh3_64_intdigest(chunk[at : at + size]) != digests[number]:
                    problem = problem or f"block {number} arrived damaged"
            # A file system that fills up takes a part, which the number alone tells.
            if os.pwrite(descriptor, chunk, begin) < len(chunk):
                problem = problem or "there is no room for it"
        return problem

    def _path(self, name: str) -> Path:
        if not FILE.fullmatch(name):
            raise WireError(f"{name[:100]!r} is not a file of a checkpoint")
        return self.server.directory / name


def _digests(wish: Put) -> list[int]:
    """The digest of each block of a replica. Raises WireError if its sizes do not fit."""
    if not 0 < wish.block_bytes <= _BLOCK_LIMIT_BYTES or not wish.size_bytes:
        raise WireError(f"blocks of {wish.block_bytes} bytes, {wish.size_bytes} in all")
    count = -(-wish.size_bytes // wish.block_bytes)
    if len(wish.digests) != count * _DIGEST_CHARACTERS:
        raise WireError(f"not one digest for each of {count} blocks")
    try:
        words = bytes.fromhex(wish.digests)
    except ValueError:
        raise WireError("digests that are not hexadecimal") from None
    return [int.from_bytes(words[at : at + 8], "big") for at in range(0, len(words), 8)]


def used_bytes(directory: Path) -> int:
    """The bytes of all files below a directory; a file with several hard links counts once."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(directory):  # skips what is gone meanwhile
        for name in names:
            with suppress(OSError):
                facts = os.lstat(os.path.join(parent, name))
                sizes[facts.st_ino] = facts.st_size if S_ISREG(facts.st_mode) else 0
    return sum(sizes.values())
