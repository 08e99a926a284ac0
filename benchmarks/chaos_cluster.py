"""The cluster of `chaos.py`: nodes and etcd members in network namespaces, a disk, and two jobs.

This process is on a machine of its own in that network, from which an operator asks and the
history of etcd is recorded. `close` leaves no namespace, mount, process or group behind.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_judge import Exit, Saved
from chaos_schedule import GUEST, JOBS, MEMBERS, NODES
from recovery import below, kill

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.cluster import AgentProcess, Cluster, is_alive
from tests.support.etcd_server import EtcdServer
from tests.support.job_history import WORKERS_END_S
from tests.support.partition import Network
from zero_agent.etcd.etcd_process import Member
from zero_orchestrator.membership.keys import ROUND, Keys
from zero_orchestrator.observe.events import goodput_prefix
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import Change, KeyValue

WORKER = Path(__file__).with_name("chaos_worker.py")
OPERATOR = "op"
CLIENT_PORT, PEER_PORT = 2379, 2380
DISK_MIB = 256
AGAIN_S = 3.0
"""Whoever runs an agent that has ended starts it again after this time."""
HANG_S = 20
CGROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
"""Where groups with a limit of CPU time are: of version 1, of version 2."""
PERIOD_US = 100_000


def needs() -> str:
    """What this machine lacks for a run; empty if it has all."""
    if os.geteuid() != 0:
        return "network namespaces and mounts need root"
    missing = [
        tool
        for tool in ("ip", "nft", "tc", "mkfs.ext4", "fsfreeze", "mount")
        if not shutil.which(tool)
    ]
    return f"not installed: {', '.join(missing)}" if missing else ""


@dataclass
class Recorder:
    """The history of a job's keys, and when each revision arrived here."""

    batches: dict[int, list[Change]] = field(default_factory=dict)
    arrived_s: dict[int, float] = field(default_factory=dict)
    goodput: dict[str, KeyValue] = field(default_factory=dict)
    """The newest ledger of the time of each node."""

    def note(self, changes: Sequence[Change]) -> None:
        now_s = time.monotonic()
        for change in changes:
            self.batches.setdefault(change.revision, []).append(change)
            self.arrived_s.setdefault(change.revision, now_s)

    def note_goodput(self, changes: Sequence[Change]) -> None:
        self.goodput |= {change.key: change.item for change in changes if change.item is not None}


class Machine:
    """The processes of one node may be limited to a part of a core."""

    def __init__(self, name: str, mark: str) -> None:
        self.name = name
        self._root = next((path for path in CGROUPS if (path / "cgroup.procs").exists()), None)
        self.group = self._root / f"zero-chaos-{mark}-{name}" if self._root else None
        if self.group is not None:
            self.group.mkdir()
            if not any((self.group / file).exists() for file in ("cpu.cfs_quota_us", "cpu.max")):
                self.group.rmdir()
                self.group = None

    @property
    def prefix(self) -> list[str]:
        """What starts a command on this machine."""
        if self.group is None:
            return []
        return ["sh", "-c", f'echo $$ > {self.group}/cgroup.procs && exec "$@"', "sh"]

    def limit(self, share: float | None) -> None:
        """The part of one core that the processes have; None: no limit."""
        assert self.group is not None
        if (old := self.group / "cpu.cfs_quota_us").exists():
            old.write_text(str(int(share * PERIOD_US) if share else -1))
        else:
            quota = str(int(share * PERIOD_US)) if share else "max"
            (self.group / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def close(self) -> None:
        deadline = time.monotonic() + 5
        while self.group is not None and self.group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.group.rmdir()
            time.sleep(0.05)


class Disk:
    """A file system of its own, for the checkpoints of all nodes."""

    def __init__(self, directory: Path) -> None:
        image, self.path = directory / "disk.img", directory / "disk"
        self.path.mkdir()
        with image.open("wb") as file:
            file.truncate(DISK_MIB << 20)
        _run("mkfs.ext4", "-q", str(image))
        _run("mount", "-o", "loop", str(image), str(self.path))

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.path / "ballast").open("wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def empty(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)

    def freeze(self) -> None:
        """From now on whoever writes waits."""
        _run("fsfreeze", "-f", str(self.path))

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "-u", str(self.path)], check=False, capture_output=True)

    def close(self) -> None:
        self.thaw()
        for lazily in ([], [], ["-l"]):
            if not subprocess.run(
                ["umount", *lazily, str(self.path)], check=False, capture_output=True
            ).returncode:
                return
            time.sleep(0.5)


