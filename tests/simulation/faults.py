"""The faults of a simulation: a list of values, drawn from a seed, that can be shortened."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tests.simulation.cluster import JOB, Cluster
from tests.simulation.etcd import SimulatedStore
from tests.simulation.kernel import Process
from tests.simulation.machine import Machine
from tests.simulation.network import ETCD
from tests.simulation.training import Worker
from zero_checkpoint.format.manifest import MANIFEST
from zero_orchestrator.ctl.requests import ask_to_drain, ask_to_stop
from zero_orchestrator.errors import StoreError

HEAL = "heal"


@dataclass(frozen=True, order=True)
class Fault:
    """Something that happens to the cluster."""

    at_s: float
    kind: str
    node: str = ""
    other: str = ""
    for_s: float = 0.0

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.node, self.other)))
        lasts = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.at_s:g} {self.kind}{' ' if where else ''}{where}{lasts}"

    @classmethod
    def of(cls, text: str) -> Fault:
        """The inverse of `str`."""
        words = text.split()
        for_s = float(words[words.index("for") + 1]) if "for" in words else 0.0
        named = words[2 : words.index("for") if "for" in words else None]
        node, other = (*named, "", "")[:2]
        return cls(float(words[0]), words[1], node, other, for_s)


def _later(cluster: Cluster, fault: Fault, undo: Callable[[], object]) -> None:
    cluster.kernel.after(fault.for_s, undo)


def _agent(cluster: Cluster, fault: Fault) -> Process | None:
    return cluster.machines.by_name[fault.node].agent


def _kill(cluster: Cluster, fault: Fault, *, power: bool) -> None:
    machine = cluster.machines.by_name[fault.node]
    run = next((run for run in cluster.runs if run.process is machine.agent), None)
    cluster.machines.end(machine, power=power)
    if run is not None:
        cluster.on_agent_killed(run)
    if fault.for_s:
        _later(cluster, fault, partial(cluster.start, fault.node))


def _freeze(cluster: Cluster, fault: Fault, *, workers: bool) -> None:
    process = _agent(cluster, fault)
    if process is None:
        return
    frozen = [w for w in cluster.workers if workers and w.server.agent is process]
    cluster.kernel.freeze(process)
    for worker in frozen:
        worker.freeze(on=True)

    def thaw() -> None:
        cluster.kernel.thaw(process)
        for worker in frozen:
            worker.freeze(on=False)

    _later(cluster, fault, thaw)


def _stall(cluster: Cluster, fault: Fault) -> None:
    process = _agent(cluster, fault)
    if process is not None and process.tasks:
        cluster.kernel.hold(process.tasks[0], fault.for_s)


def _stick(cluster: Cluster, fault: Fault) -> None:
    """The loop of an agent stands still for ever, while its threads run; of one node at a time."""
    process = _agent(cluster, fault)
    if process is not None and process.tasks and not any(r.process.stuck for r in cluster.runs):
        process.stuck = True
        cluster.kernel.hold(process.tasks[0], 1e9)


def _slow_loop(cluster: Cluster, fault: Fault) -> None:
    process = _agent(cluster, fault)
    if process is not None:
        process.lag_s = 0.5
        _later(cluster, fault, lambda: setattr(process, "lag_s", 0.0))


def _cut(cluster: Cluster, fault: Fault, *, both: bool) -> None:
    network, one, other = cluster.network, fault.node, fault.other
    links = [(one, other), (other, one)] if both else [(one, other)]
    for link in links:
        network.cut(*link)
        _later(cluster, fault, partial(network.mend, *link))


def _alone(cluster: Cluster, fault: Fault) -> None:
    for other in (*cluster.machines.by_name, ETCD):
        if other != fault.node:
            _cut(cluster, Fault(0, "", fault.node, other, fault.for_s), both=True)


def _outage(cluster: Cluster, fault: Fault) -> None:
    """No node reaches etcd, which works, so that leases end."""
    for name in cluster.machines.by_name:
        _cut(cluster, Fault(0, "", name, ETCD, fault.for_s), both=True)


def _restore(cluster: Cluster, fault: Fault, *, new_cluster: bool) -> None:
    """Somebody replaces etcd by a copy of it from before: what was written meanwhile is lost."""
    cluster.etcd.copy()
    _later(cluster, fault, lambda: cluster.etcd.restore(new_cluster=new_cluster))


def _set(cluster: Cluster, fault: Fault, name: str, value: object, after: object) -> None:
    """Change something of the cluster for a while: `etcd.full`, `training.disk.full`."""
    path, _, attribute = name.rpartition(".")
    holder: object = cluster
    for part in path.split("."):
        holder = getattr(holder, part)
    setattr(holder, attribute, value)
    _later(cluster, fault, lambda: setattr(holder, attribute, after))


def _corrupt(cluster: Cluster, fault: Fault) -> None:
    """A file of the newest checkpoint on disk is damaged, if there is another whole one."""
    if (path := cluster.training.disk.corrupt()) is not None:
        cluster.say("disk", f"damaged: {path.parent.name}/{path.name}")


def _corrupt_memory(cluster: Cluster, fault: Fault) -> None:
    """A file of a checkpoint in the memory of a node is damaged."""
    files = sorted(cluster.machines.by_name[fault.node].shm.glob("*/*/step-*/*"))
    files = [path for path in files if (path.parent / MANIFEST).exists()]
    if files:
        cluster.training.disk.flip(cluster.kernel.random(f"{fault}").choice(files))


def _worker(cluster: Cluster, fault: Fault, what: str) -> None:
    found = [w for w in cluster.workers if w.machine.name == fault.node]
    if not found:
        return
    worker = found[0]
    if what == "fail":
        worker.fail("RuntimeError: simulated")
    elif what == "kill":
        worker.end(-9)
    elif what == "hang":
        worker.hangs = worker.stepped  # before its first step, nothing tells a hang from a load
    else:
        worker.freeze(on=True)
        _later(cluster, fault, lambda: worker.freeze(on=False))


def _waiting(cluster: Cluster, fault: Fault, what: str) -> None:
    """Something happens to a worker that waits for a round: the next one of the node that does."""

    def happens(worker: Worker) -> None:
        if what == "kill":
            worker.end(-9)
        elif worker.alive:
            worker.freeze(on=True)
            _later(cluster, fault, lambda: worker.freeze(on=False))

    found = [w for w in cluster.workers if w.machine.name == fault.node and w.waits]
    if found:
        happens(found[0])
    else:
        cluster.training.ambushes[fault.node] = happens


def _machine(cluster: Cluster, fault: Fault, name: str, value: object, after: object) -> None:
    machine: Machine = cluster.machines.by_name[fault.node]
    setattr(machine, name, value)
    _later(cluster, fault, lambda: setattr(machine, name, after))


def _clock(cluster: Cluster, fault: Fault) -> None:
    process = _agent(cluster, fault)
    if process is not None:
        process.wall_offset_s += fault.for_s


def _suspect(cluster: Cluster, fault: Fault) -> None:
    ring = cluster.machines.by_name[fault.node].ring
    if ring is not None:
        ring.suspect()


def _signal(cluster: Cluster, fault: Fault, *, again: bool) -> None:
    cluster.signal(fault.node, again=again)
    if fault.for_s:
        _later(cluster, fault, partial(cluster.start, fault.node))


def _operator(cluster: Cluster, fault: Fault, ask: Callable[[SimulatedStore], object]) -> None:
    process = Process("operator")
    store = SimulatedStore(cluster.etcd, process, "operator")

    def run() -> None:
        try:
            ask(store)
        except StoreError as error:
            cluster.say("operator", f"{error}")
        except Exception as error:  # no such job yet
            cluster.say("operator", f"{type(error).__name__}: {error}")

    cluster.kernel.spawn(process, "zero-ctl", run)


def _drain(cluster: Cluster, fault: Fault) -> None:
    _operator(cluster, fault, lambda store: ask_to_drain(store, JOB, fault.node, "operator"))
    if fault.for_s:
        _later(cluster, fault, partial(cluster.start, fault.node))


def _stop(cluster: Cluster, fault: Fault) -> None:
    _operator(cluster, fault, lambda store: ask_to_stop(store, JOB, "operator", ""))


def _heal(cluster: Cluster, fault: Fault) -> None:
    """All faults are over: what was broken works, and every node has an agent."""
    cluster.network.mend_all()
    etcd, disk = cluster.etcd, cluster.training.disk
    cluster.training.ambushes.clear()
    etcd.full, etcd.slow_s, disk.full, disk.slow, disk.fails = False, 0.0, False, 1.0, False
    for name, machine in cluster.machines.by_name.items():
        machine.ill, machine.slow = "", 1.0
        if (process := machine.agent) is not None:
            process.lag_s = 0.0
            if process.frozen:
                cluster.kernel.thaw(process)
        cluster.start(name)
    for worker in list(cluster.workers):
        if worker.frozen:
            worker.freeze(on=False)


APPLY: Mapping[str, Callable[[Cluster, Fault], object]] = {
    "start": lambda cluster, fault: cluster.start(fault.node),
    "kill-agent": partial(_kill, power=False),
    "power-off": partial(_kill, power=True),
    "freeze": partial(_freeze, workers=False),
    "freeze-all": partial(_freeze, workers=True),
    "stall-loop": _stall,
    "stuck-loop": _stick,
    "slow-loop": _slow_loop,
    "cut": partial(_cut, both=True),
    "cut-one-way": partial(_cut, both=False),
    "alone": _alone,
    "outage": _outage,
    "loss": lambda c, f: _set(c, f, "network.loss", 0.2, 0.0),
    "no-leader": lambda c, f: c.etcd.lose_leader(f.for_s),
    "slow-etcd": lambda c, f: _set(c, f, "etcd.slow_s", 1.5, 0.0),
    "full-etcd": lambda c, f: _set(c, f, "etcd.full", True, False),
    "compact": lambda c, f: c.etcd.compact(),
    "restore-etcd": partial(_restore, new_cluster=False),
    "restore-etcd-elsewhere": partial(_restore, new_cluster=True),
    "full-disk": lambda c, f: _set(c, f, "training.disk.full", True, False),
    "slow-disk": lambda c, f: _set(c, f, "training.disk.slow", 20.0, 1.0),
    "failing-disk": lambda c, f: _set(c, f, "training.disk.fails", True, False),
    "corrupt": _corrupt,
    "corrupt-memory": _corrupt_memory,
    "fail-worker": partial(_worker, what="fail"),
    "kill-worker": partial(_worker, what="kill"),
    "hang-worker": partial(_worker, what="hang"),
    "freeze-worker": partial(_worker, what="freeze"),
    "kill-waiting": partial(_waiting, what="kill"),
    "freeze-waiting": partial(_waiting, what="freeze"),
    "slow-node": lambda c, f: _machine(c, f, "slow", 5.0, 1.0),
    "ill-node": lambda c, f: _machine(c, f, "ill", "disk: 0 MiB free", ""),
    "clock-jump": _clock,
    "suspect": _suspect,
    "sigterm": partial(_signal, again=False),
    "sigterm-again": partial(_signal, again=True),
    "drain": _drain,
    "stop": _stop,
    HEAL: _heal,
}
"""What each kind of fault does."""

FREE = (
    "compact",
    "sigterm",
    "drain",
    "slow-node",
    "clock-jump",
    "full-disk",
    "slow-disk",
    "corrupt",
    "corrupt-memory",
    "start",
    "no-leader",
    "outage",
    "suspect",
)
"""Faults that must cost no restart."""
OF_WAITING = ("kill-waiting", "freeze-waiting")
"""Faults of workers that wait for a round, which they do where they stay."""
TWO = {"cut", "cut-one-way"}
GLOBAL = {
    "loss",
    "outage",
    "no-leader",
    "slow-etcd",
    "full-etcd",
    "compact",
    "restore-etcd",
    "restore-etcd-elsewhere",
    "full-disk",
    "slow-disk",
    "failing-disk",
    "corrupt",
}
LONGEST_S = 25.0


def draw(
    source: random.Random, nodes: Sequence[str], *, count: int, until_s: float, kinds: Sequence[str]
) -> list[Fault]:
    """A random list of faults, in order of time."""
    found = []
    for _ in range(count):
        kind = source.choice(kinds)
        at_s = round(source.uniform(0.0, until_s), 2)
        node = "" if kind in GLOBAL else source.choice(nodes)
        other = ""
        if kind in TWO:
            other = source.choice([*(name for name in nodes if name != node), ETCD, ETCD])
            if kind == "cut-one-way" and source.random() < 0.5:
                node, other = other, node
        for_s = round(min(source.expovariate(1 / 6.0) + 0.1, LONGEST_S), 2)
        found.append(Fault(at_s, kind, node, other, for_s))
    return sorted(found)


__all__ = ["APPLY", "FREE", "HEAL", "OF_WAITING", "Fault", "draw"]
