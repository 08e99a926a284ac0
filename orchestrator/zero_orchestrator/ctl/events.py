"""A job's events and progress in the store, for `zero-ctl`: written by agents, best effort.

    /zero/events/<job>/<node>.<agent>.<number>   one event of an agent's journal: the story
    /zero/events/<job>/detail/<node>.<agent>.<number>   one that is soon replaced by others
    /zero/progress/<job>/<node>                  the last step of a node's workers; leased
    /zero/progress/<job>/job/seen                when an agent of the job was last alive

They are not among the job's own keys, which every agent watches and reads. The order of events
is that of the store's revisions: clocks of two nodes are never compared.

Must always hold: publishing never blocks, slows or fails an agent; what cannot be written in
time is dropped. The store keeps about the last `KEEP` events of a job's story and the last
`KEEP_DETAILS` others, however many agents write: no detail takes the place of a cause. It gets at
most about one progress a second from a job of any size.
Who calls it: the agent, through its journal and its loop; `zero-ctl`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zero_contract.clock import Clock
from zero_contract.journal import Retention
from zero_contract.worker import Progress
from zero_orchestrator.errors import StoreError
from zero_orchestrator.store import retry
from zero_orchestrator.store.kv import Change, Delete, KeyValue, KeyValueStore

_log = logging.getLogger(__name__)

KEEP = 1000
"""Events of a job's story that outlive a trim..."""
KEEP_DETAILS = 300
"""...and details."""
TRIM_EVERY = 97
"""Whoever writes an event at a revision that this divides deletes the oldest: about one event in
so many of all agents together. A prime, lest it keep step with the other writes of a job."""
PROGRESS_S = 2.0
"""Between two progresses of a node..."""
PROGRESS_PER_NODE_S = 1.0
"""...or this, times the nodes of the job, if that is longer."""
SEEN_S = 30.0
"""Between two signs of life of an agent, which stay when it goes..."""
SEEN_PER_NODE_S = 10.0
"""...or this, times the nodes of the job, if that is longer."""
IDLE_S = 1.0
"""`follow` gives a sign after so long without an event."""

_QUEUE = 1000
_RETRY_S = 10.0
_FLUSH_S = 1.0
_DETAIL = "detail/"
"""No node's, whose names have no slash."""
_DELETES = 100
"""In one transaction: etcd's limit is 128 operations."""


def events_prefix(job: str) -> str:
    """What the keys of a job's events start with."""
    return f"/zero/events/{job}/"


def progress_prefix(job: str) -> str:
    """What the keys of its nodes' progress start with."""
    return f"/zero/progress/{job}/"


def seen_key(job: str) -> str:
    """When an agent of a job was last alive; no node's, whose names have no slash."""
    return progress_prefix(job) + "job/seen"


def seen_s(seen: KeyValue | None) -> float | None:
    """What `seen_key` says, in seconds since the epoch; None if it says nothing."""
    try:
        return float(json.loads(seen.value)["time"]) if seen is not None else None
    except (ValueError, TypeError, KeyError):
        return None


