"""The progress of a job in the `status.trainerStatus` of its TrainJob of Kubeflow Trainer.

With its gate TrainJobStatus, Trainer gives the pods of a TrainJob an address, the authority behind
it and a token (KUBEFLOW_TRAINER_SERVER_*). The agent of rank 0 posts there how much of the job is
done, how long the rest takes, and the loss.

Source: Kubeflow Trainer, "TrainJob Progress and Training Metrics".
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_contract.clock import Clock
from zero_contract.worker import Progress
from zero_contract.writer import Writer
from zero_orchestrator.observe.pace import Speed

log = logging.getLogger("zero")

# Trainer asks for at most one post in five seconds.
EVERY_S = 5.0
TIMEOUT_S = 5.0
_PREFIX = "KUBEFLOW_TRAINER_SERVER_"


def trainer_status(
    progress: Progress, speed: Speed | None, now_s: float, *, done: bool
) -> dict[str, Any]:
    """The status after a step: seconds since the epoch -> the object that Trainer takes."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s))
    status: dict[str, Any] = {"lastUpdatedTime": when}
    metrics = {
        "step": progress.step,
        "loss": progress.loss,
        "gradient_norm": progress.gradient_norm,
        "steps_per_second": speed.steps if speed is not None else None,
    }
    status["metrics"] = [
        {"name": name, "value": f"{value:.6g}" if isinstance(value, float) else str(value)}
        for name, value in metrics.items()
        if value is not None
    ]
    total = progress.step if done else progress.total_steps
    if total:
        status["progressPercentage"] = min(100, 100 * progress.step // total)
        left = max(0, total - progress.step)
        if not left or (speed is not None and speed.steps > 0):
            status["estimatedRemainingSeconds"] = round(left / speed.steps) if left and speed else 0
    return status


class TrainJobStatus:
    """Posts the status; does nothing unless the environment is that of a TrainJob's pod."""

    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        """Nothing is sent yet."""
        self._url = environ.get(f"{_PREFIX}URL", "")
        self._authority = environ.get(f"{_PREFIX}CA_CERT")
        self._token = environ.get(f"{_PREFIX}TOKEN")
        self._clock = clock
        self._due_s = 0.0
        self._failed = False
        self._writer = Writer("zero-trainjob", limit_bytes=1)  # one waits: the next is newer

    def look(self, progress: Progress | None, speed: Speed | None, *, done: bool = False) -> None:
        """Post if the time has come, or if the job is done; call it often."""
        now_s = self._clock.now()
        if not self._url or progress is None or (now_s < self._due_s and not done):
            return
        self._due_s = now_s + EVERY_S
        status = trainer_status(progress, speed, time.time(), done=done)
        if done:  # else the last post would find the queue full, and be dropped
            self._writer.flush(TIMEOUT_S)
        self._writer.put(self._post, json.dumps({"trainerStatus": status}).encode())
        if done:  # the agent ends, and its threads with it
            self._writer.flush(TIMEOUT_S)

    def _post(self, body: bytes) -> None:
        import ssl  # 20 ms with urllib.request, on the thread that needs it
        import urllib.request

        headers = {"Content-Type": "application/json"}
        try:
            if self._token:  # read each time: the kubelet renews it
                headers["Authorization"] = f"Bearer {Path(self._token).read_text().strip()}"
            request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
            context = ssl.create_default_context(cafile=self._authority)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context):
                self._failed = False
        except (OSError, ValueError) as error:  # of a status other than 2xx as well
            if not self._failed:
                log.warning("the TrainJob at %s shows no progress: %s", self._url, error)
            self._failed = True
