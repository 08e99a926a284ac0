"""OTLP traces of a job's recoveries and saves, for a collector of OpenTelemetry.

The agent of rank 0 sends them: a trace of each recovery after the first step of the round that it
leads to, from the events of all nodes in etcd, and a trace of each save that has ended. The
standard variables (OTEL_EXPORTER_OTLP_ENDPOINT and others) say where to; without them nothing is
imported, made or sent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zero_contract.extras import remedy
from zero_contract.worker import Saved
from zero_orchestrator.errors import StoreError
from zero_orchestrator.observe import events
from zero_orchestrator.observe.story import ENDS, Recovery, Span, recoveries, spans
from zero_orchestrator.store.kv import KeyValueStore

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import Tracer

log = logging.getLogger("zero")

SETTLE_S = 3.0
"""Other agents write their events of a recovery up to this long after its first step."""
CLOSE_S = 5.0
"""How long the end of an agent waits for what is still to be sent: a busy node takes seconds to
import the library, and a job that ends soon after its recovery would have no trace of it."""
# Traces that wait for the thread that sends them, for which no other waits: others are dropped.
_QUEUE = 64
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

Attribute = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace: one span, and its parts."""

    whole: Span
    parts: tuple[Span, ...]
    attributes: Mapping[str, Attribute]
    problem: str = ""
    """Why what it shows has failed; empty: it has not."""


def of_recovery(found: Recovery, first_step_s: float) -> Trace:
    """The trace of a recovery, up to the end of the next round's first step."""
    parts = spans(found, first_step_s)
    end = next(e.record for e in found.events if e.record.get("event") in ENDS)
    return Trace(
        whole=Span(name="recovery", from_s=parts[0].from_s, to_s=parts[-1].to_s),
        parts=parts,
        attributes={
            "zero.round": found.round,
            "zero.cause": found.cause,
            "zero.reason": str(end.get("text", "")),
            "zero.failure": end.get("event") == "interrupt",
        },
    )


def of_save(saved: Saved) -> Trace:
    """The trace of a save, as rank 0 has reported it: its parts overlap."""

    def part(name: str, from_s: float, to_s: float) -> Span:
        return Span(name=name, from_s=saved.began_s + from_s, to_s=saved.began_s + to_s)

    parts = [part("stall", 0.0, saved.stall_s)]
    if saved.written_s:
        parts.append(part("write", saved.written_s - saved.write_s, saved.written_s))
    if saved.published_s:
        parts.append(part("publish", saved.published_s - saved.publish_s, saved.published_s))
    return Trace(
        whole=part("save", 0.0, saved.total_s),
        parts=tuple(parts),
        attributes={"zero.step": saved.step, "zero.size_bytes": saved.whole_bytes},
        problem="" if saved.committed else "nothing was published",
    )


def refusal(environ: Mapping[str, str]) -> str | None:
    """Why no traces are sent, in a sentence; empty: they are not asked for; None: they are sent."""
    asked = next((name for name in _ENDPOINTS if environ.get(name)), None)
    off = environ.get("OTEL_TRACES_EXPORTER") == "none"
    if asked is None or off or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    protocol = next((name for name in _PROTOCOLS if environ.get(name)), None)
    if protocol is not None and environ[protocol] != _HTTP:
        return (
            f"no traces are sent: {protocol} is {environ[protocol]}, and agents send them by "
            f"{_HTTP}, to port 4318 of most collectors; set {protocol}={_HTTP} and {asked}"
        )
    # Raised where a package around the module is missing.
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(_EXPORTER) is not None:
            return None
    return f"no traces are sent, although {asked} is set: {remedy('opentelemetry')}"


