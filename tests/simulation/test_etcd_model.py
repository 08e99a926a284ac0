"""The simulated etcd does what a real one does: the same random histories run on both.

Two clients and some watches use each store. Every answer is compared, and in the end what the
watches have delivered. Ids of leases, and revisions before the history, differ; they are counted
from its beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.etcd import Etcd, SimulatedStore
from tests.simulation.kernel import Kernel, Process
from tests.simulation.network import Network
from tests.support.etcd_server import EtcdServer
from tests.support.waiting import wait_for
from tests.support.watching import SOON_S
from zero_orchestrator.errors import StoreError
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.kv import (
    Change,
    Compare,
    Delete,
    Field,
    KeyValue,
    KeyValueStore,
    Put,
    Range,
    Read,
)

KEYS = ("a", "a/b", "b", "b/1", "b/2")
_number = st.integers(0, 5)
_key = st.sampled_from(KEYS)
_put = st.tuples(st.just("put"), _key, _number, _number)
_delete = st.tuples(st.just("delete"), _key, st.booleans())
_compare = st.tuples(_key, st.sampled_from(Field), _number)
_read = st.tuples(_key, st.booleans(), _number)
_write = st.one_of(_put, _delete)
OPERATIONS = st.one_of(
    st.tuples(st.just("txn"), st.lists(_compare, max_size=2), st.lists(_write, max_size=3)),
    st.tuples(st.just("read"), st.lists(_read, min_size=1, max_size=3)),
    st.tuples(st.just("range"), _key, _number),
    st.tuples(st.just("grant"), st.integers(60, 90)),
    st.tuples(st.just("revoke"), _number),
    st.tuples(st.just("keep"), _number),
    st.tuples(st.just("left"), _number),
    st.tuples(st.just("watch"), _key, _number),
)


@dataclass
class Session:
    """One history on one store."""

    clients: Sequence[KeyValueStore]
    root: str
    leases: list[int] = field(default_factory=list)
    revisions: list[int] = field(default_factory=list)
    """Those that answers have had, as far as the history itself knows them."""
    seen: list[list[Change]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base = self.clients[0].put(f"{self.root}zero", "")

    def run(self, operations: Sequence[Any]) -> list[Any]:
        """The answers to all operations."""
        answers = []
        for number, operation in enumerate(operations):
            try:
                found = self._one(self.clients[number % len(self.clients)], *operation)
            except StoreError as error:
                found = type(error).__name__
            answers.append(self.plain(found))
        return answers

    def _one(self, store: KeyValueStore, kind: str, *facts: Any) -> Any:
        if kind == "txn":
            compares = [Compare(self.root + k, f, self._revision(n)) for k, f, n in facts[0]]
            return store.txn(compares, [self._write(*write) for write in facts[1]])
        if kind == "read":
            return store.read([Read(self.root + k, prefix, n) for k, prefix, n in facts[0]])
        if kind == "range":
            return store.range(self.root + facts[0], limit=facts[1])
        if kind == "grant":
            self.leases.append(store.grant(facts[0]))
            return None
        if kind == "watch":
            self.seen.append([])
            after = min(self.base + facts[1], store.range(self.root).revision)
            store.watch(self.root + facts[0], self.seen[-1].extend, after=after)
            return None
        lease = self._lease(facts[0])
        return {"revoke": store.revoke, "keep": store.keep_alive, "left": _left(store)}[kind](lease)

    def _write(self, kind: str, key: str, *facts: Any) -> Put | Delete:
        if kind == "delete":
            return Delete(self.root + key, facts[0])
        return Put(self.root + key, str(facts[0]), self._lease(facts[1]) if facts[1] else 0)

    def _lease(self, number: int) -> int:
        return self.leases[number % len(self.leases)] if self.leases else 12345

    def _revision(self, number: int) -> int:
        return self.base + number if number else 0

    def plain(self, found: Any) -> Any:
        """An answer without what differs from store to store."""
        if isinstance(found, KeyValue):
            lease = self.leases.index(found.lease) + 1 if found.lease else 0
            revisions = found.create_revision - self.base, found.mod_revision - self.base
            return found.key.removeprefix(self.root), found.value, revisions, lease
        if isinstance(found, Range):
            return found.revision - self.base, [self.plain(item) for item in found.items]
        if isinstance(found, Change):
            key = found.key.removeprefix(self.root)
            return key, found.revision - self.base, self.plain(found.item)
        if isinstance(found, tuple | list):
            return [self.plain(one) for one in found]
        if hasattr(found, "succeeded"):
            return found.succeeded, found.revision - self.base
        return found

    def deliveries(self, complete: Callable[[], bool]) -> list[Any]:
        """What the watches have delivered, once that is all."""
        wait_for(complete, SOON_S, "all watches have delivered")
        return [self.plain(changes) for changes in self.seen]


def _left(store: KeyValueStore) -> Callable[[int], bool]:
    return lambda lease: store.time_left(lease) > 50


class Driven:
    """A simulated store whose calls let the simulation run until they are answered."""

    def __init__(self, kernel: Kernel, store: SimulatedStore, process: Process) -> None:
        self._kernel, self._store, self._process = kernel, store, process

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found: list[Any] = []

            def run() -> None:
                try:
                    found.append(getattr(self._store, name)(*args, **options))
                except StoreError as error:
                    found.append(error)

            self._kernel.spawn(self._process, name, run)
            while not found:
                self._kernel.run(self._kernel.now + 0.1)
            if isinstance(found[0], StoreError):
                raise found[0]
            return found[0]

        return call


_roots = itertools.count()


def on_simulated(operations: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    kernel = Kernel(0)
    etcd = Etcd(kernel, Network(kernel))
    process = Process("client")
    stores = [Driven(kernel, SimulatedStore(etcd, process, "a"), process) for _ in range(2)]
    session = Session(stores, "/zero/h/")  # type: ignore[arg-type]
    answers = session.run(operations)
    kernel.run(kernel.now + 60)
    return answers, session.deliveries(lambda: True)


@pytest.fixture
def clients(etcd: EtcdServer) -> Iterator[list[EtcdStore]]:
    stores = [EtcdStore(etcd.endpoint), EtcdStore(etcd.endpoint)]
    yield stores
    for store in stores:
        store.close()


@pytest.mark.etcd
def test_random_histories_have_the_same_answers_on_a_real_etcd(clients: list[EtcdStore]) -> None:
    @settings(max_examples=25)
    @given(operations=st.lists(OPERATIONS, max_size=14))
    def check(operations: list[Any]) -> None:
        expected, delivered = on_simulated(operations)
        session = Session(clients, f"/zero/history-{next(_roots)}/")
        assert session.run(operations) == expected

        def complete() -> bool:
            pairs = zip(session.seen, delivered, strict=True)
            return all(len(seen) >= len(expected) for seen, expected in pairs)

        assert session.deliveries(complete) == delivered
        for lease in session.leases:
            clients[0].revoke(lease)

    check()
