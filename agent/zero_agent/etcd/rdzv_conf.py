"""`--rdzv-backend` and `--rdzv-conf`: torchrun's rendezvous settings, and their meaning here.

Pure: text in, settings out, together with notes for the user on settings without a meaning here.

Source of the names: torch.distributed.elastic.rendezvous (dynamic, c10d, etcd, static).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_contract.values import nearest
from zero_orchestrator.errors import SpecError

# torchrun: a heartbeat every 5 s, 3 of which may be missing.
_KEEP_ALIVE_INTERVAL_S = 5.0
_KEEP_ALIVE_ATTEMPTS = 3.0

_MEANINGS: Mapping[str, str] = {
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "settle_s",
    "read_timeout": "read_timeout_s",
    "keep_alive_interval": "",
    "keep_alive_max_attempt": "",
    "ca_cert": "ca",
    "cacert": "ca",
    "ssl_cert": "cert",
    "ssl_cert_key": "key",
}
_WITHOUT_MEANING = ("close_timeout", "heartbeat_timeout", "is_host", "store_type", "protocol")
_FILES = ("ca", "cert", "key")

BACKENDS: Mapping[str, str] = {
    "static": "",
    "etcd-v3": "",
    "zero-etcd": "",
    "etcd": "--rdzv-backend=etcd: the v3 API of that etcd is used",
    "etcd-v2": "--rdzv-backend=etcd-v2: the v3 API of that etcd is used",
    "c10d": "--rdzv-backend=c10d: the etcd at --rdzv-endpoint exists already, and is used",
}
"""Known backends, and a note for the user of each; empty: none."""


@dataclass(frozen=True, kw_only=True)
class RdzvConf:
    """The settings that have a meaning here; None: not given."""

    join_timeout_s: float | None = None
    settle_s: float | None = None
    """torchrun's last call: how long to wait for more nodes once there are enough."""
    lease_ttl_s: int | None = None
    """Time to live of a node's lease: the node is lost this long after its last heartbeat."""
    read_timeout_s: float | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    notes: tuple[str, ...] = ()
    """Notes for the user."""


def check_backend(name: str) -> str:
    """The note for a user of this backend; empty: none.

    Raises:
        SpecError: There is no such backend.
    """
    if name in BACKENDS:
        return BACKENDS[name]
    near = nearest(name, BACKENDS)
    remedy = f"did you mean {near}?" if near else f"known are {', '.join(BACKENDS)}"
    raise SpecError(f"--rdzv-backend={name}: there is no such backend; {remedy}")


def parse_rdzv_conf(text: str) -> RdzvConf:
    """Parse `join_timeout=60,last_call_timeout=5`, also in quotes that a template left in.

    Raises:
        SpecError: A key is unknown in torchrun, or a value is invalid.
    """
    pairs = {}
    for part in filter(None, (part.strip() for part in text.strip().strip("'\"").split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise SpecError(f"--rdzv-conf: {part!r}: write KEY=VALUE[,KEY=VALUE...]")
        if key not in _MEANINGS and key not in _WITHOUT_MEANING:
            known = (*_MEANINGS, *_WITHOUT_MEANING)
            near = nearest(key, known)
            remedy = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
            raise SpecError(f"--rdzv-conf: {key}: there is no such setting; {remedy}")
        pairs[key] = value
    ignored = [key for key in pairs if key in _WITHOUT_MEANING]
    given = {_MEANINGS[key]: (key, value) for key, value in pairs.items() if _MEANINGS.get(key)}
    settings: dict[str, Any] = {
        name: Path(pair[1]) if name in _FILES else _number(*pair) for name, pair in given.items()
    }
    note = f"--rdzv-conf: {', '.join(ignored)}: without meaning in etcd v3, and ignored"
    # The time after which torchrun gives up a silent node is the time to live of a lease here.
    names = ("keep_alive_interval", "keep_alive_max_attempt")
    keep_alive = {name: _number(name, pairs[name]) for name in names if name in pairs}
    interval_s = keep_alive.get(names[0], _KEEP_ALIVE_INTERVAL_S)
    # etcd has no lease that is shorter than 2 s.
    ttl_s = max(2, round(interval_s * keep_alive.get(names[1], _KEEP_ALIVE_ATTEMPTS)))
    lease_ttl_s = ttl_s if keep_alive else None
    return RdzvConf(lease_ttl_s=lease_ttl_s, notes=(note,) if ignored else (), **settings)


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise SpecError(f"--rdzv-conf: {key}={text}: write a number above 0, such as {key}=30")
    return value
