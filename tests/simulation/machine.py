"""The machines of a simulated cluster, as an agent sees them: processes, sockets and neighbours.

Each class takes the place of a part of the product that touches a process id, a socket or a file:
`Forkserver` that of `ForkserverClient`, `Channel` and `Ring` those of the same names. They keep the
contracts of those: orders are held until the imports are done, a worker ends some time after its
signal, the workers die with the fork server, and it dies with its agent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.kernel import Kernel, Process
from tests.simulation.network import Network
from tests.simulation.sockets import AgentSocket, Service, between_nodes
from tests.simulation.standard_library import Lock
from zero_agent.node.last_word import TIMEOUT_S
from zero_agent.node.memory import NodeMemory, _Caller
from zero_agent.node.probe import Measured
from zero_agent.node.ring import AnotherProcess, neighbour
from zero_contract.worker import CommitReply, CommitRequest, Hello, Message, Saved
from zero_orchestrator.membership.job_state import Node

if TYPE_CHECKING:
    from tests.simulation.training import Training, Worker

IMPORTS_S = 2.0
"""About how long the fork server imports."""
START_S = 0.05
DIE_S = 0.02
"""About how long a process lives after SIGKILL."""


@dataclass(eq=False)
class Machine:
    """One machine, and what runs on it."""

    name: str
    alive: bool = True
    ill: str = ""
    """What its health checks find."""
    agent: Process | None = None
    ring: Ring | None = None
    slow: float = 1.0
    """Its workers need so many times as long for a step."""
    shm: Path = Path()
    """Its memory, a directory."""
    stores: set[str] = field(default_factory=set)
    """Addresses of the TCPStores that are open here."""

    @property
    def serves(self) -> bool:
        """Whether an agent runs here."""
        return self.alive and self.agent is not None and self.agent.alive


class Machines:
    """All machines of a cluster."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        self.kernel, self.network = kernel, network
        self.draw = kernel.random("machines")
        self.by_name: dict[str, Machine] = {}
        self.training: Training
        self.channels: dict[str, Channel] = {}
        self.services: dict[tuple[str, int], Service] = {}
        self.memories: dict[Process, NodeMemory] = {}
        self.forkservers: list[Forkserver] = []
        self.pids = itertools.count(1000)
        self.ports = itertools.count(20000)
        self.connections = itertools.count()

    def here(self) -> Machine:
        """The machine of the task that runs."""
        assert self.kernel.current is not None
        return self.by_name[self.kernel.current.process.name.partition("/")[0]]

    def about(self, seconds: float) -> float:
        """A time around this one."""
        return self.draw.uniform(0.5, 1.5) * seconds

    def end(self, machine: Machine, *, power: bool = False) -> None:
        """Kill the agent of a machine, and with it its workers; with `power`, the whole machine."""
        agent, machine.agent = machine.agent, None
        if power:
            machine.alive = False
        if agent is not None:
            self.kernel.kill(agent)
            self.bury(agent, word=not power)
        if power:
            self.training.disk.lose_power(machine.name)
            shutil.rmtree(machine.shm, ignore_errors=True)

    def bury(self, agent: Process, *, word: bool) -> None:
        """An agent has ended; the kernel kills what it has left.

        Args:
            agent: The process.
            word: Its fork server lives long enough to answer in its place.
        """
        for server in list(self.forkservers):
            if server.agent is agent:
                server.die(within_s=0.2 if word else 0.0)
        for path in [p for p, channel in self.channels.items() if channel.process is agent]:
            self.channels[path].close()
        for where in [w for w, service in self.services.items() if service.process is agent]:
            del self.services[where]
        memory = self.memories.pop(agent, None)
        if memory is not None and (owned := memory._memory) is not None and owned._lock >= 0:
            os.close(owned._lock)
            owned._lock = -1
        if word:
            for machine in self.by_name.values():
                if machine.ring is not None:
                    machine.ring.neighbour_died(agent)

    def unlock(self, memory: Any) -> None:
        """The process of a `SharedStaging` is dead: its file is no longer locked."""
        if (made := getattr(memory._remove, "detach", lambda: None)()) is not None:
            os.close(made[2][1])

    def parts(self) -> dict[str, Any]:
        """What takes the place of what in the product; see `standard_library.replaced`."""
        machines = self

        class HereForkserver(Forkserver):
            def __init__(self, hub: object, env: object, preload: object, news: Any, clock: object):
                super().__init__(machines, news)

        class HereChannel(Channel):
            def __init__(self, hub: object, path: Any, on_message: Any) -> None:
                super().__init__(machines, str(path), on_message)

        class HereRing(Ring):
            def __init__(self, address: str, on_dead: Any, ports: object) -> None:
                super().__init__(machines, address, on_dead)

        hub = SimpleNamespace(pauses=False, close=lambda: None)
        tap = SimpleNamespace(along=lambda *_: SimpleNamespace(follow=lambda route: None))
        unchanged = SimpleNamespace(changed=None)
        where = "zero_agent.loop.node_workers"
        return {
            f"{where}:ForkserverClient": HereForkserver,
            f"{where}:Channel": HereChannel,
            f"{where}:Hub": lambda: hub,
            f"{where}:Installed": lambda: unchanged,
            f"{where}:interface_of": lambda address: "",
            "zero_agent.workers.group:Tap": tap,
            "zero_agent.workers.group:OomKills": lambda: SimpleNamespace(blame=lambda: ""),
            "zero_agent.loop.agent:Ring": HereRing,
            "zero_agent.loop.agent:NodeMemory": partial(Memory, self),
            "zero_agent.node.memory:MemoryServer": partial(PageServer, self),
            "zero_contract.peer_memory:socket": between_nodes(self),
            "zero_agent.loop.answers:probe.measure": lambda connection: Measured(
                latency_s=0.001, bytes_per_s=1e9, cpu_wait=0.0
            ),
            "zero_agent.loop.agent:Strain": lambda clock: SimpleNamespace(look=lambda: {}),
            "zero_agent.loop.agent:devices": lambda: "",
            "zero_agent.loop.config:identity.own": lambda: f"pid of {self.here().name}",
            "zero_agent.loop.leaving:socket": SimpleNamespace(gethostname=lambda: self.here().name),
            "zero_agent.node.health_checks:examine": lambda node: self._examine(),
            "zero_agent.node.health_checks:complaint": lambda found: found,
        }

    def _examine(self) -> str:
        machine = self.here()
        self.kernel.park(self.about(0.3))
        return machine.ill


