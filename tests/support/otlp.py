"""A collector of OpenTelemetry: it takes traces over HTTP, and decodes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Collector:
    """What has been received."""

    url: str
    requests: list[Any] = field(default_factory=list)
    """Each an ExportTraceServiceRequest."""

    @property
    def spans(self) -> list[Any]:
        """The spans of all requests, in their order."""
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    @property
    def resources(self) -> list[dict[str, str]]:
        """The attributes of each sender."""
        found = [of.resource for request in self.requests for of in request.resource_spans]
        return [{one.key: one.value.string_value for one in of.attributes} for of in found]

    def tree(self) -> dict[str, list[tuple[str, float, float]]]:
        """Each root span -> its parts: name, seconds from the beginning of the root, duration."""
        roots = {span.span_id: span for span in self.spans if not span.parent_span_id}
        found: dict[str, list[tuple[str, float, float]]] = {
            root.name: [("", 0.0, _s(root.end_time_unix_nano - root.start_time_unix_nano))]
            for root in roots.values()
        }
        for span in self.spans:
            if span.parent_span_id:
                root = roots[span.parent_span_id]
                assert span.trace_id == root.trace_id
                offset = _s(span.start_time_unix_nano - root.start_time_unix_nano)
                took = _s(span.end_time_unix_nano - span.start_time_unix_nano)
                found[root.name].append((span.name, offset, took))
        return found


def _s(ns: int) -> float:
    return round(ns / 1e9, 3)


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector on the loopback."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            received.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()
