"""Notices that this process, or its machine, is to go: signals, the clouds' metadata, a file.

Without an agent a training asks `heard` at the end of each step, and leaves after that step. An
agent looks for the same notices of the machine (`watch`) and drains its node. No step and no start
waits for a server, however slow.

Sources: AWS "Spot Instance interruption notices", IMDSv2; Google "Preemption process", "Live
migration"; Azure "Scheduled Events"; how a machine knows its cloud: cloud-init's ds-identify.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zero_contract.kernel import text_of

_log = logging.getLogger(__name__)

ENV_FILE = "ZERO_LEAVE_FILE"
"""As in `zero_contract.worker`, which is not needed here."""
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
OF_MACHINE = 128 + signal.SIGTERM
"""The exit code after a notice of the machine."""
POLL_S = 1.0
"""Google gives 30 s of notice, AWS and Azure more; Azure recommends to ask once in a second."""
TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20
_LINK_LOCAL = "169.254.169.254"
_FIRMWARE = Path("/sys/class/dmi/id")


class Notice(NamedTuple):
    """That this process is to leave."""

    number: int
    """The signal that it is, or that it stands for."""
    text: str

    @property
    def code(self) -> int:
        """The exit code of a process that has left, as of one that this signal has ended."""
        return 128 + self.number


class Found(NamedTuple):
    """What the metadata say."""

    text: str
    advice: bool = False
    """Whether the machine may stay: a recommendation, which may stand for hours."""


# ---- the clouds ----

Get = Callable[..., str]
"""path, method, **headers -> the body; empty if there is none, or no answer."""


def _getter(base: str, **always: str) -> Get:
    import http.client  # 100 ms, on the thread that needs it
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy

    def get(path: str, method: str = "GET", **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in (always | headers).items()}
        try:
            request = urllib.request.Request(f"{base}{path}", headers=named, method=method)
            with opener.open(request, timeout=TIMEOUT_S) as reply:
                return str(reply.read(_MOST_BYTES).decode())
        except (OSError, ValueError, http.client.HTTPException):  # 404: nothing is scheduled
            return ""

    return get


def _read(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(told := json.loads(text), dict):
            return told
    return {}


def _aws(base: str) -> Iterator[Found]:
    get = _getter(base)
    # IMDSv2, which a machine may demand: whoever reads shows a token that it has asked for.
    token = get("/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    of_data = "/latest/meta-data"
    if action := _read(get(f"{of_data}/spot/instance-action", X_aws_ec2_metadata_token=token)):
        yield Found(f"AWS: spot instance-action {action.get('action')} at {action.get('time')}")
    advice = get(f"{of_data}/events/recommendations/rebalance", X_aws_ec2_metadata_token=token)
    if told := _read(advice):
        yield Found(f"AWS: rebalance recommendation of {told.get('noticeTime')}", advice=True)


def _google(base: str) -> Iterator[Found]:
    get = _getter(f"http://{base}/computeMetadata/v1/instance", Metadata_Flavor="Google")
    if get("/preempted").strip() == "TRUE":
        yield Found("Google: preempted")
    event = get("/maintenance-event").strip()
    if event.startswith("TERMINATE"):  # MIGRATE_ON_HOST_MAINTENANCE is a pause
        yield Found(f"Google: maintenance-event {event}")


_TAKES_AWAY = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Of Azure's events; Freeze is a pause."""


def _azure(base: str) -> Iterator[Found]:
    get = _getter(f"{base}/metadata", Metadata="true")
    events = _read(get("/scheduledevents?api-version=2020-07-01")).get("Events") or ()
    events = [one for one in events if one.get("EventType") in _TAKES_AWAY]
    # Other machines of a scale set, or of an availability set, have their events there as well.
    name = events and get("/instance/compute/name?api-version=2021-02-01&format=text")
    for event in events:
        if not name or name in event.get("Resources", ()):
            when = event.get("NotBefore") or "once"
            yield Found(f"Azure: scheduled event {event['EventType']} at {when}")


class _Cloud(NamedTuple):
    variable: str
    """The variable by which its SDK knows another endpoint."""
    endpoint: str
    firmware: Mapping[str, str]
    """What the firmware says of a machine there: the file, and a part of its text."""
    look: Callable[[str], Iterator[Found]]


