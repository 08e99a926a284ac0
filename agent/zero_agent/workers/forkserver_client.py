"""The agent's end of the forkserver: starts and ends it, sends it orders, receives its messages.

The forkserver reads no messages while it imports, or while it stands still (SIGSTOP, a full swap),
and the agent waits for neither: orders are held until the forkserver, and its socket, take them.
They arrive in the order in which they were given, from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_agent.node.network import ANY_PORT
from zero_agent.workers.forkserver import LONG_ORDER, PACKET_BYTES, STOP_FORKSERVER
from zero_agent.workers.output.tap import Tap
from zero_agent.workers.worker_main import Program
from zero_contract.clock import Clock, Stopwatch, SystemClock
from zero_contract.hub import Hub
from zero_contract.signing import Key

log = logging.getLogger("zero")

CLOSE_TIMEOUT_S = 8.0
KILL_TIMEOUT_S = 5.0
SIGNAL = "signal"
"""The order that begins no process."""
ANSWER_S = 10.0
"""A forkserver that has not carried an order out for this long is stuck: it takes milliseconds."""


class ForkserverClient:
    """The agent's handle on its forkserver process."""

    def __init__(
        self,
        hub: Hub,
        env: Mapping[str, str],
        preload: Sequence[str],
        on_news: Callable[[ForkserverClient, dict[str, Any]], None],
        clock: Clock | None = None,
    ) -> None:
        """Start it; `on_news` gets its messages, on any thread, and `{"gone": True}` at its end."""
        self._hub = hub
        self._on_news = on_news
        self.ready = False
        """Whether it has imported the modules of `preload`."""
        self._obeyed = self._answered = 0
        self._unresponsive = Stopwatch(clock or SystemClock())
        self._ids = itertools.count(1)
        # Packets keep the bounds of the orders, and their end shows the death of either process.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outbox = _Outbox(self._socket)
        fd = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zero_agent.workers.forkserver", str(fd), *preload],
            pass_fds=[fd],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C on this terminal is for the agent
        )
        theirs.close()
        hub.add(self._socket.fileno(), self._on_readable)

    def start(
        self,
        program: Program,
        env: Mapping[str, str],
        out: Tap,
        err: Tap,
        cpus: Collection[int] = (),
    ) -> int:
        """Fork a worker, bound to `cpus` if there are any; returns its id in `on_news`."""
        order = {"op": "start", "program": vars(program), "env": dict(env), "cpus": sorted(cpus)}
        worker = self._order(order, [out.write_fd, err.write_fd])
        # The order has copies of the descriptors, also while it is held.
        out.started()
        err.started()
        return worker

    def host_store(self, address: str, ports: range = ANY_PORT) -> int:
        """Fork a process that hosts a TCPStore on an address, at one of these ports; its id.

        `on_news` receives its port, or, if no port was free, its end.
        """
        ends = [ports.start, ports.stop]
        return self._order({"op": "store", "address": address, "ports": ends}, [])

    def host_timers(self, path: str) -> int:
        """Fork a process that hosts torch's file timers at a path; returns its id."""
        return self._order({"op": "timers", "path": path}, [])

    def keep_word(self, node: str, listener: int, key: Key) -> None:
        """Give the forkserver what it needs to answer in the place of a dead agent."""
        self._order({"op": "word", "node": node, "key": key}, [listener])

    def signal(self, worker: int, number: int) -> None:
        """Signal a worker's whole process group; nothing happens if it is gone."""
        # One that still waits for the imports is not started any more.
        if self._outbox.withdraw(worker):
            self._on_news(self, {"id": worker, "status": -int(number)})
        else:
            self._outbox.give(worker, {"op": SIGNAL, "signal": int(number)}, [])

    def stuck_s(self, imports_s: float) -> float | None:
        """Seconds that the forkserver has owed an answer, if that is too long; to be polled."""
        limit_s = ANSWER_S if self.ready else imports_s
        # To be ready is an answer, too: that to the order to import.
        answered = self._obeyed + self.ready
        if answered != self._answered or self._outbox.given <= self._obeyed:
            self._answered = answered
            self._unresponsive.stop()
        else:
            self._unresponsive.start()
        return self._unresponsive.elapsed_s if self._unresponsive.past(limit_s) else None

    def close(self) -> int:
        """End the forkserver and all its descendants; its exit code, or its signal, negative."""
        # The word of the agent is not needed: it lives, and a watcher must not take it for dead.
        # Without waiting: a forkserver that hangs reads nothing, and is killed below.
        with contextlib.suppress(OSError):
            self._socket.send(STOP_FORKSERVER, socket.MSG_DONTWAIT)
        self._hub.remove(self._socket, self._socket.close)
        self._outbox.close()
        if not self.ready:  # it imports, and reads no messages
            self.kill()
        try:
            return self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        try:
            return self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it cannot be killed
            return -signal.SIGKILL

    @property
    def pid(self) -> int:
        """The pid of the forkserver, the parent of the workers."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the forkserver and its process group; the kernel kills the workers with it."""
        # Else it would count as stuck, and be killed, in each turn.
        self._unresponsive.stop()
        # The group has what its imports have started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def _order(self, order: dict[str, Any], fds: list[int]) -> int:
        worker = next(self._ids)
        self._outbox.give(worker, order, fds)
        return worker

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(PACKET_BYTES)
        except OSError:
            data = b""
        if not data:
            self._hub.remove(self._socket)
            self._on_news(self, {"gone": True})
            return
        news = json.loads(data)
        if "ready" in news:
            self.ready = True
        self._obeyed += "obeyed" in news
        if self.ready:  # it has read an order, so there is room for another
            self._outbox.open()
        self._on_news(self, news)


