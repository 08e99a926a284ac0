"""Fixtures for what every store must do: in memory, and a real etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.etcd_server import EtcdServer, server
from tests.support.watching import Seen
from zero_orchestrator.store.kv import KeyValueStore


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server of this suite's own: some claims count its revisions."""
    with server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def watch(store: KeyValueStore) -> Iterator[Callable[..., Seen]]:
    running = []

    def start(prefix: str, after: int) -> Seen:
        seen = Seen()
        running.append(store.watch(prefix, seen, after=after, on_compacted=seen.compacted.append))
        return seen

    yield start
    for each in running:
        each.cancel()
