"""`zero-ctl`: show the jobs of an etcd, drain a node, stop a job, exclude a host.

`zero-ctl` talks to etcd alone, so it works from any machine that reaches etcd, whether or not the
job's nodes can be reached. It decides nothing: an operator request is a key, and the job's agents
carry the request out.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_contract.errors import ZeroError
from zero_contract.exit_codes import CtlExit
from zero_contract.values import whole
from zero_contract.version import add_version
from zero_orchestrator.addresses import host_port, who
from zero_orchestrator.arguments import host, named_as_set, port, seconds, variable_of, with_dashes
from zero_orchestrator.ctl import (
    completion,
    dashboard_command,
    events_command,
    logs_command,
    probe_command,
    report_command,
    requests,
    stack_command,
    top_command,
)
from zero_orchestrator.ctl.views import JsonView, TableView, View
from zero_orchestrator.errors import SpecError, StoreError, StoreUnavailable
from zero_orchestrator.jobfile import command as job_files
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe import ended, events, status
from zero_orchestrator.observe import gc as collect
from zero_orchestrator.observe.status import JobStatus, NoSuchJob
from zero_orchestrator.observe.story import recoveries
from zero_orchestrator.store import private_etcd, retry
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN, write_certificates
from zero_orchestrator.store.kv import KeyValueStore

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from zero_orchestrator.store.etcd.client import EtcdStore

DEFAULT_ENDPOINT = "127.0.0.1:2379"
"""Endpoint of etcd if none is given: the same as that of agents on one machine."""
CALL_S = 5.0
WATCH_S = 1.0
OUTAGE_S = 30.0
"""`status --watch` continues through an outage of etcd of up to this many seconds."""

_HANDED_OVER: Mapping[str, tuple[str, str]] = {
    "launch": (
        "zero_agent.launch",
        "start agents on the hosts of a hostfile, and wait for the end of the job",
    ),
    "certs": (
        "zero_orchestrator.store.join_token",
        "make certificates for an etcd that admits only holders of ZERO_JOIN_TOKEN",
    ),
}
"""Command -> the module that replaces this process, and its help. Neither reads etcd here."""
_Command = Callable[[str, str], argparse.ArgumentParser]
"""Adds a command: its name, and its help."""
_MODULES: Mapping[str, tuple[Any, str]] = {
    "top": (top_command, "show a job live: its status, speed and last events"),
    "events": (events_command, "show the events of a job, each with its cause"),
    "logs": (logs_command, "show what the workers of a job print, on all nodes"),
    "stack": (
        stack_command,
        "show the stacks of all workers of a job; equal stacks are shown once",
    ),
    "probe": (probe_command, "measure the network between the nodes of a job, and name slow links"),
    "report": (report_command, "write what happened in a job into one HTML file, with charts"),
    "dashboard": (dashboard_command, "serve a page that shows a job as it runs, until Ctrl-C"),
}
"""Command -> the module with its `add_flags` and `run`, and its help."""
_WITHOUT_ETCD: Mapping[str, str] = {
    "report": "; --log-dir=DIR makes the report without etcd, of the files that agents wrote there",
}
"""Command -> what it can do when etcd is out of reach."""
_FOR = "duration of the exclusion, such as 30, 10m or 2h (default: until `zero-ctl include`)"
_ETCD_FILES = {
    "etcd-ca": "certificate authority of etcd (PEM)",
    "etcd-cert": "certificate of this client (PEM)",
    "etcd-key": "private key of --etcd-cert (PEM)",
    "etcd-password-file": "file with the password of --etcd-user",
}
_ETCD_FLAGS = {
    "rdzv-endpoint": (
        "HOST:PORT[,...]",
        f"addresses of etcd (default {DEFAULT_ENDPOINT}; if nothing answers there, the etcd of the "
        "job of one node on this machine)",
    ),
    "etcd-user": ("NAME", "user name to log in to etcd with"),
    **{name: ("FILE", text) for name, text in _ETCD_FILES.items()},
}
"""Flag -> metavar and help."""


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Before anything is parsed: the flags of these commands are those of other modules.
    if words and words[0] in _HANDED_OVER:
        os.execv(sys.executable, [sys.executable, "-m", _HANDED_OVER[words[0]][0], *words[1:]])
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:
        completion.complete(parser, open_store=_open)
    args = parser.parse_args([with_dashes(word) for word in words])
    logging.getLogger("zero_orchestrator").setLevel(logging.CRITICAL)  # errors are printed here
    try:
        code = _run(args)
        print(end="", flush=True)  # a failure at the end of Python would be told by Python
    except ZeroError as error:
        remedy = ""
        if isinstance(error, StoreUnavailable):
            remedy = f"--rdzv-endpoint names it{_WITHOUT_ETCD.get(args.command, '')}"
        joined = " " if str(error).endswith("?") else "; "
        print(f"zero-ctl: {joined.join(filter(None, (str(error), remedy)))}", file=sys.stderr)
        code = CtlExit.NO_STORE if isinstance(error, StoreError) else CtlExit.USAGE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # `zero-ctl events | head`
        # At its end Python writes what is left for stdout, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except OSError as error:  # `zero-ctl render > file`, and the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"zero-ctl: {error}", file=sys.stderr)
        code = CtlExit.USAGE
    sys.exit(code)


def _run(args: argparse.Namespace) -> int:
    act = getattr(args, "act", None)
    if act is not None and (code := act(args)) is not None:  # a command that needs no etcd
        return int(code)
    view = JsonView() if args.json else TableView()
    with contextlib.closing(_open(args)) as store:
        code = _COMMANDS[args.command](args, store, view)
        if args.command == "status":
            # If etcd is full, a job cannot write that it waits: its status looks as if it ran.
            with contextlib.suppress(StoreError):  # the status is printed; this is an extra
                if note := store.full_note():
                    print(
                        f"zero-ctl: {note}; jobs go on without publishing until then",
                        file=sys.stderr,
                    )
                if note := store.version_note():
                    print(f"zero-ctl: {note}", file=sys.stderr)
        return code


# ---- the command line ----


def make_parser() -> argparse.ArgumentParser:
    """The command line of `zero-ctl`."""
    parser = argparse.ArgumentParser(
        prog="zero-ctl",
        description="Show the jobs of an etcd, drain a node, stop a job, or start one.",
        epilog="Exit codes: 0 done, 1 not done within --wait, 2 wrong usage or no such job or "
        "node, 3 etcd out of reach. The flags of etcd can be set as PET_<FLAG> in the environment.",
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.add_argument(
            "--json", action="store_true", help="print JSON for tools, one object a line"
        )
        group = sub.add_argument_group("etcd")
        for flag, (metavar, explained) in _ETCD_FLAGS.items():
            default = os.environ.get(variable_of(flag), "")
            group.add_argument(f"--{flag}", default=default, metavar=metavar, help=explained)
        return sub

    _add_looks(command)
    _add_requests(command)
    job_files.add_to(commands)
    completion.add_to(commands)
    for name, (_, text) in _HANDED_OVER.items():  # listed here; `main` starts them
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _add_looks(command: _Command) -> None:
    """The commands that show something."""
    look = command("status", "show the state, nodes, restarts and newest checkpoint of a job")
    look.add_argument(
        "job", nargs="?", help="name of the job (default: the running one; all if several run)"
    )
    look.add_argument("--watch", action="store_true", help="refresh until the job ends")
    look.add_argument("--all", action="store_true", help="list all jobs of this etcd")
    command("jobs", "list all jobs of this etcd, as `zero-ctl status --all`")
    for name, (module, text) in _MODULES.items():
        module.add_flags(command(name, text))
    numbers = command(
        "metrics", "print the metrics of the jobs of this etcd for Prometheus, or serve them"
    )
    numbers.add_argument("job", nargs="?", help="name of the job (default: all jobs)")
    text = "port that serves /metrics until Ctrl-C, 0: a free one (default: print the metrics once)"
    numbers.add_argument("--port", type=port, metavar="PORT", help=text)
    text = "address on which --port listens (default: the loopback)"
    numbers.add_argument("--host", type=host, default="127.0.0.1", metavar="HOST", help=text)


def _add_requests(command: _Command) -> None:
    """The commands that change something: most of them ask a job's agents for it."""
    drain = command(
        "drain", "make a node leave at its next step boundary; the job continues without it"
    )
    drain.add_argument("node", help="name of the node, as `zero-ctl status` shows it")
    drain.add_argument("job", nargs="?", help="name of the job (default: the job of the node)")
    stop = command(
        "stop", "stop a job on all its nodes, with a checkpoint at the next step boundary"
    )
    stop.add_argument("job", nargs="?", help="name of the job (default: the running one)")
    stop.add_argument("--reason", default="", help="reason for the stop; every agent logs it")
    bar = command("exclude", "exclude a host for a while; a spare takes its place, if there is one")
    bar.add_argument("node", help="name of the host, or of a node on it")
    bar.add_argument("--for", dest="for_s", type=seconds, default=0.0, metavar="SECONDS", help=_FOR)
    bar.add_argument(
        "--reason", default="", help="reason for the exclusion; `zero-ctl status` shows it"
    )
    admit = command("include", "admit an excluded host again")
    admit.add_argument("node", help="name of the host, or of a node on it")
    for sub in (bar, admit):
        sub.add_argument("job", nargs="?", help="name of the job (default: the running one)")
    for sub, event in ((drain, "the node has left"), (stop, "the job has ended")):
        text = f"seconds to wait until {event} (default 0)"
        sub.add_argument("--wait", type=seconds, default=0.0, metavar="SECONDS", help=text)
    gc = command("gc", "delete the records of ended jobs")
    text = "delete the records of jobs that ended longer ago than this (default 7d)"
    gc.add_argument(
        "--older-than", type=seconds, default=collect.OLDER_THAN_S, metavar="SECONDS", help=text
    )
    text = f"number of ended jobs to keep; older ones are deleted too (default {collect.KEEP})"
    count = whole(": write a number of jobs, such as 50")
    gc.add_argument("--keep", type=count, default=collect.KEEP, metavar="N", help=text)
    text = (
        "also delete jobs that did not end, if all their agents left longer ago than --older-than"
    )
    gc.add_argument("--lost", action="store_true", help=text)
    gc.add_argument(
        "--dry-run", action="store_true", help="print what would be deleted, and delete nothing"
    )


