"""`zero-ctl report`: what happened in a job, as one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from zero_contract.exit_codes import CtlExit
from zero_orchestrator.ctl import picture as pictures
from zero_orchestrator.ctl import status
from zero_orchestrator.ctl.page import document
from zero_orchestrator.ctl.views import View
from zero_orchestrator.errors import SpecError
from zero_orchestrator.store.kv import KeyValueStore


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "job", nargs="?", help="name of the job (default: the newest that runs, else the newest)"
    )
    text = "file that receives the report, replaced if it exists (default: JOB.html)"
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help=text)


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Write the report of a finished or running job.

    Raises:
        NoSuchJob: There is no such job.
        SpecError: The file cannot be written.
    """
    job = args.job or status.newest_job(status.read_all(store)).job
    status.find(store, job)  # raises NoSuchJob, which names the jobs there are
    path = args.output or Path(f"{job}.html")
    write(store, job, path)
    view.report(f"the report of job {job} is {path}; any browser shows it, without a network")
    return CtlExit.OK


def write(store: KeyValueStore, job: str, path: Path) -> None:
    """Write the report of a job; a reader sees the old file or the whole new one.

    Raises:
        NoSuchJob: The job has no keys.
        SpecError: The file cannot be written.
    """
    picture = pictures.picture(pictures.read(store, job), now_s=time.time())
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        part.write_text(document.page(picture, live=False), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SpecError(
            f"--output={path}: cannot be written ({error.strerror}); name another file"
        ) from error
