"""Ranks of one host read what they exchange from each other's memory.

Owns the system call, the introduction at the start, and what such ranks tell each other afterwards,
over a Unix socket for each pair, with the thread that reads. Must always hold:

- At the start every rank says where it is and holds out a token; who can read the token can read
  more. All ranks come to the same division, in runs of consecutive ranks each of which can read
  every other of its run. A rank outside, or a kernel that forbids it, costs nothing but speed:
  sockets then carry what memory does not.
- An exchange is known by its name and by how many of that name came before. What a neighbour holds
  out goes to where this rank wants it under that name, whoever of the two comes first.
- What is held out stays as it is until every neighbour has said that it has read it: only then
  has the exchange ended for the rank that holds it out.
- It needs nobody's wait to go on: the thread reads as soon as both sides have begun.
- When a neighbour's socket closes, or its memory cannot be read, what needs it ends in an error.

Each byte is copied once, where loopback sockets copy it twice and wake the ranks in between. The
kernel allows it where a debugger would be allowed: the same user, and no Yama that forbids it.

Called by `cpu.transport`. Source of the idea: cross-memory attach, as MPI libraries use it.
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

from zero_comm.waiting import Watched

# ---- the system call ----


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def read_memory(pid: int, address: int, into: int, size_bytes: int) -> None:
    """Copy `size_bytes` bytes at `address` of process `pid` to the address `into` of this one.

    Raises:
        OSError: There is no such process or memory, it may not be read, or no such call here.
    """
    done = 0
    while done < size_bytes:
        here = _Range(into + done, size_bytes - done)
        there = _Range(address + done, size_bytes - done)
        count = _call()(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"reading the memory of process {pid}: {os.strerror(code)}")
        done += count


def let_siblings_read() -> None:
    """Let the parent of this process, and all below it, read this process's memory.

    Only that which Yama adds on some systems (ptrace_scope 1: none but ancestors may) is lifted,
    and only for them; where there is no Yama nothing happens. Source: prctl(2), PR_SET_PTRACER.
    """
    _LIBRARY.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


_PR_SET_PTRACER = 0x59616D61
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def _call() -> ctypes._NamedFuncPointer:
    try:
        function = _LIBRARY.process_vm_readv
    except AttributeError as error:
        raise OSError(f"there is no process_vm_readv here: {error}") from None
    function.restype = ctypes.c_ssize_t
    return function


# ---- exchanges ----

_HELD_OUT, _READ = b"h", b"r"
_WORD = struct.Struct("=c16sQQ")
"""What, the key, the address and the number of bytes."""


def key_of(what: str, turn: int) -> bytes:
    """The key of exchange number `turn` of a name."""
    return hashlib.blake2b(f"{turn} {what}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class SameHostPeer:
    """A rank whose memory can be read from here, and ours from there."""

    pid: int
    line: socket.socket
    """SOCK_SEQPACKET: a word is there as a whole or not at all."""


class Reading(Watched):
    """An exchange with neighbours, under way."""

    def __init__(
        self, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor], changed: threading.Condition
    ) -> None:
        super().__init__(changed)
        self.held = held
        self.wanted = wanted
        self.unread = set(wanted)
        """Ranks that this one has not read from,"""
        self.unreleased = set(held)
        """and those that have not read from this one."""

    def needs(self, rank: int) -> bool:
        """Whether anything is missing from that rank."""
        return rank in self.unread or rank in self.unreleased


class SameHostPeers:
    """This rank's exchanges with its neighbours."""

    def __init__(self, members: Mapping[int, SameHostPeer], changed: threading.Condition) -> None:
        """Begin.

        Args:
            members: By rank.
            changed: Notified when an exchange ends.
        """
        self._changed = changed
        self._desk = _Desk(members)
        threading.Thread(target=self._desk.serve, daemon=True).start()
        weakref.finalize(self, self._desk.close)

    def exchange(
        self, key: bytes, held: Mapping[int, Tensor], wanted: Mapping[int, Tensor]
    ) -> Reading:
        """Hold tensors out to some neighbours and want others of some; by rank, contiguous."""
        reading = Reading(held, wanted, self._changed)
        self._desk.open(key, reading)
        return reading