class ChaosCluster:
    """Everything that runs."""

    def __init__(self, directory: Path, *, seed: int, stage: int, pause_s: float) -> None:
        self.directory = directory
        self.pause_s = pause_s
        self.down: set[tuple[str, str]] = set()
        """Jobs on nodes that are not to run now."""
        self.asked: set[int] = set()
        """Pids of agents whose end is wanted."""
        self.exits: list[Exit] = []
        self.outlived: list[tuple[str, str, float]] = []
        self.manifests: dict[str, Mapping[str, Saved]] = {}
        """Job -> the committed checkpoints that were on the disk at the end; see `manifests_of`."""
        self.requests: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._ended_s: dict[int, float] = {}
        """Pid of an agent -> when its end was seen."""
        self._orphans: list[tuple[str, str, float, list[int]]] = []
        self._stack = contextlib.ExitStack()
        try:
            self._open(seed, stage)
        except BaseException:
            self.close()
            raise

    def _open(self, seed: int, stage: int) -> None:
        directory, stack = self.directory, self._stack
        self.disk = Disk(directory)
        stack.callback(self.disk.close)
        self.net = Network((OPERATOR, *MEMBERS, *NODES, GUEST))
        stack.callback(self.net.close)
        mark = str(os.getpid())
        self.machines = {name: Machine(name, mark) for name in (*NODES, GUEST)}
        for machine in self.machines.values():
            stack.callback(machine.close)
        stack.enter_context(self.net.inside(OPERATOR))
        self.members = {name: self._member(name) for name in MEMBERS}
        for name, server in self.members.items():
            stack.callback(server.close)
            self.start_member(name)
        for name, server in self.members.items():
            with self.net.inside(name):
                server.wait_healthy()
        self.endpoint = ",".join(f"{self.net.address(m)}:{CLIENT_PORT}" for m in MEMBERS)
        self.jobs = {job: self._job(job, seed, stage) for job in JOBS}
        stack.callback(self._end_all)
        self.store = EtcdStore(self.endpoint)
        stack.callback(self.store.close)
        self.recorders = {job: Recorder() for job in JOBS}
        for job, recorder in self.recorders.items():
            name = self.jobs[job].job
            self.store.watch(Keys(name).prefix, recorder.note, after=0)
            self.store.watch(Keys(name).events + ROUND, recorder.note, after=0)
            self.store.watch(goodput_prefix(name), recorder.note_goodput, after=0)

    def _member(self, name: str) -> EtcdServer:
        peers = ",".join(f"{m}=http://{self.net.address(m)}:{PEER_PORT}" for m in MEMBERS)
        url = f"http://{self.net.address(name)}"
        options = (
            "--listen-client-urls=http://0.0.0.0:2379",
            f"--advertise-client-urls={url}:{CLIENT_PORT}",
            f"--listen-peer-urls={url}:{PEER_PORT}",
            f"--initial-advertise-peer-urls={url}:{PEER_PORT}",
            "--auto-compaction-retention=0",  # the history is judged at the end
        )
        data = self.directory / name
        member = Member(
            name=name,
            data=data,
            client_port=CLIENT_PORT,
            peer_port=PEER_PORT,
            peers=peers,
            options=options,
        )
        return EtcdServer(self.directory, member)

    def _job(self, job: str, seed: int, stage: int) -> Cluster:
        directory = self.directory / job
        for path in (directory, directory / "steps", self.disk.path / job):
            path.mkdir()
        words = [job, str(stage), str(seed), str(directory)]
        return Cluster(
            directory,
            self.endpoint,
            job=f"chaos-{job}-{os.getpid()}",
            flags=(
                "--nnodes=1:4",
                "--max-restarts=100000",
                "--max-restarts-without-progress=0",  # faults come whether there was a step or not
                "--exclude-after=0",
                f"--hang-timeout={HANG_S}",
            ),
            script=[str(WORKER), *words, str(self.disk.path / job)],
            pause_s=self.pause_s,
        )

    # ---- etcd ----

    def start_member(self, name: str) -> None:
        with self.net.inside(name):
            self.members[name].start(wait=False)

    def leader(self) -> str | None:
        """The member that leads, as those that answer say."""
        for name in MEMBERS:
            with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
                status = _post(self.net.address(name), "maintenance/status")
                if status["leader"] == status["header"]["member_id"]:
                    return name
        return None

    # ---- nodes ----

    def start(self, job: str, node: str) -> None:
        """Start the agent of a job on a node, unless it runs."""
        cluster = self.jobs[job]
        agent = cluster.agents.get(node)
        if agent is not None and agent.process.poll() is None:
            return
        cluster.prefix = self.machines[node].prefix
        with self.net.inside(node):
            cluster.start(node)

    def agent(self, job: str, node: str) -> AgentProcess | None:
        """The agent of a job on a node, if it runs."""
        agent = self.jobs[job].agents.get(node)
        return agent if agent is not None and agent.process.poll() is None else None

    def worker(self, job: str, node: str) -> int | None:
        """The pid of the worker of a job on a node, if it runs."""
        agent = self.agent(job, node)
        if agent is None:
            return None
        try:
            pid = self.jobs[job].worker_of(node)
        except StopIteration:
            return None
        return pid if is_alive(pid) and pid in below(agent.process.pid) else None

    def pids(self, node: str, jobs: Iterable[str] = JOBS) -> list[int]:
        """The processes of jobs on a node."""
        agents = (self.agent(job, node) for job in jobs)
        return [pid for agent in agents if agent is not None for pid in below(agent.process.pid)]

    def kill(self, job: str, node: str, *, workers: bool) -> None:
        """Kill an agent with -9, or it and all below it; it is not waited for."""
        agent = self.agent(job, node)
        if agent is None:
            return
        self.asked.add(agent.process.pid)
        if workers:
            kill(agent.process.pid)
            return
        orphans = below(agent.process.pid)[1:]
        agent.process.kill()
        self._orphans.append((job, node, time.monotonic(), orphans))

    def leave(self, node: str) -> None:
        """SIGTERM to the agents of a node."""
        for job in JOBS:
            if (agent := self.agent(job, node)) is not None:
                self.asked.add(agent.process.pid)
                agent.process.send_signal(signal.SIGTERM)

    def ask(self, *words: str) -> None:
        """An operator types `zero-ctl`."""
        command = [sys.executable, "-m", "zero_orchestrator", *words]
        process = subprocess.Popen(
            [*command, f"--rdzv-endpoint={self.endpoint}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.requests.append((" ".join(words), process))

    def state(self, job: str) -> dict[str, Any]:
        """The newest state of a job that has arrived here."""
        key = Keys(self.jobs[job].job).round
        for changes in reversed(list(self.recorders[job].batches.values())):
            for change in changes:
                if change.key == key and change.item is not None:
                    return dict(json.loads(change.item.value))
        return {}

    def over(self, job: str) -> bool:
        """Whether a job has ended."""
        return self.state(job).get("state") in {"DONE", "FAILED", "STOPPED"}

    def look_after(self) -> None:
        """Start agents that have ended again, and see which workers outlive their agents."""
        now_s = time.monotonic()
        for job, cluster in self.jobs.items():
            for node, agent in cluster.agents.items():
                self._look_after(job, node, agent, now_s)
        for one in list(self._orphans):
            job, node, at_s, pids = one
            left = [pid for pid in pids if is_alive(pid)]
            if not left:
                self._orphans.remove(one)
            elif now_s - at_s > WORKERS_END_S:
                self._orphans.remove(one)
                self.outlived.append((job, node, now_s - at_s))

    def _look_after(self, job: str, node: str, agent: AgentProcess, now_s: float) -> None:
        code = agent.process.poll()
        if code is None:
            return
        pid = agent.process.pid
        if pid not in self._ended_s:
            self._ended_s[pid] = now_s
            words = "\n".join(agent.output.splitlines()[-5:])
            self.exits.append(Exit(job, node, code, pid in self.asked, words))
        wanted = (job, node) not in self.down and node != GUEST and not self.over(job)
        if wanted and now_s - self._ended_s[pid] > AGAIN_S:
            self.start(job, node)

    def hold(self, node: str, jobs: Iterable[str] = JOBS) -> None:
        """Do not start these again until `release`."""
        self.down |= {(job, node) for job in jobs}

    def release(self, node: str, jobs: Iterable[str] = JOBS) -> None:
        self.down -= {(job, node) for job in jobs}

    @property
    def runs(self) -> bool:
        """Whether any agent runs."""
        agents = [agent for job in self.jobs.values() for agent in job.agents.values()]
        return any(agent.process.poll() is None for agent in agents)

    # ---- the end ----

    def _end_all(self) -> None:
        self.disk.thaw()
        agents = [agent for job in self.jobs.values() for agent in job.everyone]
        for agent in agents:
            if agent.process.poll() is None:
                kill(agent.process.pid, signal.SIGKILL)
        for agent in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(10)
        for _, process in self.requests:
            process.kill()
            process.wait()
        self.manifests = {job: manifests_of(self.disk.path / job) for job in self.jobs}
        for job in self.jobs.values():
            for path in Path("/dev/shm").glob(f"zero-ram.{job.job}.*"):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        self._stack.close()


def manifests_of(root: Path) -> Mapping[str, Saved]:
    """Every committed checkpoint of a directory, by its name."""
    found = {}
    for path in root.glob("step-*/MANIFEST.json"):
        manifest = json.loads(path.read_text())
        found[path.parent.name] = Saved(
            manifest["step"],
            manifest["round"],
            manifest["meta"]["engine"]["weight_hash"],
            manifest["digest"],
        )
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _post(host: str, path: str) -> Any:
    connection = http.client.HTTPConnection(host, CLIENT_PORT, timeout=1)
    try:
        connection.request("POST", f"/v3/{path}", "{}")
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()
