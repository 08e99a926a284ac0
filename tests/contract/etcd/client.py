"""A store that is to live through the faults of its etcd."""

from __future__ import annotations

import contextlib

from tests.support.etcd_server import EtcdServer
from tests.support.watching import SOON_S
from zero_orchestrator.store import retry
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import KeyValueStore

TIMEOUT_S = 5.0
HANGS_S = TIMEOUT_S + 10.0
"""A call that takes so long does not heed its timeout; gRPC itself is patient for 20 s."""

ROOT = "/zero/faults/"


def connect(endpoints: str, **options: object) -> contextlib.closing[EtcdStore]:
    return contextlib.closing(EtcdStore(endpoints, timeout_s=TIMEOUT_S, **options))  # type: ignore[arg-type]


def put(store: KeyValueStore, key: str, value: str) -> int:
    return retry.within(SOON_S)(store.put, key, value)


def member_at(members: list[EtcdServer], endpoint: str) -> EtcdServer:
    return next(member for member in members if member.endpoint == endpoint)
