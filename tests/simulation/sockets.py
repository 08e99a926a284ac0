"""The sockets of simulated workers and agents: to the agent of a node, and between the nodes.

Each is what the product finds under the name `socket` in one of its modules.
"""

from __future__ import annotations

import socket as real_socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from msgspec import structs

from tests.simulation.standard_library import Waiters
from zero_contract.worker import ENV_FENCE, ENV_ROUND, Hello, Left, Message, decode, encode

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel, Process
    from tests.simulation.machine import Channel, Machines
    from tests.simulation.network import Network


class AgentSocket:
    """A connection of a worker to its agent, in the round in which it was made."""

    def __init__(self, machines: Machines, *_: object) -> None:
        assert machines.kernel.current is not None
        self._machines, self._kernel = machines, machines.kernel
        self.worker: Any = machines.kernel.current.process.owner
        self.rank = int(self.worker.env["RANK"])
        self.round, self.fence = (int(self.worker.env[name]) for name in (ENV_ROUND, ENV_FENCE))
        self.number = next(machines.connections)
        self.hung_up = False
        """Whether the agent has closed it, which reads nothing of it any more."""
        self._channel: Channel | None = None
        self._to_agent: deque[Message] = deque()
        self._to_worker: deque[Message | None] = deque()
        """What is on its way, in order; None: the end."""
        self._lines: list[bytes] = []
        self._closed = False
        self._waiters = Waiters(machines.kernel)

    def setsockopt(self, *_: object) -> None: ...

    def settimeout(self, timeout_s: float | None) -> None: ...

    def connect(self, path: str) -> None:
        self._channel = self._machines.channels.get(path)
        if self._channel is None:
            raise ConnectionRefusedError(111, "Connection refused")

    def sendall(self, data: bytes, flags: int = 0) -> None:
        channel = self._channel
        if self._closed or channel is None or not channel.process.alive:
            raise BrokenPipeError(32, "Broken pipe")
        for line in data.splitlines():
            self._to_agent.append(self._as_sent(line))
            arrive = partial(self._arrive, channel)
            self._kernel.after(self._machines.about(0.001), arrive, channel.process)

    def _as_sent(self, line: bytes) -> Message:
        message = decode(line)
        if isinstance(message, Hello):  # all simulated processes have the pid of this one
            message = structs.replace(message, pid=self.worker.pid)
        if isinstance(message, Left) and message.stays:
            self.worker.begin_wait()
        return message

    def _arrive(self, channel: Channel) -> None:
        message = self._to_agent.popleft()
        if not self.hung_up:
            channel.receive(self, message)

    def makefile(self, mode: str) -> Any:
        return Lines(self._read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Iterator[bytes]:
        while self._waiters.wait_until(lambda: self._lines or self._closed) and self._lines:
            yield self._lines.pop(0)

    # ---- the agent's end ----

    def send(self, message: Message) -> None:
        """Send the worker a message."""
        self._later(message)

    def hang_up(self) -> None:
        """Close it, after what has been sent."""
        self.hung_up = True
        self._later(None)

    def _later(self, message: Message | None) -> None:
        def arrive() -> None:
            message = self._to_worker.popleft()
            if message is None:
                self.close()
                return
            self.worker.hears(message)
            self._lines.append(encode(message).rstrip(b"\n"))
            self._waiters.wake()

        self._to_worker.append(message)
        self._kernel.after(self._machines.about(0.001), arrive, self.worker.process)

    @property
    def is_open(self) -> bool:
        """Whether an answer can still come."""
        return not self._closed

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        """Close it, at the worker's end."""
        self._closed = True
        self._waiters.wake()


class Lines(nullcontext[Any]):
    """What `socket.makefile` returns: the lines of a connection."""

    def __iter__(self) -> Iterator[bytes]:
        lines: Iterator[bytes] = self.enter_result
        return lines


def to_agent(machines: Machines) -> Any:
    """The module `socket` for `zero_comm.worker`."""
    return SimpleNamespace(
        socket=partial(AgentSocket, machines),
        **{
            name: getattr(real_socket, name)
            for name in ("AF_UNIX", "SOCK_STREAM", "SOL_SOCKET", "SO_SNDTIMEO", "SHUT_RDWR")
        },
    )


class Wire:
    """One end of a connection between two machines; its bytes take as long as the network."""

    def __init__(self, kernel: Kernel, network: Network, here: str, there: str) -> None:
        self._kernel, self._network, self._here, self._there = kernel, network, here, there
        self.peer: Wire
        self._came = bytearray()
        self._closed = False
        self._arrives_s = 0.0
        self._timeout_s: float | None = None
        self._waiters = Waiters(kernel)

    @classmethod
    def pair(cls, kernel: Kernel, network: Network, one: str, other: str) -> tuple[Wire, Wire]:
        """Both ends."""
        here, there = cls(kernel, network, one, other), cls(kernel, network, other, one)
        here.peer, there.peer = there, here
        return here, there

    def setsockopt(self, *_: object) -> None: ...

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def sendall(self, data: bytes | memoryview) -> None:
        if self.peer._closed or self._closed:
            raise BrokenPipeError(32, "Broken pipe")
        self._later(partial(self.peer._receive, bytes(data)))

    def sendfile(self, file: Any, offset: int, count: int) -> int:
        file.seek(offset)
        self.sendall(file.read(count))
        return count

    def _later(self, arrive: Callable[[], None]) -> None:
        """In order; a link that is cut loses what is on its way."""
        latency_s = self._network.latency_s(self._here, self._there)
        self._arrives_s = max(self._kernel.now + latency_s, self._arrives_s + 1e-9)

        def go() -> None:
            if self._network.delivers(self._here, self._there):
                arrive()
            else:  # the kernel gives up some time after the readers
                self._closed = self.peer._closed = True

        self._kernel.after(self._arrives_s - self._kernel.now, go)

    def _receive(self, data: bytes) -> None:
        self._came += data
        self._waiters.wake()

    def recv(self, count: int) -> bytes:
        self._waiters.wait_until(lambda: self._came or self._closed, self._timeout_s)
        if not self._came and not self._closed:
            raise TimeoutError("timed out")
        data = bytes(self._came[:count])
        del self._came[:count]
        return data

    def recv_into(self, buffer: memoryview) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._later(self.peer.hang_up)

    def hang_up(self) -> None:
        """The other end is closed, or its process is dead."""
        self._closed = True
        self._waiters.wake()


class Service:
    """What listens on a machine: each connection is served by a task of its process."""

    def __init__(self, process: Process, serve: Callable[[Wire], object]) -> None:
        self.process, self.serve = process, serve


def between_nodes(machines: Machines) -> Any:
    """The module `socket` for `zero_contract.peer_memory`."""
    kernel, network = machines.kernel, machines.network

    def create_connection(address: tuple[str, int], timeout_s: float) -> Wire:
        assert kernel.current is not None
        here, there = kernel.current.process.name.partition("/")[0], address[0]
        network.connect(here, there, lambda: machines.by_name[there].alive, timeout_s)
        service = machines.services.get(address)
        if service is None or not service.process.alive:
            raise ConnectionRefusedError(111, "Connection refused")
        mine, theirs = Wire.pair(kernel, network, here, there)
        mine.settimeout(timeout_s)
        kernel.spawn(service.process, "connection", lambda: service.serve(theirs))
        return mine

    return SimpleNamespace(
        create_connection=create_connection,
        IPPROTO_TCP=real_socket.IPPROTO_TCP,
        TCP_NODELAY=real_socket.TCP_NODELAY,
        socket=Wire,
    )
