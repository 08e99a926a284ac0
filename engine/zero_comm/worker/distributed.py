"""The process group and the device of this worker.

Owns how a worker finds its rank: from the environment of torchrun and zero-agent, or of mpirun and
srun (`discover`), or as a world of one; and how it leaves its group, to join another one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from zero_comm.waiting import transport_failures
from zero_contract.errors import ConfigError, PeerLost
from zero_contract.signing import Key, Purpose, derive
from zero_contract.worker import (
    ENV_ROUND,
    ENV_SOCKET,
    ENV_VOTE_KEY,
    Hello,
    Join,
    Left,
    Preparing,
    decode,
    encode,
)

_log = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 600.0
"""The timeout of a collective; DeepSpeed's default as well."""
MOST_TIMEOUT_S = 7 * 24 * 3600.0
"""torch counts in milliseconds, gloo in 32 bits of them: 24 days."""
MEETING = "meeting the other ranks"
TELL_TIMEOUT_S = 1.0
ABORT_TIMEOUT_S = 5.0
"""How long an abort may take; then the process ends, or continues, without its end."""
MPI_PORT = 29500
"""The port of rank 0's store under mpirun and srun; DeepSpeed's default as well."""
_LIBRARY = ctypes.CDLL(None)
_ADDRESS_BYTES = 128
_ADDRESSES: Mapping[int, slice] = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Where the kernel puts the host in an address of each family."""


def group_timeout_s() -> float:
    """The timeout of a collective: DEEPSPEED_TIMEOUT, in minutes, or the default."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "")
    try:
        timeout_s = 60 * float(minutes) if minutes else GROUP_TIMEOUT_S
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= MOST_TIMEOUT_S:  # nor is NaN
        raise ConfigError(
            f"DEEPSPEED_TIMEOUT={minutes}: not a number of minutes above 0, and up to a week's"
        )
    return timeout_s


def leave_failures_to_agent() -> None:
    """Under an agent: keep the threads of NCCL from ending this process because of its peers.

    Called before the group is made, which reads the variables.
    """
    if ENV_SOCKET in os.environ:
        # The agent decides that, and a process that is told to leave aborts its group by itself.
        # The agent sets 1, as torchrun does; any other value is the user's and stays.
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def init_distributed(*, timeout_s: float | None = None, mpi_port: int | None = MPI_PORT) -> None:
    """Join the default process group, unless this process is in one already.

    With RANK and WORLD_SIZE in the environment, or the variables of mpirun or srun, the group is
    that of all ranks; without them this process is a world of one and needs no network.

    `mpi_port` is that of rank 0's store under mpirun and srun; None: ignore these launchers.

    Raises:
        ConfigError: mpirun has started this worker, and the host of rank 0 is unknown. Or this
            worker's number on its node is larger than its devices allow.
        PeerLost: A rank, or the host of the store, is lost.
    """
    has_group = dist.is_initialized()
    if not has_group and mpi_port is not None and "RANK" not in os.environ:
        os.environ |= discover(os.environ, mpi_port)  # first: it has the number on the node
    if torch.cuda.is_available():
        current = torch.cuda.current_device()
        torch.cuda.set_device(device_index(local_rank(), torch.cuda.device_count(), current))
    if has_group:
        return
    _await_round()
    leave_failures_to_agent()
    backend = backend_for(has_gpu=torch.cuda.is_available(), has_nccl=dist.is_nccl_available())
    timeout = timedelta(seconds=timeout_s or group_timeout_s())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if path := os.environ.get(ENV_SOCKET):
            # Without a group it has no link to the agent yet: it says by itself what it does. An
            # agent that cannot be told is no reason not to train.
            n = int(os.environ.get(ENV_ROUND, "0"))
            hello = Hello(rank=int(os.environ["RANK"]), pid=os.getpid(), round=n)
            with suppress(OSError), connect_to_agent(path, TELL_TIMEOUT_S) as connection:
                connection.sendall(encode(hello) + encode(Preparing(what=MEETING)))
        with transport_failures(MEETING):
            dist.init_process_group(backend, timeout=timeout)
    else:
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def await_round_in_script() -> None:
    """Let `init_process_group` of a script wait for a round, in a worker that has none yet."""
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers["env"] = partial(_in_round, handlers["env"])


def _in_round(rendezvous: Callable[..., Iterator[Any]], url: str, **given: Any) -> Iterator[Any]:
    # Rank and world are those of the round, whatever the script has read before: they come from the
    # environment, and not from the URL.
    return rendezvous("env://" if _await_round() else url, **given)


