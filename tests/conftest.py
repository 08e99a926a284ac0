"""Fixtures that several suites share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.etcd_server import EtcdServer, server
from zero_orchestrator.etcd import EtcdStore
from zero_orchestrator.kv import KeyValueStore
from zero_orchestrator.kv_memory import MemoryStore

_namespaces = itertools.count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One real server for the whole run. Tests that hurt their server start one of their own."""
    with server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def etcd_store(etcd: EtcdServer) -> Iterator[EtcdStore]:
    store = EtcdStore(etcd.endpoint)
    yield store
    store.close()


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
def store(request: pytest.FixtureRequest) -> Iterator[KeyValueStore]:
    """Each implementation of the store in turn; keys of other tests may be in it."""
    if request.param == "etcd":
        yield request.getfixturevalue("etcd_store")
        return
    memory = MemoryStore()
    yield memory
    memory.close()


@pytest.fixture
def root() -> str:
    """A prefix that no other test uses."""
    return f"/zero/test-{next(_namespaces)}/"
