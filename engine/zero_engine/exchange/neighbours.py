"""Ranks of one host read what they exchange from each other's memory.

Owns what such ranks tell each other, over a Unix socket for each pair, and the thread that reads.
Must always hold:

- An exchange is known by its name and by how many of that name came before. What a neighbour holds
  out goes to where this rank wants it under that name, whoever of the two comes first.
- What is held out stays as it is until every neighbour has said that it has read it: only then
  has the exchange ended for the rank that holds it out.
- It needs nobody's wait to go on: the thread reads as soon as both sides have begun.
- When a neighbour's socket closes, or its memory cannot be read, what needs it ends in an error.

Each byte is copied once, where loopback sockets copy it twice and wake the ranks in between.

Made by `neighbourhood`; used by `collectives`.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from zero_engine.exchange import process_memory
from zero_engine.exchange.waiting import Told

_HELD_OUT, _READ = b"h", b"r"
_WORD = struct.Struct("=c16sQQ")
"""What, the key, the address and the number of bytes."""


def key_of(what: str, turn: int) -> bytes:
    """The key of exchange number `turn` of a name."""
    return hashlib.blake2b(f"{turn} {what}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A rank whose memory can be read from here, and ours from there."""

    pid: int
    line: socket.socket
    """SOCK_SEQPACKET: a word is there as a whole or not at all."""


class Reading(Told):
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


class Neighbours:
    """This rank's exchanges with its neighbours."""

    def __init__(self, members: Mapping[int, Neighbour], changed: threading.Condition) -> None:
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

    def __init__(self, members: Mapping[int, Neighbour]) -> None:
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
            process_memory.read(self._members[rank].pid, address, into.data_ptr(), size)
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
