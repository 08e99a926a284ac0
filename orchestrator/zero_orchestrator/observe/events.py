"""A job's events and progress in the store, for `zero-ctl`: agents write them, best effort.

    /zero/events/<job>/<node>.<agent>.<number>   one event of an agent's journal: the story
    /zero/events/<job>/detail/<node>.<agent>.<number>   one detail, of which fewer are kept
    /zero/progress/<job>/<node>                  the last step of a node's workers; leased
    /zero/progress/<job>/job/seen                when an agent of the job was last alive
    /zero/progress/<job>/job/goodput/<node>      its goodput ledger and lane, of all its agents
    /zero/progress/<job>/job/output/<node>       what its workers printed last, once the agent ends
    /zero/progress/<job>/job/verdicts            what holds about the ranks now; leased
    /zero/progress/<job>/job/history             the steps of the job, bounded; by rank 0's agent

These keys are not below the job's prefix, which every agent watches and reads. Events are shown in
the order of the store's revisions, and of their times where these differ by less than the time of a
write: no decision compares the clocks of two nodes.

Must always hold: publishing never blocks, slows or fails an agent; what cannot be written in
time is dropped. The store keeps about the last `KEEP` events of a job's story and the last
`KEEP_DETAILS` details, however many agents write, so no detail displaces the cause of a failure.
A job of any size writes about one progress a second at most, and a ledger every two seconds.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from msgspec import structs

from zero_contract.clock import Clock
from zero_contract.journal import Retention
from zero_contract.worker import Progress
from zero_orchestrator.errors import StoreError
from zero_orchestrator.observe import history as histories
from zero_orchestrator.observe import lane as lanes
from zero_orchestrator.observe import pace as paces
from zero_orchestrator.observe.goodput import Use, add_up, from_record, to_record
from zero_orchestrator.observe.history import History
from zero_orchestrator.observe.lane import Lane
from zero_orchestrator.observe.pace import Pace
from zero_orchestrator.observe.verdicts import Verdict, from_item, to_value
from zero_orchestrator.store import retry
from zero_orchestrator.store.kv import Change, Delete, KeyValue, KeyValueStore

_log = logging.getLogger(__name__)

KEEP = 1000
"""Number of events of a job's story that a trim keeps."""
KEEP_DETAILS = 300
"""Number of details that a trim keeps."""
TRIM_EVERY = 97
"""The agent whose event gets a revision divisible by this number deletes the oldest events, so
about one event in 97 causes a trim. A prime does not fall into step with a job's other writes."""
PROGRESS_S = 2.0
"""Seconds between two writes of a node's progress, or `PROGRESS_PER_NODE_S` times the number of
nodes if that is longer."""
PROGRESS_PER_NODE_S = 1.0
"""Seconds between two writes of progress by all nodes of a job together."""
SEEN_S = 30.0
"""Seconds between two signs of life of an agent, or `SEEN_PER_NODE_S` times the number of nodes if
that is longer. A sign of life has no lease: it stays when the agent exits."""
SEEN_PER_NODE_S = 10.0
"""Seconds between two signs of life by all nodes of a job together."""
GOODPUT_S = 5.0
"""Seconds between two writes of a node's goodput ledger, or `GOODPUT_PER_NODE_S` times the number
of nodes if that is longer. The ledger lacks what a killed agent had not yet written."""
GOODPUT_PER_NODE_S = 2.0
"""Seconds between two writes of goodput ledgers by all nodes of a job together."""
OUTPUT_S = 3600
"""Seconds for which the last output of a node's workers stays after the end of its agent."""
LATE_S = 0.1
"""An event is written within this many seconds; a larger difference is that of two clocks."""
IDLE_S = 1.0
"""`follow` yields None after this many seconds without an event."""

_QUEUE = 1000
_RETRY_S = 10.0
_FLUSH_S = 1.0
_DETAIL = "detail/"
"""Part of a key that no node's name equals: names have no slash."""
_DELETES = 100
"""Deletes in one transaction; etcd's limit is 128 operations."""


def events_prefix(job: str) -> str:
    """The prefix of the keys of a job's events."""
    return f"/zero/events/{job}/"


def progress_prefix(job: str) -> str:
    """The prefix of the keys of the progress of a job's nodes."""
    return f"/zero/progress/{job}/"