class _Desk:
    """What the caller and the thread share."""

    def __init__(self, members: Mapping[int, SameHostPeer]) -> None:
        self._members = members
        self._lock = threading.Lock()
        self._open: dict[bytes, Reading] = {}
        self._early: defaultdict[bytes, dict[int, tuple[int, int]]] = defaultdict(dict)
        """Held out to this rank, which has not begun that exchange: by rank."""
        self._ready: deque[bytes] = deque()
        """Keys that the thread is to look at."""
        self._unsaid: dict[int, deque[bytes]] = {rank: deque() for rank in members}
        """Words that a full socket did not take."""
        self._lost: set[int] = set()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        for member in members.values():
            member.line.setblocking(False)

    # ---- the caller ----

    def open(self, key: bytes, reading: Reading) -> None:
        with self._lock:
            self._open[key] = reading
            come = key in self._early
            lost = [rank for rank in self._lost if reading.needs(rank)]
        for rank, tensor in reading.held.items():
            self._say(rank, _WORD.pack(_HELD_OUT, key, tensor.data_ptr(), tensor.nbytes))
        if lost:
            self._fail(key, _gone(lost[0]))
        elif come:
            self._ready.append(key)
            self._ring()

    def close(self) -> None:
        self._closed = True
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # the thread has ended
            os.eventfd_write(self._bell, 1)

    def _say(self, rank: int, word: bytes) -> None:
        try:
            self._members[rank].line.send(word)
        except BlockingIOError:
            self._unsaid[rank].append(word)
            self._ring()
        except OSError:  # the thread will find the line's end
            pass

    # ---- the thread ----

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for rank, member in self._members.items():
                selector.register(member.line, selectors.EVENT_READ, rank)
            while not self._closed:
                self._turn(selector)
        os.close(self._bell)
        for member in self._members.values():
            member.line.close()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select():
            if key.data is None:
                os.eventfd_read(self._bell)
            elif not self._hear(key.data):
                selector.unregister(key.fileobj)
        while self._ready:
            self._read(self._ready.popleft())
        for rank, words in self._unsaid.items():
            if rank not in self._lost:
                self._go_on_saying(selector, rank, words)

    def _go_on_saying(
        self, selector: selectors.BaseSelector, rank: int, words: deque[bytes]
    ) -> None:
        line = self._members[rank].line
        with suppress(BlockingIOError, OSError):
            while words:
                line.send(words[0])
                words.popleft()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if words else 0)
        if selector.get_key(line).events != wanted:
            selector.modify(line, wanted, rank)

    def _hear(self, rank: int) -> bool:
        """Take what a neighbour has said; False at the end of the line."""
        try:
            word = self._members[rank].line.recv(_WORD.size)
        except BlockingIOError:
            return True
        except OSError:
            word = b""
        if not word:
            self._lose(rank)
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
        """Read everything that is held out under a key."""
        with self._lock:
            reading, come = self._open.get(key), self._early.pop(key, {})
        for rank, (address, size_bytes) in come.items():
            if reading is not None and self._copy(key, reading, rank, address, size_bytes):
                self._say(rank, _WORD.pack(_READ, key, 0, 0))
                self._tick(key, rank, released=False)

    def _copy(self, key: bytes, reading: Reading, rank: int, address: int, size: int) -> bool:
        into = reading.wanted.get(rank)
        if into is None or size != into.nbytes:
            wanted = 0 if into is None else into.nbytes
            self._fail(key, f"rank {rank} holds out {size} bytes, {wanted} are wanted")
            return False
        try:
            read_memory(self._members[rank].pid, address, into.data_ptr(), size)
        except OSError as error:
            self._fail(key, f"{_gone(rank)} ({error})")
            return False
        return True

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

    def _fail(self, key: bytes, why: str) -> None:
        with self._lock:
            reading = self._open.pop(key, None)
        if reading is not None:
            reading.end(RuntimeError(why))

    def _lose(self, rank: int) -> None:
        with self._lock:
            self._lost.add(rank)
            keys = [key for key, reading in self._open.items() if reading.needs(rank)]
        for key in keys:
            self._fail(key, _gone(rank))