# ---- writing ----


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What checkpoints in memory take of a node."""

    used_bytes: int
    budget_bytes: int
    """They never take more."""


class Publisher:
    """One agent's pen: a queue, and a daemon thread that writes what is in it."""

    def __init__(
        self, store: KeyValueStore, job: str, node: str, incarnation: str, clock: Clock
    ) -> None:
        """Nothing is written before the first event.

        Args:
            store: Shared with others; used on the publisher's own thread alone.
            job: The job's name.
            node: The agent's node.
            incarnation: Tells this agent process from earlier ones of the node.
            clock: Paces the progress.
        """
        self._store = store
        self._prefix = events_prefix(job)
        self._writer = f"{node}.{incarnation}"
        self._progress = progress_prefix(job) + node
        self._seen = seen_key(job)
        self._clock = clock
        self._count = 0
        self._shown: Progress | None = None
        self._due_s = clock.now()
        self._seen_due_s: float | None = None
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(_QUEUE)
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def event(self, line: str, kept: Retention = Retention.STORY) -> None:
        """Publish an event, one JSON object; a detail only if there is not much to publish."""
        detail = kept is Retention.DETAIL
        if detail and self._queue.qsize() > _QUEUE // 2:
            return

        def write() -> None:
            self._count += 1
            prefix = self._prefix + (_DETAIL if detail else "")
            revision = self._put(f"{prefix}{self._writer}.{self._count:06d}", line)
            if revision % TRIM_EVERY == 0:
                trim(self._store, self._prefix, KEEP, KEEP_DETAILS)

        self._enqueue(write)

    def progress(
        self,
        progress: Progress,
        *,
        lease: int,
        nodes: int,
        ram: Callable[[], MemoryUse | None] = lambda: None,
    ) -> None:
        """Show how far this node's workers are, unless it is too soon; call it often.

        Args:
            progress: Of any of them.
            lease: What is shown vanishes with it.
            nodes: Of the job's round: the more there are, the rarer each writes.
            ram: What checkpoints in memory take of this node, if any; asked when it is written.
        """
        if self._clock.now() < self._due_s or progress == self._shown:
            return
        self._due_s = self._clock.now() + max(PROGRESS_S, nodes * PROGRESS_PER_NODE_S)
        self._shown = progress
        use = ram()
        shown = {"ram": dataclasses.asdict(use)} if use is not None else {}
        value = json.dumps({**dataclasses.asdict(progress), "time": time.time(), **shown})
        self._enqueue(lambda: self._put(self._progress, value, lease))

    def alive(self, *, nodes: int) -> None:
        """Leave a sign of life, unless it is too soon; call it often.

        Args:
            nodes: Of the job's round, 0 before the first: the more, the rarer each writes.
        """
        now_s, every_s = self._clock.now(), max(SEEN_S, nodes * SEEN_PER_NODE_S)
        if self._seen_due_s is None and nodes:  # a thousand that begin together write in turn
            self._seen_due_s = now_s + random.uniform(0, every_s) * (nodes > 1)
        if self._seen_due_s is None or now_s < self._seen_due_s:
            return
        self._seen_due_s = now_s + every_s
        value = json.dumps({"time": time.time()})
        self._enqueue(lambda: self._put(self._seen, value))

    def close(self) -> None:
        """Give what is queued a moment to be written."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_FLUSH_S)
        self._thread.join(_FLUSH_S)
        self._cancelled.set()

    def _enqueue(self, write: Callable[[], object]) -> None:
        with contextlib.suppress(queue.Full):  # the store is away for long: the line is lost
            self._queue.put_nowait(write)

    def _run(self) -> None:
        while (write := self._queue.get()) is not None:
            try:
                write()
            except StoreError as error:
                _log.debug("not published: %s", error)
            except Exception:  # no thread, no descriptor: the next one may find one
                _log.exception("an event is not published")

    def _put(self, key: str, value: str, lease: int = 0) -> int:
        """Write a key that nobody else writes: doing it twice is doing it once."""
        again = retry.within(_RETRY_S, cancelled=self._cancelled)
        return again(self._store.put, key, value, lease=lease)


def trim(store: KeyValueStore, prefix: str, keep: int, keep_details: int = KEEP_DETAILS) -> None:
    """Delete the oldest events but `keep`, and the oldest details; several may do it at once."""
    items = sorted(store.range(prefix).items, key=lambda item: item.create_revision)
    story = [item for item in items if not item.key.startswith(prefix + _DETAIL)]
    details = [item for item in items if item.key.startswith(prefix + _DETAIL)]
    oldest = [Delete(item.key) for item in (*story[:-keep], *details[:-keep_details])]
    for first in range(0, len(oldest), _DELETES):
        store.txn([], oldest[first : first + _DELETES])


# ---- reading ----


@dataclass(frozen=True)
class Event:
    """One line of the story."""

    revision: int
    """Of the store, when it happened (a transition says so itself) or else was written."""
    record: dict[str, Any]
    """`time` (wall clock of the node, seconds since the epoch), `node`, `round`, `event`, `text`,
    and what else the event has to say."""


def read(store: KeyValueStore, job: str) -> tuple[Event, ...]:
    """The events that are kept, oldest first."""
    return tuple(_in_order(store.range(events_prefix(job)).items))


def follow(store: KeyValueStore, job: str) -> Iterator[Event | None]:
    """The events that are kept, then each as it comes; None when none came for `IDLE_S`.

    Raises:
        StoreUnavailable: At the beginning. Later the watch survives an outage by itself.
    """
    prefix = events_prefix(job)
    arrived: queue.SimpleQueue[Sequence[Change] | None] = queue.SimpleQueue()
    found = store.range(prefix)
    watch = store.watch(
        prefix, arrived.put, after=found.revision, on_compacted=lambda revision: arrived.put(None)
    )
    try:
        seen, items = 0, found.items
        while True:
            fresh = [item for item in items if item.create_revision > seen]
            seen = max((item.create_revision for item in fresh), default=seen)
            yield from _in_order(fresh)
            items = ()
            with contextlib.suppress(queue.Empty):
                changes = arrived.get(timeout=IDLE_S)
                if changes is None:  # compacted: everything there is may be new
                    items = store.range(prefix).items
                else:
                    items = tuple(change.item for change in changes if change.item is not None)
            if not items:
                yield None
    finally:
        watch.cancel()


def _in_order(items: Sequence[KeyValue]) -> list[Event]:
    found = []
    for item in items:
        try:
            record = dict(json.loads(item.value))
        except (ValueError, TypeError):  # one that nobody can read hides no other
            record = {"event": "?", "text": item.value}
        found.append(Event(record.pop("revision", item.create_revision), record))
    return sorted(found, key=lambda event: event.revision)