class Memory(NodeMemory):
    """`NodeMemory` on the memory of a simulated machine, which outlives the agent's process."""

    def __init__(self, machines: Machines, *words: Any, **options: Any) -> None:
        machine = machines.here()
        machine.shm.mkdir(exist_ok=True)
        assert machines.kernel.current is not None
        machines.memories[machines.kernel.current.process] = self
        super().__init__(*words, **{**options, "directory": machine.shm})


class PageServer:
    """`MemoryServer`, which serves connections of the simulated network."""

    def __init__(
        self, machines: Machines, directory: Path, address: str, key: Any, budget: int, ports: Any
    ) -> None:
        assert machines.kernel.current is not None
        self.port = next(machines.ports)
        self.address = f"{address}:{self.port}"
        self.budget_bytes = budget
        self.directory, self.key = directory, key
        self.taking = Lock(machines.kernel)
        self._machines, self._where = machines, (address, self.port)
        process = machines.kernel.current.process
        machines.services[self._where] = Service(process, self._serve)

    def _serve(self, connection: Any) -> None:
        with contextlib.suppress(OSError):
            _Caller(connection, (connection._there, 0), self)  # type: ignore[arg-type]
        connection.close()

    def close(self) -> None:
        """As `MemoryServer.close`."""
        self._machines.services.pop(self._where, None)