def _gone(rank: int) -> str:
    return f"connection closed by rank {rank}, which runs on this host"


# ---- the introduction ----

_log = logging.getLogger(__name__)

SWITCH = "ZERO_NEIGHBOURS"
"""The environment variable that turns this off, with "0"."""

Gather = Callable[[Tensor, str], Tensor]
"""A row [n] and a name -> everybody's rows [world, n]. Collective."""

_CARD_BYTES = 512
_TOKEN_BYTES = 16
_INTRODUCTION_S = 60.0
_CREDENTIALS = struct.Struct("=iII")
"""Of a peer on a Unix socket: pid, user, group."""


def meet(
    rank: int, world: int, gather: Gather, changed: threading.Condition
) -> tuple[range, SameHostPeers | None]:
    """This rank's run of ranks that read each other's memory, and the way to do so. Collective.

    Args:
        rank: This one.
        world: Ranks.
        gather: Over sockets.
        changed: Notified when an exchange with neighbours ends.

    Raises:
        OSError: A neighbour is gone.
    """
    if _willing():
        let_siblings_read()
    token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel finds a name, in this network namespace
        listener.listen(world)
        row = json.dumps(_card(listener, token)).encode().ljust(_CARD_BYTES)
        rows = gather(torch.frombuffer(bytearray(row), dtype=torch.uint8), "where the ranks are")
        cards = [json.loads(bytes(each.tolist())) for each in rows]
        sees = [_readable(card, cards[rank]) for card in cards]
        mutual = gather(torch.tensor(sees, dtype=torch.uint8), "who reads whose memory").bool()
        run = next(run for run in runs(mutual & mutual.t()) if rank in run)
        members = _connect(listener, rank, run, cards)
    if rank == run.start and len(run) > 1:
        _log.debug("ranks %d to %d read from each other", run.start, run.stop - 1)
    return run, SameHostPeers(members, changed) if members else None


def _willing() -> bool:
    return os.environ.get(SWITCH, "1") != "0"


def _card(listener: socket.socket, token: ctypes.Array[ctypes.c_char]) -> dict[str, Any]:
    """Where this rank is."""
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid", "user")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {
        "willing": _willing(),
        "host": [boot, *spaces],
        "pid": os.getpid(),
        "listens": listener.getsockname().hex(),
        "address": ctypes.addressof(token),
        "token": token.raw.hex(),
    }


def _readable(card: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether what a card says can be read is what it says."""
    if not (card["willing"] and own["willing"] and card["host"] == own["host"]):
        return False
    found = ctypes.create_string_buffer(_TOKEN_BYTES)
    try:
        read_memory(card["pid"], card["address"], ctypes.addressof(found), _TOKEN_BYTES)
    except OSError as error:
        _log.debug("process %d: %s", card["pid"], error)
        return False
    return found.raw.hex() == card["token"]


def runs(mutual: Tensor) -> list[range]:
    """Consecutive ranks, all of which read each other: [world, world] bool -> a division."""
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
    """A line to every other rank of the run: the higher one calls."""
    lines: dict[int, socket.socket] = {}
    for other in range(run.start, rank):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(_INTRODUCTION_S)
        line.connect(bytes.fromhex(cards[other]["listens"]))
        lines[other] = line
    callers = {cards[other]["pid"]: other for other in range(rank + 1, run.stop)}
    listener.settimeout(_INTRODUCTION_S)
    while callers:
        line, _ = listener.accept()
        caller = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(caller)[0]
        if pid in callers:
            lines[callers.pop(pid)] = line
        else:  # a stranger
            line.close()
    return {other: SameHostPeer(cards[other]["pid"], line) for other, line in lines.items()}
