"""The flags of `zero-agent`: one table, in the order and groups in which `--help` prints it.

Every flag of torchrun is here with its meaning, beside ours. `command_line.py` reads a line of
them.

Source of the names: torch.distributed.run.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_agent.network import ANY_PORT, loopback
from zero_agent.workers.hang import parse_hang_timeout
from zero_contract.exit_codes import AgentExit
from zero_contract.values import Size, argument_type
from zero_orchestrator.arguments import seconds

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
LAST_PORT = 65535
FEWEST_PORTS = 4
"""The ring, the memory for checkpoints, and the stores of two rounds, one of which ends."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag."""

    name: str
    """Its words, with `-` between them."""
    help: str
    default: Any = ""
    short: str = ""
    kind: Callable[[str], Any] | None = str
    """Makes a value of its text; None for a switch, which has none."""
    metavar: str = ""
    choices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "default", False)


def _whole(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no whole number; write one, such as 3")
    return int(text)


def _exit_code(text: str) -> int:
    if not text.isdecimal() or int(text) > 255:
        raise argparse.ArgumentTypeError(f"{text} is no exit code; write a number from 0 to 255")
    return int(text)


def _hang(text: str) -> str:
    try:
        parse_hang_timeout(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: write seconds, such as 600, or 10m, or auto, or off"
        ) from None
    return text


def _some_seconds(text: str) -> float:
    if not (length_s := seconds(text)):
        raise argparse.ArgumentTypeError(f"{text}: write more than 0 seconds, such as 30")
    return length_s


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; write a number up to 65535")
    return int(text)


def _host(text: str) -> str:
    """A name or an IP address, without brackets: what others can connect to; or nothing."""
    host = text.removeprefix("[").removesuffix("]")
    try:
        known = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        known = _NAME.fullmatch(host) is not None
    if host and not known:
        raise argparse.ArgumentTypeError(
            f"{text}: write the address or the name of one machine, without a port, such as "
            "203.0.113.7"
        )
    return host


def parse_ports(text: str) -> range:
    """`29600-29699` as those ports; any, for nothing. Raises ValueError."""
    if not text:
        return ANY_PORT
    low, _, high = text.partition("-")
    ports = range(int(low), int(high) + 1)
    if len(ports) < FEWEST_PORTS or not 0 < ports[0] <= ports[-1] <= LAST_PORT:
        raise ValueError("too few, or none")
    return ports


def _ports(text: str) -> str:
    try:
        parse_ports(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: write the first and the last of at least {FEWEST_PORTS} ports, such as "
            "29600-29699"
        ) from None
    return text


_size_bytes = argument_type(lambda text: Size(text).size_bytes)


def _items(text: str) -> tuple[str, ...]:
    """`a,b` -> (a, b); a doubled comma stands for a comma."""
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


# What `zero-agent --help` prints, in its order. A default in parentheses.
GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "the job": (
        Flag(name="nnodes", default="1:1", metavar="MIN:MAX", help="how many nodes: 4, 1:4 (1:1)"),
        Flag(
            name="nproc-per-node",
            default="1",
            metavar="N|auto|cpu|gpu",
            help="workers here (1)",
        ),
        Flag(
            name="max-restarts",
            kind=_whole,
            default=0,
            help="failures the whole job may survive (0)",
        ),
        Flag(
            name="refill-after-steps",
            kind=_whole,
            default=0,
            help="a restart comes back after so many committed steps (0: never)",
        ),
        Flag(
            name="max-restarts-without-progress",
            kind=_whole,
            default=3,
            help="restarts in a row that finish no new step; the next ends the job (3, 0: any)",
        ),
        Flag(
            name="exclude-after",
            kind=_whole,
            default=2,
            help="go on without a host that is lost, or fails, so often in a row (2, 0: never)",
        ),
        Flag(
            name="exclude-for",
            kind=_some_seconds,
            default=60.0,
            help="for so long at first, twice as long each time (60)",
        ),
        Flag(
            name="stop-exit-code",
            kind=_exit_code,
            default=int(AgentExit.STOPPED),
            help="exit code after `zero-ctl stop` (5); 0 for a cluster that knows no other success",
        ),
        Flag(
            name="grow-every",
            kind=seconds,
            default=None,
            help="a round runs for so long before nodes that come later join it (as long as a "
            "re-forming is worth, up to 600)",
        ),
        Flag(name="node-unit", kind=_whole, default=1, help="rounds of a multiple of N nodes (1)"),
        Flag(name="rdzv-id", metavar="NAME", help="the job's name (derived from the command)"),
        Flag(name="role", default="default", help="what this node's workers are called (default)"),
    ),
    "the program": (
        Flag(name="module", short="-m", kind=None, help="SCRIPT is the name of a module"),
        Flag(name="no-python", kind=None, help="SCRIPT is a program, not run by Python"),
        Flag(name="run-path", kind=None, help="run SCRIPT in a warm worker, even with PYTHON_EXEC"),
        Flag(
            name="preload",
            kind=_items,
            default=(),
            metavar="MODULE[,...]",
            help="import these once, besides torch, before workers are forked: a restart then "
            "does not wait for them",
        ),
        Flag(name="cold-start", kind=None, help="a fresh interpreter for each worker, no fork"),
    ),
    "where the nodes meet": (
        Flag(name="rdzv-backend", default="static", help="etcd-v3; see --rdzv-endpoint"),
        Flag(
            name="rdzv-endpoint",
            metavar="HOST:PORT[,...]",
            help="etcd (one on this machine, which the first agent starts)",
        ),
        Flag(name="rdzv-conf", metavar="KEY=VALUE[,...]", help="torchrun's rendezvous settings"),
        Flag(name="standalone", kind=None, help="one node, with an etcd of its own"),
        Flag(name="master-addr", metavar="HOST", help="without etcd: where node 0 is"),
        Flag(
            name="master-port",
            kind=_port,
            default=None,
            help="without etcd: its port, also of the workers' store (29500)",
        ),
        Flag(
            name="node-rank", kind=_whole, default=None, help="without etcd: this node, from 0 (0)"
        ),
        Flag(name="node-id", metavar="NAME", help="this node's name (host and random characters)"),
        Flag(
            name="machine",
            metavar="NAME",
            help="the machine this node is on, which an exclusion is about (the host's name; "
            "with --node-id that)",
        ),
        Flag(
            name="local-addr",
            metavar="HOST",
            help="listen for other nodes on this address of this machine (that routes to etcd)",
        ),
        Flag(
            name="advertise-addr",
            kind=_host,
            metavar="HOST",
            help="other nodes reach this one at this address, which is not its own: behind NAT "
            "(--local-addr)",
        ),
        Flag(
            name="port-range",
            kind=_ports,
            metavar="LOW-HIGH",
            help="other nodes' agents and workers' store use these ports of this node alone (any)",
        ),
        Flag(
            name="join-timeout", kind=seconds, default=None, help="seconds to wait for nodes (600)"
        ),
    ),
    "etcd": (
        Flag(name="etcd-ca", kind=Path, default=None, help="who signed its certificate (PEM)"),
        Flag(name="etcd-cert", kind=Path, default=None, help="this client's certificate (PEM)"),
        Flag(name="etcd-key", kind=Path, default=None, help="and its key (PEM)"),
        Flag(name="etcd-user", metavar="NAME", help="log in as this user"),
        Flag(
            name="etcd-password-file",
            kind=Path,
            default=None,
            metavar="FILE",
            help="with the password in this file",
        ),
        Flag(
            name="etcd-wait",
            kind=seconds,
            default=30.0,
            help="seconds to try at the start until it answers (30)",
        ),
        Flag(
            name="lease-ttl",
            kind=_whole,
            default=None,
            metavar="SECONDS",
            help="a silent node is lost after so long (3; 1 more for each 200 of MAX, up to 15)",
        ),
        Flag(
            name="etcd-grace", kind=seconds, default=None, help="seconds to go on without it (600)"
        ),
    ),
    "output": (
        Flag(
            name="log-dir",
            kind=Path,
            default=None,
            metavar="DIR",
            help="keep output here, where torchrun does, and events in JOB/events-NODE.jsonl",
        ),
        Flag(
            name="redirects",
            short="-r",
            default="0",
            metavar="STREAMS",
            help="into files only: 1 stdout, 2 stderr, 3 both, or by local rank 0:1,1:3 (0)",
        ),
        Flag(
            name="tee",
            short="-t",
            default="0",
            metavar="STREAMS",
            help="into files, and here with the worker's name before each line (0)",
        ),
        Flag(
            name="local-ranks-filter", metavar="RANK[,...]", help="show only these local ranks here"
        ),
        Flag(
            name="duplicate-stdout-filters",
            kind=_items,
            default=(),
            metavar="TEXT[,...]",
            help="copy lines with any of these into filtered_stdout.log",
        ),
        Flag(
            name="duplicate-stderr-filters",
            kind=_items,
            default=(),
            metavar="TEXT[,...]",
            help="the same for stderr",
        ),
    ),
    "this node": (
        Flag(
            name="shutdown-timeout",
            kind=seconds,
            default=None,
            help="seconds from SIGTERM to SIGKILL (30)",
        ),
        Flag(
            name="hang-timeout",
            kind=_hang,
            default="auto",
            metavar="SECONDS|auto|off",
            help="kill workers that take no step for so long; auto: learnt from their steps "
            "(workers under zero_engine, or with zero_agent.heartbeat())",
        ),
        Flag(
            name="signals-to-handle",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            metavar="NAME[,...]",
            help="leave the job on these (SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
        ),
        Flag(
            name="virtual-local-rank",
            kind=None,
            help="each worker sees its own GPU alone, as local rank 0",
        ),
        Flag(
            name="numa-binding",
            choices=("node", "socket", "exclusive", "core-complex"),
            metavar="MODE",
            help="keep each worker on the CPUs near its GPU: node, socket, exclusive, core-complex",
        ),
        Flag(
            name="health-check",
            metavar="COMMAND",
            help="a shell command that must end with 0 before this node joins, and joins again",
        ),
        Flag(
            name="health-check-timeout",
            kind=_some_seconds,
            default=60.0,
            help="it is given so long (60)",
        ),
        Flag(
            name="ram-budget",
            kind=_size_bytes,
            default=None,
            help="checkpoints in memory take at most so much of /dev/shm: 16Gi (half of it, or "
            "what the config says)",
        ),
        Flag(
            name="preflight",
            kind=None,
            help="check this node, print what was found, and start nothing",
        ),
        Flag(
            name="health-port",
            kind=_port,
            default=None,
            help="serve /healthz and /readyz; 0 takes a free port (off)",
        ),
        Flag(
            name="health-host",
            default=loopback(),
            metavar="HOST",
            help="and do so there (the loopback)",
        ),
    ),
    "from torchrun, without effect here": (
        Flag(
            name="start-method",
            default="spawn",
            choices=("spawn", "fork", "forkserver"),
            metavar="METHOD",
            help="workers are forked from a warm process in any case",
        ),
        Flag(
            name="monitor-interval",
            kind=seconds,
            default=0.1,
            help="the end of a worker is noticed at once",
        ),
        Flag(name="event-log-handler", default="null", help="events are kept in --log-dir"),
        Flag(name="logs-specs", metavar="NAME", help="refused; see --redirects and --tee"),
    ),
}

FLAGS = {flag.name: flag for flags in GROUPS.values() for flag in flags}
OURS = frozenset(
    {
        *("hang-timeout", "node-id", "join-timeout", "cold-start", "health-port", "health-host"),
        *("refill-after-steps", "max-restarts-without-progress", "node-unit"),
        *("exclude-after", "exclude-for", "health-check", "health-check-timeout", "preflight"),
        *("etcd-ca", "etcd-cert", "etcd-key", "etcd-user", "etcd-password-file"),
        *("etcd-wait", "etcd-grace", "lease-ttl", "grow-every"),
        *("ram-budget", "preload", "stop-exit-code", "machine", "port-range", "advertise-addr"),
    }
)
"""Those that torchrun has not: a beginning that is one flag's alone there is that flag's here."""
METAVARS: Mapping[object, str] = {
    seconds: "SECONDS",
    _some_seconds: "SECONDS",
    _port: "PORT",
    _whole: "N",
    _exit_code: "N",
    _size_bytes: "SIZE",
    Path: "FILE",
}
"""What a value is called in the help, by its kind."""
