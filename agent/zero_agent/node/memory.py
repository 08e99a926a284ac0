"""The node's memory for checkpoints: a directory in /dev/shm that outlives the workers.

Workers freeze their state into files here; when one dies, its last image is still there for the
next round, because the directory belongs to the agent. It is made when a worker first asks for
it, and removed when the agent ends. `memory_server` serves it to the other nodes.

An agent that crashes leaves it behind, and the next one of that machine in the same run of the job
(whose secret marks the name) adopts it: what is in it is verified by its digests, as ever.

Must always hold: the directory is owned (`owned_dir`) for as long as its agent lives, so `sweep`
removes exactly what dead agents have left: when an agent starts, some time after it was last used;
when it ends, all of its job.

Called by the agent's loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from pathlib import Path

from zero_agent.node.memory_server import RamServer, used_bytes
from zero_agent.node.network import ANY_PORT
from zero_contract import owned_dir
from zero_contract.owned_dir import OwnedDir
from zero_contract.peer_memory import key_of
from zero_contract.worker import RamReply, RamRequest
from zero_orchestrator.addresses import host_port
from zero_orchestrator.ctl.events import RamUse

log = logging.getLogger("zero")

DIRECTORY = Path("/dev/shm")
_PREFIX = "zero-ram."
GRACE_S = 60.0
"""Others leave the memory of a crashed agent alone for so long: it may be started again."""


class Ram:
    """One agent's memory for checkpoints; nothing is taken before a worker asks."""

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
        """Remove what dead agents have left, but for what a successor may still come for.

        Args:
            job: With `node`, what the directory is called: people see whose memory it is.
            node: This agent's, or its machine: by it a successor knows what is its own.
            address: The node's own; the server listens there and nowhere else.
            directory: A tmpfs.
            limit_bytes: The node gives no more, whatever workers ask for; None: half of the room
                there is, or what they ask for.
            ports: One of them is the server's.
            advertised: Under which the other nodes reach the server, if not by `address`.
        """
        job, node = (re.sub(r"[^0-9A-Za-z_-]", "-", word)[:64] for word in (job, node))
        self._name = f"{job}.{node}"
        self._address, self._ports = address, ports
        self._reached_at = advertised or address
        self._parent = directory
        self._memory: OwnedDir | None = None
        self._server: RamServer | None = None
        self._limit_bytes = limit_bytes
        self._half_bytes = 0
        """Half of the room that there was in the beginning."""
        self._of_job = f"{job}.*"
        sweep(directory, spare=f"{self._name}.*", grace_s=GRACE_S)

    def open(self, request: RamRequest, secret: str) -> RamReply:
        """What a worker needs to know to keep its images here.

        Args:
            request: The worker's; the budget of the last one counts.
            secret: The job's.
        """
        key = key_of(secret)
        try:
            if self._memory is None:
                self._memory = self._adopt_or_make(key)
                room = os.statvfs(self._parent)
                room_bytes = room.f_bavail * room.f_frsize + used_bytes(self._memory.path)
                self._half_bytes = room_bytes // 2  # training needs memory, too
                log.info("checkpoints in memory are kept in %s", self._memory.path)
            path = self._memory.path
            budget = self._budget_bytes(request.budget_bytes)
            if self._server is None:
                self._server = RamServer(path, self._address, key, budget, self._ports)
            self._server.budget_bytes = budget
        except OSError as error:
            return RamReply(request=request.request, reason=f"{self._parent}: {error.strerror}")
        return RamReply(
            request=request.request,
            directory=str(path),
            address=host_port(self._reached_at, self._server.port),
            key=key,
            budget_bytes=budget,
        )

    def _adopt_or_make(self, key: str) -> OwnedDir:
        """That of a crashed agent of this machine and run, or a new one. Raises OSError."""
        name = f"{self._name}.{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        sweep(self._parent, f"{self._name}.*", spare=f"{name}.*")  # of earlier runs of the job
        for path in sorted(self._parent.glob(f"{_PREFIX}{name}.*")):
            with contextlib.suppress(OSError):  # that agent lives
                left = owned_dir.claim(path, only_left=True)
                log.info("the agent before this one crashed; its memory is adopted")
                return left
        return owned_dir.make(self._parent, f"{_PREFIX}{name}.")

    @property
    def is_open(self) -> bool:
        """Whether a worker has asked for memory: what it kept there is lost with this agent."""
        return self._memory is not None

    def use(self) -> RamUse | None:
        """How much of the node's memory is taken; None if no worker has asked for any."""
        if self._memory is None or self._server is None:
            return None
        budget = self._server.budget_bytes
        return RamUse(used_bytes=used_bytes(self._memory.path), budget_bytes=budget)

    def _budget_bytes(self, wanted: int | None) -> int:
        if self._limit_bytes is None:
            return wanted or self._half_bytes
        return min(wanted or self._limit_bytes, self._limit_bytes)

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
    """Remove the memory of agents that are dead; never raises.

    Args:
        directory: Where it is.
        names: A pattern, of the job and what follows it.
        spare: Another, of what is left alone.
        grace_s: What was in use so recently is left for a successor.
    """
    spare = _PREFIX + spare if spare else ""
    for path in owned_dir.sweep(directory, _PREFIX + names, spare=spare, grace_s=grace_s):
        log.info("removed %s, left by an agent that died", path)
