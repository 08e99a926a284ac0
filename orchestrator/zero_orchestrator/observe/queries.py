"""Questions of `zero-ctl` to the agents of a job, and their answers: keys in etcd.

    /zero/progress/<job>/job/queries/<node>/<asker>   a question to the agent of one node
    /zero/progress/<job>/job/answers/<asker>/<node>   its answer

Why keys, as for a drain, and not the HTTP port of the agents: every agent and every `zero-ctl`
reaches etcd, from behind NAT as well, and has the credentials of the job. The port of an agent is
open only if `--health-port` is given, has no authentication, and cannot be reached behind NAT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_contract.decoding import decode, encode
from zero_orchestrator.membership import records
from zero_orchestrator.observe.events import progress_prefix
from zero_orchestrator.store.kv import Change, KeyValueStore, Put

ANSWER_BYTES = 512 << 10
"""Largest value of an answer, compressed; etcd's limit of a request is 1.5 MiB."""
LONGEST_S = 600.0
"""An agent works on an answer for no longer, however long the asker waits."""
LEASE_S = 30
"""Time to live of the keys of an asker that has died."""
_BATCH = 100
"""Questions in one transaction; etcd's limit is 128 operations."""


def queries_prefix(job: str, node: str) -> str:
    """The prefix of the keys of the questions to a node."""
    return f"{progress_prefix(job)}job/queries/{node}/"


def answers_prefix(job: str, asker: str) -> str:
    """The prefix of the keys of the answers to an asker."""
    return f"{progress_prefix(job)}job/answers/{asker}/"


@dataclass(frozen=True, kw_only=True)
class Query:
    """A question to one agent."""

    number: int
    """Number of the question, among those of one asker."""
    kind: str
    """What is asked for, such as `stack`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    within_s: float = 5.0
    """Seconds for which the asker waits."""

    @classmethod
    def from_json(cls, text: str) -> Query:
        """The question in a key. Raises ValueError: it is none."""
        found = decode(cls, text, "a question of zero-ctl")
        return dataclasses.replace(found, within_s=min(found.within_s, LONGEST_S))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of one node."""

    node: str
    number: int
    """Number of the question."""
    record: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why there is no record; empty if there is one."""


def pack(answer: Answer) -> str:
    """The value of an answer's key; one that is too large says so instead."""
    packed = records.pack(whole := encode(answer))
    if len(packed) <= ANSWER_BYTES and len(whole) <= records.LARGEST_BYTES:
        return packed
    sizes = f"{len(packed)} bytes, {len(whole)} unpacked, the limit is {ANSWER_BYTES}"
    text = f"the answer has {sizes}; ask for one --rank"
    # Once more without the record: that is small enough.
    return pack(dataclasses.replace(answer, record={}, problem=text))


def unpack(text: str) -> Answer:
    """The answer in a key's value. Raises ValueError: it is no answer."""
    return decode(Answer, records.unpack(text), "an answer of an agent")


class Asker:
    """Asks the agents of one job; use it as a context manager."""

    def __init__(self, store: KeyValueStore, job: str) -> None:
        """Nothing is asked yet. Raises StoreError: etcd does not answer, or does not allow it."""
        self._store, self._job = store, job
        self._name = secrets.token_hex(8)
        self._number = 0
        # Of questions and answers: nothing is left of an asker that is gone.
        self._lease = store.grant(LEASE_S)
        self._kept_s = time.monotonic()
        self._arrived: queue.SimpleQueue[Sequence[Change] | None] = queue.SimpleQueue()
        self._prefix = answers_prefix(job, self._name)
        # Watched before the first question is asked: no answer comes too early.
        found = store.range(self._prefix)
        self._watch = store.watch(
            self._prefix,
            self._arrived.put,
            after=found.revision,
            cluster=found.cluster,
            on_compacted=lambda revision: self._arrived.put(None),
        )

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.cancel()
        with contextlib.suppress(Exception):  # its lease ends by itself
            self._store.revoke(self._lease)

    def ask(self, kind: str, arguments: Mapping[str, Mapping[str, Any]], *, within_s: float) -> int:
        """Ask some nodes, each with its arguments; returns the number that the answers have."""
        self._number += 1
        puts = []
        for node, its in arguments.items():
            query = Query(number=self._number, kind=kind, arguments=dict(its), within_s=within_s)
            # One key for each node: a question before is withdrawn where it has no answer yet.
            key = queries_prefix(self._job, node) + self._name
            puts.append(Put(key, encode(query), self._lease))
        for first in range(0, len(puts), _BATCH):
            self._store.txn([], puts[first : first + _BATCH])
        return self._number

    def answers(self, wait_s: float) -> Iterator[Answer]:
        """The answers that come within some seconds; the caller stops when it has all."""
        deadline_s = time.monotonic() + wait_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            # Here, since an asker has no thread for its lease; so no wait below is longer than 1 s.
            if time.monotonic() - self._kept_s > LEASE_S / 3:
                self._store.keep_alive(self._lease)
                self._kept_s = time.monotonic()
            try:
                changes = self._arrived.get(timeout=min(left_s, 1.0))
            except queue.Empty:
                continue
            # The history was compacted: all are read again, and the caller may see one twice.
            if changes is None:
                values = [item.value for item in self._store.range(self._prefix).items]
            else:
                values = [change.item.value for change in changes if change.item is not None]
            for value in values:
                # An answer of another version is none: its node counts as silent.
                with contextlib.suppress(ValueError):
                    yield unpack(value)


def ask_each(
    store: KeyValueStore,
    job: str,
    kind: str,
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    within_s: float,
) -> dict[str, Answer]:
    """Ask each of some nodes one question; one that does not answer has a problem as its answer.

    Raises:
        StoreError: etcd does not answer, or does not allow it.
    """
    text = (
        f"no answer within {within_s:g} s: the agent hangs, is torchrun or of an older version, or "
        f"may not read {queries_prefix(job, '')} in etcd"
    )
    found = {node: Answer(node=node, number=1, problem=text) for node in arguments}
    missing = set(arguments)
    # All at once: the slowest agent sets the time, not their number.
    with Asker(store, job) as asker:
        asker.ask(kind, arguments, within_s=within_s)
        for answer in asker.answers(within_s):
            found[answer.node] = answer
            missing.discard(answer.node)
            if not missing:
                break
    return found