class Forkserver:
    """The fork server of one agent, and the agent's handle on it."""

    def __init__(self, machines: Machines, on_news: Callable[[Any, dict[str, Any]], None]) -> None:
        assert machines.kernel.current is not None
        self._machines, self._kernel = machines, machines.kernel
        self._on_news = on_news
        self.agent: Process = machines.kernel.current.process
        self.machine = machines.here()
        self.ready = False
        self.alive = True
        self.pid = next(machines.pids)
        self._ids = itertools.count(1)
        self._held: list[tuple[int, Callable[[], None]]] = []
        self.running: dict[int, Worker | str] = {}
        """By id: a worker, or the address of a TCPStore."""
        machines.forkservers.append(self)
        self._kernel.after(machines.about(IMPORTS_S), self._imported, self.agent)

    def _imported(self) -> None:
        if not self.alive:
            return
        self.ready = True
        self._tell(ready=True)
        held, self._held = self._held, []
        for _, order in held:
            order()

    def _tell(self, **news: Any) -> None:
        """Send the agent a message."""

        def arrive() -> None:
            self._on_news(self, news)

        self._kernel.after(self._machines.about(0.001), arrive, self.agent)

    def _order(self, number: int, order: Callable[[], None]) -> int:
        if self.ready:
            order()
        else:
            self._held.append((number, order))
        return number

    def start(
        self, program: Any, env: Mapping[str, str], out: object, err: object, cpus: object = ()
    ) -> int:
        """As `ForkserverClient.start`."""
        number = next(self._ids)

        def start() -> None:
            worker = self._machines.training.worker(self, number, dict(env))
            self.running[number] = worker
            self._kernel.after(self._machines.about(START_S), worker.begin)

        return self._order(number, start)

    def host_store(self, address: str, ports: object = None) -> int:
        """As `ForkserverClient.host_store`."""
        number, port = next(self._ids), next(self._machines.ports)

        def host() -> None:
            where = f"{address}:{port}"
            self.running[number] = where
            self.machine.stores.add(where)
            self._kernel.after(self._machines.about(0.02), lambda: self._tell(id=number, port=port))

        return self._order(number, host)

    def keep_word(self, node: str, listener: int, key: object) -> None:
        """It proves the death of its agent; `Machines.bury` does."""

    def signal(self, worker: int, number: int) -> None:
        """As `ForkserverClient.signal`."""
        if any(held == worker for held, _ in self._held):
            self._held = [one for one in self._held if one[0] != worker]
            self._on_news(self, {"id": worker, "status": -int(number)})
            return
        found = self.running.get(worker)
        if isinstance(found, str):
            self._kernel.after(self._machines.about(DIE_S), lambda: self.ended(worker, -number))
        elif found is not None:
            found.signalled(number)

    def ended(self, number: int, status: int) -> None:
        """One of its processes has ended."""
        found = self.running.pop(number, None)
        if found is None:
            return
        if isinstance(found, str):
            self.machine.stores.discard(found)
            self._machines.training.store_closed(found)
        if self.alive:
            self._tell(id=number, status=int(status))

    def stuck_s(self, imports_s: float) -> None:
        """It always answers."""

    def kill(self) -> None:
        """As `ForkserverClient.kill`."""
        if self.alive:
            self.die(within_s=0.0)
            self._tell(gone=True)

    def close(self) -> int:
        """As `ForkserverClient.close`."""
        self.die(within_s=0.0)
        return -int(signal.SIGKILL)

    def die(self, within_s: float) -> None:
        """End, and all its processes with it."""
        if not self.alive:
            return

        def end() -> None:
            self.alive = False
            for number, found in list(self.running.items()):
                if not isinstance(found, str):
                    found.end(-signal.SIGKILL)
                self.ended(number, -signal.SIGKILL)
            if self in self._machines.forkservers:
                self._machines.forkservers.remove(self)

        if within_s:
            self._kernel.after(self._machines.draw.uniform(0, within_s), end)
        else:
            end()


class Channel:
    """The agent's socket for its workers."""

    def __init__(
        self, machines: Machines, path: str, on_message: Callable[[int, Message], None]
    ) -> None:
        assert machines.kernel.current is not None
        self._machines, self._kernel = machines, machines.kernel
        self.process: Process = machines.kernel.current.process
        self.path = path
        self._on_message = on_message
        self._peers: dict[int, AgentSocket] = {}
        machines.channels[path] = self

    def receive(self, peer: AgentSocket, message: Message) -> None:
        """A worker has sent a message."""
        watcher = self._machines.training.watcher
        if isinstance(message, Hello):
            held = self._peers.get(peer.rank)
            if held is None or (held.round, held.number) <= (peer.round, peer.number):
                self._peers[peer.rank] = peer
        if isinstance(message, CommitRequest):
            watcher.asked(peer, message)
        if isinstance(message, Saved):
            watcher.acknowledged(peer, message)
        self._on_message(peer.rank, message)

    def send(self, rank: int, message: Message) -> None:
        """As `Channel.send`."""
        if (peer := self._peers.get(rank)) is not None:
            if isinstance(message, CommitReply):
                self._machines.training.watcher.answered(peer, message.request)
            peer.send(message)

    def hang_up(self, last: Mapping[int, Message] = MappingProxyType({})) -> None:
        """As `Channel.hang_up`."""
        for rank, message in last.items():
            self.send(rank, message)
        for peer in self._peers.values():
            peer.hang_up()
        self._peers.clear()

    def close(self) -> None:
        """As `Channel.close`."""
        self.hang_up()
        self._machines.channels.pop(self.path, None)


