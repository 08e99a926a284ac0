"""Validation of a command line: all errors at once, one line for each.

`command_line.py` finds flags that do not exist and values of the wrong type. This module finds
values without a meaning, names of things that do not exist, and flags that contradict each other.
Nothing is started and, except for --log-dir, nothing made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from zero_agent.command import resolve
from zero_agent.command.command_line import Line
from zero_agent.etcd import etcd_choice
from zero_agent.etcd.etcd_access import PAIRS, Access, check_authority, check_pair, given, readable
from zero_agent.etcd.etcd_choice import Static, Way
from zero_agent.etcd.rdzv_conf import RdzvConf, check_backend, parse_rdzv_conf
from zero_agent.node.network import is_local
from zero_agent.workers.environment import own_device
from zero_agent.workers.output.streams import parse_ranks, parse_selection
from zero_orchestrator.errors import SpecError
from zero_orchestrator.membership.spec import JobSpec, check_name, parse_nnodes


@dataclass(frozen=True, kw_only=True)
class Typed:
    """The flags and the environment that are validated."""

    args: argparse.Namespace
    environ: Mapping[str, str]

    @property
    def conf(self) -> RdzvConf:
        """The settings of --rdzv-conf.

        Raises:
            SpecError: A setting does not exist, or has an invalid value.
        """
        return parse_rdzv_conf(self.args.rdzv_conf)


@dataclass(frozen=True, kw_only=True)
class Look:
    """One check of the command line."""

    at: tuple[str, ...]
    """The flags that are wrong if the check fails."""
    beside: tuple[str, ...] = ()
    """Further flags that the check reads."""
    find: Callable[[Typed], object]
    """The check; raises SpecError."""


def refuse(line: Line, environ: Mapping[str, str]) -> None:
    """Return if the command line is valid, as far as that is known before a start.

    Raises:
        SpecError: The command line is wrong: the message has one line for each error. With
            --preflight only parse errors count, since --preflight checks the other flags itself.
    """
    found, wrong = list(line.wrong), set(line.about)
    for look in () if line.args.preflight else LOOKS:
        # No error is only the consequence of another one.
        if wrong.isdisjoint((*look.at, *look.beside)):
            try:
                look.find(Typed(args=line.args, environ=environ))
            except SpecError as error:
                found.append(str(error))
            except OSError as error:  # what is named lies where this user may not look
                found.append(f"{error.filename}: cannot be read: {error.strerror}")
            else:
                continue
            wrong.update(look.at)
    if found:
        raise SpecError("\n".join(found))


# ---- the job ----


def _count(name: str, typed: Typed) -> None:
    # The bounds are those of the job's specification, whose other fields do not matter here.
    JobSpec(min_nodes=1, max_nodes=1, **{name: getattr(typed.args, name)})


def _name(flag: str, typed: Typed) -> None:
    if name := getattr(typed.args, flag.replace("-", "_")):
        check_name(f"--{flag}", name)


def _standalone(typed: Typed) -> None:
    nnodes = typed.args.nnodes
    if typed.args.standalone and parse_nnodes(nnodes)[1] > 1:
        raise SpecError(
            f"--standalone with --nnodes={nnodes}: a standalone job has one node; "
            "leave out --standalone, the agents of one machine find each other without it"
        )


# ---- where the nodes meet ----


def _local_address(typed: Typed) -> None:
    address = typed.args.local_addr
    # Found now: the agent would listen there only once it has joined.
    if address and not is_local(address):
        raise SpecError(
            f"--local-addr={address}: not an address of this machine; leave it out to use the one "
            "that routes to etcd, or write --advertise-addr if other nodes reach this one by it"
        )


def _file(flag: str, typed: Typed) -> None:
    readable(f"--{flag}", given(flag, typed.args, typed.conf))


def _pair(one: str, other: str, typed: Typed) -> None:
    check_pair(one, other, typed.args, typed.conf)


def _etcd_is_named(typed: Typed) -> None:
    is_secure = any(given(flag, typed.args, typed.conf) for flag in ("etcd-user", *_TLS))
    if is_secure and etcd_choice.choose(typed.args)[0] is not Way.NAMED:
        raise SpecError("--etcd-ca, --etcd-user: an etcd must be named with --rdzv-endpoint")


# ---- output ----


def _selection(name: str, typed: Typed) -> None:
    parse_selection(f"--{name}", getattr(typed.args, name))


def _logs_specs(typed: Typed) -> None:
    if typed.args.logs_specs not in (None, "", "default"):
        raise SpecError(
            f"--logs-specs={typed.args.logs_specs}: torchrun's plug-ins do not work here; use "
            "--log-dir, --redirects and --tee"
        )


_COUNTS = ("max_restarts", "refill_after_steps", "max_restarts_without_progress", "exclude_after")
_PROGRAM = ("script", "module", "no-python", "run-path", "cold-start")
_WAY = ("nnodes", "standalone", "rdzv-endpoint", "node-rank", "master-addr", "master-port")
_TLS = ("etcd-ca", "etcd-cert", "etcd-key")

LOOKS: tuple[Look, ...] = (
    Look(at=("nnodes",), find=lambda typed: parse_nnodes(typed.args.nnodes)),
    Look(at=("nproc-per-node",), find=lambda typed: resolve.check_slots(typed.args.nproc_per_node)),
    *(Look(at=(name.replace("_", "-"),), find=partial(_count, name)) for name in _COUNTS),
    Look(
        at=("node-unit",),
        beside=("nnodes",),
        find=lambda typed: JobSpec(
            min_nodes=parse_nnodes(typed.args.nnodes)[0],
            max_nodes=parse_nnodes(typed.args.nnodes)[1],
            node_unit=typed.args.node_unit,
        ),
    ),
    Look(at=("standalone",), beside=("nnodes",), find=_standalone),
    Look(at=("rdzv-id",), find=partial(_name, "rdzv-id")),
    Look(at=_PROGRAM, find=lambda typed: resolve.program_of(typed.args, typed.environ)),
    Look(
        at=("preload",),
        beside=_PROGRAM,
        find=lambda typed: resolve.preload_of(
            typed.args.preload, resolve.program_of(typed.args, typed.environ)
        ),
    ),
    Look(at=("rdzv-backend",), find=lambda typed: check_backend(typed.args.rdzv_backend)),
    Look(at=("rdzv-conf",), find=lambda typed: typed.conf),
    Look(
        at=_WAY,
        beside=("advertise-addr", "local-addr", "rdzv-backend"),
        find=lambda typed: (
            etcd_choice.choose(typed.args)[0] is not Way.STATIC
            or Static.of(typed.args, join_timeout_s=0.0)
        ),
    ),
    Look(
        at=("rdzv-endpoint",),
        beside=_WAY,
        find=lambda typed: (
            etcd_choice.choose(typed.args)[0] is not Way.NAMED
            or Access(endpoints=typed.args.rdzv_endpoint).first
        ),
    ),
    Look(at=("node-id",), find=partial(_name, "node-id")),
    Look(at=("local-addr",), find=_local_address),
    *(
        Look(at=(flag,), beside=("rdzv-conf",), find=partial(_file, flag))
        for flag in (*_TLS, "etcd-password-file")
    ),
    *(
        Look(at=(one, other), beside=("rdzv-conf",), find=partial(_pair, one, other))
        for one, other in PAIRS
    ),
    Look(
        at=("etcd-cert", "etcd-ca"),
        beside=("rdzv-conf",),
        find=lambda typed: check_authority(typed.args, typed.conf),
    ),
    Look(at=("etcd-user", *_TLS), beside=(*_WAY, "rdzv-conf"), find=_etcd_is_named),
    Look(at=("lease-ttl",), find=lambda typed: resolve.check_lease_ttl(typed.args.lease_ttl)),
    Look(at=("redirects",), find=partial(_selection, "redirects")),
    Look(at=("tee",), find=partial(_selection, "tee")),
    Look(at=("local-ranks-filter",), find=lambda typed: parse_ranks(typed.args.local_ranks_filter)),
    Look(at=("log-dir",), find=lambda typed: resolve.make_log_dir(typed.args.log_dir)),
    Look(at=("logs-specs",), find=_logs_specs),
    Look(
        at=("shutdown-timeout",),
        find=lambda typed: resolve.shutdown_timeout_s(typed.args.shutdown_timeout, typed.environ),
    ),
    Look(
        at=("signals-to-handle",),
        find=lambda typed: resolve.signals_to_handle(typed.args.signals_to_handle),
    ),
    Look(
        at=("virtual-local-rank",),
        beside=("nproc-per-node",),
        find=lambda typed: (
            typed.args.virtual_local_rank
            and typed.args.nproc_per_node.isdecimal()
            and own_device(typed.environ, int(typed.args.nproc_per_node) - 1)
        ),
    ),
)
"""Every check, in the order in which `--help` prints the flags."""
