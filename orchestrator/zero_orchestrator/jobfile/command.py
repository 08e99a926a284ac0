"""`zero-ctl run` and `zero-ctl render`: their command lines, and reading the job file for both.

Who calls it: `cli`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from zero_orchestrator.jobfile.reading import checks, schema
from zero_orchestrator.jobfile.reading.schema import Job

TARGETS = ("kubernetes", "slurm", "compose", "systemd")
PLACES = ("local", "kubernetes", "slurm")


def add_to(commands: Any) -> None:
    """Add both commands to those of `zero-ctl`."""
    run = commands.add_parser(
        "run", help="start the job of a job file", description="Start the job of a job file."
    )
    run.add_argument("file", type=Path, help="the job file (YAML); deploy/README.md lists its keys")
    text = "where (the cluster of kubectl's context; else Slurm, if here; else this machine)"
    run.add_argument("--on", choices=PLACES, help=text)
    text = "on this machine: start so many (as many as the job needs)"
    run.add_argument("--agents", type=_agents, metavar="N", help=text)
    run.add_argument("--dry-run", action="store_true", help="check all, show it, start nothing")
    run.set_defaults(act=_run)
    render = commands.add_parser(
        "render",
        help="show what a kind of cluster is given for a job file",
        description="Show what a kind of cluster is given for a job file. Starts nothing.",
    )
    render.add_argument("file", type=Path, help="the job file (YAML)")
    render.add_argument("--to", choices=TARGETS, required=True, help="for what")
    text = "write files there instead of showing them"
    render.add_argument("--output", "-o", type=Path, metavar="DIR", help=text)
    render.set_defaults(act=_render)


def _agents(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: write a number of agents, from 1")
    return int(text)


def _read(path: Path) -> Job:
    job = schema.load(path)
    found = checks.check(job)
    job.source.refuse(one for one in found if one.is_fatal)
    for problem in found:
        print(f"zero-ctl: {job.source.tell(problem)}", file=sys.stderr)
    return job


def _run(args: argparse.Namespace) -> int:
    from zero_orchestrator.jobfile.start import run

    job = _read(args.file)
    on, why = (args.on, "") if args.on else run.choose()
    if why:
        print(f"zero-ctl: on {on}, since {why}; --on says otherwise", file=sys.stderr)
    agents = args.agents or job.file.nodes.min
    return run.run(job, on, run.Start(agents=agents, dry_run=args.dry_run))


def _render(args: argparse.Namespace) -> int:
    from zero_orchestrator.jobfile.render import RENDERERS, files

    job = _read(args.file)
    rendered = RENDERERS[args.to](job)
    if args.output is None:
        print(files.shown(rendered), end="", flush=True)
    else:
        for path in files.write(rendered, args.output):
            print(path)
    return 0