class Ring:
    """The liveness ring: it learns at once of a neighbour's death, if the network lets it."""

    def __init__(
        self, machines: Machines, address: str, on_dead: Callable[[Node, bool], None]
    ) -> None:
        assert machines.kernel.current is not None
        self._machines, self._kernel = machines, machines.kernel
        self._on_dead = on_dead
        self.process: Process = machines.kernel.current.process
        self.machine = machines.here()
        self.machine.ring = self
        self.port = next(machines.ports)
        self.listener = 0
        self.me: Node | None = None
        self._target: Node | None = None
        self._met = False

    def start(self, me: Node, key: object) -> None:
        """As `Ring.start`."""
        self.me = me

    def follow(self, me: Node, nodes: Sequence[Node]) -> None:
        """As `Ring.follow`."""
        self.me = me
        target = neighbour(me, nodes)
        before, self._target = self._target, target
        if target is None or (before and _key(before) == _key(target)):
            return
        self._met = False
        self._meet()

    def _meet(self) -> None:
        target = self._target
        if target is None or self._met:
            return
        other = self._machines.by_name[target.id]
        connects = self._machines.network.connects(self.machine.name, target.id)
        answers = other.serves and other.ring is not None and other.ring.me is not None
        if connects and answers and _key(other.ring.me) == _key(target):
            self._met = True
            return

        def again() -> None:
            if self._target is target:
                self._meet()

        self._kernel.after(1.0, again, self.process)

    def neighbour_died(self, agent: Process) -> None:
        """The agent on another machine has ended; its kernel, or its fork server, says so."""
        target = self._target
        if target is None or not self._met or not self.process.alive:
            return
        other = self._machines.by_name[target.id]
        if other.ring is None or other.ring.process is not agent:
            return
        if not self._machines.network.connects(self.machine.name, target.id):
            return
        self._report(target, self._machines.draw.random() < 0.8)

    def suspect(self) -> None:
        """The neighbour's port refuses, although its agent may live: a firewall."""
        if self._target is not None and self._met:
            self._report(self._target, False)

    def _report(self, target: Node, certain: bool) -> None:
        self._met = False
        delay_s = self._machines.about(0.02)
        self._kernel.after(delay_s, lambda: self._on_dead(target, certain), self.process)

    def dial(self, target: Node, connect_s: float = TIMEOUT_S, answer_s: float = TIMEOUT_S) -> Any:
        """As `Ring.dial`."""
        other = self._machines.by_name[target.id]
        network = self._machines.network
        network.connect(self.machine.name, target.id, lambda: other.alive, connect_s)
        agent = other.agent
        if agent is not None and other.serves and agent.frozen:  # its kernel accepts
            self._kernel.park(answer_s)
            if other.agent is agent and agent.frozen:  # and has not reset the connection since
                raise TimeoutError("timed out")
        if not other.serves or other.ring is None or other.ring.me is None:
            raise ConnectionRefusedError(111, "Connection refused")
        if _key(other.ring.me) != _key(target):
            raise AnotherProcess(target.id)
        return Dialled()

    def close(self) -> None:
        """As `Ring.close`."""
        self._target = None
        if self.machine.ring is self:
            self.machine.ring = None


class Dialled:
    """A connection to another agent."""

    def __enter__(self) -> Dialled:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


def _key(node: Node) -> tuple[str, str]:
    return node.id, node.incarnation


__all__ = ["Channel", "Forkserver", "Machine", "Machines", "Ring"]
