"""`zero-ctl dashboard`: the page of a job, kept up to date, with drain and stop behind a token."""

from __future__ import annotations

import argparse
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zero_contract.exit_codes import CtlExit
from zero_contract.extras import remedy
from zero_orchestrator import arguments
from zero_orchestrator.addresses import family_of, host_port, who
from zero_orchestrator.ctl import requests
from zero_orchestrator.ctl.page import picture as pictures
from zero_orchestrator.ctl.page.picture import Json
from zero_orchestrator.ctl.views import View
from zero_orchestrator.errors import SpecError
from zero_orchestrator.observe import status
from zero_orchestrator.store.kv import KeyValueStore

PORT = 8780
LOOK_S = 1.0
"""Pause between two looks for a job that does not exist yet."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The page of a job, which is served until the command ends."""

    job: str
    """Name of the job."""
    url: str
    """Address of the page."""
    token: str | None
    """The token for drain and stop; None: it is that of `--token-file`."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("job", nargs="?", help=status.OR_NEWEST)
    text = f"port of the page (default {PORT}; 0: a free one)"
    parser.add_argument("--port", type=arguments.port, default=PORT, metavar="PORT", help=text)
    text = (
        "address on which the page is served (default: the loopback); anyone who reaches "
        "another address can read the page without a token"
    )
    parser.add_argument(
        "--host", type=arguments.host, default="127.0.0.1", metavar="HOST", help=text
    )
    text = "file with the token for drain and stop (default: a new one, which is printed)"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=text)


def run(args: argparse.Namespace, store: KeyValueStore, view: View) -> int:
    """Serve the page until Ctrl-C, as soon as there is the job.

    Raises:
        SpecError: The port is taken, the token's file cannot be read, or the extra is missing.
    """
    try:
        import uvicorn

        from zero_orchestrator.ctl.page.server import Server
    except ImportError as error:
        raise SpecError(
            f"{remedy(str(error.name))}; `zero-ctl report` needs no dashboard"
        ) from error
    job = _await_job(store, args.job, view)
    token = secrets.token_urlsafe(24) if args.token_file is None else _token(args.token_file)

    def look() -> Json:
        return pictures.picture(pictures.read(store, job), now_s=time.time())

    def drain(asked: Mapping[str, str]) -> str:
        node = asked.get("node", "")
        status.choose_node((status.find(store, job),), node, job)
        requests.ask_to_drain(store, job, node, who())
        return f"Node {node} will leave job {job} at its next step boundary."

    def stop(asked: Mapping[str, str]) -> str:
        requests.ask_to_stop(store, job, who(), "on the dashboard")
        return f"Job {job} is asked to stop; its workers leave at the next step boundary."

    names = {"localhost", args.host, socket.gethostname()}
    if not args.host.startswith("127."):  # of the loopback no other machine has a name
        names.add(socket.getfqdn())
    app = Server(look, token, {"drain": drain, "stop": stop}).app(names)
    # Its log would be between the lines of `view`; there are no web sockets, and nothing to set up.
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,  # a stream ends only when its reader leaves
    )
    try:
        listener = socket.create_server((args.host, args.port), family=family_of(args.host))
    except OSError as error:
        raise SpecError(
            f"--port={args.port}: cannot listen on {args.host} ({error}); choose another port, or "
            "another --host"
        ) from error
    with listener:
        url = f"http://{host_port(args.host, listener.getsockname()[1])}/"
        new = token if args.token_file is None else None
        view.record(asdict(Served(job=job, url=url, token=new)))
        view.report(f"job {job}: {url} until Ctrl-C")
        if new is not None:
            view.report(f"the token for drain and stop is {token}")
        uvicorn.Server(config).run(sockets=[listener])
    return CtlExit.OK


def _await_job(store: KeyValueStore, name: str | None, view: View) -> str:
    """The name of the job, once it exists."""
    # A dashboard may be started before the agents, as by one script.
    waits = False
    while True:
        try:
            job = name or status.newest_job(status.read_all(store)).job
            return status.find(store, job).job
        except status.NoSuchJob as error:
            if not waits:
                view.report(f"{error}; waiting for it, until Ctrl-C")
            waits = True
            time.sleep(LOOK_S)


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, ValueError) as error:
        raise SpecError(f"--token-file={path}: cannot be read: {error}") from error
    if len(token) < 16:
        raise SpecError(
            f"--token-file={path}: its first line is shorter than 16 characters; write a random "
            "token, such as that of `openssl rand -hex 16`"
        )
    return token
