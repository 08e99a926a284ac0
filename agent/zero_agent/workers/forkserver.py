"""The fork server (forkserver): the one child of an agent, and the parent of all its workers.

It imports torch (and the modules of --preload) once and forks each worker from that: a restart
costs tens of milliseconds instead of seconds of imports. It also keeps a dead agent from leaving
processes behind: when the socket to its agent ends it kills every descendant and exits, and the
kernel kills the workers when it is killed itself.

The socket carries one JSON object a packet. From the agent:

    {"op": "start", "id": 7, "program": {...}, "env": {...}}   + descriptors of stdout, stderr
    {"op": "store", "id": 8, "address": ...}    host a TCPStore there, on a free port
    {"op": "timers", "id": 9, "path": "..."}    host torch's file timers: kill whose time is up
    {"op": "signal", "id": 7, "signal": 15}     to the worker's whole process group
    {"op": "word", "node": ..., "key": ...}  + the agent's listener: answer there when it is dead
    {"op": "stop"}                              the agent lives, and ends this process

An order that is longer than a packet is in a file, the first of the descriptors of `LONG_ORDER`.

To the agent: `{"ready": true}`, `{"id", "pid"}`, `{"id", "port"}`, `{"id", "status"}`,
`{"left_out": module, "why"}` for a module that is left to the workers, and `{"obeyed": true}` once
for each order, which shows that this process is not stuck.

Run as `python -m zero_agent.workers.forkserver FD MODULE...`; only `forkserver_client` does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_agent.node.last_word import last_word
from zero_agent.node.network import first_free
from zero_agent.node.process_control import (
    adopt_orphans,
    children,
    die_with_parent,
    outlive_parent,
    set_title,
)
from zero_agent.workers import worker_main
from zero_contract.signing import Key
from zero_orchestrator.addresses import family_of

PACKET_BYTES = 1 << 17
LONG_ORDER = b"in the file"
STOP_FORKSERVER = b'{"op": "stop"}'
KILL_TIMEOUT_S = 5.0
ENDS_S = 0.01
"""Interval at which it looks which of the killed processes have ended."""
_LET_BE = (ProcessLookupError, PermissionError)
"""Signalling a process that is gone, or another user's: a worker may have started `sudo`."""
WAITING = 4096
"""Backlog of a round's TCPStore: how many workers may connect before it serves."""
TIMERS_S = 0.1
"""Interval at which torch's timer server looks at the timers."""


