"""In-memory checkpoints of a node: a directory in /dev/shm that outlives the workers.

Workers write snapshots of their state into files here. When a worker dies, its last snapshot is
still there for the next round, because the directory belongs to the agent. The directory is made
when a worker first asks for it, and removed when the agent ends. `memory_server` serves it to the
other nodes.

An agent that crashes leaves the directory behind, and the next agent of that machine in the same
run of the job (the job's secret marks the name) adopts it: readers verify its checksums, as ever.

Must always hold: the directory is owned (`owned_dir`) for as long as its agent lives, so `sweep`
removes exactly what dead agents have left: at the start of an agent, what was not used for
`GRACE_S`; at its end, everything of its job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path

from zero_agent.node.memory_server import MemoryServer, used_bytes
from zero_agent.node.network import ANY_PORT
from zero_contract import owned_dir
from zero_contract.owned_dir import OwnedDir
from zero_contract.signing import Purpose, Secret, derive
from zero_contract.worker import PeerMemoryReply, PeerMemoryRequest
from zero_orchestrator.addresses import host_port
from zero_orchestrator.observe.events import MemoryUse

log = logging.getLogger("zero")

DIRECTORY = Path("/dev/shm")
_PREFIX = "zero-ram."
GRACE_S = 60.0
"""How long other agents spare the memory of a crashed agent, which may be started again."""


class NodeMemory:
    """One agent's in-memory checkpoints; no memory is allocated before a worker asks for it."""

    def __init__(
        self,
        job: str,
        node: str,
        address: str,
        directory: Path = DIRECTORY,
        *,
        limit_bytes: int | None = None,
        ports: range = ANY_PORT,
        advertised: str = "",
    ) -> None:
        """Remove what dead agents have left, except what a successor may still adopt.

        Args:
            job: The job's name; with `node` it names the directory.
            node: The id of the node, or its machine's name, by which a successor finds its own.
            address: The node's own address; the server listens there and nowhere else.
            directory: A tmpfs.
            limit_bytes: Upper limit of the budget, whatever workers ask for; None: no limit, and
                half of the free space for workers that name no budget.
            ports: The server takes the first free one of them.
            advertised: The address under which other nodes reach the server, if not `address`.
        """
        job, node = (re.sub(r"[^0-9A-Za-z_-]", "-", word)[:64] for word in (job, node))
        self._name = f"{job}.{node}"
        self._address, self._ports = address, ports
        self._reached_at = advertised or address
        self._parent = directory
        self._memory: OwnedDir | None = None
        self._server: MemoryServer | None = None
        self._limit_bytes = limit_bytes
        self._half_bytes = 0
        """Half of the space that was free in the beginning."""
        self._of_job = f"{job}.*"
        sweep(directory, spare=f"{self._name}.*", grace_s=GRACE_S)

    def open(self, request: PeerMemoryRequest, secret: Secret) -> PeerMemoryReply:
        """Give a worker the directory, the address and the key for its snapshots.

        Args:
            request: The worker's; the budget of the last request counts.
            secret: The job's.

        Returns:
            What the worker needs, or the reason why there is no memory.
        """
        key = derive(secret, Purpose.PEER_MEMORY)
        try:
            if self._memory is None:
                name = f"{self._name}.{derive(secret, Purpose.MEMORY_NAME)[:8]}"
                # Remove what earlier runs of the job have left.
                sweep(self._parent, f"{self._name}.*", spare=f"{name}.*")
                for left in sorted(self._parent.glob(f"{_PREFIX}{name}.*")):
                    with contextlib.suppress(OSError):  # that agent lives
                        self._memory = owned_dir.claim(left, only_left=True)
                        log.info("the agent before this one crashed; its memory is adopted")
                        break
                else:
                    self._memory = owned_dir.make(self._parent, f"{_PREFIX}{name}.")
                room = os.statvfs(self._parent)
                room_bytes = room.f_bavail * room.f_frsize + used_bytes(self._memory.path)
                self._half_bytes = room_bytes // 2  # training needs memory, too
                log.info("checkpoints in memory are kept in %s", self._memory.path)
            path = self._memory.path
            budget = request.budget_bytes or self._limit_bytes or self._half_bytes
            if self._limit_bytes is not None:
                budget = min(budget, self._limit_bytes)
            if self._server is None:
                self._server = MemoryServer(path, self._address, key, budget, self._ports)
            self._server.budget_bytes = budget
        except OSError as error:
            return PeerMemoryReply(
                request=request.request, reason=f"{self._parent}: {error.strerror}"
            )
        return PeerMemoryReply(
            request=request.request,
            directory=str(path),
            address=host_port(self._reached_at, self._server.port),
            key=key,
            budget_bytes=budget,
        )

    @property
    def is_open(self) -> bool:
        """Whether a worker has asked for memory: its snapshots are lost with this agent."""
        return self._memory is not None

    def use(self) -> MemoryUse | None:
        """How much memory the snapshots take; None if no worker has asked for any."""
        if self._memory is None or self._server is None:
            return None
        budget = self._server.budget_bytes
        return MemoryUse(used_bytes=used_bytes(self._memory.path), budget_bytes=budget)

    def close(self) -> None:
        """Stop serving and give the memory back; the workers must be gone."""
        if self._server is not None:
            self._server.close()
        if self._memory is not None:
            self._memory.remove()
        self._server = self._memory = None
        sweep(self._parent, self._of_job)


def sweep(
    directory: Path = DIRECTORY, names: str = "*", *, spare: str = "", grace_s: float = 0.0
) -> None:
    """Remove the in-memory checkpoints of dead agents; never raises.

    Args:
        directory: The tmpfs with the agents' directories.
        names: The pattern of names to remove: the job and what follows it.
        spare: The pattern of names to keep.
        grace_s: A directory that was in use less than this long ago is kept for a successor.
    """
    spare = _PREFIX + spare if spare else ""
    for path in owned_dir.sweep(directory, _PREFIX + names, spare=spare, grace_s=grace_s):
        log.info("removed %s, left by an agent that died", path)
