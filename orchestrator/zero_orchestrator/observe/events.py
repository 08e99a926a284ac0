"""A job's events and progress in the store, for `zero-ctl`: agents write them, best effort.

    /zero/events/<job>/<node>.<agent>.<number>   one event of an agent's journal: the story
    /zero/events/<job>/round/<revision>.<move>   the event of a transition, written with it
    /zero/events/<job>/detail/<node>.<agent>.<number>   one detail, of which fewer are kept
    /zero/progress/<job>/<node>                  the last step of a node's workers; leased
    /zero/progress/<job>/job/seen                when an agent of the job was last alive
    /zero/progress/<job>/job/goodput/<node>      its goodput ledger and timeline, of all its agents
    /zero/progress/<job>/job/output/<node>       what its workers printed last, once the agent ends
    /zero/progress/<job>/job/verdicts            what holds about the ranks now; leased
    /zero/progress/<job>/job/history             the steps of the job, bounded; by rank 0's agent

These keys are not below the job's prefix, which every agent watches and reads. Publishing never
blocks, slows or fails an agent; what is told while the store is out of reach is written when it
answers again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from msgspec import Meta, structs

from zero_contract.clock import Clock
from zero_contract.journal import Retention
from zero_contract.worker import Progress
from zero_orchestrator.errors import SpecMismatch, StoreError
from zero_orchestrator.membership import records
from zero_orchestrator.membership.keys import ROUND, Keys
from zero_orchestrator.membership.records import kept
from zero_orchestrator.observe import history as histories
from zero_orchestrator.observe import pace as paces
from zero_orchestrator.observe import timeline as timelines
from zero_orchestrator.observe.goodput import Use, add_up, from_record, to_record
from zero_orchestrator.observe.history import History
from zero_orchestrator.observe.pace import Pace
from zero_orchestrator.observe.timeline import Timeline
from zero_orchestrator.observe.verdicts import Verdict, from_item, to_value
from zero_orchestrator.store import retry
from zero_orchestrator.store.kv import Change, Delete, KeyValue, KeyValueStore

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Of each kind its own number: no detail displaces the cause of a failure.
KEEP = 1000
"""Number of events of a job's story that a trim keeps."""
KEEP_DETAILS = 300
"""Number of details that a trim keeps."""
TRIM_EVERY = 97
"""The agent whose event gets a revision divisible by this number deletes the oldest events, so
about one event in 97 causes a trim. A prime does not fall into step with a job's other writes."""
OUTPUT_S = 3600
"""Seconds for which the last output of a node's workers stays after the end of its agent."""
LATE_S = 0.1
"""An event is written within this many seconds, or says how much later; a larger difference is that
of two clocks."""
IDLE_S = 1.0
"""`follow` yields None after this many seconds without an event."""

_WAITING = 1000
"""The number of events that wait for the store."""
_FLUSH_S = 1.0
_DETAIL = "detail/"
"""Part of a key that no node's name equals: names have no slash."""
_DELETES = 100
"""Deletes in one transaction; etcd's limit is 128 operations."""


def events_prefix(job: str) -> str:
    """The prefix of the keys of a job's events."""
    return Keys(job).events


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
    found = kept(_Seen, seen)
    return None if found is None else found.time


def by_node(prefix: str, items: Sequence[KeyValue]) -> dict[str, dict[str, Any]]:
    """The records below a prefix, by the rest of the key; empty for one of another version."""
    found = {item.key.removeprefix(prefix): _typed(_Progressed, item.value) for item in items}
    return {name: record or {} for name, record in found.items()}


def read_goodput(item: KeyValue | None) -> dict[Use, int]:
    """The ledger in a key below `goodput_prefix`; empty without one, or if it is unreadable."""
    found = kept(_Ledger, item)
    return {} if found is None else from_record(found.ns)


def read_timeline(item: KeyValue | None) -> Timeline | None:
    """The timeline in a key below `goodput_prefix`; None without one, or if it is unreadable."""
    found = kept(_Ledger, item)
    shown = None if found is None else found.timeline
    return None if shown is None else timelines.from_record(shown)


