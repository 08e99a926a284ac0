"""The command line of `zero-ctl launch`: the flags of DeepSpeed's launcher, and further ones.

Must always hold: everything after the script belongs to the script.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from zero_agent.launch.runners import RUNNERS

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""DeepSpeed's default hostfile, used if it exists."""

_FLAGS: Sequence[tuple[str, str, Mapping[str, object]]] = (
    (
        "-H --hostfile",
        "file of hosts, one a line, as HOST slots=N (default /job/hostfile)",
        {"type": Path},
    ),
    (
        "-i --include",
        "hosts and slots to use: HOST[:SLOT,...][@HOST...] (default: all)",
        {"default": ""},
    ),
    ("-e --exclude", "hosts and slots to leave out, written as for --include", {"default": ""}),
    ("--num-nodes", "number of hosts to use, the first of the file", {"type": int, "metavar": "N"}),
    (
        "--num-gpus",
        "number of slots to use of each host, the first ones",
        {"type": int, "metavar": "N"},
    ),
    (
        "--min-nodes",
        "smallest number of hosts with which the job continues (default 1)",
        {"type": int, "default": 1, "metavar": "N"},
    ),
    (
        "--max-restarts",
        "number of failures that the job may survive (default 3)",
        {"type": int, "default": 3, "metavar": "N"},
    ),
    (
        "--launcher",
        "how hosts are reached (default ssh)",
        {"choices": sorted(RUNNERS), "default": "ssh"},
    ),
    (
        "--launcher-args",
        "further flags for the program of --launcher",
        {"type": shlex.split, "default": [], "metavar": "FLAGS"},
    ),
    ("--ssh-port", "port of sshd on the hosts", {"type": int, "metavar": "PORT"}),
    (
        "--rdzv-endpoint",
        "addresses of an etcd that all hosts reach (default: one that runs here)",
        {"default": "", "metavar": "HOST:PORT[,...]"},
    ),
    (
        "--rdzv-id",
        "name of the job (default: derived from the script)",
        {"default": "", "metavar": "NAME"},
    ),
    (
        "--agent-args",
        "further flags for zero-agent",
        {"type": shlex.split, "default": [], "metavar": "FLAGS"},
    ),
    ("--no-ssh", "start only the agent of this host; run the command on each host", {}),
    ("--node-rank", "with --no-ssh: number of this host, from 0", {"type": int, "metavar": "K"}),
    ("--master-addr", "with --no-ssh: address of host 0", {"default": "", "metavar": "HOST"}),
    (
        "--master-port",
        "with --no-ssh: port of the etcd on host 0",
        {"type": int, "metavar": "PORT"},
    ),
    ("-m --module", "run SCRIPT as a module, as `python -m` does", {}),
    ("--no-python", "run SCRIPT as a program, without Python", {}),
    ("--no-local-rank", "no effect: LOCAL_RANK is in the environment, not an argument", {}),
    ("--force-multi", "reach a single host through --launcher, too", {}),
    ("--dry-run", "print the commands that would start the agents, and run nothing", {}),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """All flags with their values, and `script` and `arguments`; exits with 2 on wrong usage."""
    return make_parser().parse_args(argv)


def make_parser() -> argparse.ArgumentParser:
    """The command line of `zero-ctl launch`."""
    made = argparse.ArgumentParser(
        prog="zero-ctl launch",
        usage="zero-ctl launch [FLAG ...] SCRIPT [ARGUMENT ...]",
        description="Start an agent on every host of a hostfile, and wait for the job's end. A "
        "host that dies does not end the job; one whose connection is lost is tried again.",
        epilog="Ctrl-C lets the job stop with a checkpoint; a second one ends it at once. A flag "
        "may be written with - or _. Exit code: the job's; 255: no host could be reached.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    for names, text, more in _FLAGS:
        options = dict(more) or {"action": "store_true"}
        given = names.split()
        given += [f"--{name[2:].replace('-', '_')}" for name in given if "-" in name[2:]]
        made.add_argument(*given, help=text, **options)  # type: ignore[arg-type]
    made.add_argument("script", metavar="SCRIPT", help="training script")
    made.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    return made