def seen_key(job: str) -> str:
    """The key that holds when an agent of a job was last alive; no node has such a name."""
    return progress_prefix(job) + "job/seen"


def goodput_prefix(job: str) -> str:
    """The prefix of the keys of the goodput ledgers of a job's nodes."""
    return progress_prefix(job) + "job/goodput/"


def output_prefix(job: str) -> str:
    """The prefix of the keys of the last output of a job's nodes; `queries.unpack` reads them."""
    return progress_prefix(job) + "job/output/"


def verdicts_key(job: str) -> str:
    """The key of the verdicts that hold now."""
    return progress_prefix(job) + "job/verdicts"


def history_key(job: str) -> str:
    """The key of the steps and checkpoints of a job."""
    return progress_prefix(job) + "job/history"


def seen_s(seen: KeyValue | None) -> float | None:
    """The time in the value of a `seen_key`, seconds since the epoch; None without one."""
    try:
        return float(json.loads(seen.value)["time"]) if seen is not None else None
    except (ValueError, TypeError, KeyError):
        return None


def by_node(prefix: str, items: Sequence[KeyValue]) -> dict[str, dict[str, Any]]:
    """The records below a prefix, by the rest of the key; empty for one of another version."""
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        try:
            record = dict(json.loads(item.value))
        except (ValueError, TypeError):
            record = {}
        found[item.key.removeprefix(prefix)] = record
    return found


def read_goodput(item: KeyValue | None) -> dict[Use, int]:
    """The ledger in a key below `goodput_prefix`; empty without one, or if it is unreadable."""
    try:
        return from_record(json.loads(item.value)["ns"]) if item is not None else {}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def read_lane(item: KeyValue | None) -> Lane | None:
    """The lane in a key below `goodput_prefix`; None without one, or if it is unreadable."""
    try:
        return lanes.from_record(json.loads(item.value)["lane"]) if item is not None else None
    except (ValueError, TypeError, KeyError):
        return None


def read_history(item: KeyValue | None) -> History:
    """The history in a `history_key`; empty without one, or if it is unreadable."""
    try:
        return histories.from_record(json.loads(item.value)) if item is not None else History()
    except (ValueError, TypeError, KeyError):
        return History()


