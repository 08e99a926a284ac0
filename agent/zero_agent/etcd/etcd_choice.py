"""The choice of the etcd at which the agents of a job meet.

`choose` knows five ways: an etcd that the user names; one that the job serves itself at the
endpoint that the user names (torchrun's c10d, `own_etcd`); a private one of this agent (one node);
the one that all agents of this machine share; or, if the nodes are given ranks and the address of
node 0 as with torchrun's static rendezvous, one that node 0 runs at that address. In that last way
the world is fixed, and the nodes keep their given order.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zero_agent.errors import AgentFailed
from zero_agent.etcd import local_etcd
from zero_agent.etcd.etcd_access import OPEN, Joining
from zero_agent.etcd.etcd_process import LOOPBACK, FoundEtcd, probe
from zero_agent.node.network import address_towards
from zero_contract.clock import wait_until
from zero_contract.errors import ZeroError
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.addresses import family_of, host_port, split_host_port
from zero_orchestrator.errors import SpecError, StoreError
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.spec import parse_nnodes
from zero_orchestrator.observe.ended import keep
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN
from zero_orchestrator.store.kv import KeyValueStore

if TYPE_CHECKING:  # its import takes a while, and few jobs need it
    from zero_agent.etcd.port_proxy import PortProxy

log = logging.getLogger("zero")

SHARED_ENDPOINT = host_port(LOOPBACK, 2379)
"""etcd's default port: agents without an endpoint meet there on one machine."""
OWN_BACKEND = "c10d"
"""The backend whose store is the job's own."""
OWN_PORT = 29400
"""Its default port, as torchrun's."""
STATIC_PORT = 29500
"""The default of --master-port, as torchrun's."""
STATIC_GRACE_S = 30.0
"""--etcd-grace of a fixed world: its etcd is lost with node 0, unlike that of a cluster."""
SEE_OFF_S = 15.0
"""The longest time that node 0, whose etcd ends with it, waits for the other agents to leave."""
_WAITING = 4096
"""Backlog: how many workers may connect at once."""


class Way(StrEnum):
    """How the agents of a job find each other."""

    NAMED = "named"
    OWN = "own"
    PRIVATE = "private"
    SHARED = "shared"
    STATIC = "static"


def choose(args: argparse.Namespace) -> tuple[Way, str]:
    """The way that these flags select, and a note on flags without effect, empty if none is."""
    static = [name for name in _STATIC if getattr(args, name) not in (None, "")]
    if args.standalone:
        named = ["rdzv_endpoint"] if args.rdzv_endpoint else []
        return Way.PRIVATE, _without_effect("--standalone", [*named, *static])
    if args.rdzv_endpoint:
        way = Way.NAMED
        existing = args.etcd_ca or args.etcd_cert or args.etcd_user
        # An etcd with certificates or a login exists already, whatever the backend is.
        if args.rdzv_backend == OWN_BACKEND and not existing:
            # Port 0 is any port, which other nodes cannot know: for a job of one node.
            port = split_host_port(endpoints_of(args.rdzv_endpoint)[0])[1]
            way = Way.OWN if port else Way.PRIVATE
        return way, _without_effect("--rdzv-endpoint", static)
    if parse_nnodes(args.nnodes)[1] == 1:
        return Way.PRIVATE, ""  # with --master-port: that is the port of the workers' store
    if static:
        return Way.STATIC, ""
    return Way.SHARED, ""


def endpoints_of(text: str) -> tuple[str, ...]:
    """`HOST:PORT` for each part of `HOST[:PORT][,HOST...]`; the port is torchrun's by default.

    Raises:
        SpecError: It is malformed.
    """
    return tuple(_endpoint(part.strip()) for part in text.split(","))


def _endpoint(text: str) -> str:
    # `[fd00::1]` ends in digits after a colon, and has no port.
    has_port = text.rpartition(":")[2].isdecimal() and not text.endswith("]")
    with contextlib.suppress(ValueError):
        host, port = split_host_port(text if has_port else f"{text}:{OWN_PORT}")
        if host and port < 1 << 16:
            return host_port(host, port)
    raise SpecError(f"--rdzv-endpoint={text}: write HOST or HOST:PORT, the port at most 65535")


_STATIC = ("node_rank", "master_addr", "master_port")


def _without_effect(because_of: str, names: Sequence[str]) -> str:
    written = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return f"{written}: without effect beside {because_of}" if written else ""


@dataclass(frozen=True, kw_only=True)
class Static:
    """A node's rank in a fixed world."""

    rank: int
    nodes: int
    address: str
    port: int
    join_timeout_s: float
    own_address: str = ""
    """The address on which node 0 listens, if that is not `address`: behind NAT."""

    @property
    def endpoint(self) -> str:
        """`host:port` by which the other nodes reach node 0's etcd."""
        return host_port(self.address, self.port)

    @property
    def listens_on(self) -> str:
        """The address on which node 0 listens."""
        return self.own_address or self.address

    @classmethod
    def of(cls, args: argparse.Namespace, join_timeout_s: float) -> Static:
        """Make it from the flags.

        Raises:
            SpecError: The number of nodes is not fixed, or the rank is out of range.
        """
        low, high = parse_nnodes(args.nnodes)
        if low != high:
            raise SpecError(
                f"--nnodes={args.nnodes} with --node-rank or --master-addr: such a world is "
                f"fixed; write --nnodes={high}, or use --rdzv-endpoint for an elastic one"
            )
        rank = args.node_rank or 0
        if not 0 <= rank < high:
            raise SpecError(f"--node-rank={rank}: with --nnodes={high} write 0 to {high - 1}")
        address, port = (args.master_addr or LOOPBACK).strip("[]"), args.master_port or STATIC_PORT
        # Node 0 can listen only on an address of its own, which `address` is not behind NAT.
        behind_nat = rank == 0 and args.advertise_addr == address
        own = (args.local_addr or address_towards(host_port(address, port))) if behind_nat else ""
        return cls(
            rank=rank,
            nodes=high,
            address=address,
            port=port,
            join_timeout_s=join_timeout_s,
            own_address=own,
        )


