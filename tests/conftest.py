"""Fixtures that several suites share.

Nothing is imported here that imports torch: the process that hands out the tests needs none of it,
and starts those that run them seconds earlier.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from filelock import FileLock
from hypothesis import settings

from tests.support.alone import OURS
from tests.support.etcd_server import EtcdServer, server
from tests.support.memory_store import MemoryStore
from tests.support.s3_server import S3Server, s3_server
from tests.support.world import WorldPool
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import Delete, KeyValueStore

_namespaces = itertools.count()


def pytest_configure() -> None:
    # Whatever a test starts can be interrupted, also where a shell runs all in its background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A case that only one run in many draws would be red for whoever has changed something else.
    # `HYPOTHESIS_PROFILE=searching pytest ...` draws others in each run.
    # It draws few: `make searches` is there to find what is not known yet.
    few = {"derandomize": True, "database": None, "max_examples": 40}
    settings.register_profile("repeatable", deadline=None, **few)
    settings.register_profile("searching", deadline=None, max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
    gc.disable()  # until all tests are collected: half of the time would go into looking at them


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A case outside the corners that its test names belongs to the full suite."""
    inside: dict[str, bool] = {}
    for item in items:
        if (corners := item.get_closest_marker("corners")) is None:
            continue
        test, parameters = item.nodeid.partition("[")[0], item.callspec.params  # type: ignore[attr-defined]
        if unknown := corners.kwargs.keys() - parameters.keys():
            raise pytest.UsageError(f"{test}: corners of {sorted(unknown)}, which it does not have")
        is_corner = all(parameters[name] in values for name, values in corners.kwargs.items())
        inside[test] = inside.get(test, False) or is_corner
        if not is_corner:
            item.add_marker(pytest.mark.full)
    whole = not any("::" in argument for argument in config.args)
    if whole and (outside := [test for test, found in inside.items() if not found]):
        raise pytest.UsageError(f"no case lies in the corners of {', '.join(outside)}")


@pytest.fixture(scope="session")
def worlds() -> Iterator[WorldPool]:
    """Worlds of any number of ranks, of which five are there from the begin."""
    pool = WorldPool(5)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """A command that runs in this process sets up its log; the next test's is its own."""
    loggers = [logging.getLogger(name) for name in ("zero", *OURS)]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A process group that a test makes in this process ends with it; the next has none."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def etcd_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def etcd(etcd_of_session: EtcdServer) -> Iterator[EtcdServer]:
    """One real server for the whole run. Tests that hurt their server start one of their own.

    No key outlives its test: it would go with its lease, a revision in the middle of another test.
    """
    yield etcd_of_session
    with contextlib.closing(EtcdStore(etcd_of_session.endpoint)) as store:
        store.txn([], [Delete("/", prefix=True)])


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
    from tests.support.cluster import run_alone

    directory = tmp_path_factory.getbasetemp()
    known = (directory if worker_id == "master" else directory.parent) / "undisturbed_hash"
    with FileLock(f"{known}.lock", timeout=300):
        if not known.exists():
            known.write_text(run_alone(tmp_path_factory.mktemp("undisturbed")))
        return known.read_text()
