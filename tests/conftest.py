"""Fixtures that several suites share."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import pytest
from filelock import FileLock

from tests.support.cluster import run_alone
from tests.support.etcd_server import EtcdServer, server
from tests.support.s3_server import S3Server, s3_server
from zero_orchestrator.store.etcd import EtcdStore
from zero_orchestrator.store.kv import KeyValueStore
from zero_orchestrator.store.kv_memory import MemoryStore

_namespaces = itertools.count()


def pytest_configure() -> None:
    """Whatever a test starts can be interrupted, also where a shell runs all in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def s3_server_of_session() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(s3_server_of_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server, to which s3:// leads in this test."""
    for name, value in s3_server_of_session.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server_of_session


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


@pytest.fixture(scope="session")
def undisturbed_hash(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> str:
    """The weights of the example trained by one process to which nothing happens.

    One worker of the suite trains, the others wait for it.
    """
    directory = tmp_path_factory.getbasetemp()
    known = (directory if worker_id == "master" else directory.parent) / "undisturbed_hash"
    with FileLock(f"{known}.lock", timeout=300):
        if not known.exists():
            known.write_text(run_alone(tmp_path_factory.mktemp("undisturbed")))
        return known.read_text()
