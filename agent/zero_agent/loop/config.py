"""The configuration of one agent, validated and complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zero_agent.node import identity
from zero_agent.node.health_checks import Surroundings
from zero_agent.node.network import ANY_PORT, loopback
from zero_agent.workers.output.streams import Streams
from zero_agent.workers.progress import HangPolicy
from zero_agent.workers.worker_main import Program
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.addresses import host_port
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.membership.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One agent's configuration, made from the flags and the environment."""

    spec: JobSpec
    program: Program
    slots: int
    """Workers on this node."""
    job: str | None
    """The job's name, or None: the current run of this very command."""
    node_id: str
    address: str
    """This machine's own address, on which the agent listens for the other nodes."""
    advertised: str = ""
    """The address under which other nodes reach this one, if not `address`: behind NAT."""
    host: str = ""
    """The host that an exclusion of this node applies to; empty: the node's id."""
    topology: str = ""
    """Where this node is in the network, as `Node.topology`."""
    timing: Timing
    gpus: bool = False
    """Whether each worker needs its own GPU."""
    health_check: str = ""
    """The command of --health-check; empty if there is none."""
    health_check_timeout_s: float = 60.0
    role: str = "default"
    """The role of this node's workers, for ROLE_NAME, ROLE_RANK and ROLE_WORLD_SIZE."""
    lease_ttl_s: int = 3
    """Time to live of the node's lease: the node is lost this long after its last refresh."""
    show_store: Callable[[int], str] | None = None
    """Makes the TCPStore at a port here reachable for other nodes; returns its address there."""
    ports: range = ANY_PORT
    """Ports on which this node listens for others: its ring, its memory, a round's TCPStore."""
    log_dir: Path | None = None
    streams: Streams = field(default_factory=Streams)
    cpus: tuple[Collection[int], ...] = ()
    """The CPUs of each worker, by local rank; empty: no worker is bound."""
    virtual_local_rank: bool = False
    """Whether each worker sees only its own GPU, as device 0."""
    preload: tuple[str, ...] = ("torch", "numpy", "torch._dynamo", "zero_deepspeed")
    """Modules that the forkserver imports for every worker."""
    shutdown_timeout_s: float = 30.0
    """Time from SIGTERM to SIGKILL for workers that are asked to end."""
    boundary_timeout_s: float = 300.0
    """How long workers may take to reach a step boundary before they are stopped."""
    hang: HangPolicy = field(default_factory=HangPolicy)
    """When workers that take no step are killed."""
    ram_budget_bytes: int | None = None
    """Budget of in-memory checkpoints on this node; None: the config's, or half of what is free."""
    etcd_grace_s: float = 600.0
    """How long the workers may continue while etcd cannot be reached."""
    stop_exit_code: int = AgentExit.STOPPED
    """The agent's exit code when the job was stopped."""
    join_timeout_s: float = 600.0
    """How long to wait for enough nodes."""

    @property
    def imports(self) -> str:
        """The modules of `preload` for people: torch stands for those that every worker has."""
        own = [module for module in self.preload if module not in AgentConfig.preload]
        return ", ".join(["torch", *own] if self.preload else own)

    @property
    def store_listens_on(self) -> str:
        """The address on which a round's TCPStore listens."""
        # Behind `show_store`, a proxy of this process, nobody else connects to it.
        return loopback() if self.show_store else self.address

    @property
    def store_ports(self) -> range:
        """The ports of a round's TCPStore; any port behind `show_store`."""
        return ANY_PORT if self.show_store else self.ports

    def where_store_is(self, port: int) -> str:
        """The address of the TCPStore at a port of this node, for the workers of all nodes."""
        return self.show_store(port) if self.show_store else self.reached_at(port)

    def reached_at(self, port: int) -> str:
        """`host:port` by which other nodes reach a port on which this node listens."""
        return host_port(self.advertised or self.address, port)

    def surroundings(self, environ: Mapping[str, str]) -> Surroundings:
        """What the health checks of this node look at."""
        # Without etcd and its clock: an agent hears from etcd all the time.
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
        """This agent's registration, as the other nodes read it."""
        return Node(
            id=self.node_id,
            incarnation=incarnation,
            address=self.advertised or self.address,
            slots=self.slots,
            ring=self.reached_at(ring_port),
            role=self.role,
            host=self.host,
            topology=self.topology,
            process=identity.own(),
            lease_ttl_s=self.lease_ttl_s,
        )
