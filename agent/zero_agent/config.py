"""What one agent was asked to do, checked and complete."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from zero_agent.workers.hang import HangPolicy
from zero_agent.workers.streams import Streams
from zero_agent.workers.worker_main import Program
from zero_orchestrator.errors import ZeroError
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec


class AgentExit(IntEnum):
    """Exit codes of `zero-agent`; an agent ended by a signal exits with 128 + its number."""

    OK = 0
    """The job is done (also for an agent that comes late, or was a spare)."""
    JOB_FAILED = 1
    """The job has failed; the root cause is printed."""
    USAGE = 2
    """The command line, the script or the job's specification is wrong; nothing was started."""
    NO_STORE = 3
    """etcd could not be reached, for longer than --etcd-wait at the start or --etcd-grace later."""
    NO_NODES = 4
    """Too few nodes came within --join-timeout."""
    STOPPED = 5
    """The job was stopped by `zero-ctl stop` (also for an agent that comes late)."""
    DRAINED = 6
    """This node left because of `zero-ctl drain`; the job goes on without it."""
    NO_PROGRESS = 7
    """The job failed early: it restarted again and again and finished no new step."""
    UNFIT = 8
    """This node did not become fit to take part within --join-timeout; the job is not over."""


class AgentFailed(ZeroError):
    """The agent itself cannot go on; `code` is its exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One agent's configuration, made from flags and environment by `resolve.py`."""

    spec: JobSpec
    program: Program
    slots: int
    """Workers on this node."""
    job: str | None
    """The job's name, or None: the current run of this very command."""
    node_id: str
    address: str
    """Under which the other nodes reach this one."""
    host: str = ""
    """What an exclusion of this node is about; empty: the node's name."""
    timing: Timing
    gpus: bool = False
    """Each of the workers is to have a GPU."""
    health_check: str = ""
    """The user's own check of this node, a shell command; empty: none."""
    health_check_timeout_s: float = 60.0
    role: str = "default"
    """What this node's workers are called, for ROLE_NAME, ROLE_RANK and ROLE_WORLD_SIZE."""
    lease_ttl_s: int = 3
    """The node is lost so long after its last sign of life."""
    log_dir: Path | None = None
    streams: Streams = field(default_factory=Streams)
    cpus: tuple[Collection[int], ...] = ()
    """Which each worker is bound to, by local rank; empty: all of them to all."""
    virtual_local_rank: bool = False
    """Each worker sees its own GPU alone, as number 0."""
    preload: tuple[str, ...] = ("torch", "numpy", "torch._dynamo", "zero_engine")
    """Modules that every worker finds imported."""
    shutdown_timeout_s: float = 30.0
    """From SIGTERM to SIGKILL for workers that are asked to end."""
    boundary_timeout_s: float = 300.0
    """How long workers may take to reach a step boundary before they are stopped."""
    hang: HangPolicy = field(default_factory=HangPolicy)
    """When workers that take no step are killed."""
    ram_budget_bytes: int | None = None
    """Checkpoints in memory take no more of this node; None: as the agent finds right."""
    etcd_grace_s: float = 600.0
    """How long the workers may go on while etcd cannot be reached."""
    join_timeout_s: float = 600.0
    """How long to wait for enough nodes."""

    def node(self, incarnation: str, ring: str) -> Node:
        """The agent as the others know it.

        Args:
            incarnation: Of this process.
            ring: Where its liveness ring listens.
        """
        return Node(
            id=self.node_id,
            incarnation=incarnation,
            address=self.address,
            slots=self.slots,
            ring=ring,
            role=self.role,
            host=self.host,
        )
