"""The faults of `chaos.py`: how each is injected and healed, and what it needs.

A fault whose target is not there (a job has no worker on that node now) is `NotNow`, which is
recorded, and nothing is done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_cluster import HANG_S, ChaosCluster
from chaos_schedule import GUEST, JOBS, MEMBERS, NODES, Fault, Kind, Subject

from zero_agent.loop.config import AgentConfig
from zero_agent.loop.link_watch import TURN_S, TURNS


class NotNow(Exception):
    """A fault cannot happen now; the text says why."""


LOOKS = 50

Undo = Callable[[], None]
Inject = Callable[[ChaosCluster, Fault], Undo | None]


@dataclass(frozen=True)
class Row:
    """One kind of fault."""

    kind: Kind
    inject: Inject
    """Returns how to heal it, if it needs that."""
    needs: Callable[[ChaosCluster], str] = lambda cluster: ""
    """What this machine lacks for it; empty if nothing."""


# ---- processes ----


def _worker(cluster: ChaosCluster, fault: Fault) -> int:
    pid = cluster.worker(fault.job, fault.node)
    if pid is None:
        raise NotNow(f"{fault.job} has no worker on {fault.node}")
    return pid


def _kill_worker(cluster: ChaosCluster, fault: Fault) -> None:
    os.kill(_worker(cluster, fault), signal.SIGKILL)


def _kill_agent(cluster: ChaosCluster, fault: Fault) -> Undo:
    cluster.hold(fault.node, [fault.job])
    cluster.kill(fault.job, fault.node, workers=False)
    return lambda: _again(cluster, fault.node, [fault.job])


def _kill_node(cluster: ChaosCluster, fault: Fault) -> Undo:
    cluster.hold(fault.node)
    for job in JOBS:
        cluster.kill(job, fault.node, workers=True)
    return lambda: _again(cluster, fault.node)


def _power_off(cluster: ChaosCluster, fault: Fault) -> Undo:
    """Nobody hears of it: the cable first."""
    cluster.net.unplug(fault.node)
    _kill_node(cluster, fault)

    def on() -> None:
        cluster.net.plug_in(fault.node)
        _again(cluster, fault.node)

    return on


def _kill_job(cluster: ChaosCluster, fault: Fault) -> Undo:
    """All nodes lose power at once, and with it what is in memory."""
    for node in (*NODES, GUEST):
        cluster.hold(node, [fault.job])
        cluster.kill(fault.job, node, workers=True)
    for path in Path("/dev/shm").glob(f"zero-ram.{cluster.jobs[fault.job].job}.*"):
        for file in path.rglob("*"):
            if file.is_file():
                file.unlink(missing_ok=True)

    def on() -> None:
        for node in NODES:
            _again(cluster, node, [fault.job])
        cluster.release(GUEST, [fault.job])

    return on


def _again(cluster: ChaosCluster, node: str, jobs: Sequence[str] = JOBS) -> None:
    cluster.release(node, jobs)
    for job in jobs:
        if not cluster.over(job):
            cluster.start(job, node)


def _freeze(pids: Sequence[int]) -> Undo:
    def send(number: signal.Signals) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    send(signal.SIGSTOP)
    return lambda: send(signal.SIGCONT)


def _freeze_worker(cluster: ChaosCluster, fault: Fault) -> Undo:
    return _freeze([_worker(cluster, fault)])


def _freeze_agent(cluster: ChaosCluster, fault: Fault) -> Undo:
    agent = cluster.agent(fault.job, fault.node)
    if agent is None:
        raise NotNow(f"{fault.job} has no agent on {fault.node}")
    return _freeze([agent.process.pid])


def _freeze_node(cluster: ChaosCluster, fault: Fault) -> Undo:
    return _freeze(cluster.pids(fault.node))


def _slow_node(cluster: ChaosCluster, fault: Fault) -> Undo:
    machine = cluster.machines[fault.node]
    machine.limit(0.1 + (fault.draw % 3) / 10)
    return lambda: machine.limit(None)


# ---- the network ----


def _cut(cluster: ChaosCluster, fault: Fault, verdict: str, *, one_way: bool = False) -> Undo:
    cluster.net.break_link(fault.node, fault.other, verdict, one_way=one_way)
    return lambda: cluster.net.mend_link(fault.node, fault.other)


def _isolate(cluster: ChaosCluster, fault: Fault) -> Undo:
    cluster.net.unplug(fault.node)
    return lambda: cluster.net.plug_in(fault.node)


def _cut_off(cluster: ChaosCluster, here: Sequence[str], there: Sequence[str]) -> Undo:
    for node in here:
        cluster.net.cut(node, *there)

    def mend() -> None:
        for node in here:
            cluster.net.heal(node, *there)

    return mend


def _from_etcd(cluster: ChaosCluster, fault: Fault) -> Undo:
    return _cut_off(cluster, [fault.node], MEMBERS)


def _split(cluster: ChaosCluster, fault: Fault) -> Undo:
    pair = [fault.node, fault.other]
    return _cut_off(cluster, pair, [node for node in NODES if node not in pair])


def _slow_link(cluster: ChaosCluster, fault: Fault) -> Undo:
    cluster.net.slow_down(fault.node, f"rate {fault.draw % 9 + 1}mbit")
    return lambda: cluster.net.full_speed(fault.node)


# ---- etcd ----


def _kill_members(cluster: ChaosCluster, names: Sequence[str]) -> Undo:
    for name in names:
        cluster.members[name].kill()

    def start() -> None:
        for name in names:
            cluster.start_member(name)

    return start


def _kill_leader(cluster: ChaosCluster, fault: Fault) -> Undo:
    leader = cluster.leader()
    if leader is None:
        raise NotNow("etcd has no leader")
    return _kill_members(cluster, [leader])


def _power_off_leader(cluster: ChaosCluster, fault: Fault) -> Undo:
    """A node loses power, and a member of etcd on the same host with it."""
    start, on = _kill_leader(cluster, fault), _power_off(cluster, fault)

    def again() -> None:
        start()
        on()

    return again


def _lose_quorum(cluster: ChaosCluster, fault: Fault) -> Undo:
    return _kill_members(cluster, [name for name in MEMBERS if name != MEMBERS[fault.draw % 3]])


def _freeze_member(cluster: ChaosCluster, fault: Fault) -> Undo:
    member = cluster.members[MEMBERS[fault.draw % 3]]
    member.suspend()
    return member.resume


# ---- the disk, and what is on it ----


def _full_disk(cluster: ChaosCluster, fault: Fault) -> Undo:
    cluster.disk.fill()
    return cluster.disk.empty


def _frozen_disk(cluster: ChaosCluster, fault: Fault) -> Undo:
    cluster.disk.freeze()
    return cluster.disk.thaw


def damage(path: Path, draw: int) -> None:
    """Change bytes in the second half of a file, which has the data."""
    half = path.stat().st_size // 2
    at = half + draw % max(1, half - 64)
    with path.open("r+b") as file:
        file.seek(at)
        changed = bytes(byte ^ 0xFF for byte in file.read(16))
        file.seek(at)
        file.write(changed)


def _newest(roots: Sequence[Path], draw: int) -> Path:
    """A file of tensors of the newest complete checkpoint below these directories.

    In memory the next one takes its place after a step, perhaps between two looks.
    """
    for _ in range(LOOKS):
        whole = [path.parent for root in roots for path in root.glob("**/step-*/MANIFEST.json")]
        newest = max((path.name for path in whole), default="")
        tags = sorted(path for path in whole if path.name == newest)
        if files := [file for tag in tags for file in sorted(tag.glob("r*.safetensors"))]:
            return files[draw % len(files)]
    raise NotNow("there is no checkpoint")


def _damage_disk(cluster: ChaosCluster, fault: Fault) -> None:
    """It is noticed when it is loaded."""
    job = JOBS[fault.draw % len(JOBS)]
    damage(_newest([cluster.disk.path / job], fault.draw), fault.draw)


def _damage_memory(cluster: ChaosCluster, fault: Fault) -> None:
    """A copy of the newest checkpoint, and at once the worker is killed that then reads it."""
    pid = _worker(cluster, fault)
    roots = list(Path("/dev/shm").glob(f"zero-ram.{cluster.jobs[fault.job].job}.*"))
    damage(_newest(roots, fault.draw), fault.draw)
    os.kill(pid, signal.SIGKILL)


# ---- operators ----


def _drain(cluster: ChaosCluster, fault: Fault) -> Undo:
    cluster.hold(fault.node)
    for job in JOBS:
        if (agent := cluster.agent(job, fault.node)) is not None:
            cluster.asked.add(agent.process.pid)
            cluster.ask("drain", fault.node, cluster.jobs[job].job)
    return lambda: _again(cluster, fault.node)


def _leave(cluster: ChaosCluster, fault: Fault) -> Undo:
    cluster.hold(fault.node)
    cluster.leave(fault.node)
    return lambda: _again(cluster, fault.node)


def _exclude(cluster: ChaosCluster, fault: Fault) -> Undo:
    jobs = [cluster.jobs[job].job for job in JOBS]
    for job in jobs:
        cluster.ask("exclude", fault.node, job)

    def include() -> None:
        for job in jobs:
            cluster.ask("include", fault.node, job)

    return include


def _join(cluster: ChaosCluster, fault: Fault) -> Undo:
    for job in JOBS:
        if not cluster.over(job):
            cluster.start(job, GUEST)
    return lambda: cluster.leave(GUEST)


def _needs_group(cluster: ChaosCluster) -> str:
    found = any(machine.group for machine in cluster.machines.values())
    return "" if found else "a control group for CPU time cannot be made"


def _reset(cluster: ChaosCluster, fault: Fault) -> Undo:
    return _cut(cluster, fault, "reject with tcp reset")


def _drop(cluster: ChaosCluster, fault: Fault) -> Undo:
    return _cut(cluster, fault, "drop")


def _drop_one_way(cluster: ChaosCluster, fault: Fault) -> Undo:
    return _cut(cluster, fault, "drop", one_way=True)


LEASE_S = AgentConfig.lease_ttl_s
LOOK_S = TURNS * TURN_S
"""How long a look at a link that does not answer takes."""
ON, NODE, LINK = Subject.JOB_ON_NODE, Subject.NODE, Subject.LINK
ETCD, DISK, JOB = Subject.ETCD, Subject.DISK, Subject.JOB
ELECTION_S = 2.0
"""Without its leader etcd answers nobody for about so long, nor does it end leases meanwhile."""

FAULTS: dict[str, Row] = {
    "a worker is killed": Row(Kind(ON, weight=4), _kill_worker),
    "an agent is killed": Row(Kind(ON, (2, 6), weight=2), _kill_agent),
    "a node is killed": Row(Kind(NODE, (3, 10), weight=2), _kill_node),
    "a node loses power": Row(Kind(NODE, (5, 12), unknown_s=LEASE_S), _power_off),
    "a host loses power, with etcd's leader": Row(
        Kind(Subject.HOST, (5, 12), unknown_s=LEASE_S + ELECTION_S), _power_off_leader
    ),
    "a job loses all nodes and its memory": Row(Kind(JOB, (1, 3)), _kill_job),
    "a worker stands still": Row(Kind(ON, (0.5, 2), free=True), _freeze_worker),
    "a worker hangs": Row(Kind(ON, (25, 30), unknown_s=HANG_S), _freeze_worker),
    "an agent stands still": Row(Kind(ON, (0.5, 1.5), free=True), _freeze_agent),
    "an agent stands still for longer than its lease": Row(Kind(ON, (6, 10)), _freeze_agent),
    "a node stands still": Row(Kind(NODE, (0.5, 1.5), free=True), _freeze_node),
    "a node stands still for longer than its lease": Row(
        Kind(NODE, (6, 10), unknown_s=LEASE_S), _freeze_node
    ),
    "a node is slow": Row(Kind(NODE, (10, 15)), _slow_node, _needs_group),
    "a link drops": Row(Kind(LINK, (8, 15), unknown_s=LOOK_S), _drop),
    "a link drops one way": Row(Kind(LINK, (8, 15), unknown_s=LOOK_S), _drop_one_way),
    "a link resets": Row(Kind(LINK, (8, 15)), _reset),
    "a node is isolated": Row(Kind(NODE, (8, 15), unknown_s=LEASE_S), _isolate),
    "a node does not reach etcd": Row(Kind(NODE, (8, 15)), _from_etcd),
    "two nodes do not reach the others": Row(Kind(LINK, (8, 15), unknown_s=LOOK_S), _split),
    "a slow link": Row(Kind(NODE, (10, 15)), _slow_link),
    "etcd's leader is killed": Row(Kind(ETCD, (2, 5), weight=2, free=True), _kill_leader),
    "a member of etcd stands still": Row(Kind(ETCD, (3, 8), free=True), _freeze_member),
    "etcd loses its quorum": Row(Kind(ETCD, (4, 10), free=True), _lose_quorum),
    "the disk is full": Row(Kind(DISK, (10, 20), free=True), _full_disk),
    "the disk hangs": Row(Kind(DISK, (3, 8), free=True), _frozen_disk),
    "a checkpoint on disk is damaged": Row(Kind(DISK, free=True), _damage_disk),
    "a checkpoint in memory is damaged": Row(Kind(ON), _damage_memory),
    "an operator drains a node": Row(Kind(NODE, (8, 15), free=True), _drain),
    "a node leaves": Row(Kind(NODE, (8, 15), free=True), _leave),
    "an operator excludes a node": Row(Kind(NODE, (8, 15), free=True), _exclude),
    "a spare joins": Row(Kind(Subject.GUEST, (20, 30), free=True), _join),
}
"""Every kind of fault. "The disk hangs" freezes the file system: writes wait, as on a server that
does not answer."""