_CLOUDS = (
    _Cloud(
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        f"http://{_LINK_LOCAL}",
        {"sys_vendor": "Amazon EC2", "bios_version": "amazon"},  # Nitro, Xen
        _aws,
    ),
    _Cloud("GCE_METADATA_HOST", _LINK_LOCAL, {"product_name": "Google"}, _google),
    _Cloud(
        "AZURE_POD_IDENTITY_AUTHORITY_HOST",
        f"http://{_LINK_LOCAL}",
        {"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
        _azure,
    ),
)


def clouds(environ: Mapping[str, str]) -> list[Callable[[], Iterator[Found]]]:
    """How to look at the metadata of the clouds that this machine may be in."""
    found: list[Callable[[], Iterator[Found]]] = []
    for cloud in _CLOUDS:
        endpoint = environ.get(cloud.variable, "").rstrip("/")
        # Only where something says which cloud it is: no other machine waits for a server that is
        # not there.
        if not endpoint and any(
            part in text_of(_FIRMWARE / name) for name, part in cloud.firmware.items()
        ):
            endpoint = cloud.endpoint
        off = cloud.look is _aws and environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
        if endpoint and not off:
            found.append(partial(cloud.look, endpoint))
    return found


# ---- looking ----


def watch(hear: Callable[[str], None], environ: Mapping[str, str]) -> None:
    """Look for notices of this machine on a thread of its own; `hear` gets the first, there."""
    looks, file = clouds(environ), environ.get(ENV_FILE)
    if file:  # Kubernetes writes an annotation of the pod there (downward API)
        looks.append(partial(_of_file, file))
    if looks:
        again = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        run = threading.Thread(
            target=_watch, args=(hear, looks, again), name="zero-notices", daemon=True
        )
        run.start()


def _of_file(path: str) -> Iterator[Found]:
    with contextlib.suppress(OSError):
        if os.stat(path).st_size:
            yield Found(f"{path} is not empty")


def _watch(
    hear: Callable[[str], None], looks: list[Callable[[], Iterator[Found]]], again: bool
) -> None:
    known: set[Found] | None = None
    while True:
        there = [found for look in looks for found in look()]
        if known is None:
            # What the program has left for may still stand when it starts again. A first start
            # stays only for advice, which may stand for hours.
            known = {found for found in there if found.advice or again}
            for found in known:
                _log.warning("%s: that was there before; this process stays", found.text)
        for found in there:
            if found not in known:
                hear(found.text)
                return
        time.sleep(POLL_S)


# ---- without an agent ----

_heard: Notice | None = None
_came: set[int] = set()
_begun_by = 0
"""The process that heeds notices: a fork of it does not."""
_FIRST = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def heard() -> Notice | None:
    """The first notice to this process, which heeds them from the first call on."""
    if _begun_by != os.getpid():
        _begin()
    return _heard


def _begin() -> None:
    global _begun_by  # noqa: PLW0603 - it is the process that heeds them
    _begun_by = os.getpid()
    if threading.current_thread() is threading.main_thread():
        interactive = hasattr(sys, "ps1")  # a notebook's interrupt ends a cell, not the process
        for number in SIGNALS:
            handler = signal.getsignal(number)
            # Not one that the script handles itself. Ray's handler would end the worker at once.
            default = handler in (signal.SIG_DFL, signal.default_int_handler, _on_signal)
            default = default or getattr(handler, "__module__", "").startswith("ray.")
            if default and not (interactive and number == signal.SIGINT):
                signal.signal(number, _on_signal)
    # One process of a machine asks; all leave after the same step.
    local = next((os.environ[name] for name in _FIRST if name in os.environ), "0")
    if local == "0":
        watch(lambda text: _hear(signal.SIGTERM, text), os.environ)


def _on_signal(number: int, _frame: object) -> None:
    if _begun_by == os.getpid() and number not in _came:
        _came.add(number)
        _hear(number, signal.Signals(number).name, "; once more to leave at once")
        return
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, default)
    signal.raise_signal(number)


def shield(_worker: int = 0) -> None:
    """Let only its parent end this process of a loader: a DataLoader's `worker_init_fn`.

    Terminals and launchers signal whole process groups, and a step is not finished without them.
    """
    # Blocked, signals wait for the thread, which learns who has sent each of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


def _hear(number: int, text: str, hint: str = "") -> None:
    global _heard  # noqa: PLW0603 - as above
    _heard = _heard or Notice(number, text)
    with contextlib.suppress(OSError):  # a handler must not log: it may have come within a log call
        os.write(2, f"zero: {text}: leaving after this step{hint}\n".encode())
