"""`--health-port`: liveness and readiness of this agent over HTTP, for a supervisor.

`/healthz` answers whether the agent is alive: its loop turns. `/readyz` answers whether this node
is ready: its workers run in the job's current round, and have ended a step if they say what they do
before. Both answer in JSON, with the state and the reason, 200 for yes and 503 for no. `/metrics`
has the metrics of this node for Prometheus. Nothing here changes anything or waits for the agent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from zero_agent.node.network import PatientServer
from zero_agent.node.state import Workers
from zero_contract.extras import remedy
from zero_orchestrator.addresses import host_port
from zero_orchestrator.errors import SpecError

log = logging.getLogger("zero")

STALLED_S = 30.0
"""A loop that has not turned for this long hangs: it turns ten times a second, even while it waits
for etcd."""
_CLIENT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of an agent, by default one that starts, as `/healthz` and `/readyz` report it."""

    job: str = ""
    node: str = ""
    round: int = 0
    state: str = ""
    """The job's state: FORMING, ACTIVE, ..."""
    reason: str
    """What the job is doing or waiting for."""
    workers: Workers = Workers.NONE
    workers_round: int = 0
    """The round in which the workers run, or ran."""
    preparing: str = ""
    """What the workers do before their first step of the round; empty once they have ended one, and
    if they do not say."""
    turned_s: float = 0.0
    """Seconds since the agent's loop last turned."""
    store_silent_s: float | None = None
    """Seconds since etcd's last answer; None while etcd answers."""


STARTING = Status(reason="the agent is starting")

Answer = tuple[bool, str]


def healthy(now: Status) -> Answer:
    """Whether the agent works, and why (not)."""
    if now.turned_s > STALLED_S:
        return False, f"the agent's loop has not turned for {now.turned_s:.0f} s"
    return True, now.reason


def ready(now: Status) -> Answer:
    """Whether this node's workers run in the job's current round, and why (not)."""
    alive, reason = healthy(now)
    if not alive:
        return False, reason
    # Before etcd: workers train on while it is away.
    if now.workers is Workers.RUNNING and now.workers_round == now.round:
        if now.preparing:
            return False, f"no step of round {now.round} has ended here yet: {now.preparing}"
        return True, now.reason
    if now.store_silent_s is not None:
        return False, f"etcd has not answered for {now.store_silent_s:.0f} s"
    return False, f"no workers run here in round {now.round} ({now.workers}): {now.reason}"


_QUESTIONS: dict[str, Callable[[Status], Answer]] = {"/healthz": healthy, "/readyz": ready}
_METRICS = "/metrics"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Health(PatientServer, ThreadingHTTPServer):
    """The server; `watch` sets the agent whose state it reports."""

    def __init__(self, host: str, port: int) -> None:
        """Listen, and answer from now on. Raises SpecError: it cannot listen at that address."""
        self._look: Callable[[], Status] = lambda: STARTING
        self.metrics: Callable[[], bytes] = bytes
        """Returns the metrics of this node in Prometheus' text format."""
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise SpecError(
                f"--health-port={port}: cannot listen on {host} ({error}); choose another port, "
                "0 for any free one, or another --health-host"
            ) from error
        # Polls ten times a second: `close` waits for the next one.
        threading.Thread(
            target=self.serve_forever, args=(0.1,), name="zero-health", daemon=True
        ).start()
        self.port = int(self.server_address[1])
        where = host_port(host, self.port)
        log.info("health: http://%s/healthz and http://%s/readyz", where, where)

    def watch(self, look: Callable[[], Status], metrics: Callable[[], bytes] = bytes) -> None:
        """Report what these return; they are called on other threads and must only read."""
        self._look, self.metrics = look, metrics

    def waits(self, why: str) -> None:
        """Report that there is no agent yet, because this node is unhealthy and cannot join."""
        waiting = replace(STARTING, reason=f"this node does not join yet: {why}")
        self.watch(lambda: waiting)

    def answer(self, path: str) -> tuple[HTTPStatus, dict[str, Any]]:
        """The HTTP status and the JSON object for a request of this path."""
        question = _QUESTIONS.get(path.partition("?")[0])
        if question is None:
            return HTTPStatus.NOT_FOUND, {
                "reason": f"ask for {', '.join(_QUESTIONS)} or {_METRICS}"
            }
        now = self._look()
        yes, reason = question(now)
        code = HTTPStatus.OK if yes else HTTPStatus.SERVICE_UNAVAILABLE
        return code, {**asdict(now), "ok": yes, "reason": reason}

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Skip HTTPServer's look-up of this host's full name, which may take a minute."""
        socketserver.TCPServer.server_bind(self)


@contextlib.contextmanager
def served(host: str, port: int | None) -> Iterator[Health | None]:
    """The server while the context lasts; None without a port."""
    if port is None:
        yield None
        return
    with contextlib.closing(Health(host, port)) as health:
        yield health


class _Handler(BaseHTTPRequestHandler):
    server: Health
    timeout = _CLIENT_TIMEOUT_S  # a slow client costs its own connection

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == _METRICS:
            code, kind, body = self._metrics()
        else:
            code, record = self.server.answer(self.path)
            kind, body = "application/json", json.dumps(record).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _metrics(self) -> tuple[HTTPStatus, str, bytes]:
        try:
            return HTTPStatus.OK, _TEXT, self.server.metrics()
        except ModuleNotFoundError as error:  # prometheus-client, an extra
            text = f"{remedy(str(error.name))}\n"
            return HTTPStatus.NOT_IMPLEMENTED, "text/plain", text.encode()

    def log_message(self, format: str, *args: Any) -> None:
        """A probe each second is not logged."""