class Forkserver:
    """Forks, signals and reaps workers; single-threaded, so that forking is safe."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._pids: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._hosts: set[int] = set()
        """Pids of the hosts of stores and timers, which may serve from one round to the next."""
        self._parent = os.getppid()
        self._listener: int | None = None
        """Of the agent's ring. A descriptor: what is preloaded may have given sockets a timeout."""
        self._word: tuple[Key, str] | None = None

    def serve(self) -> worker_main.Program | None:
        """Serve the agent until it is gone and everything has been killed; then None.

        In a forked worker, right after the fork, the program to run.
        """
        # SIGCHLD ends the wait for orders; its handler only has to exist.
        wake_read, wake_write = os.pipe()
        # A full pipe wakes as well, and a signal handler must not block.
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._send({"ready": True})
        while True:
            readable, _, _ = select.select([self._agent.fileno(), wake_read], [], [])
            if wake_read in readable:
                with suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            if self._agent.fileno() in readable:
                try:
                    # At most three: stdout, stderr, and the file of a long order.
                    data, fds, _, _ = socket.recv_fds(self._agent, PACKET_BYTES, 3)
                except OSError:
                    data, fds = b"", []
                if not data:  # the agent is gone, however it ended
                    # Before the word: no worker trains on when the others begin without this node.
                    self._kill_children()
                    if self._listener is not None and self._word is not None:
                        listener = socket.socket(fileno=self._listener)
                        last_word(listener, self._parent, *self._word)
                    # One generation after the other: the orphans of a killed generation are
                    # adopted, and killed next.
                    deadline = time.monotonic() + KILL_TIMEOUT_S
                    while self._kill_children() and time.monotonic() < deadline:
                        # Some never end: of another user, or in a call of a dead file system.
                        self._reap()
                        time.sleep(ENDS_S)
                    return None
                if data == LONG_ORDER:
                    with open(fds.pop(0), "rb") as file:
                        file.seek(0)
                        data = file.read()
                if program := self._obey(json.loads(data), fds):
                    return program
                self._send({"obeyed": True})
            self._reap()

    def _obey(self, order: dict[str, Any], fds: list[int]) -> worker_main.Program | None:
        """Carry out one order; the program to run if this is the forked worker."""
        if order["op"] == "signal":
            # The pid cannot have been reused: only this process reaps it, and forgets it then.
            if (pid := self._pids.get(order["id"])) is not None:
                try:
                    os.killpg(pid, order["signal"])
                except _LET_BE:
                    with suppress(*_LET_BE):
                        os.kill(pid, order["signal"])  # just forked: it has no process group yet
            return None
        # A stop takes the word back: the agent lives, and nobody is to learn of its death.
        if order["op"] in {"word", "stop"}:
            if self._listener is not None:
                os.close(self._listener)
            self._word = (order["key"], order["node"]) if fds else None
            self._listener = fds[0] if fds else None
            return None
        return self._begin(order, fds)

    def _begin(self, order: dict[str, Any], fds: list[int]) -> worker_main.Program | None:
        """Fork a process; the program to run if this is the forked worker."""
        forkserver = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # the end of this process would be that of all workers
            why = f"{error.strerror}; ulimit -u and pids.max bound their number"
            print(f"zero-agent: no further process can be started: {why}", file=sys.stderr)
            pid, news = -1, {"status": os.EX_OSERR}
        else:
            news = {"pid": pid}
        if pid == 0:
            die_with_parent(forkserver)
            # A group of its own: what the worker starts is signalled, and killed, with it.
            os.setsid()
            return self._become(order, fds)
        if pid > 0:
            self._pids[order["id"]], self._ids[pid] = pid, order["id"]
            if order["op"] != "start":
                self._hosts.add(pid)
        for fd in fds:
            os.close(fd)
        self._send({"id": order["id"], **news})
        return None

    def _become(self, order: dict[str, Any], fds: list[int]) -> worker_main.Program:
        """In the forked worker: give up everything that belongs to the forkserver."""
        # The key of the ring is a secret of the agents, and a worker is the user's program. By a
        # listener left open the kernel would accept connections for an agent that is dead.
        self._word = None
        if self._listener is not None:
            os.close(self._listener)
        signal.set_wakeup_fd(-1)
        numbers = [signal.SIGCHLD, signal.SIGHUP]
        if order["op"] == "start":  # the hosts of stores and timers go on ignoring SIGTERM
            numbers.append(signal.SIGTERM)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The hosts of stores and timers get no descriptors: they write where the agent does.
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in zip((null, *fds), range(3), strict=False):
            os.dup2(source, target)
            os.close(source)
        if order["op"] == "store":
            host_store(self._agent, order["id"], order["address"], range(*order["ports"]))
        if order["op"] == "timers":
            host_timers(self._agent, order["path"])
        # With a copy in every worker the agent would not see the end of the forkserver.
        self._agent.close()
        rank = order["env"].get("RANK")
        set_title(f"zero-worker rank {rank}", f"zero-rank {rank}")
        if order["cpus"]:
            os.sched_setaffinity(0, order["cpus"])
        os.environ.update(order["env"])
        return worker_main.Program(**order["program"])

    def _reap(self) -> None:
        while True:
            try:
                # Not reaped yet: until then its pid, and so the number of its group, is not reused.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._ids:
                # Before the report of its end: what it left in its group may hold a GPU's memory.
                with suppress(*_LET_BE):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            worker = self._ids.pop(pid, None)
            if worker is None:  # an orphan that was adopted: nobody asks for its end
                continue
            del self._pids[worker]
            self._hosts.discard(pid)
            self._send({"id": worker, "status": os.waitstatus_to_exitcode(status)})
            # Without a worker, the rest beside the hosts are orphans that had left their groups.
            if self._ids.keys() == self._hosts:
                self._kill_children(self._hosts)

    def _kill_children(self, spared: Collection[int] = ()) -> list[int]:
        pids = [pid for pid in children(os.getpid()) if pid not in spared]
        for pid in pids:
            with suppress(*_LET_BE):
                os.kill(pid, signal.SIGKILL)
        return pids

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a dead agent is noticed when reading
            self._agent.send(json.dumps(message).encode())


def host_store(agent: socket.socket, worker: int, address: str, ports: range) -> None:
    """Serve a round's TCPStore until killed; it outlives every worker of its round.

    Raises:
        SystemExit: It cannot listen there.
    """
    # On the node's own address alone: torch's store has no authentication.
    try:
        listener = first_free(
            ports,
            lambda port: socket.create_server(
                (address, port), family=family_of(address), backlog=WAITING
            ),
        )
    except OSError as error:
        raise SystemExit(f"zero-agent: no store for the workers: {error.strerror}") from None
    port = listener.getsockname()[1]
    set_title(f"zero-store port {port}", "zero-store")
    agent.send(json.dumps({"id": worker, "port": port}).encode())
    agent.close()
    # Until a worker connects nothing is imported: programs without torch never connect.
    select.select([listener], [], [])
    # Imported by name: the agent itself does not depend on torch, only its children use it.
    torch, distributed = map(importlib.import_module, ("torch", "torch.distributed"))
    store = distributed.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=torch.__version__ >= (2, 8),  # libuv could not take a socket over before
    )
    while store is not None:  # it serves as long as this reference exists
        signal.pause()


