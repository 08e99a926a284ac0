"""The metadata servers of three clouds, on the loopback: real HTTP, with their protocols.

Sources: AWS, "Use the Instance Metadata Service"; Google, "About VM metadata"; Azure, "Scheduled
Events for Linux VMs".
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CLOUDS = {
    "AWS": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "Google": "GCE_METADATA_HOST",
    "Azure": "AZURE_POD_IDENTITY_AUTHORITY_HOST",
}
"""Cloud -> the variable by which its SDK finds another server."""
_TOKEN = "/latest/api/token"
_INSTANCE = "/computeMetadata/v1/instance/"
NAME = "vm-1"

NOTICES: dict[str, tuple[str, str, str]] = {
    "spot": (
        "AWS",
        "/latest/meta-data/spot/instance-action",
        json.dumps({"action": "terminate", "time": "2026-11-24T18:00:00Z"}),
    ),
    "rebalance": (
        "AWS",
        "/latest/meta-data/events/recommendations/rebalance",
        json.dumps({"noticeTime": "2026-11-24T17:00:00Z"}),
    ),
    "preempted": ("Google", _INSTANCE + "preempted", "TRUE"),
    "maintenance": ("Google", _INSTANCE + "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
    "scheduled event": (
        "Azure",
        "/metadata/scheduledevents?api-version=2020-07-01",
        json.dumps(
            {
                "DocumentIncarnation": 2,
                "Events": [
                    {
                        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
                        "EventType": "Preempt",
                        "ResourceType": "VirtualMachine",
                        "Resources": [NAME],
                        "EventStatus": "Scheduled",
                        "NotBefore": "Tue, 24 Nov 2026 18:00:00 GMT",
                    }
                ],
            }
        ),
    ),
}
"""Notice -> its cloud, and what its server answers to which question from then on."""
NOTHING = {
    _INSTANCE + "preempted": "FALSE",
    _INSTANCE + "maintenance-event": "NONE",
    "/metadata/scheduledevents?api-version=2020-07-01": '{"DocumentIncarnation":1,"Events":[]}',
    "/metadata/instance/compute/name?api-version=2021-02-01&format=text": NAME,
}
"""What they answer while nothing is scheduled; to the rest of what is asked here, 404."""


class Metadata(ThreadingHTTPServer):
    """One server that speaks the protocols of all three."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = dict(NOTHING)
        self.asked: list[str] = []
        """The paths that were answered, or were not found, in their order."""
        self.answering = threading.Event()
        """Cleared: connections are accepted, and never answered."""
        self.answering.set()

    def schedule(self, notice: str) -> None:
        """Answer with this notice from now on."""
        _, path, body = NOTICES[notice]
        self.answers[path] = body

    def environment(self, cloud: str) -> dict[str, str]:
        """The variable that names this server as that of a cloud."""
        host = f"127.0.0.1:{self.server_address[1]}"
        return {CLOUDS[cloud]: host if cloud == "Google" else f"http://{host}"}


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        self.server.answering.wait()
        if self.path != _TOKEN or "X-aws-ec2-metadata-token-ttl-seconds" not in self.headers:
            self._reply(400)
        else:
            self._reply(200, "token")

    def do_GET(self) -> None:
        self.server.answering.wait()
        name, value, refusal = next(
            needed
            for begin, *needed in (
                ("/latest/", "X-aws-ec2-metadata-token", "token", 401),
                ("/computeMetadata/", "Metadata-Flavor", "Google", 403),
                ("/metadata/", "Metadata", "true", 400),
            )
            if self.path.startswith(str(begin))
        )
        if self.headers.get(str(name)) != value:
            self._reply(int(refusal))
            return
        body = self.server.answers.get(self.path)
        self._reply(404 if body is None else 200, body or "")
        self.server.asked.append(self.path)

    def _reply(self, status: int, body: str = "") -> None:
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def metadata_server() -> Iterator[Metadata]:
    """A server, to the end of the context."""
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.answering.set()
            server.shutdown()