def read_history(item: KeyValue | None) -> History:
    """The history in a `history_key`; empty without one, or if it is unreadable."""
    return kept(History, item) or History()


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The value of a `seen_key`."""

    time: float


@dataclass(frozen=True, kw_only=True)
class _Ledger:
    """The value of a key below `goodput_prefix`."""

    ns: dict[str, int]
    timeline: timelines.KeptTimeline | None = None


_Time = Annotated[float, Meta(ge=0, lt=253_402_300_800)]
"""Seconds since the epoch, before the year 10000: no calendar of Python goes on."""
_Span = Annotated[float, Meta(gt=-1e9, lt=1e9)]
"""Seconds between two events of a job, by one clock or by two."""


@dataclass(frozen=True, kw_only=True)
class _Progressed:
    """The fields of a node's progress that are more than words to a reader, with their types."""

    time: _Time = 0.0
    step: int | None = None
    loss: float | None = None
    samples: int = 0
    tokens: int = 0
    total_steps: int = 0
    ram: dict[str, int] = dataclasses.field(default_factory=dict)
    strain: dict[str, float] = dataclasses.field(default_factory=dict)
    pids: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Told:
    """The fields of events that are more than words to a reader, with their types."""

    event: str = ""
    node: str = ""
    round: int = 0
    time: _Time = 0.0
    stopped_s: _Time | None = None
    revision: int = 0
    late_s: _Span = 0.0
    after_s: _Span = 0.0
    idle_s: _Span = 0.0
    load_s: _Span = 0.0
    read_bytes: int = 0
    world_size: int = 0
    rank: int | None = None
    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    ns: dict[str, int] = dataclasses.field(default_factory=dict)


# ---- writing ----


# Compared by identity: two keys may have one pace, and are still two.
@dataclass(frozen=True, kw_only=True, eq=False)
class Paced:
    """The pace at which an agent writes a key: the more nodes a job has, the slower."""

    every_s: float
    """Seconds between two writes."""
    per_node_s: float = 0.0
    """Seconds between two writes of all nodes of a job together, if that makes them rarer."""

    def pause_s(self, nodes: int) -> float:
        """Seconds between two writes of one node."""
        return max(self.every_s, nodes * self.per_node_s)


