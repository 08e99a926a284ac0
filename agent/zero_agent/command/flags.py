"""The flags of `zero-agent`: one table, in the order and groups in which `--help` prints it.

Every flag of torchrun is here with torchrun's meaning, beside the flags that torchrun does not
have. `command_line.py` parses a command line by this table.

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

from zero_agent.node.network import ANY_PORT, loopback
from zero_agent.workers.output.streams import Format
from zero_agent.workers.progress import HangPolicy, parse_hang_timeout
from zero_contract.exit_codes import AgentExit
from zero_contract.values import Size, argument_type, whole
from zero_orchestrator.arguments import seconds

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
LAST_PORT = 65535
FEWEST_PORTS = 4
"""Ports of the ring, of peer memory, and of the TCPStores of two rounds, one of which ends."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag."""

    name: str
    """The name without `--`, with `-` between its words."""
    help: str
    default: Any = ""
    short: str = ""
    kind: Callable[[str], Any] | None = str
    """Parses the value; None for a switch, which has no value."""
    metavar: str = ""
    choices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "default", False)


def _whole(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number; write one, such as 3")
    return int(text)


def _hang(text: str) -> HangPolicy:
    try:
        return parse_hang_timeout(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: write seconds, such as 600, or 10m, or auto, or off"
        ) from None


def _some_seconds(text: str) -> float:
    if not (length_s := seconds(text)):
        raise argparse.ArgumentTypeError(f"{text}: write more than 0 seconds, such as 30")
    return length_s


def _host(text: str) -> str:
    """A host name or an IP address that others can connect to, without brackets; or empty."""
    host = text.removeprefix("[").removesuffix("]")
    try:
        # 0.0.0.0 is where one listens, and nobody connects to it.
        known = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        known = _NAME.fullmatch(host) is not None
    if host and not known:
        raise argparse.ArgumentTypeError(
            f"{text}: write the address or the name of one machine, without a port, such as "
            "203.0.113.7"
        )
    return host


def _ports(text: str) -> range:
    """`29600-29699` as a range of ports; any port for an empty text."""
    if not text:
        return ANY_PORT
    low, _, high = text.partition("-")
    try:
        ports = range(int(low), int(high) + 1)
    except ValueError:
        ports = range(0)
    if ports.stop - ports.start < FEWEST_PORTS or ports.start < 1 or ports.stop > LAST_PORT + 1:
        raise argparse.ArgumentTypeError(
            f"{text}: write the first and the last of at least {FEWEST_PORTS} ports, such as "
            "29600-29699"
        )
    return ports


_exit_code = whole(" is not an exit code; write a number up to 255", most=255)
_port = whole(" is not a port; write a number up to 65535", most=LAST_PORT)
_size_bytes = argument_type(lambda text: Size(text).size_bytes)


def _items(text: str) -> tuple[str, ...]:
    """`a,b` -> (a, b); a doubled comma is a literal comma."""
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


# What `zero-agent --help` prints, in its order. A default in parentheses.
GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "the job": (
        Flag(
            name="nnodes",
            default="1:1",
            metavar="MIN:MAX",
            help="number of nodes, or its minimum and maximum (default 1:1)",
        ),
        Flag(
            name="nproc-per-node",
            default="1",
            metavar="N|auto|cpu|gpu",
            help="number of workers on this node (default 1)",
        ),
        Flag(
            name="max-restarts",
            kind=_whole,
            default=0,
            help="number of failures that the whole job may survive (default 0)",
        ),
        Flag(
            name="refill-after-steps",
            kind=_whole,
            default=0,
            help="number of committed steps after which the job gets one restart back (default 0: "
            "never)",
        ),
        Flag(
            name="max-restarts-without-progress",
            kind=_whole,
            default=3,
            help="number of restarts in a row without a new step after which one more failure "
            "ends the job (default 3; 0: no limit)",
        ),
        Flag(
            name="exclude-after",
            kind=_whole,
            default=2,
            help="number of failures or losses in a row after which the job excludes a host "
            "(default 2; 0: never)",
        ),
        Flag(
            name="exclude-for",
            kind=_some_seconds,
            default=60.0,
            help="seconds of the first exclusion of a host; each further one lasts twice as long "
            "(default 60)",
        ),
        Flag(
            name="stop-exit-code",
            kind=_exit_code,
            default=int(AgentExit.STOPPED),
            help="exit code of this agent after `zero-ctl stop` (default 5); use 0 if the cluster "
            "takes every other code for a failure",
        ),
        Flag(
            name="grow-every",
            kind=seconds,
            default=None,
            help="seconds that a round runs before nodes that arrive later may join (default: "
            "longer, the more a new round costs, at most 600)",
        ),
        Flag(
            name="node-unit",
            kind=_whole,
            default=1,
            help="every round has a multiple of N nodes (default 1)",
        ),
        Flag(
            name="rdzv-id",
            metavar="NAME",
            help="name of the job (default: derived from the command)",
        ),
        Flag(
            name="role",
            default="default",
            help="role name of this node's workers (default 'default')",
        ),
    ),
    "the program": (
        Flag(
            name="module", short="-m", kind=None, help="run SCRIPT as a module, as `python -m` does"
        ),
        Flag(name="no-python", kind=None, help="run SCRIPT as a program, without Python"),
        Flag(
            name="run-path",
            kind=None,
            help="run SCRIPT in a process of the forkserver even if PYTHON_EXEC is set",
        ),
        Flag(
            name="preload",
            kind=_items,
            default=(),
            metavar="MODULE[,...]",
            help="modules that the forkserver imports besides torch, so that a restart does not "
            "wait for them",
        ),
        Flag(
            name="cold-start",
            kind=None,
            help="start each worker in a new interpreter instead of forking it",
        ),
    ),
    "where the nodes meet": (
        Flag(
            name="rdzv-backend",
            default="static",
            help="c10d: the agents run an etcd of the job's own, which begins on the host of "
            "--rdzv-endpoint; otherwise that names an etcd that runs already",
        ),
        Flag(
            name="rdzv-endpoint",
            metavar="HOST:PORT[,...]",
            help="addresses of etcd (default: an etcd on this machine, which the first agent "
            "starts; with --rdzv-backend=c10d, HOST[:29400], and more hosts where it may be later)",
        ),
        Flag(
            name="rdzv-conf",
            metavar="KEY=VALUE[,...]",
            help="settings of the rendezvous, as with torchrun, such as "
            "join_timeout=600,last_call_timeout=1",
        ),
        Flag(
            name="standalone",
            kind=None,
            help="run a job of one node, with a private etcd that ends with it",
        ),
        Flag(
            name="master-addr",
            kind=_host,
            metavar="HOST",
            help="address of node 0, where the nodes meet instead of --rdzv-endpoint; the number "
            "of nodes is then fixed",
        ),
        Flag(
            name="master-port",
            kind=_port,
            default=None,
            help="with --master-addr: port of node 0, for its etcd and for the TCPStore of the "
            "workers (default 29500)",
        ),
        Flag(
            name="node-rank",
            kind=_whole,
            default=None,
            help="with --master-addr: number of this node, from 0 (default 0)",
        ),
        Flag(
            name="node-id",
            metavar="NAME",
            help="name of this node (default: host name and random characters)",
        ),
        Flag(
            name="machine",
            metavar="NAME",
            help="name of this node's machine; an exclusion applies to all nodes of a machine "
            "(default: --node-id if given, else the host name)",
        ),
        Flag(
            name="local-addr",
            kind=_host,
            metavar="HOST",
            help="address of this machine on which the agent listens for other nodes (default: "
            "the local address of the route to etcd)",
        ),
        Flag(
            name="advertise-addr",
            kind=_host,
            metavar="HOST",
            help="address at which other nodes reach this node if that is another one, as behind "
            "NAT (default: --local-addr)",
        ),
        Flag(
            name="port-range",
            kind=_ports,
            metavar="LOW-HIGH",
            help="the only ports on which the agent and the TCPStore of the workers listen for "
            "other nodes (default: any)",
        ),
        Flag(
            name="join-timeout",
            kind=seconds,
            default=None,
            help="seconds to wait until enough nodes have joined (default 600)",
        ),
    ),
    "etcd": (
        Flag(name="etcd-ca", kind=Path, default=None, help="certificate authority of etcd (PEM)"),
        Flag(
            name="etcd-cert",
            kind=Path,
            default=None,
            help="certificate of this agent as a client of etcd (PEM)",
        ),
        Flag(name="etcd-key", kind=Path, default=None, help="private key of --etcd-cert (PEM)"),
        Flag(
            name="etcd-user", metavar="NAME", help="user name with which this agent logs in to etcd"
        ),
        Flag(
            name="etcd-password-file",
            kind=Path,
            default=None,
            metavar="FILE",
            help="file with the password of --etcd-user",
        ),
        Flag(
            name="etcd-wait",
            kind=seconds,
            default=30.0,
            help="seconds to wait at the start until etcd answers (default 30)",
        ),
        Flag(
            name="lease-ttl",
            kind=_whole,
            default=None,
            metavar="SECONDS",
            help="seconds of silence after which a node is lost (default 3; 1 more for each 200 "
            "nodes of the maximum of --nnodes, up to 15)",
        ),
        Flag(
            name="etcd-grace",
            kind=seconds,
            default=None,
            help="seconds that workers continue while etcd does not answer (default 600; with "
            "--master-addr 30)",
        ),
    ),
    "output": (
        Flag(
            name="log-dir",
            kind=Path,
            default=None,
            metavar="DIR",
            help="directory of the workers' output, in torchrun's layout, and of the events, in "
            "JOB/events-NODE.jsonl",
        ),
        Flag(
            name="redirects",
            short="-r",
            default="0",
            metavar="STREAMS",
            help="streams that go into files only: 1 stdout, 2 stderr, 3 both, or by local rank, "
            "such as 0:1,1:3 (default 0: none)",
        ),
        Flag(
            name="tee",
            short="-t",
            default="0",
            metavar="STREAMS",
            help="streams that go into files and to the terminal, with the worker's name before "
            "each line; written as for --redirects (default 0: none)",
        ),
        Flag(
            name="log-format",
            choices=tuple(one.value for one in Format),
            default=Format.TEXT.value,
            help="what the terminal shows: text, as workers print it; rank, with [rankN]: before "
            "each line; json, one JSON object a line, of the agent as well (default text)",
        ),
        Flag(
            name="log-limit",
            kind=_size_bytes,
            default=1 << 30,
            metavar="SIZE",
            help="largest size of the stdout or stderr of one worker in --log-dir; older output "
            "is dropped (default 1Gi; 0: no limit)",
        ),
        Flag(
            name="local-ranks-filter",
            metavar="RANK[,...]",
            help="local ranks whose output is shown on the terminal (default: all)",
        ),
        Flag(
            name="duplicate-stdout-filters",
            kind=_items,
            default=(),
            metavar="TEXT[,...]",
            help="copy lines of stdout that contain one of these texts into filtered_stdout.log",
        ),
        Flag(
            name="duplicate-stderr-filters",
            kind=_items,
            default=(),
            metavar="TEXT[,...]",
            help="copy lines of stderr that contain one of these texts into filtered_stderr.log",
        ),
    ),
    "this node": (
        Flag(
            name="shutdown-timeout",
            kind=seconds,
            default=None,
            help="seconds from SIGTERM to SIGKILL when workers are stopped (default 30)",
        ),
        Flag(
            name="hang-timeout",
            kind=_hang,
            default="auto",
            metavar="SECONDS|auto|off",
            help="seconds without a step after which a worker counts as hung and is killed; auto: "
            "ten times a long step, at least 300; applies to workers that report their steps, "
            "by zero_engine, zero_torch or zero_agent.heartbeat() (default auto)",
        ),
        Flag(
            name="signals-to-handle",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            metavar="NAME[,...]",
            help="signals on which this node leaves the job (default "
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT); under nohup, not on SIGHUP",
        ),
        Flag(
            name="virtual-local-rank",
            kind=None,
            help="show each worker only its own GPU, as device 0, and set its LOCAL_RANK to 0",
        ),
        Flag(
            name="numa-binding",
            choices=("node", "socket", "exclusive", "core-complex"),
            metavar="MODE",
            help="bind each worker to the CPUs near its GPU: node, socket, exclusive or core-"
            "complex",
        ),
        Flag(
            name="health-check",
            metavar="COMMAND",
            help="shell command that must exit with 0 before this node joins a round, and before "
            "it joins again after a failure",
        ),
        Flag(
            name="health-check-timeout",
            kind=_some_seconds,
            default=60.0,
            help="timeout of --health-check, seconds (default 60)",
        ),
        Flag(
            name="ram-budget",
            kind=_size_bytes,
            default=None,
            help="largest size of in-memory checkpoints in /dev/shm, such as 16Gi (default: the "
            "budget in the training config, else half of the free memory)",
        ),
        Flag(
            name="preflight",
            kind=None,
            help="check the health of this node, print the result, and start nothing",
        ),
        Flag(
            name="health-port",
            kind=_port,
            default=None,
            help="port that serves /healthz, /readyz and /metrics; 0 takes a free one "
            "(default: not served)",
        ),
        Flag(
            name="health-host",
            default=loopback(),
            metavar="HOST",
            help="address on which --health-port listens (default: the loopback)",
        ),
    ),
    "from torchrun, without effect here": (
        Flag(
            name="start-method",
            default="spawn",
            choices=("spawn", "fork", "forkserver"),
            metavar="METHOD",
            help="no effect: workers are forked from a forkserver, see --cold-start",
        ),
        Flag(
            name="monitor-interval",
            kind=seconds,
            default=0.1,
            help="no effect: the end of a worker is noticed at once",
        ),
        Flag(
            name="event-log-handler", default="null", help="no effect: events are kept in --log-dir"
        ),
        Flag(
            name="logs-specs",
            metavar="NAME",
            help="`default` has no effect; plug-ins are refused: use --redirects and --tee",
        ),
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
        *("log-format", "log-limit"),
    }
)
"""Flags that torchrun does not have: a prefix that is unique in torchrun means the same here."""
METAVARS: Mapping[object, str] = {
    seconds: "SECONDS",
    _some_seconds: "SECONDS",
    _port: "PORT",
    _whole: "N",
    _exit_code: "N",
    _size_bytes: "SIZE",
    Path: "FILE",
}
"""The name of a value in the help, by the function that parses it."""
