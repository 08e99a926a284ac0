"""The commands `zero-ctl run` and `zero-ctl render`: their arguments, and reading the job file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from zero_contract.values import whole
from zero_orchestrator.jobfile.reading import checks, schema
from zero_orchestrator.jobfile.reading.schema import Job

TARGETS = ("kubernetes", "slurm", "systemd")
PLACES = ("local", "kubernetes", "slurm")


def add_to(commands: Any) -> None:
    """Add both commands to the parser of `zero-ctl`."""
    run = commands.add_parser(
        "run", help="start the job of a job file", description="Start the job of a job file."
    )
    run.add_argument("file", type=Path, help="job file (YAML); docs/job-files.md lists its keys")
    text = "where the job runs (default: kubectl's cluster, else Slurm, else this machine)"
    run.add_argument("--on", choices=PLACES, help=text)
    text = "with --on local: number of agents (default: the minimum that the job needs)"
    agents = whole(": write a number of agents, from 1", 1)
    run.add_argument("--agents", type=agents, metavar="N", help=text)
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="check the job file, print what would be started, and start nothing",
    )
    run.set_defaults(act=_run)
    render = commands.add_parser(
        "render",
        help="print the files that a kind of cluster needs for a job file",
        description="Print the files that a kind of cluster needs for a job file. Starts nothing.",
    )
    render.add_argument("file", type=Path, help="job file (YAML); docs/job-files.md lists its keys")
    render.add_argument("--to", choices=TARGETS, required=True, help="kind of cluster")
    text = "directory to write the files into instead of printing them"
    render.add_argument("--output", "-o", type=Path, metavar="DIR", help=text)
    render.set_defaults(act=_render)


def _read(path: Path) -> Job:
    job = schema.load(path)
    found = checks.check(job)
    job.source.refuse(one for one in found if one.is_fatal)
    for problem in found:
        print(f"zero-ctl: {job.source.message(problem)}", file=sys.stderr)
    return job


def _run(args: argparse.Namespace) -> int:
    from zero_orchestrator.jobfile.start import run

    job = _read(args.file)
    on, why = (args.on, "") if args.on else run.choose()
    if why:
        print(
            f"zero-ctl: on {on}, since {why}; --on chooses another kind of cluster", file=sys.stderr
        )
    agents = args.agents or job.file.nodes.min
    return run.run(job, on, run.StartOptions(agents=agents, dry_run=args.dry_run))


def _render(args: argparse.Namespace) -> int:
    from zero_orchestrator.jobfile.render import RENDERERS, files

    job = _read(args.file)
    rendered = RENDERERS[args.to](job)
    if args.output is None:
        print(files.shown(rendered), end="")
    else:
        for path in files.write(rendered, args.output):
            print(path)
    return 0
