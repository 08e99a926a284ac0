"""Ranks of one host: what they hold out to each other, in whatever order, and how it fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from tests.support.waiting import wait_for
from zero_comm.errors import Diverged
from zero_comm.exchange.cpu.same_host import (
    Reading,
    SameHostPeer,
    SameHostPeers,
    key_of,
    meet,
    runs,
)

NOBODY = 2**22 + 1
"""A process id that no kernel gives."""


class Host:
    """Two ranks, both in this process, whose memory is then readable for sure."""

    def __init__(self, *, pid: int) -> None:
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.changed = threading.Condition()
        self.ranks = [
            SameHostPeers({1: SameHostPeer(pid, first)}, self.changed),
            SameHostPeers({0: SameHostPeer(pid, second)}, self.changed),
        ]

    def begin(self, rank: int, name: str, held: Tensor, turn: int = 0) -> Reading:
        """Hold a tensor out to the other rank, and want one like it."""
        other, wanted = 1 - rank, torch.full_like(held, -1)
        return self.ranks[rank].exchange(key_of(name, turn), {other: held}, {other: wanted})


@pytest.fixture
def host() -> Host:
    return Host(pid=os.getpid())


def ended(reading: Reading) -> Tensor:
    """What has come, when the exchange has ended; raises what went wrong."""
    with reading._changed:
        assert reading._changed.wait_for(reading.is_completed, 10), "not within 10 s"
    reading.wait()
    (came,) = reading.wanted.values()
    return came


def test_each_gets_what_the_other_holds_out_whoever_begins_first(host: Host) -> None:
    for first in (0, 1):
        held = [torch.arange(5000.0), torch.arange(5000.0).neg()]
        one = host.begin(first, f"weights {first}", held[first])
        assert not one.is_completed()
        two = host.begin(1 - first, f"weights {first}", held[1 - first])
        assert torch.equal(ended(one), held[1 - first])
        assert torch.equal(ended(two), held[first])


def test_names_and_turns_are_not_mixed_up(host: Host) -> None:
    names = [("a", 0), ("a", 1), ("b", 0)]
    tensors = {pair: torch.tensor([float(number)]) for number, pair in enumerate(names)}
    ours = {pair: host.begin(0, pair[0], tensors[pair], pair[1]) for pair in names}
    theirs = {pair: host.begin(1, pair[0], tensors[pair], pair[1]) for pair in reversed(names)}
    for readings in (ours, theirs):
        assert {pair: float(ended(reading)) for pair, reading in readings.items()} == {
            pair: float(tensor) for pair, tensor in tensors.items()
        }


def test_more_exchanges_than_a_socket_holds_words_for_all_end(host: Host) -> None:
    value = torch.ones(4)
    ours = [host.begin(0, "shards", value, turn) for turn in range(3000)]
    theirs = [host.begin(1, "shards", value, turn) for turn in range(3000)]
    assert sum(float(ended(reading).sum()) for reading in ours + theirs) == 4 * 6000


class Refuses:
    """A socket whose kernel lacks memory for some messages, one of which comes at last."""

    def __init__(self, line: socket.socket, code: int) -> None:
        self._line, self._code, self._left = line, code, 3

    def __getattr__(self, name: str) -> object:
        return getattr(self._line, name)

    def send(self, word: bytes) -> int:
        self._left -= 1
        if self._left >= 0:
            raise OSError(self._code, os.strerror(self._code))
        return self._line.send(word)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM])
def test_a_message_that_the_kernel_has_no_memory_for_is_sent_again(host: Host, code: int) -> None:
    members = host.ranks[0]._exchanges._members
    members[1] = SameHostPeer(os.getpid(), Refuses(members[1].line, code))
    ours, theirs = (host.begin(rank, "weights", torch.ones(3)) for rank in (0, 1))
    assert float(ended(ours).sum()) == float(ended(theirs).sum()) == 3


def test_a_neighbour_that_goes_fails_what_needs_it_and_what_comes_later(host: Host) -> None:
    done = host.begin(0, "before", torch.ones(1)), host.begin(1, "before", torch.ones(1))
    assert [float(ended(reading)) for reading in done] == [1.0, 1.0]
    under_way = host.begin(0, "under way", torch.ones(1))
    del host.ranks[1]
    for reading in (under_way, host.begin(0, "later", torch.ones(1))):
        with pytest.raises(RuntimeError, match="connection closed by rank 1"):
            ended(reading)


def test_who_has_ended_writes_to_no_file_that_has_the_number_of_its_bell(host: Host) -> None:
    exchanges, bell = host.ranks[0]._exchanges, host.ranks[0]._exchanges._bell
    exchanges.close()
    wait_for(lambda: not os.path.exists(f"/proc/self/fd/{bell}"), 10, "the end of the thread")
    other = os.eventfd(0, os.EFD_NONBLOCK)
    os.dup2(other, bell)
    exchanges.close()
    os.close(bell)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(other)
    os.close(other)


def test_memory_that_cannot_be_read_is_a_lost_neighbour() -> None:
    host = Host(pid=NOBODY)
    readings = [host.begin(rank, "weights", torch.ones(1)) for rank in (0, 1)]
    with pytest.raises(RuntimeError, match=f"closed by rank 1.*process {NOBODY}: No such process"):
        ended(readings[0])


def test_another_number_of_bytes_is_refused(host: Host) -> None:
    host.begin(1, "weights", torch.ones(3))
    with pytest.raises(Diverged, match="rank 1 sends 12 bytes where this rank expects 4"):
        ended(host.begin(0, "weights", torch.ones(1)))


@pytest.mark.parametrize(
    ("cut", "division"),
    [
        ([], [(0, 4)]),
        ([(0, 2)], [(0, 2), (2, 4)]),
        ([(1, 2)], [(0, 2), (2, 4)]),
        ([(3, 0), (3, 1), (3, 2)], [(0, 3), (3, 4)]),
        ([(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_a_run_is_of_consecutive_ranks_that_all_read_each_other(
    cut: list[tuple[int, int]], division: list[tuple[int, int]]
) -> None:
    mutual = torch.ones(4, 4, dtype=torch.bool)
    for one, other in cut:
        mutual[one, other] = mutual[other, one] = False
    assert runs(mutual) == [range(*run) for run in division]


MEETS = """
import threading, torch
from zero_comm.exchange.cpu.same_host import meet
print(meet(0, 2, lambda row, what: torch.stack([row, row]), threading.Condition()))
"""


CALLS = """
import socket, sys
call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
call.settimeout(60)
call.connect(bytes.fromhex(sys.argv[1]))
print("connected", flush=True)
print(call.recv(100))
"""


@pytest.mark.parametrize("number", [1, 3])
def test_strangers_who_connect_while_ranks_meet_are_hung_up_on_and_they_meet(number: int) -> None:
    """Of three the queue of a world of two is full."""
    both, rows = threading.Barrier(2, timeout=60), [torch.empty(0), torch.empty(0)]
    strangers: list[subprocess.Popen[str]] = []

    def gather(row: Tensor, what: str) -> Tensor:
        rank = threading.current_thread().rank  # type: ignore[attr-defined]
        rows[rank] = row
        both.wait()
        everyones = torch.stack(rows)
        if rank == 0 and not strangers:  # before the other rank connects
            where = json.loads(bytes(row.tolist()))["listens"]
            command = [sys.executable, "-c", CALLS, where]
            for _ in range(number):
                strangers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                assert strangers[-1].stdout.readline() == "connected\n"
        both.wait()
        if rank == 0 and what == "who reads whose memory":
            ranks[1].join(0.5)  # it connects meanwhile, or has failed
        return everyones

    met: dict[int, object] = {}
    ranks = [
        threading.Thread(
            target=lambda rank=rank: met.update(
                {rank: meet(rank, 2, gather, threading.Condition())}
            )
        )
        for rank in (0, 1)
    ]
    for rank, thread in enumerate(ranks):
        thread.rank = rank
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert [each.communicate(timeout=60)[0] for each in strangers] == ["b''\n"] * number
    assert [met[rank][0] for rank in (0, 1)] == [range(2), range(2)]
    assert all(met[rank][1] is not None for rank in (0, 1))


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="hides a file of /proc"
)
def test_a_kernel_that_does_not_say_where_a_rank_is_costs_nothing_but_speed() -> None:
    """As sandboxes do that have kernels of their own."""
    hidden = 'mount -t tmpfs none /proc/sys/kernel/random && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", hidden, "sh", sys.executable, "-c", MEETS]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.stdout == "(range(0, 1), None)\n", ended.stderr