# A job of any size writes about one progress a second at most.
PROGRESS = Paced(every_s=2.0, per_node_s=1.0)
SEEN = Paced(every_s=30.0, per_node_s=10.0)
"""Signs of life, which have no lease: they stay when the agent exits."""
GOODPUT = Paced(every_s=5.0, per_node_s=2.0)
"""Ledgers: that of a killed agent lacks what it had not yet written."""
HISTORY = Paced(every_s=5.0)


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory of a node that in-memory checkpoints use."""

    used_bytes: int
    budget_bytes: int
    """Upper limit of `used_bytes`."""


class Publisher:
    """Writes one agent's events and progress on a daemon thread.

    What cannot be written waits: the events, in order and bounded, and of each other key the newest
    value. An event that is written later than `LATE_S` says by how much (`late_s`).
    """

    def __init__(
        self, store: KeyValueStore, job: str, node: str, incarnation: str, clock: Clock
    ) -> None:
        """Start the thread, on which alone the store is used."""
        self._store = store
        self._job = job
        self._node = node
        self._incarnation = incarnation
        self._clock = clock
        self._count = 0
        self._due_s: dict[Paced, float] = {}
        """When a key is written next; at once without an entry."""
        self._shown: tuple[Progress | None, str, Mapping[int, int]] = None, "", {}
        self._shown_lease = 0
        """The lease of the progress that was written; 0: none was."""
        self._ledger_before: tuple[Mapping[Use, int], Timeline | None] | None = None
        """Ledger and timeline of this node's agents before this one; None: not read yet."""
        self._reign = 0
        self._resolution_s = 0.0
        """The time between two points of the history."""
        self._history_before: tuple[int, History] | None = None
        """A reign, and the history of the job before it; None: not read yet."""
        self._changed = threading.Condition()
        self._events: deque[Callable[[], object]] = deque()
        self._newest: dict[str, Callable[[], object]] = {}
        """By key, what writes its newest value."""
        self._closing = False
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def event(self, line: str, kept: Retention = Retention.STORY) -> None:
        """Publish an event, one JSON object; dropped if too many wait, a detail if half as many."""
        detail = kept is Retention.DETAIL
        told_s = time.monotonic()

        def put(key: str) -> int:
            # Measured anew at each attempt: it waits as long as the store is away.
            late_s = time.monotonic() - told_s
            late = {"late_s": round(late_s, 3)} if late_s > LATE_S else {}
            return self._store.put(key, json.dumps({**json.loads(line), **late}) if late else line)

        def write() -> None:
            self._count += 1
            prefix = events_prefix(self._job)
            writer = f"{_DETAIL if detail else ''}{self._node}.{self._incarnation}"
            revision = self._patiently(put, f"{prefix}{writer}.{self._count:06d}")
            if revision % TRIM_EVERY == 0:
                trim(self._store, prefix, KEEP, KEEP_DETAILS)

        with self._changed:
            # Half of the room is for the story, which details must not displace.
            if len(self._events) < (_WAITING // 2 if detail else _WAITING):
                self._events.append(write)
                self._changed.notify_all()

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

        Without a step of any worker, progress is None. What the workers do before their first step
        of the round is `preparing`. The functions are called at each write.
        """
        shown = progress, preparing, pids
        # The store need not hear the same twice: a job that takes no step writes nothing. What was
        # written has ended with its lease, if this agent has registered again meanwhile.
        told = shown == self._shown and self._shown_lease in (0, lease)
        if told or not self._is_due(PROGRESS, nodes):
            return
        self._shown, self._shown_lease = shown, lease
        use = ram()
        record = structs.asdict(progress) if progress is not None else {}
        record |= {"ram": dataclasses.asdict(use)} if use is not None else {}
        record |= {"strain": dict(strain()), "pace": paces.to_record(pace())}
        record |= {"preparing": preparing, "pids": dict(pids), "devices": devices}
        self._put_newest(progress_prefix(self._job) + self._node, record, lease)

    def verdicts(self, verdicts: Sequence[Verdict], *, lease: int) -> None:
        """Publish the verdicts that hold now, with the lease of this agent."""
        key, value = verdicts_key(self._job), to_value(verdicts)
        self._enqueue(key, lambda: self._patiently(self._store.put, key, value, lease=lease))

    def read_verdicts(self, then: Callable[[Sequence[Verdict]], None]) -> None:
        """Call `then` on the publisher's thread with the verdicts that hold now."""

        def read() -> None:
            found: Sequence[Verdict] = ()
            with contextlib.suppress(StoreError):  # none are known: asked again in a few seconds
                found = from_item(self._store.get(verdicts_key(self._job)))
            then(found)

        # Under no key's name: it does not replace what is to be written.
        self._enqueue("", read)

    def alive(self, *, nodes: int) -> None:
        """Write a sign of life if the time has come; call it often. Without a round: 0 nodes."""
        # Spread out, since a thousand agents may have started together.
        if SEEN not in self._due_s and nodes:
            spread_s = random.uniform(0, SEEN.pause_s(nodes)) * (nodes > 1)
            self._due_s[SEEN] = self._clock.now() + spread_s
        if SEEN in self._due_s and self._is_due(SEEN, nodes):
            self._put_newest(seen_key(self._job), {})

    def goodput(
        self,
        used_ns: Callable[[], Mapping[Use, int]],
        *,
        nodes: int,
        last: bool,
        timeline: Callable[[], Timeline | None] = lambda: None,
    ) -> None:
        """Publish this node's ledger if the time for it has come, or if the agent ends (`last`)."""
        if not self._is_due(GOODPUT, nodes, last=last):
            return
        key = goodput_prefix(self._job) + self._node
        used, shown = used_ns(), timeline()

        def write() -> None:
            # Read on this thread, which may wait, and once: no other agent has this node's id.
            if self._ledger_before is None:
                kept = self._store.get(key)
                self._ledger_before = read_goodput(kept), read_timeline(kept)
            used_before, timeline_before = self._ledger_before
            record: dict[str, Any] = {"ns": to_record(add_up([used_before, used]))}
            record |= {"last": True} if last else {}
            if shown is not None:
                record["timeline"] = timelines.to_record(shown.after(timeline_before))
            self._put(key, record)

        self._enqueue(key, write)

    def last_output(self, value: str) -> None:
        """Leave the last output of this node's workers, for an hour, because the agent ends."""
        key = output_prefix(self._job) + self._node
        self._enqueue(key, lambda: self._store.put(key, value, lease=self._store.grant(OUTPUT_S)))

    def history(self, history: History, *, reign: int, last: bool) -> None:
        """Publish the steps of the job if the time for it has come, or if the agent ends (`last`).

        With each `reign` of this agent, what another one has written meanwhile is continued.
        """
        # The agent of the last rank 0 may have something left to write.
        if reign != self._reign:
            self._reign, self._due_s[HISTORY] = reign, self._clock.now() + HISTORY.every_s
        if not self._is_due(HISTORY, last=last, least_s=self._resolution_s):
            return
        key = history_key(self._job)

        def write() -> None:
            if self._history_before is None or self._history_before[0] != reign:
                self._history_before = reign, read_history(self._store.get(key))
            whole = history.after(self._history_before[1])
            self._resolution_s = whole.resolution_s
            value = json.dumps(histories.to_record(whole))
            self._patiently(self._store.put, key, value)

        if history.points or history.saved:
            self._enqueue(key, write)

    def close(self) -> None:
        """Write what waits, for up to two seconds, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # Until all is written, at most; an agent that ends does not wait for an outage.
        self._thread.join(2 * _FLUSH_S)
        # The thread may wait for the store: its retries end as well.
        self._cancelled.set()

    def _is_due(
        self, paced: Paced, nodes: int = 0, *, last: bool = False, least_s: float = 0.0
    ) -> bool:
        """Whether a key is to be written now; if so, the next write comes a pause later."""
        now_s = self._clock.now()
        if now_s < self._due_s.get(paced, now_s) and not last:
            return False
        self._due_s[paced] = now_s + max(paced.pause_s(nodes), least_s)
        return True

    def _put_newest(self, key: str, record: Mapping[str, Any], lease: int = 0) -> None:
        # Now, and not when the store answers again.
        stamped = {**record, "time": time.time()}
        self._enqueue(key, lambda: self._put(key, stamped, lease))

    def _put(self, key: str, record: Mapping[str, Any], lease: int = 0) -> None:
        self._patiently(self._store.put, key, json.dumps(record), lease=lease)

    def _enqueue(self, key: str, write: Callable[[], object]) -> None:
        with self._changed:
            self._newest[key] = write
            self._changed.notify_all()

    def _run(self) -> None:
        while (write := self._next()) is not None:
            try:
                write()
            except StoreError as error:
                _log.debug("not published: %s", error)
            except Exception:  # no thread, no descriptor: the next one may find one
                _log.exception("an event is not published")

    def _next(self) -> Callable[[], object] | None:
        """The next write; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest or self._events or self._closing)
            # Of these there are few, and none of them twice; of the events a thousand may wait.
            if self._newest:
                return self._newest.pop(next(iter(self._newest)))
            return self._events.popleft() if self._events else None

    def _patiently(self, put: Callable[..., int], *args: Any, **options: Any) -> int:
        """Write a key until the store answers."""
        # Idempotent, since no other process writes the key.
        return retry.until_set(self._cancelled)(put, *args, **options)