@contextlib.contextmanager
def static_server(world: Static, access: Joining) -> Iterator[tuple[str, PortProxy | None]]:
    """The endpoint of node 0's etcd, and on node 0 its port; the other nodes wait for it.

    Raises:
        SpecError: Node 0 cannot listen there.
        AgentFailed: Node 0 has not come in time.
    """
    if world.rank > 0:
        there = lambda: probe(world.endpoint, access.tls) is FoundEtcd.ETCD  # noqa: E731
        if not wait_until(there, world.join_timeout_s):
            raise AgentFailed(
                AgentExit.NO_NODES,
                f"node 0 has not appeared at {world.endpoint} within {world.join_timeout_s:g} s; "
                "start it with --node-rank=0 and the same --master-addr, --master-port and "
                f"{ENV_JOIN_TOKEN} (if any node has one, all have the same)",
            )
        yield world.endpoint, None
        return
    # The certificate must have every name by which an agent may dial this node.
    names = [world.address, world.listens_on, *(others := _addresses(world.address))]
    if others and not access.token:
        log.warning("%s", OPEN.format(where=world.endpoint))
    with (
        _listening(world) as listeners,
        local_etcd.private_server(token=access.token, names=names) as etcd,
        _proxy(world, listeners, etcd) as proxy,
    ):
        yield host_port(world.listens_on, world.port), proxy


@contextlib.contextmanager
def own_port(args: argparse.Namespace) -> Iterator[PortProxy | None]:
    """The port of the only node's workers, if --master-port names one.

    Raises:
        SpecError: This node cannot listen there.
    """
    if args.standalone or args.master_port is None:
        yield None
        return
    world = Static.of(args, join_timeout_s=0.0)
    with _listening(world) as listeners, _proxy(world, listeners, etcd="") as proxy:
        yield proxy


def _proxy(
    world: Static, listeners: list[socket.socket], etcd: str
) -> contextlib.closing[PortProxy]:
    from zero_agent.etcd.port_proxy import PortProxy

    return contextlib.closing(PortProxy(world.endpoint, listeners, etcd))


@contextlib.contextmanager
def _listening(world: Static) -> Iterator[list[socket.socket]]:
    """Sockets at the port of node 0, on all of its addresses."""
    with contextlib.ExitStack() as made:
        found = []
        for address in sorted({LOOPBACK, *_addresses(world.listens_on)}):
            try:
                listener = socket.create_server(
                    (address, world.port), family=family_of(address), backlog=_WAITING
                )
            except OSError as error:
                remedy = "choose another port, the same on all nodes"
                if error.errno == errno.EADDRNOTAVAIL:
                    remedy = (
                        "start --node-rank=0 on the machine that --master-addr names, behind NAT "
                        "with the same --advertise-addr"
                    )
                raise SpecError(
                    f"--master-port={world.port}: cannot listen on {address}: {error.strerror}; "
                    f"{remedy}"
                ) from error
            found.append(made.enter_context(listener))
        yield found


def _addresses(host: str) -> list[str]:
    """The IP addresses of a host."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter: no DNS name, such as a..b
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        raise SpecError(
            f"--master-addr={host}: {why}; write the address or the name of the "
            "machine with --node-rank=0"
        ) from error
    found = {str(info[4][0]).partition("%")[0] for info in infos}
    # Not the loopback, which is served anyway: Debian gives a host's own name 127.0.1.1.
    return sorted(ip for ip in found if not ip.startswith("127."))


def await_turn(store: KeyValueStore, job: str, world: Static) -> None:
    """Wait until the node before this one is registered: ranks follow the order of arrival.

    Raises:
        AgentFailed: The node before this one has not come in time.
    """
    if world.rank == 0:
        return
    # After the first round this node returns: it gets its old rank without waiting.
    before, begun = Keys(job).node(static_id(world.rank - 1)), Keys(job).of_round(1, "members")
    if not wait_until(lambda: any(map(store.get, (before, begun))), world.join_timeout_s):
        raise AgentFailed(
            AgentExit.NO_NODES,
            f"node {world.rank - 1} of {world.nodes} has not come within "
            f"{world.join_timeout_s:g} s; start it with --node-rank={world.rank - 1}",
        )


def static_id(rank: int) -> str:
    """The node id of a rank in a fixed world."""
    return f"node-{rank}"


def see_off(store: KeyValueStore, job: str) -> None:
    """Keep how the job ended; wait, up to `SEE_OFF_S`, until the others have read it, and left."""
    with contextlib.suppress(ZeroError):
        keep(store, job)
    with contextlib.suppress(StoreError):  # the job has ended, and so may this etcd
        wait_until(lambda: not store.range(Keys(job).nodes, limit=1).items, SEE_OFF_S)
