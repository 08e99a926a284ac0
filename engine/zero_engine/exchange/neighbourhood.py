"""Who of the ranks can read whose memory, found out once at the start.

Owns the introduction: every rank says where it is and holds out a token; who can read the token
can read more. Must always hold: all ranks come to the same division, in runs of consecutive ranks
each of which can read every other of its run. A rank outside, or a kernel that forbids it, costs
nothing but speed: sockets then carry what memory does not.

Called by `collectives`, on CPUs.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_engine.exchange import process_memory
from zero_engine.exchange.neighbours import Neighbour, Neighbours

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
) -> tuple[range, Neighbours | None]:
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
        process_memory.let_siblings_read()
    token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel finds a name, in this network namespace
        listener.listen(world)
        cards = _cards(gather, _card(listener, token))
        sees = [_readable(card, cards[rank]) for card in cards]
        mutual = gather(torch.tensor(sees, dtype=torch.uint8), "who reads whose memory").bool()
        run = _run_of(rank, runs(mutual & mutual.t()))
        members = _connect(listener, rank, run, cards)
    if rank == run.start and len(run) > 1:
        _log.debug("ranks %d to %d read from each other", run.start, run.stop - 1)
    return run, Neighbours(members, changed) if members else None


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


def _cards(gather: Gather, own: dict[str, Any]) -> list[dict[str, Any]]:
    row = json.dumps(own).encode().ljust(_CARD_BYTES)
    rows = gather(torch.frombuffer(bytearray(row), dtype=torch.uint8), "where the ranks are")
    return [json.loads(bytes(each.tolist())) for each in rows]


def _readable(card: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether what a card says can be read is what it says."""
    if not (card["willing"] and own["willing"] and card["host"] == own["host"]):
        return False
    found = ctypes.create_string_buffer(_TOKEN_BYTES)
    try:
        process_memory.read(card["pid"], card["address"], ctypes.addressof(found), _TOKEN_BYTES)
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


def _run_of(rank: int, division: Sequence[range]) -> range:
    return next(run for run in division if rank in run)


def _connect(
    listener: socket.socket, rank: int, run: range, cards: Sequence[dict[str, Any]]
) -> dict[int, Neighbour]:
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
    return {other: Neighbour(cards[other]["pid"], line) for other, line in lines.items()}
