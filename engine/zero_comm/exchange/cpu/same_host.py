"""Same-host peers: ranks of one host read exchanged tensors from each other's memory.

Owns the system call, the introduction at the start, and the messages of such ranks afterwards, over
a Unix socket for each pair, with the thread that reads. Each byte is copied once; loopback sockets
copy it twice and wake the ranks in between. Where the kernel forbids it, or a rank is elsewhere,
sockets are used instead.

Source of the idea: cross-memory attach, as MPI libraries use it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_comm.errors import Diverged
from zero_comm.waiting import Watched

# ---- the system call ----


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def read_memory(pid: int, address: int, into: int, size_bytes: int) -> None:
    """Copy `size_bytes` bytes at `address` of process `pid` to the address `into` of this one.

    Raises:
        OSError: There is no such process, memory or system call, or the read is not permitted.
    """
    try:
        read = _LIBRARY.process_vm_readv
    except AttributeError as error:
        raise OSError(f"there is no process_vm_readv here: {error}") from None
    read.restype = ctypes.c_ssize_t
    done = 0
    while done < size_bytes:
        # The kernel may have copied a part.
        here = _Range(into + done, size_bytes - done)
        there = _Range(address + done, size_bytes - done)
        count = read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"reading the memory of process {pid}: {os.strerror(code)}")
        done += count


_PR_SET_PTRACER = 0x59616D61
_LIBRARY = ctypes.CDLL(None, use_errno=True)


# ---- exchanges ----

_OFFER, _READ = b"h", b"r"
_WORD = struct.Struct("=c16sQQ")
"""The kind of message, the key, the address and the number of bytes."""
_UNLIKE = (
    "rank {} sends {} bytes where this rank expects {}: the ranks do not exchange the same. Run "
    "the same modules on every rank, and train the same parameters there (requires_grad)"
)


def key_of(what: str, turn: int) -> bytes:
    """The key of exchange number `turn` of a name."""
    return hashlib.blake2b(f"{turn} {what}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class SameHostPeer:
    """A rank that can read this rank's memory, and whose memory this rank can read."""

    pid: int
    line: socket.socket
    """SOCK_SEQPACKET: a message arrives whole or not at all."""


class Reading(Watched):
    """An exchange with same-host peers, under way."""

    def __init__(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], changed: threading.Condition
    ) -> None:
        super().__init__(changed)
        self.held = held
        self.wanted = wanted
        self.unread = set(wanted)
        """The ranks that this rank has not read from."""
        # An offered tensor must not change until all of them have reported that they have read it.
        self.unreleased = set(held)
        """The ranks that have not read from this rank."""

    def needs(self, rank: int) -> bool:
        """Whether the exchange still waits for that rank."""
        return rank in self.unread or rank in self.unreleased


class SameHostPeers:
    """This rank's exchanges with its same-host peers."""

    def __init__(self, members: Mapping[int, SameHostPeer], changed: threading.Condition) -> None:
        """Start the thread that reads from peers, by rank.

        `changed` is notified when an exchange ends.
        """
        self._changed = changed
        self._exchanges = _Exchanges(members)
        # It reads as soon as both sides have begun, whether or not a rank waits.
        threading.Thread(target=self._exchanges.serve, daemon=True).start()
        # The thread holds the exchanges alone, so it ends with this object.
        weakref.finalize(self, self._exchanges.close)

    def exchange(
        self, key: bytes, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor]
    ) -> Reading:
        """Offer tensors to some peers and want tensors of some; by rank, contiguous."""
        reading = Reading(held, wanted, self._changed)
        self._exchanges.open(key, reading)
        return reading


