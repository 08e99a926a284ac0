"""Server of a node's in-memory checkpoints (peer memory): serves ranges, receives replicas.

Must always hold: a replica appears under its name only when it is complete and the checksum of
every block is right; a refused or interrupted transfer leaves nothing; the files never take more
than the budget; a client that does not know the key, or stops in the middle of a message, costs a
thread for seconds and nothing else.

The protocol is `zero_contract.peer_memory`.
"""

from __future__ import annotations

import logging
import os
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
from zero_contract import handshake, peer_memory
from zero_contract.handshake import StrangerError, WireError
from zero_contract.peer_memory import FILE, Get, Put, Reply
from zero_contract.signing import Key
from zero_orchestrator.addresses import host_port

log = logging.getLogger("zero")

_DIGEST_CHARACTERS = 16
_BLOCK_LIMIT_BYTES = 64 << 20
"""The largest block of a replica: one block is held in memory while it is verified."""
_CHUNK_BYTES = 1 << 20
"""Bytes that are received, verified and written at once, because blocks may be short."""


class MemoryServer:
    """Serves one directory on daemon threads until it is closed."""

    def __init__(
        self, directory: Path, address: str, key: Key, budget_bytes: int, ports: range = ANY_PORT
    ) -> None:
        """Listen on the first free one of `ports` at the node's own address.

        Raises:
            OSError: It cannot listen there.
        """
        self._server = first_free(ports, lambda port: _Server((address, port), _Caller))
        self._server.directory, self._server.key = directory, key
        self._server.budget_bytes = budget_bytes
        self.port = int(self._server.server_address[1])
        self.address = host_port(address, self.port)
        threading.Thread(
            target=self._server.serve_forever, name="zero-ram-server", daemon=True
        ).start()

    @property
    def budget_bytes(self) -> int:
        """How many bytes all files of the directory may take together."""
        return self._server.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, budget_bytes: int) -> None:
        self._server.budget_bytes = budget_bytes

    def close(self) -> None:
        """Stop listening; returns at once."""
        threading.Thread(target=self._server.shutdown, daemon=True).start()
        self._server.server_close()


class _Server(PatientServer):
    daemon_threads = True
    allow_reuse_address = False
    block_on_close = False
    request_queue_size = 128
    directory: Path
    key: Key
    budget_bytes: int

    def __init__(
        self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]
    ) -> None:
        self.taking = threading.Lock()
        """Held while space is reserved: two clients must not reserve the same bytes."""
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("memory: the connection with %s broke", client_address)


class _Caller(socketserver.BaseRequestHandler):
    """One worker's connection."""

    server: _Server
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
            except (OSError, WireError) as error:
                self._session.send(Reply(ok=False, reason=str(error)))
                return
            self._session.send(Reply(ok=True))
            problem = self._receive(file, wish, digests)
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
                os.truncate(file, size_bytes)  # pages are allocated as they are written
            yield file, incoming

    def _receive(self, descriptor: int, wish: Put, digests: list[int]) -> str:
        """Write all blocks to the file; the first wrong checksum in words, empty if none is."""
        size = wish.block_bytes
        chunk_bytes = max(_CHUNK_BYTES // size, 1) * size
        buffer = memoryview(bytearray(min(chunk_bytes, wish.size_bytes)))
        problem = ""
        for begin in range(0, wish.size_bytes, chunk_bytes):
            chunk = buffer[: min(chunk_bytes, wish.size_bytes - begin)]
            handshake.receive_into(self.request, chunk)
            for at in range(0, len(chunk), size):
                number = (begin + at) // size
                if xxhash.xxh3_64_intdigest(chunk[at : at + size]) != digests[number]:
                    problem = problem or f"block {number} arrived damaged"
            os.pwrite(descriptor, chunk, begin)
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
    for path in directory.rglob("*"):
        with suppress(OSError):  # gone meanwhile
            facts = path.lstat()
            sizes[facts.st_ino] = facts.st_size if S_ISREG(facts.st_mode) else 0
    return sum(sizes.values())