def trim(store: KeyValueStore, prefix: str, keep: int, keep_details: int = KEEP_DETAILS) -> None:
    """Delete all but the newest `keep` events and `keep_details` details; idempotent."""
    items = sorted(store.range(prefix).items, key=lambda item: item.create_revision)
    story = [item for item in items if not item.key.startswith(prefix + _DETAIL)]
    details = [item for item in items if item.key.startswith(prefix + _DETAIL)]
    oldest = [Delete(item.key) for item in (*story[:-keep], *details[:-keep_details])]
    for first in range(0, len(oldest), _DELETES):
        # Nothing is compared: what another agent has deleted meanwhile is gone in any case.
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

    @property
    def time_s(self) -> float:
        """Its `time`; 0 without one."""
        return number(self.record.get("time")) or 0.0


def parse(text: str) -> dict[str, Any] | None:
    """The record of an event; None if it is none, or a field has not the type that readers need."""
    return _typed(_Told, text)


def _typed(kind: type[Any], text: str) -> dict[str, Any] | None:
    """A record with all of its fields; None if one of them has not the type that it has there."""
    with contextlib.suppress(SpecMismatch):
        record = records.read(dict[str, Any], text)
        records.read(kind, record)
        return record
    return None


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
        shown = deque[KeyValue](maxlen=2 * (KEEP + KEEP_DETAILS))
        while True:
            # By its creation: a write that was repeated for want of an answer is no new event.
            fresh = [item for item in items if item.create_revision > seen]
            seen = max((item.create_revision for item in fresh), default=seen)
            shown.extend(fresh)
            yield from _in_order(fresh)
            items = ()
            with contextlib.suppress(queue.Empty):
                changes = arrived.get(timeout=IDLE_S)
                # The changes were compacted: everything there is may be new.
                if changes is None:
                    before, found = found, store.range(prefix)
                    items = found.items
                    # Revisions of another cluster, or of an older state, count anew; it may have a
                    # copy of what was shown.
                    if found.cluster != before.cluster or found.revision < seen:
                        seen, old = 0, {*shown}
                        items = tuple(item for item in items if item not in old)
                else:
                    items = tuple(change.item for change in changes if change.item is not None)
            if not items:
                yield None
    finally:
        watch.cancel()


def _in_order(items: Sequence[KeyValue]) -> list[Event]:
    """Events in the order in which they happened, as far as that is known."""
    found: list[tuple[float, Event]] = []
    for item in items:
        record = parse(item.value)
        if record is None:
            record = {"event": "?", "text": item.value}  # that must not hide the others
        # A transition has the revision of its transaction. Any other event gets its own when it is
        # written: a little after it happened, or much if it waited for the store.
        known = "revision" in record or f"/{ROUND}" in item.key
        late_s = 0.0 if known else record.pop("late_s", 0.0) + LATE_S
        found.append((late_s, Event(record.pop("revision", item.create_revision), record)))
    order: list[Event] = []
    for late_s, event in sorted(found, key=lambda pair: pair[1].revision):
        # It goes before those of a later time that it has just missed: by the clocks of nodes,
        # which is good enough for people.
        place = len(order)
        while place and 0 < order[place - 1].time_s - event.time_s <= late_s:
            place -= 1
        order.insert(place, event)
    return order


def number(value: object) -> float | None:
    """A number in a record, if it is finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