def _open(args: argparse.Namespace, timeout_s: float = CALL_S) -> EtcdStore:
    """The etcd that the flags name; each call ends within `timeout_s`. Raises SpecError."""
    # Here, since it imports gRPC, for which --help need not wait.
    from zero_orchestrator.store.etcd.client import Credentials, EtcdStore

    given: dict[str, str] = {name: getattr(args, name.replace("-", "_")) for name in _ETCD_FLAGS}
    variables = {name: variable_of(name) for name in given}
    by_environment = {n: v for n, v in variables.items() if given[n] == os.environ.get(v)}
    # An error names the flag, or the variable from which its value comes.
    with named_as_set(by_environment):
        for name in _ETCD_FILES:
            try:  # here, since the client's error does not name the flag
                if given[name]:
                    Path(given[name]).read_bytes()
            except OSError as error:
                raise SpecError(
                    f"--{name}={given[name]}: cannot be read: {error.strerror}"
                ) from error
        ca, cert, key, password_file = (given[name] for name in _ETCD_FILES)
        if not ca and (token := os.environ.get(ENV_JOIN_TOKEN)):
            # Until this process ends: each new connection reads the files again.
            directory = tempfile.mkdtemp(prefix="zero-tls-")
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
            files = write_certificates(Path(directory), token)
            ca, cert, key = str(files.ca), str(files.cert), str(files.key)
        try:
            text = Path(password_file).read_text(encoding="utf-8") if password_file else None
        except (OSError, ValueError) as error:
            raise SpecError(
                f"--etcd-password-file={password_file}: cannot be read: {error}"
            ) from error
        credentials = Credentials(
            user=args.etcd_user or None,
            password=None if text is None else text.partition("\n")[0],
            ca=Path(ca) if ca else None,
            cert=Path(cert) if cert else None,
            key=Path(key) if key else None,
        )
        endpoint = args.rdzv_endpoint or private_etcd.choose(DEFAULT_ENDPOINT)
        try:
            return EtcdStore(endpoint, timeout_s=timeout_s, credentials=credentials)
        except SpecError as error:
            raise SpecError(f"--rdzv-endpoint={args.rdzv_endpoint}: {error}") from error


