"""The command line of `zero-ctl launch`: the flags of DeepSpeed's launcher, and ours.

Must always hold: what follows the script belongs to the script. Who calls it: `command`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from zero_agent.launch.runners import RUNNERS

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""DeepSpeed's: used if it is there."""

_FLAGS: Sequence[tuple[str, str, Mapping[str, object]]] = (
    ("-H --hostfile", "the hosts, one a line, as HOST slots=N (/job/hostfile)", {"type": Path}),
    ("-i --include", "only these: HOST[:SLOT,...][@HOST...]", {"default": ""}),
    ("-e --exclude", "all but these", {"default": ""}),
    ("--num-nodes", "the first so many hosts", {"type": int, "metavar": "N"}),
    ("--num-gpus", "the first so many slots of each host", {"type": int, "metavar": "N"}),
    ("--min-nodes", "the job goes on with so few hosts (1)", {"type": int, "default": 1}),
    ("--max-restarts", "failures that it may survive (3)", {"type": int, "default": 3}),
    ("--launcher", "how hosts are reached (ssh)", {"choices": sorted(RUNNERS), "default": "ssh"}),
    ("--launcher-args", "more flags for that program", {"type": shlex.split, "default": []}),
    ("--ssh-port", "of the hosts' sshd", {"type": int, "metavar": "PORT"}),
    ("--rdzv-endpoint", "an etcd that all hosts reach (one is run here)", {"default": ""}),
    ("--rdzv-id", "the job's name (derived from the script)", {"default": ""}),
    ("--agent-args", "more flags for zero-agent", {"type": shlex.split, "default": []}),
    ("--no-ssh", "start the agent of this host alone; every host does so", {}),
    ("--node-rank", "with --no-ssh: which host this is", {"type": int, "metavar": "K"}),
    ("--master-addr", "with --no-ssh: the address of host 0", {"default": ""}),
    ("--master-port", "with --no-ssh: the port of its etcd", {"type": int, "metavar": "PORT"}),
    ("--module", "SCRIPT is the name of a module", {}),
    ("--no-python", "SCRIPT is a program, not run by Python", {}),
    ("--no-local-rank", "accepted: LOCAL_RANK is in the environment, not an argument", {}),
    ("--force-multi", "reach even a single host as one of several", {}),
    ("--dry-run", "print the commands, and run nothing", {}),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """All flags with their values, and `script` and `arguments`; exits with 2 on wrong usage."""
    parser = argparse.ArgumentParser(
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
        parser.add_argument(*_spellings(names), help=text, **options)  # type: ignore[arg-type]
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own")
    return parser.parse_args(argv)


def _spellings(names: str) -> list[str]:
    """`--num-nodes` and `--num_nodes`."""
    given = names.split()
    return [*given, *(f"--{n[2:].replace('-', '_')}" for n in given if "-" in n[2:])]