@dataclass(frozen=True, slots=True)
class _Packet:
    """An order, and copies of its descriptors."""

    id: int
    begins: bool
    """Whether it begins the process; a signal has the id of its process, too."""
    data: bytes
    fds: list[int]


class _Outbox:
    """The agent's end of the forkserver's socket, for sending."""

    def __init__(self, to_forkserver: socket.socket) -> None:
        self._socket = to_forkserver
        self._lock = threading.Lock()
        self._held: deque[_Packet] = deque()
        self._open = self._closed = False
        self.given = 0
        """How many orders were given and not withdrawn."""

    def give(self, id: int, order: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Send an order about a process, or hold it; the caller may close the descriptors."""
        data = json.dumps({**order, "id": id}).encode()
        with self._lock:
            if self._closed:  # the process ended with the forkserver
                return
            # The caller may close its own before the packet is sent.
            copies = [os.dup(fd) for fd in fds]
            # A user may pass thousands of files as arguments. A longer packet would arrive cut off.
            if len(data) > PACKET_BYTES:
                descriptor = os.memfd_create("zero-order")  # a file that only descriptors lead to
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    file.write(data)
                data, copies = LONG_ORDER, [descriptor, *copies]
            packet = _Packet(id, order["op"] != SIGNAL, data, copies)
            self.given += 1
            self._held.append(packet)
            # Sent under the lock: two threads must not send in another order than they gave.
            if self._open:
                self._send_held()

    def open(self) -> None:
        """Send the held orders: the forkserver reads messages; callable any number of times."""
        with self._lock:
            self._open = True
            self._send_held()

    def withdraw(self, id: int) -> bool:
        """Drop the held order to start a process; False if it is not held any more."""
        with self._lock:
            found = [packet for packet in self._held if packet.id == id and packet.begins]
            self._held = deque(packet for packet in self._held if packet not in found)
            self.given -= len(found)
        _close(found)
        return bool(found)

    def close(self) -> None:
        """Send nothing any more, not even the held orders."""
        with self._lock:
            self._closed = True
            found, self._held = self._held, deque()
        _close(found)

    def _send_held(self) -> None:
        while self._held:
            packet = self._held[0]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", packet.fds))
            try:  # not `send_fds`: it ignores flags before Python 3.13
                self._socket.sendmsg([packet.data], [rights], socket.MSG_DONTWAIT)
            except BlockingIOError:  # full of orders: the answer to one of them comes back here
                return
            except OSError as error:
                log.warning("the forkserver cannot be reached: %s", error)  # its end is reported
            _close([self._held.popleft()])


def _close(packets: Collection[_Packet]) -> None:
    for packet in packets:
        for fd in packet.fds:
            os.close(fd)