class _Exchanges:
    """The state that the caller and the thread share."""

    def __init__(self, members: Mapping[int, SameHostPeer]) -> None:
        self._members = members
        self._lock = threading.RLock()  # `close` may run in the midst of the thread
        self._open: dict[bytes, Reading] = {}
        self._early: defaultdict[bytes, dict[int, tuple[int, int]]] = defaultdict(dict)
        """By key and rank: offers to this rank, which has not begun that exchange."""
        self._ready: deque[bytes] = deque()
        """The keys whose offers the thread is to read."""
        self._unsent: dict[int, deque[bytes]] = {rank: deque() for rank in members}
        """By rank: messages that a full socket did not take."""
        self._lost: set[int] = set()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        for member in members.values():
            member.line.setblocking(False)

    # ---- the caller ----

    def open(self, key: bytes, reading: Reading) -> None:
        # Open before it is offered: a peer may have read it before `_send` returns.
        with self._lock:
            self._open[key] = reading
            come = key in self._early
            lost = [rank for rank in self._lost if reading.needs(rank)]
        for rank, tensor in reading.held.items():
            self._send(rank, _WORD.pack(_OFFER, key, tensor.data_ptr(), tensor.nbytes))
        if lost:
            self._fail(key, RuntimeError(_gone(lost[0])))
        elif come:
            self._ready.append(key)
            self._ring()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._ring()

    def _ring(self) -> None:
        with self._lock, suppress(OSError, ValueError):  # the thread has ended
            os.eventfd_write(self._bell, 1)

    def _send(self, rank: int, word: bytes) -> None:
        try:
            self._members[rank].line.send(word)
        except OSError:
            # Full, or the kernel lacks memory: it is sent again. Later words may overtake it: each
            # names its exchange. Where the connection has ended, the thread sees that.
            self._unsent[rank].append(word)
            self._ring()

    # ---- the thread ----

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for rank, member in self._members.items():
                selector.register(member.line, selectors.EVENT_READ, rank)
            while not self._closed:
                self._turn(selector)
        # Here, and not in `close`: until now this thread has selected on them.
        with self._lock:
            os.close(self._bell)
            self._bell = -1  # the number is another file's from now on
        for member in self._members.values():
            member.line.close()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select():
            if key.data is None:
                os.eventfd_read(self._bell)
            elif not self._receive(key.data):
                selector.unregister(key.fileobj)
        while self._ready:
            self._read(self._ready.popleft())
        # A socket that is full is watched until it has taken what waits for it.
        for rank, words in self._unsent.items():
            if rank not in self._lost:
                line = self._members[rank].line
                # A peer that is lost is noticed where its messages are received.
                with suppress(BlockingIOError, OSError):
                    while words:
                        line.send(words[0])
                        words.popleft()
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if words else 0)
                if selector.get_key(line).events != wanted:
                    selector.modify(line, wanted, rank)

    def _receive(self, rank: int) -> bool:
        """Receive a message of a peer; returns False at the end of the connection."""
        try:
            word = self._members[rank].line.recv(_WORD.size)
        except BlockingIOError:
            return True
        except OSError:  # as good as the end of the connection
            word = b""
        if not word:
            # One lock: an exchange that opens now sees the loss, or is among those that fail.
            with self._lock:
                self._lost.add(rank)
                keys = [key for key, reading in self._open.items() if reading.needs(rank)]
            for key in keys:
                self._fail(key, RuntimeError(_gone(rank)))
            return False
        what, key, address, size_bytes = _WORD.unpack(word)
        if what == _READ:
            self._tick(key, rank, released=True)
        else:
            with self._lock:
                self._early[key][rank] = (address, size_bytes)
                begun = key in self._open
            if begun:
                self._ready.append(key)
        return True

    def _read(self, key: bytes) -> None:
        """Read everything that is offered under a key."""
        with self._lock:
            reading, come = self._open.get(key), self._early.pop(key, {})
        if reading is None:  # it has failed
            return
        for rank, (address, size) in come.items():
            into = reading.wanted.get(rank)
            if into is None or size != into.nbytes:
                wanted = 0 if into is None else into.nbytes
                self._fail(key, Diverged(_UNLIKE.format(rank, size, wanted)))
                continue
            try:
                read_memory(self._members[rank].pid, address, into.data_ptr(), size)
            except OSError as error:
                self._fail(key, RuntimeError(f"{_gone(rank)} ({error})"))
                continue
            self._send(rank, _WORD.pack(_READ, key, 0, 0))
            self._tick(key, rank, released=False)

    def _tick(self, key: bytes, rank: int, *, released: bool) -> None:
        with self._lock:
            reading = self._open.get(key)
            if reading is None:  # it has failed
                return
            (reading.unreleased if released else reading.unread).discard(rank)
            if reading.unread or reading.unreleased:
                return
            del self._open[key]
        reading.end()

    def _fail(self, key: bytes, why: Exception) -> None:
        with self._lock:
            reading = self._open.pop(key, None)
        if reading is not None:
            reading.end(why)


def _gone(rank: int) -> str:
    return f"connection closed by rank {rank}, which runs on this host"


# ---- the introduction ----

_log = logging.getLogger(__name__)

SWITCH = "ZERO_NEIGHBOURS"
"""The environment variable that turns this off, with "0"."""

Gather = Callable[[Tensor, str], Tensor]
"""A row [n] and a name -> the rows of all ranks [world, n]. Collective."""