def _await_round() -> bool:
    """In a worker that was started before it has a round: wait for one, and take its environment.

    Returns whether it had none.

    Raises:
        SystemExit: There is no round for this process.
    """
    path = os.environ.get(ENV_SOCKET)
    if not path or os.environ.get(ENV_ROUND) != "0":
        return False
    hello = Hello(rank=int(os.environ["RANK"]), pid=os.getpid())
    with suppress(OSError), connect_to_agent(path) as connection:
        connection.sendall(encode(hello) + encode(Left(round=0, step=0, stays=True)))
        # No timeout: the agent ends the wait with the round, or by closing the connection.
        for line in connection.makefile("rb"):
            if isinstance(message := decode(line), Join):
                os.environ.update(message.env)
                return True
    # It has trained nothing, so it has not failed.
    raise SystemExit(0)


def connect_to_agent(path: str, timeout_s: float | None = None) -> socket.socket:
    """A connection to the agent of this node, whose calls have this timeout.

    None is none: a script may have given all sockets one (`socket.setdefaulttimeout`).

    Raises:
        OSError: The agent does not listen there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def backend_for(*, has_gpu: bool, has_nccl: bool) -> str:
    """The backends of the default group; a torch may be built without NCCL."""
    if not has_gpu:
        return "gloo"
    return f"cpu:gloo,cuda:{'nccl' if has_nccl else 'gloo'}"


def leave_group() -> bool:
    """Leave all process groups, also if exchanges are under way that never end.

    Returns whether everything has been aborted in time.
    """
    if not dist.is_initialized():
        return True
    # Not by `destroy_process_group`, which waits for exchanges; and in a thread of its own: an
    # abort that waits for a device must not keep the process.
    thread = threading.Thread(target=_abort, daemon=True, name="zero-abort")
    thread.start()
    thread.join(ABORT_TIMEOUT_S)
    if thread.is_alive():
        _log.warning("the process group has not been aborted within %g s", ABORT_TIMEOUT_S)
    return not thread.is_alive()


def hang_up_on_store() -> None:
    """End every call to the store of the default group, now and later: the group is lost.

    Threads that wait for it get the error that a store whose host has died gives them.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    # A host that is suspended closes no connection, and torch's store waits for its answers for as
    # long as the group's timeout, in threads that nothing else can interrupt.
    with suppress(OSError):
        known = {found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        for number in map(int, os.listdir("/proc/self/fd")):
            # Not closed: the descriptor is torch's, whose threads would read from whatever gets its
            # number next.
            if _is_at(number, known, port):
                _LIBRARY.shutdown(number, socket.SHUT_RDWR)


def _is_at(number: int, hosts: Collection[object], port: int) -> bool:
    """Whether the other end of a descriptor is there."""
    # Not by `socket.socket(fileno=number)`: it would change how the descriptor blocks, for whoever
    # has it, if the script has given all sockets a timeout (`socket.setdefaulttimeout`).
    peer, size = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_int(_ADDRESS_BYTES)
    if _LIBRARY.getpeername(number, peer, ctypes.byref(size)):
        return False  # no socket, or not connected
    family = int.from_bytes(peer.raw[:2], sys.byteorder)
    if family not in _ADDRESSES or int.from_bytes(peer.raw[2:4], "big") != port:
        return False
    host = socket.inet_ntop(family, peer.raw[_ADDRESSES[family]])
    # torch connects to IPv4 addresses by mapped IPv6 ones.
    return host.removeprefix("::ffff:") in hosts


def found_again(environ: Mapping[str, str], within_s: float = GROUP_TIMEOUT_S) -> None:
    """Leave the process group and found the next one, with other variables, in the same process.

    Rank, world size and store are those of `environ`, such as a `Join` has. The other ranks are
    waited for `within_s`. What was made of the group before, such as `Collectives`, must be made
    anew. Threads, devices, compiled code and memory stay.

    Raises:
        PeerLost: The former group has not been aborted in time; or a rank of the next one, or the
            host of its store, is lost, or does not come.
    """
    if not leave_group():
        raise PeerLost(f"the former process group is not aborted within {ABORT_TIMEOUT_S:g} s")
    os.environ.update(environ)
    usual_s = group_timeout_s()
    init_distributed(timeout_s=min(within_s, usual_s))
    # The shorter timeout was that of the meeting; torch gives it to the group and the store.
    usual = timedelta(seconds=usual_s)
    dist.distributed_c10d._set_pg_timeout(usual)
    dist.distributed_c10d._get_default_store().set_timeout(usual)


def _abort() -> None:
    try:
        dist.distributed_c10d._abort_process_group()
    except (RuntimeError, ValueError) as error:  # it is broken, or left by another thread
        _log.debug("aborting the process group: %s", error)


class GroupStore(PrefixStore):
    """The part of the default group's store under `path`."""

    def __init__(self, path: str, store: Store) -> None:
        super().__init__(path, store)
        self.path = path

    @property
    def votes_key(self) -> Key | None:
        """Signs what ranks vote on here; None if no agent has given them a key of the round."""
        of_round = Key(os.environ.get(ENV_VOTE_KEY, ""))
        return derive(of_round, Purpose.VOTES, self.path) if of_round else None


def group_store(name: str) -> GroupStore:
    """A part of the default group's store that nothing else uses.

    Every rank gets the same part for its first, second, ... call with this name.
    """
    store = dist.distributed_c10d._get_default_store()
    turn = store.add(f"zero/{name}/calls/{dist.get_rank()}", 1)
    return GroupStore(f"zero/{name}/{turn}", store)


def local_rank() -> int:
    """This worker's number on its node; 0 outside torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_device() -> torch.device:
    """The device that this worker computes on; the current one, after `init_distributed`."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_index(local: int, visible: int, current: int) -> int:
    """Which of its `visible` devices a worker uses, by its number on its node.

    A script may have chosen the current one, which is 0 unless anybody has.

    Raises:
        ConfigError: There are fewer devices than workers.
    """
    if current or visible == 1:  # the script's choice; or the launcher's, one for each worker
        return current
    if local >= visible:
        raise ConfigError(
            f"LOCAL_RANK={local}, but this worker sees {visible} devices: start at most {visible} "
            "workers on this node (--nproc-per-node), or let CUDA_VISIBLE_DEVICES name one device "
            "for each worker"
        )
    return local


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The variables of one launcher."""

    name: str
    rank: str
    world: tuple[str, ...]
    """Names of variables, of which the first that is set counts."""
    local_rank: str
    local_world: str = ""
    nodelist: tuple[str, ...] = ()
    """Names of variables with the list of hosts, the first of which runs rank 0."""
    only_with: str = ""
    """The launcher is meant only if this variable is set, too."""


LAUNCHERS = (
    Launcher(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        name="MVAPICH2",
        rank="MV2_COMM_WORLD_RANK",
        world=("MV2_COMM_WORLD_SIZE",),
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        name="MPICH or Intel MPI",
        rank="PMI_RANK",
        world=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_world="MPI_LOCALNRANKS",
    ),
    Launcher(
        name="Slurm",
        rank="SLURM_PROCID",
        world=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        nodelist=("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"),
        only_with="SLURM_STEP_ID",  # a batch script has the others, too, and is one process
    ),
)


def discover(environ: Mapping[str, str], port: int) -> dict[str, str]:
    """The variables that torchrun would have set; {} if no such launcher has started this process.

    `port` is that of rank 0's store if MASTER_PORT is not set.

    Raises:
        ConfigError: The host of rank 0 is unknown.
    """
    started = [
        launcher
        for launcher in LAUNCHERS
        if launcher.rank in environ and (launcher.only_with or launcher.rank) in environ
    ]
    if not started:
        return {}
    # Slurm's PMI-2 sets the rank of MPICH, and nothing else of it: who knows the place on the node
    # has started this process.
    launcher = next((each for each in started if each.local_rank in environ), started[0])
    world = next((environ[name] for name in launcher.world if name in environ), "1")
    # A world of one is on one host, whatever its launcher tells.
    local_world = environ.get(launcher.local_world, world if world == "1" else "")
    address = environ.get("MASTER_ADDR")
    if not address:
        hosts = next((environ[name] for name in launcher.nodelist if name in environ), None)
        if hosts is not None:
            address = first_of(hosts)
        elif local_world == world:
            address = LOOPBACK
        else:
            try:
                from mpi4py import MPI
            except ImportError:
                raise ConfigError(
                    f"{launcher.name} runs this worker on one of several hosts and does not say "
                    "which has rank 0: set MASTER_ADDR (mpirun -x MASTER_ADDR=HOST), or install "
                    "mpi4py"
                ) from None
            mine = socket.gethostbyname(socket.gethostname())
            address = str(MPI.COMM_WORLD.bcast(mine, root=0))
    return {
        "RANK": environ[launcher.rank],
        "WORLD_SIZE": world,
        "LOCAL_RANK": environ.get(launcher.local_rank, "0"),
        "MASTER_ADDR": address,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def first_of(nodelist: str) -> str:
    """The first host of a Slurm list: `gpu[07-12,15],cpu1` -> `gpu07`.

    Source: the hostlist expressions of `scontrol show hostnames`.
    """
    first = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodelist)
    return first.partition(",")[0].strip()