# ---- writing ----


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory of a node that in-memory checkpoints use."""

    used_bytes: int
    budget_bytes: int
    """Upper limit of `used_bytes`."""


class Publisher:
    """Writes one agent's events and progress: a queue, and a daemon thread that empties it."""

    def __init__(
        self, store: KeyValueStore, job: str, node: str, incarnation: str, clock: Clock
    ) -> None:
        """Start the thread; nothing is written before the first event.

        Args:
            store: Receives the keys, on the publisher's thread alone.
            job: The job's name.
            node: The agent's node.
            incarnation: Distinguishes this agent process from earlier ones of the node.
            clock: Paces the progress.
        """
        self._store = store
        self._prefix = events_prefix(job)
        self._writer = f"{node}.{incarnation}"
        self._progress = progress_prefix(job) + node
        self._seen = seen_key(job)
        self._verdicts = verdicts_key(job)
        self._goodput = goodput_prefix(job) + node
        self._output = output_prefix(job) + node
        self._clock = clock
        self._count = 0
        self._shown: tuple[Progress | None, str, Mapping[int, int]] = None, "", {}
        self._due_s = clock.now()
        self._seen_due_s: float | None = None
        self._goodput_due_s = clock.now()
        self._before: tuple[Mapping[Use, int], Lane | None] | None = None
        """Ledger and lane of this node's agents before this one; None: not read yet."""
        self._history = history_key(job)
        self._reign = 0
        self._history_due_s = clock.now()
        self._history_every_s = 0.0
        self._history_before: tuple[int, History] | None = None
        """A reign, and the history of the job before it; None: not read yet."""
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(_QUEUE)
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def event(self, line: str, kept: Retention = Retention.STORY) -> None:
        """Publish an event, one JSON object; a detail is dropped if the queue is half full."""
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
        progress: Progress | None,
        *,
        lease: int,
        nodes: int,
        preparing: str = "",
        pids: Mapping[int, int] = MappingProxyType({}),
        devices: str = "",
        ram: Callable[[], MemoryUse | None] = lambda: None,
        strain: Callable[[], Mapping[str, float]] = lambda: {},
        pace: Callable[[], Pace] = Pace,
    ) -> None:
        """Publish the progress of this node's workers if the time for it has come; call it often.

        Args:
            progress: The last step of any of the workers; None: none has ended one.
            lease: Lease of the key, which vanishes with the agent.
            nodes: Number of nodes in the round: the more nodes, the rarer each of them writes.
            preparing: What the workers do before their first step of this round; empty: nothing.
            pids: The process ids of the workers that run, by rank.
            devices: The accelerators of the node, in words.
            ram: Returns the memory that in-memory checkpoints use, or None; called at each write.
            strain: Returns what slows the node down, see `strain`; called at each write.
            pace: Returns how fast the workers train in this round; called at each write.
        """
        shown = progress, preparing, pids
        if self._clock.now() < self._due_s or shown == self._shown:
            return
        self._due_s = self._clock.now() + max(PROGRESS_S, nodes * PROGRESS_PER_NODE_S)
        self._shown = shown
        use = ram()
        record = structs.asdict(progress) if progress is not None else {}
        record |= {"ram": dataclasses.asdict(use)} if use is not None else {}
        record |= {"strain": dict(strain()), "pace": paces.to_record(pace())}
        record |= {"preparing": preparing, "pids": dict(pids), "devices": devices}
        value = json.dumps({**record, "time": time.time()})
        self._enqueue(lambda: self._put(self._progress, value, lease))

    def verdicts(self, verdicts: Sequence[Verdict], *, lease: int) -> None:
        """Publish the verdicts that hold now, with the lease of this agent."""
        value = to_value(verdicts)
        self._enqueue(lambda: self._put(self._verdicts, value, lease))

    def read_verdicts(self, then: Callable[[Sequence[Verdict]], None]) -> None:
        """Call `then` on the publisher's thread with the verdicts that hold now."""

        def read() -> None:
            found: Sequence[Verdict] = ()
            with contextlib.suppress(StoreError):
                found = from_item(self._store.get(self._verdicts))
            then(found)

        self._enqueue(read)

    def alive(self, *, nodes: int) -> None:
        """Write a sign of life if the time for it has come; call it often.

        Args:
            nodes: Number of nodes in the round, 0 before the first round: the more nodes, the
                rarer each of them writes.
        """
        now_s, every_s = self._clock.now(), max(SEEN_S, nodes * SEEN_PER_NODE_S)
        if self._seen_due_s is None and nodes:  # a thousand agents that start together spread out
            self._seen_due_s = now_s + random.uniform(0, every_s) * (nodes > 1)
        if self._seen_due_s is None or now_s < self._seen_due_s:
            return
        self._seen_due_s = now_s + every_s
        value = json.dumps({"time": time.time()})
        self._enqueue(lambda: self._put(self._seen, value))

    def goodput(
        self,
        used_ns: Callable[[], Mapping[Use, int]],
        *,
        nodes: int,
        last: bool,
        lane: Callable[[], Lane | None] = lambda: None,
    ) -> None:
        """Publish this node's goodput ledger if the time for it has come; call it often.

        Args:
            used_ns: Returns the ledger of this agent; called at each write.
            nodes: Number of nodes in the round: the more nodes, the rarer each of them writes.
            last: Whether to write in any case, because the agent ends.
            lane: Returns the lane of this agent, or None; called at each write.
        """
        if self._clock.now() < self._goodput_due_s and not last:
            return
        self._goodput_due_s = self._clock.now() + max(GOODPUT_S, nodes * GOODPUT_PER_NODE_S)
        used, shown = used_ns(), lane()

        def write() -> None:
            if self._before is None:
                kept = self._store.get(self._goodput)
                self._before = read_goodput(kept), read_lane(kept)
            used_before, lane_before = self._before
            record: dict[str, Any] = {"ns": to_record(add_up([used_before, used]))}
            record["time"] = time.time()
            if last:
                record["last"] = True
            if shown is not None:
                record["lane"] = lanes.to_record(shown.after(lane_before))
            self._put(self._goodput, json.dumps(record))

        self._enqueue(write)

    def last_output(self, value: str) -> None:
        """Leave the last output of this node's workers, for an hour, because the agent ends."""
        self._enqueue(lambda: self._put(self._output, value, self._store.grant(OUTPUT_S)))

    def history(self, history: History, *, reign: int, last: bool) -> None:
        """Publish the steps of the job if the time for it has come; rank 0's agent calls it often.

        Args:
            history: The steps that this agent knows, and the checkpoints since it has rank 0.
            reign: How often this agent has come to have rank 0: what another agent has written
                meanwhile is read anew, and continued.
            last: Whether to write in any case, because the agent ends.
        """
        if reign != self._reign:  # the agent of the last rank 0 may have something left to write
            self._reign, self._history_due_s = reign, self._clock.now() + GOODPUT_S
        if self._clock.now() < self._history_due_s and not last:
            return
        self._history_due_s = self._clock.now() + max(GOODPUT_S, self._history_every_s)

        def write() -> None:
            if self._history_before is None or self._history_before[0] != reign:
                self._history_before = reign, read_history(self._store.get(self._history))
            whole = history.after(self._history_before[1])
            self._history_every_s = whole.resolution_s
            self._put(self._history, json.dumps(histories.to_record(whole)))

        if history.points or history.saved:
            self._enqueue(write)

    def close(self) -> None:
        """Write the queued events, for up to two seconds, and end the thread."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_FLUSH_S)
        self._thread.join(_FLUSH_S)
        self._cancelled.set()

    def _enqueue(self, write: Callable[[], object]) -> None:
        with contextlib.suppress(queue.Full):  # a long outage of the store: the event is dropped
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
        """Write a key, with retries: no other process writes it, so a put is idempotent."""
        again = retry.within(_RETRY_S, cancelled=self._cancelled)
        return again(self._store.put, key, value, lease=lease)


def trim(store: KeyValueStore, prefix: str, keep: int, keep_details: int = KEEP_DETAILS) -> None:
    """Delete all but the newest `keep` events and `keep_details` details; idempotent."""
    items = sorted(store.range(prefix).items, key=lambda item: item.create_revision)
    story = [item for item in items if not item.key.startswith(prefix + _DETAIL)]
    details = [item for item in items if item.key.startswith(prefix + _DETAIL)]
    oldest = [Delete(item.key) for item in (*story[:-keep], *details[:-keep_details])]
    for first in range(0, len(oldest), _DELETES):
        store.txn([], oldest[first : first + _DELETES])


# ---- reading ----


@dataclass(frozen=True)
class Event:
    """One event of a job."""

    revision: int
    """Revision of the store at the event, if the record has one (a transition), or at its write."""
    record: dict[str, Any]
    """`time` (wall clock of the node, seconds since the epoch), `node`, `round`, `event`, `text`,
    and further fields of the event."""


def read(store: KeyValueStore, job: str) -> tuple[Event, ...]:
    """All events of a job that are kept, oldest first."""
    return tuple(_in_order(store.range(events_prefix(job)).items))


def follow(store: KeyValueStore, job: str) -> Iterator[Event | None]:
    """Yield the kept events, then each new one; None if no event came for `IDLE_S` seconds.

    Raises:
        StoreUnavailable: The first read failed. Later the watch survives an outage by itself.
    """
    prefix = events_prefix(job)
    arrived: queue.SimpleQueue[Sequence[Change] | None] = queue.SimpleQueue()
    found = store.range(prefix)
    watch = store.watch(
        prefix,
        arrived.put,
        after=found.revision,
        cluster=found.cluster,
        on_compacted=lambda revision: arrived.put(None),
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
    """Events in the order in which they happened, as far as that is known.

    An event gets its revision when it is written, a little after it happened; a transition has the
    revision of its transaction. So the revisions order all, and an event moves before those of a
    later time that it has just missed.
    """
    found = []
    for item in items:
        try:
            record = dict(json.loads(item.value))
        except (ValueError, TypeError):  # an unreadable event must not hide the others
            record = {"event": "?", "text": item.value}
        late = "revision" not in record
        found.append((late, Event(record.pop("revision", item.create_revision), record)))
    order: list[Event] = []
    for late, event in sorted(found, key=lambda pair: pair[1].revision):
        place = len(order)
        while late and place and 0 < _later_s(order[place - 1], event) <= LATE_S:
            place -= 1
        order.insert(place, event)
    return order


def _later_s(one: Event, other: Event) -> float:
    """How much later one event was than another one; 0 if a record lacks the time."""
    first, second = one.record.get("time"), other.record.get("time")
    return first - second if isinstance(first, float) and isinstance(second, float) else 0.0