_CARD_BYTES = 512
_TOKEN_BYTES = 16
_INTRODUCTION_S = 60.0
_CONNECT_TIMEOUT = struct.pack("ll", int(_INTRODUCTION_S), 0)  # a C timeval
_CREDENTIALS = struct.Struct("=iII")
"""The credentials of a peer on a Unix socket: pid, user, group."""


def meet(
    rank: int, world: int, gather: Gather, changed: threading.Condition
) -> tuple[range, SameHostPeers | None]:
    """This rank's run of ranks that read each other's memory, and its peers there.

    Collective over sockets; `changed` is notified when an exchange with these peers ends.

    Raises:
        OSError: A peer is lost.
    """
    # A rank that can read the token can read the rest of the memory.
    token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # An unwilling rank has a card, too: all ranks take part in the gathers.
        card: dict[str, Any] = {"willing": False}
        if os.environ.get(SWITCH, "1") != "0":
            try:
                card = _card(listener, world, token)
            except OSError as error:  # not the kernel that this was made for
                _log.debug("this rank cannot say where it is: %s", error)
        row = json.dumps(card).encode().ljust(_CARD_BYTES)
        rows = gather(torch.frombuffer(bytearray(row), dtype=torch.uint8), "where the ranks are")
        cards = [json.loads(bytes(each.tolist())) for each in rows]
        sees = [_readable(card, cards[rank]) for card in cards]
        mutual = gather(
            torch.tensor(sees, dtype=torch.uint8, device="cpu"), "who reads whose memory"
        ).bool()
        # All ranks have the same matrix, and so divide alike.
        run = next(run for run in runs(mutual & mutual.t()) if rank in run)
        members = _connect(listener, rank, run, cards)
    if rank == run.start and len(run) > 1:
        _log.debug("ranks %d to %d read from each other", run.start, run.stop - 1)
    return run, SameHostPeers(members, changed) if members else None


def _card(
    listener: socket.socket, world: int, token: ctypes.Array[ctypes.c_char]
) -> dict[str, Any]:
    """Where this rank is, and where it listens from now on. Raises OSError."""
    # Let the parent of this process, and all below it, read this process's memory: Yama on some
    # systems lets only ancestors (ptrace_scope 1). Without Yama nothing happens.
    _LIBRARY.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
    listener.bind("")  # the kernel finds a name, in this network namespace
    listener.listen(world)
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid", "user")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {
        "willing": True,
        "host": [boot, *spaces],
        "pid": os.getpid(),
        "listens": listener.getsockname().hex(),
        "address": ctypes.addressof(token),
        "token": token.raw.hex(),
    }


def _readable(card: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether the token of a card can be read from the memory that the card names."""
    if not (card["willing"] and own["willing"] and card["host"] == own["host"]):
        return False
    found = ctypes.create_string_buffer(_TOKEN_BYTES)
    try:
        read_memory(card["pid"], card["address"], ctypes.addressof(found), _TOKEN_BYTES)
    except OSError as error:  # Yama forbids it, or it is another user's process
        _log.debug("process %d: %s", card["pid"], error)
        return False
    return found.raw.hex() == card["token"]


def runs(mutual: Tensor) -> list[range]:
    """Divide the ranks into runs of consecutive ranks that all read each other.

    `mutual` is [world, world] bool.
    """
    found: list[range] = []
    for rank in range(len(mutual)):
        if found and bool(mutual[rank, found[-1].start : rank].all()):
            found[-1] = range(found[-1].start, rank + 1)
        else:
            found.append(range(rank, rank + 1))
    return found


def _connect(
    listener: socket.socket, rank: int, run: range, cards: Sequence[dict[str, Any]]
) -> dict[int, SameHostPeer]:
    """A connection to every other rank of the run: the higher rank connects."""
    lines: dict[int, socket.socket] = {}
    for other in range(run.start, rank):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The kernel waits, as Python's timeout does not, while others fill the queue.
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _CONNECT_TIMEOUT)
        # It listens: every rank did before it sent its card.
        line.connect(bytes.fromhex(cards[other]["listens"]))
        lines[other] = line
    callers = {cards[other]["pid"]: other for other in range(rank + 1, run.stop)}
    listener.settimeout(_INTRODUCTION_S)
    # Who it is, the kernel says: anybody on this host may connect.
    while callers:
        line, _ = listener.accept()
        caller = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(caller)[0]
        if pid in callers:
            lines[callers.pop(pid)] = line
        else:  # a stranger
            line.close()
    return {other: SameHostPeer(cards[other]["pid"], line) for other, line in lines.items()}
