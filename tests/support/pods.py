"""A pod of the local cluster: its process, its probes, and how it is ended.

Must always hold: `turn` does what is due and never waits, a probe's own timeout excepted. Who
calls it: `kubelet`.

Source: the Kubernetes documentation, Pod Lifecycle.
"""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.sandbox import Sandbox

Object = dict[str, Any]

_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def is_answer_good(url: str, timeout_s: float) -> bool:
    """An HTTP probe."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return 200 <= int(answer.status) < 400
    except (OSError, urllib.error.URLError):
        return False


@dataclass
class Probe:
    """One probe of one container and what it has found so far."""

    spec: Object
    url: str
    due_s: float
    failures: int = 0
    passed: bool = False

    def run(self, now_s: float) -> None:
        if now_s < self.due_s:
            return
        self.due_s = now_s + self.spec.get("periodSeconds", 10)
        self.passed = is_answer_good(self.url, self.spec.get("timeoutSeconds", 1))
        self.failures = 0 if self.passed else self.failures + 1

    @property
    def has_failed(self) -> bool:
        return self.failures >= int(self.spec.get("failureThreshold", 3))


@dataclass
class Pod:
    """One pod with one container."""

    name: str
    owner: str
    index: int
    spec: Object
    labels: Mapping[str, str]
    namespace: str
    address: str
    sandbox: Sandbox
    probes: dict[str, Probe]
    disrupted: bool = False
    """It was ended by the cluster, not by itself: a drained, reclaimed or lost node."""
    deadlines: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """What is still to be done to end it, and when."""
    exit_code: int | None = None
    killed_by_probe: bool = False

    @property
    def is_ready(self) -> bool:
        return self.exit_code is None and self.probes["readinessProbe"].passed

    @property
    def output(self) -> str:
        return self.sandbox.log.read_text(errors="replace")

    def terminate(self, now_s: float) -> None:
        """preStop, SIGTERM, and at the end of the grace period SIGKILL."""
        if self.deadlines or self.exit_code is not None:
            return
        hook = self.spec["containers"][0].get("lifecycle", {}).get("preStop")
        pause_s = hook["sleep"]["seconds"] if hook else 0
        grace_s = self.spec.get("terminationGracePeriodSeconds", 30)
        self.deadlines = [
            (now_s + pause_s, lambda: self.sandbox.signal(signal.SIGTERM)),
            (now_s + grace_s, self.sandbox.kill),
        ]

    def turn(self, now_s: float) -> None:
        """What is due: the end, or a probe."""
        self.exit_code = self.sandbox.exit_code
        if self.exit_code is not None:
            return
        while self.deadlines and self.deadlines[0][0] <= now_s:
            self.deadlines.pop(0)[1]()
        if not self.deadlines:
            self._probe(now_s)

    def _probe(self, now_s: float) -> None:
        startup = self.probes["startupProbe"]
        if not startup.passed:
            startup.run(now_s)
            self._end_if(startup, now_s)
            return
        for name in ("livenessProbe", "readinessProbe"):
            self.probes[name].run(now_s)
        self._end_if(self.probes["livenessProbe"], now_s)

    def _end_if(self, probe: Probe, now_s: float) -> None:
        if probe.has_failed:
            self.killed_by_probe = True
            self.terminate(now_s)


def probes_of(container: Object, address: str) -> dict[str, Probe]:
    """A container's three probes, by name; the policies ask that there are three."""
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    def probe(spec: Object) -> Probe:
        question = spec["httpGet"]
        url = f"http://{address}:{ports[question['port']]}{question['path']}"
        return Probe(spec, url, time.monotonic() + spec.get("initialDelaySeconds", 0))

    return {name: probe(container[name]) for name in _PROBES}