class Traces:
    """Sends traces on a thread of its own; does nothing unless the environment asks for it."""

    def __init__(
        self,
        job: str,
        node: str,
        store: KeyValueStore,
        environ: Mapping[str, str],
        settle_s: float = SETTLE_S,
    ) -> None:
        """Log why no traces are sent, if they are asked for and cannot be.

        The store is read on the thread of the traces alone.
        """
        self._store = store
        self._job = job
        self._settle_s = settle_s
        self._round = 0
        self._closing = threading.Event()
        self._queue: queue.Queue[Callable[[], Trace | None] | None] = queue.Queue(_QUEUE)
        self._sender = _Sender(job, node, environ)
        self._thread: threading.Thread | None = None
        problem = refusal(environ)
        if problem:
            log.warning("%s", problem)
        elif problem is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()

    def stepped(self, n: int, at_s: float) -> None:
        """Rank 0, which is here, has ended a step of round n; the first ends a recovery."""
        if n != self._round:
            self._round = n
            if n > 1:  # the first round recovers from nothing
                self._put(partial(self._recovery_before, n, at_s))

    def saved(self, saved: Saved) -> None:
        """A save of rank 0, which is here, has ended."""
        self._put(partial(of_save, saved))

    def close(self) -> None:
        """Send what is queued, for up to `CLOSE_S`."""
        self._closing.set()
        self._put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._sender.stop()

    def _put(self, make: Callable[[], Trace | None] | None) -> None:
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # the collector does not answer
                self._queue.put_nowait(make)

    def _run(self) -> None:
        while (make := self._queue.get()) is not None:
            try:
                if (trace := make()) is not None:
                    self._sender.send(trace)
            except StoreError as error:  # its outage is logged elsewhere
                log.debug("a trace is not sent: %s", error)
            except Exception as error:  # a variable that the library refuses, for example
                self._sender.fails(str(error) or type(error).__name__)

    def _recovery_before(self, n: int, at_s: float) -> Trace | None:
        """The trace of the recovery that has led to round n; None if its events are not kept."""
        # Other agents write their events later; an agent that ends does not wait for them.
        self._closing.wait(self._settle_s)
        found = recoveries(events.read(self._store, self._job))
        last = next((one for one in reversed(found) if one.round == n - 1), None)
        return of_recovery(last, at_s) if last is not None else None


class _Sender:
    """The library that encodes and sends traces; it is imported by the first of them."""

    def __init__(self, job: str, node: str, environ: Mapping[str, str]) -> None:
        self._attributes = {"zero.job": job, "zero.node": node}
        if "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            self._attributes["service.name"] = environ.get("OTEL_SERVICE_NAME") or "zero-elastic"
        self._exporter: OTLPSpanExporter | None = None
        self._ended: InMemorySpanExporter | None = None
        self._tracer: Tracer | None = None
        self._fails = False

    def send(self, trace: Trace) -> None:
        """Send a trace, in one request; log the first of several failures in a row."""
        if self._exporter is None:
            self._open()
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        assert self._exporter is not None
        assert self._tracer is not None
        assert self._ended is not None
        # Spans of the past: a span processor only collects them, and all are sent at once. An empty
        # context begins a trace, whatever span this thread may be in.
        root = self._tracer.start_span(
            trace.whole.name,
            context=Context(),
            attributes=trace.attributes,
            start_time=_ns(trace.whole.from_s),
        )
        inside = set_span_in_context(root)
        for part in trace.parts:
            span = self._tracer.start_span(part.name, inside, start_time=_ns(part.from_s))
            span.end(_ns(part.to_s))
        if trace.problem:
            root.set_status(Status(StatusCode.ERROR, trace.problem))
        root.end(_ns(trace.whole.to_s))
        ended = self._ended.get_finished_spans()
        self._ended.clear()
        if not ended:  # OTEL_TRACES_SAMPLER leaves it out
            return
        if self._exporter.export(ended).name == "SUCCESS":
            self._fails = False
        else:
            self.fails("the collector does not answer, or refuses them")

    def fails(self, why: str) -> None:
        """Log that traces are not sent, and why, unless that is known."""
        if not self._fails:
            log.warning("traces are not sent, and the job goes on without: %s", why)
        self._fails = True

    def stop(self) -> None:
        """Break off a request that is under way."""
        if self._exporter is not None:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _open(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `fails` says it once
        resource = Resource.create(dict(self._attributes))
        # No exit handler of the library waits for a collector: `close` has its own limit.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._ended = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = provider.get_tracer("zero-elastic")
        self._exporter = OTLPSpanExporter()


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
