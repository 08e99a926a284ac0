"""The machines of a simulated cluster, as an agent sees them: processes, sockets and neighbours.

Each class takes the place of a part of the product that touches a process id, a socket or a file:
`Forkserver` that of `ForkserverClient`, `Channel` and `Ring` those of the same names. They keep the
contracts of those: orders are held until the imports are done, a worker ends some time after its
signal, the workers die with the fork server, and it dies with its agent.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.kernel import Kernel, Process
from tests.simulation.network import Network
from zero_agent.node.ring import AnotherProcess, neighbour
from zero_contract.worker import ENV_SOCKET, Hello, Message, decode, encode
from zero_orchestrator.membership.job_state import Node

if TYPE_CHECKING:
    from tests.simulation.training import Training, Worker

IMPORTS_S = 2.0
"""About how long the fork server imports."""
START_S = 0.05
DIE_S = 0.02
"""About how long a process lives after SIGKILL."""
DIAL_S = 5.0
"""How long a connection to a machine that does not answer is tried."""


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
        self.forkservers: list[Forkserver] = []
        self.pids = itertools.count(1000)
        self.ports = itertools.count(20000)

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
        if agent is None:
            return
        self.kernel.kill(agent)
        self.bury(agent, word=not power)

    def bury(self, agent: Process, *, word: bool) -> None:
        """An agent has ended; the kernel kills what it has left.

        Args:
            agent: The process.
            word: Its fork server lives long enough to answer in its place.
        """
        for server in self.forkservers:
            if server.agent is agent:
                server.die(within_s=0.2 if word else 0.0)
        for path in [p for p, channel in self.channels.items() if channel.process is agent]:
            del self.channels[path]
        if word:
            for machine in self.by_name.values():
                if machine.ring is not None:
                    machine.ring.neighbour_died(agent)

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
        tap = SimpleNamespace(along=lambda *_: None)
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
            "zero_agent.loop.agent:NodeMemory": lambda *_, **__: NoMemory(),
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


class NoMemory:
    """In the place of `NodeMemory`: no in-memory checkpoints."""

    is_open = False

    def open(self, request: Any, secret: object) -> Any:
        """Refuse."""
        raise NotImplementedError("the simulated workers keep no checkpoints in memory")

    def use(self) -> None:
        """Nothing is used."""

    def close(self) -> None:
        """Nothing is held."""


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
        self._peers: dict[int, Worker] = {}
        machines.channels[path] = self

    def receive(self, worker: Worker, message: Message) -> None:
        """A worker has sent a message."""
        rank = worker.rank
        if isinstance(message, Hello):
            self._peers[rank] = worker
        self._on_message(rank, decode(encode(message).rstrip(b"\n")))

    def send(self, rank: int, message: Message) -> None:
        """As `Channel.send`."""
        if (worker := self._peers.get(rank)) is not None:
            self._kernel.after(self._machines.about(0.001), lambda: worker.hear(message))

    def hang_up(self) -> None:
        """As `Channel.hang_up`."""
        self._peers.clear()

    def close(self) -> None:
        """As `Channel.close`."""
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

    def dial(self, target: Node) -> Any:
        """As `Ring.dial`."""
        other = self._machines.by_name[target.id]
        network, kernel = self._machines.network, self._kernel
        if not (network.connects(self.machine.name, target.id) and other.alive):
            kernel.park(DIAL_S)
            raise TimeoutError(110, "Connection timed out")
        kernel.park(0.001)
        if not other.serves or other.ring is None or other.ring.me is None:
            raise ConnectionRefusedError(111, "Connection refused")
        if _key(other.ring.me) != _key(target):
            raise AnotherProcess(target.id)
        return SimpleNamespace(close=lambda: None)

    def close(self) -> None:
        """As `Ring.close`."""
        self._target = None
        if self.machine.ring is self:
            self.machine.ring = None


def _key(node: Node) -> tuple[str, str]:
    return node.id, node.incarnation


__all__ = ["ENV_SOCKET", "Channel", "Forkserver", "Machine", "Machines", "Ring"]