# ---- the commands ----


def _status(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    name = None if args.all else args.job
    try:
        if name is None:
            # To choose one job, the progress of the nodes of all jobs need not be read.
            jobs = status.read_all(store)
            if args.all or status.is_open(jobs):
                view.jobs(status.read_each(store))
                return CtlExit.OK
            name = status.choose_job(jobs, None).job
        if args.watch:
            view.watch(_looks(store, name))
        else:
            view.status(status.find(store, name))
    except StoreUnavailable:
        # The store of the job's own ends with the job, whose last status is then in a file.
        if args.job is None or (last := ended.find(args.job)) is None:
            raise
        print("zero-ctl: etcd does not answer; this is its last word here", file=sys.stderr)
        view.status(last)
    return CtlExit.OK


def _jobs(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    view.jobs(status.read_each(store))
    return CtlExit.OK


def _looks(store: KeyValueStore, job: str) -> Iterator[JobStatus]:
    """The status of a job every `WATCH_S` seconds, until the job has ended."""
    yield (last := status.find(store, job))
    while not last.ended:
        time.sleep(WATCH_S)
        yield (last := retry.within(OUTAGE_S)(status.read, store, job))


def _metrics(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    from prometheus_client.exposition import start_http_server  # 0.1 s

    from zero_orchestrator.observe import metrics

    def now() -> Iterator[Metric]:
        jobs = [status.find(store, args.job)] if args.job else status.read_each(store)
        told = {job.job: recoveries(events.read(store, job.job)) for job in jobs}
        return metrics.of_jobs(jobs, told)

    if args.port is not None and args.json:
        raise SpecError(
            "--json prints the metrics once, and --port serves them as Prometheus reads them: "
            "leave out one of the two"
        )
    if args.json:
        for sample in metrics.samples(now()):
            view.record(dataclasses.asdict(sample))
        return CtlExit.OK
    if args.port is None:
        print(metrics.exposition(now).decode(), end="")
        return CtlExit.OK
    # What cannot be read at the start is an error of this command; later it is one of a scrape.
    list(now())

    def scraped() -> Iterator[Metric]:
        found, up = [], False
        try:
            found, up = [*now()], True
        except ZeroError as error:  # Prometheus must see that etcd is away
            view.report(f"no metrics: {error}")
        yield from found
        yield from metrics.collected([metrics.ETCD_UP], [], [((), up)])

    registry = metrics.Metrics(scraped).registry
    try:
        server, _ = start_http_server(args.port, addr=args.host, registry=registry)
    except OSError as error:
        raise SpecError(
            f"--port={args.port}: cannot listen on {args.host} ({error.strerror}); choose another "
            "port, or another --host"
        ) from error
    view.report(f"http://{host_port(args.host, server.server_port)}/metrics is served until Ctrl-C")
    # The server has a thread of its own; this one waits for Ctrl-C.
    with contextlib.closing(server.socket):
        signal.pause()
    return CtlExit.OK


def _drain(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    jobs = (status.find(store, args.job),) if args.job else status.read_all(store)
    job = status.choose_node(jobs, args.node, args.job).job
    before = ended.find(job)
    incarnation = requests.ask_to_drain(store, job, args.node, who())
    say = partial(_say, view, command="drain", job=job, target=args.node)
    say(f"node {args.node} will leave job {job} at its next step boundary", done=False)

    def has_left() -> bool:
        agent = store.get(Keys(job).node(args.node))
        # Another one may take its name at once.
        return agent is None or Node.from_json(agent.value).incarnation != incarnation

    left = _or_kept(job, before, has_left, lambda last: args.node not in last.live_nodes)
    return _wait(say, args.wait, left, f"node {args.node} has left job {job}")


def _stop(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    job = status.find(store, args.job)
    say = partial(_say, view, command="stop", job=job.job)
    if job.ended:
        say(f"job {job.job} has ended already: {job.now}", done=True)
        return CtlExit.OK
    before = ended.find(job.job)
    asked = requests.ask_to_stop(store, job.job, who(), args.reason)
    if not job.live_nodes:
        text = "no agent of job {} is alive; the first agent that starts will end the job"
        say(text.format(job.job), done=False)
    else:
        # The first request stands, with its reason.
        how = "is asked to stop" if asked else f"is being stopped already: {job.stop}"
        say(f"job {job.job} {how}; its workers leave at the next step boundary", done=False)
    over = _or_kept(
        job.job, before, lambda: status.read(store, job.job).ended, lambda last: last.ended
    )
    return _wait(say, args.wait, over, f"job {job.job} has ended")


def _exclude(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    job = _running(store, args.job)
    why = f"asked for by {who()}" + (f" ({args.reason})" if args.reason else "")
    # Whole seconds, as of a lease; of less than one it would be 0, which is for ever.
    found = requests.exclude(store, job, args.node, why, math.ceil(args.for_s))
    text = f"job {job} continues without the host: {found}"
    _say(view, text, command="exclude", job=job, target=found.host, done=True)
    return CtlExit.OK


def _include(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    job = _running(store, args.job)
    host = requests.include(store, job, args.node)
    text = f"{host} may take part in job {job} again"
    _say(view, text, command="include", job=job, target=host, done=True)
    return CtlExit.OK


def _gc(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Print one line for each deleted job; a job that has started again meanwhile is kept."""
    limits = {"older_than_s": args.older_than, "keep": args.keep, "lost": args.lost}
    now_s, gone = time.time(), 0
    if args.dry_run:
        found: Iterable[collect.Doomed] = collect.due(collect.look(store), now_s=now_s, **limits)
    else:
        found = collect.collect(store, now_s=now_s, **limits)
    verb = "would be" if args.dry_run else "is"
    for doomed in found:
        gone += 1
        job = doomed.remains.job
        text = f"job {job} {verb} deleted: {doomed.reason}"
        _say(view, text, command="gc", job=job, done=not args.dry_run)
    if not gone:
        view.report("nothing is to be deleted: --older-than, --keep and --lost say what is")
    return CtlExit.OK


def _running(store: KeyValueStore, name: str | None) -> str:
    """The name of the job that a request is for. Raises NoSuchJob if the job has ended."""
    job = status.find(store, name)
    if job.ended:
        raise NoSuchJob(f"job {job.job} has ended: {job.now}")
    return job.job


def _say(view: View, text: str, **facts: Any) -> None:
    """Print what has become of a request, in words and for tools."""
    view.record(dataclasses.asdict(requests.Answered(text=text, **facts)))
    view.report(text)


def _or_kept(
    job: str,
    before: JobStatus | None,
    happened: Callable[[], bool],
    is_told: Callable[[JobStatus], bool],
) -> Callable[[], bool]:
    """`happened`; if etcd does not answer, whether the last status of the job on disk tells of it.

    `before`: that status before the request, which may be of an earlier run.
    """

    def look() -> bool:
        try:
            return happened()
        except StoreUnavailable:
            # The store of the job's own ends with the job, perhaps between two looks.
            last = ended.find(job)
            if last is None or last == before or not is_told(last):
                raise
            return True

    return look


def _wait(
    say: Callable[..., None], wait_s: float, happened: Callable[[], bool], sentence: str
) -> int:
    """Wait up to `wait_s` seconds until `happened`."""
    # Without --wait a request is done when it is made.
    if wait_s == 0:
        return CtlExit.OK
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if happened():
            say(sentence, done=True)
            return CtlExit.OK
        time.sleep(0.1)
    say(f"not within {wait_s:g} s; `zero-ctl status` shows more", done=False)
    return CtlExit.TOO_LATE


_COMMANDS: Mapping[str, Callable[[argparse.Namespace, KeyValueStore, View], int]] = {
    **{name: module.run for name, (module, _) in _MODULES.items()},
    "status": _status,
    "jobs": _jobs,
    "metrics": _metrics,
    "drain": _drain,
    "stop": _stop,
    "exclude": _exclude,
    "include": _include,
    "gc": _gc,
}
