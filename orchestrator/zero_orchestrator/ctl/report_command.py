"""`zero-ctl report`: what happened in a job, as one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path

from zero_contract.decoding import line_of
from zero_contract.exit_codes import CtlExit
from zero_orchestrator.ctl import event_files
from zero_orchestrator.ctl.page import document
from zero_orchestrator.ctl.page import picture as pictures
from zero_orchestrator.ctl.page.picture import Records
from zero_orchestrator.ctl.requests import Answered
from zero_orchestrator.ctl.views import JsonView, TableView, View
from zero_orchestrator.errors import SpecError
from zero_orchestrator.observe import recovery_trace, status
from zero_orchestrator.store.kv import KeyValueStore


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("job", nargs="?", help=status.OR_NEWEST)
    text = "file that receives the report, replaced if it exists (default: JOB.html)"
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help=text)
    text = (
        "read the event files that agents wrote with this --log-dir, and not etcd, which may be "
        "gone; the report then lacks what only etcd keeps, and says so"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help=text)
    parser.set_defaults(act=_run_without_etcd)


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Write the report of a finished or running job.

    Raises:
        NoSuchJob: There is no such job.
        SpecError: The file cannot be written.
    """
    job = args.job or status.newest_job(status.read_all(store)).job
    status.find(store, job)  # raises NoSuchJob, which names the jobs there are
    return _write(pictures.read(store, job), args.output, view)


def _run_without_etcd(args: argparse.Namespace) -> int | None:
    """Write the report from files; None: it is to be made from etcd."""
    if args.log_dir is None:
        return None
    try:
        records = event_files.read(args.log_dir, event_files.choose(args.log_dir, args.job))
    except OSError as error:
        raise SpecError(
            f"--log-dir={args.log_dir}: {error.filename} cannot be read ({error.strerror})"
        ) from error
    return _write(records, args.output, JsonView() if args.json else TableView())


def _write(records: Records, output: Path | None, view: View) -> int:
    job = records.status.job
    path = output or Path(f"{job}.html")
    write(records, path)
    text = (
        f"the report of job {job} is {path}; any browser shows it, without a network. "
        f"ui.perfetto.dev opens its recoveries: {trace_of(path)}"
    )
    view.record(asdict(Answered(command="report", job=job, target=str(path), done=True, text=text)))
    view.report(text)
    return CtlExit.OK


def trace_of(path: Path) -> Path:
    """The file of the recoveries, beside that of a report."""
    return path.with_suffix(".trace.json")


def write(records: Records, path: Path) -> None:
    """Write the report of a job, and its recoveries beside it.

    Raises:
        SpecError: A file cannot be written.
    """
    if not path.name:  # "." and "/", beside which there can be no other file
        raise SpecError(f"--output={path}: is a directory; name a file")
    now_s = time.time()
    lost = pictures.without_steps(records, now_s=now_s)
    page = document.page(pictures.picture(records, now_s=now_s), live=False)
    _replace(path, page)
    _replace(trace_of(path), line_of(recovery_trace.trace(records.events, lost)))


def _replace(path: Path, text: str) -> None:
    # A reader sees the old file or the whole new one.
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SpecError(
            f"--output={path}: cannot be written ({error.strerror}); name another file"
        ) from error
