"""What one agent was asked to do, checked and complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zero_agent.node import identity
from zero_agent.node.health_checks import Surroundings
from zero_agent.node.network import ANY_PORT, loopback
from zero_agent.workers.progress import HangPolicy
from zero_agent.workers.streams import Streams
from zero_agent.workers.worker_main import Program
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.addresses import host_port
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.membership.records import PROTOCOL
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec


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
    """This machine's own, on which it listens for the other nodes."""
    advertised: str = ""
    """Under which the other nodes reach this one, if not by `address`: behind NAT."""
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
    show_store: Callable[[int], str] | None = None
    """Makes the store of a round, at this port here, reachable elsewhere; where that is."""
    ports: range = ANY_PORT
    """Those at which other nodes reach this one: its ring, its memory, a round's store."""
    log_dir: Path | None = None
    streams: Streams = field(default_factory=Streams)
    cpus: tuple[Collection[int], ...] = ()
    """Which each worker is bound to, by local rank; empty: all of them to all."""
    virtual_local_rank: bool = False
    """Each worker sees its own GPU alone, as number 0."""
    preload: tuple[str, ...] = ("torch", "numpy", "torch._dynamo", "zero_deepspeed")
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
    stop_exit_code: int = AgentExit.STOPPED
    """With which this agent exits when the job was stopped."""
    join_timeout_s: float = 600.0
    """How long to wait for enough nodes."""

    @property
    def store_listens_on(self) -> str:
        """The one address of a round's store: behind this node's port, or the node's own."""
        return loopback() if self.show_store else self.address

    @property
    def store_ports(self) -> range:
        """Of a round's store; behind this node's port nobody else reaches it."""
        return ANY_PORT if self.show_store else self.ports

    def where_store_is(self, port: int) -> str:
        """The address of a round's store at a port of this node, for the workers of all nodes."""
        return self.show_store(port) if self.show_store else self.reached_at(port)

    def reached_at(self, port: int) -> str:
        """Where the other nodes find a port on which this node listens."""
        return host_port(self.advertised or self.address, port)

    def surroundings(self, environ: Mapping[str, str]) -> Surroundings:
        """What is checked of this node; whether etcd answers, the agent sees for itself."""
        return Surroundings(
            slots=self.slots,
            gpus=self.gpus,
            address=self.address,
            log_dir=self.log_dir,
            command=self.health_check,
            command_timeout_s=self.health_check_timeout_s,
            environ=environ,
        )

    def node(self, incarnation: str, ring_port: int) -> Node:
        """The agent as the others know it.

        Args:
            incarnation: Of this process.
            ring_port: At which its liveness ring listens.
        """
        return Node(
            id=self.node_id,
            incarnation=incarnation,
            address=self.advertised or self.address,
            slots=self.slots,
            ring=self.reached_at(ring_port),
            role=self.role,
            host=self.host,
            protocol=PROTOCOL,
            process=identity.own(),
            lease_ttl_s=self.lease_ttl_s,
        )