def host_timers(agent: socket.socket, path: str) -> None:
    """Serve torch's `FileTimerClient`s until killed: a worker whose timer expires gets SIGKILL."""
    timer = importlib.import_module("torch.distributed.elastic.timer")
    agent.close()
    set_title("zero-timers")
    timer.FileTimerServer(path, run_id="", max_interval=TIMERS_S).start()
    while True:
        signal.pause()


def preload(modules: list[str], agent: socket.socket) -> None:
    """Import the modules that workers need, or leave them to the workers.

    Raises:
        SystemExit: An import fails.
    """
    gc.disable()  # collections would be a fifth of the time of these imports
    for module in modules:
        before = Native.here()
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            # A package that is not installed is no mistake: the defaults name some.
            if error.name == module and "." in module:
                print(f"zero-agent: there is no module {module} to preload", file=sys.stderr)
        except Exception as error:
            raise SystemExit(
                f"zero-agent: importing {module} has failed: {type(error).__name__}: {error}; "
                f"python -c 'import {module}' shows where"
            ) from None
        # What an import has started cannot be undone: this process begins again without it.
        if why := hindrance(module, before, Native.here()):
            agent.send(json.dumps({"left_out": module, "why": why}).encode())
            os.execv(sys.executable, [word for word in sys.orig_argv if word != module])
    # No collection in a worker touches these pages, which stay shared (copy-on-write), and
    # `end_process` looks only at what the worker itself has made.
    gc.freeze()
    gc.enable()


def main() -> None:
    """Serve the agent; in a forked worker, run its program."""
    # The SIGTERM that a scheduler such as Slurm sends to every process of a job is the agent's.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    adopt_orphans()
    set_title("zero-forkserver")
    fd, *modules = sys.argv[1:]
    agent = socket.socket(fileno=int(fd))
    # While it imports it does not read the socket, and would not notice the agent's end.
    die_with_parent(os.getppid())
    preload(modules, agent)
    # From here on it outlives the agent by moments: to kill all that workers leave behind, and to
    # answer in the agent's place.
    outlive_parent()
    program = Forkserver(agent).serve()
    if program is not None:
        worker_main.run(program)
    worker_main.end_process(0)


# ---- whether it can be forked after an import ----
# A fork copies memory and one thread. A lock that another thread holds stays locked in the copy for
# ever, and a CUDA context does not work there at all. BLAS libraries (OpenBLAS, MKL) stop their
# threads around a fork by themselves (`pthread_atfork`).

_BLAS = ("openblas", "mkl", "blis")
HARMLESS: Mapping[str, str] = {
    "jemalloc_bg_thd": "jemalloc (in pyarrow): its pthread_atfork handlers take its locks, and the "
    "copy runs without background threads",
}
"""Threads that a fork may leave behind, by the name that the kernel shows, and why."""
_CUDA = "/dev/nvidia-uvm"
"""Opened by the first call of CUDA, and by nothing that only looks at the devices."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """What the kernel says of this process."""

    threads: Mapping[int, str] = field(default_factory=dict)
    """The name of each thread but the main one."""
    name: str = ""
    """That of the main thread, which threads without a name of their own inherit."""
    blas: frozenset[str] = frozenset()
    """BLAS libraries that are loaded."""
    cuda: bool = False
    """Whether CUDA is initialized."""

    @classmethod
    def here(cls) -> Native:
        """This process, now."""
        own, names = Path("/proc/self"), dict[int, str]()
        for task in (own / "task").iterdir():
            with suppress(OSError):  # it has just ended
                names[int(task.name)] = (task / "comm").read_text().strip()
        opened = set[str]()
        for descriptor in (own / "fd").iterdir():
            with suppress(OSError):
                opened.add(str(descriptor.readlink()))
        mapped = {line.rpartition("/")[2] for line in (own / "maps").read_text().splitlines()}
        return cls(
            name=names.pop(os.getpid(), ""),
            threads=names,
            blas=frozenset(each for each in mapped if any(name in each for name in _BLAS)),
            cuda=_CUDA in opened,
        )


def hindrance(module: str, before: Native, after: Native) -> str:
    """Why a process must not be forked after an import; empty if it may."""
    if after.cuda and not before.cuda:
        return f"importing {module} initializes CUDA, which does not work in forked workers"
    new = [
        name
        for thread, name in after.threads.items()
        if thread not in before.threads and name not in HARMLESS
    ]
    if after.blas - before.blas:  # its threads inherit the process's name
        new = [name for name in new if name != after.name]
    if not new:
        return ""
    named = sorted({name for name in new if name != after.name})
    which = f" ({', '.join(named)})" if named else ""
    return (
        f"importing {module} starts {'a thread' if len(new) == 1 else f'{len(new)} threads'}"
        f"{which}, which forked workers would lack"
    )


if __name__ == "__main__":
    main()
