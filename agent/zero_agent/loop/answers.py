"""The agent's answers to the questions of `zero-ctl`, such as for the stacks of its workers.

`zero_orchestrator.observe.queries` says how a question comes, and why through etcd. No answer
changes the job, and nothing that a question contains is executed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from zero_agent.loop.link_watch import Reach, others_of
from zero_agent.loop.node_workers import NodeWorkers
from zero_agent.node import probe
from zero_agent.node.ring import Ring
from zero_agent.workers import stacks
from zero_agent.workers.output.recent import Page, RecentOutput
from zero_orchestrator.errors import StoreError
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.membership.rendezvous import Rendezvous
from zero_orchestrator.observe.queries import Answer, Query, answers_prefix, pack, queries_prefix
from zero_orchestrator.store import retry
from zero_orchestrator.store.kv import Change, KeyValue, KeyValueStore

log = logging.getLogger("zero")

Reply = Callable[[Query], dict[str, Any]]
"""Makes the record that answers a question."""
PAGE_BYTES = 256 << 10
"""Output in one answer, before compression."""
WAITS_S = 3.0
"""How long a worker may take to say what it waits for."""
_CLOSE_S = 1.0


class Answers:
    """Answers the questions to one node, from its creation to `close`."""

    def __init__(
        self, store: KeyValueStore, job: str, node: str, kinds: Mapping[str, Reply]
    ) -> None:
        """Start the thread, on which `kinds` are called and the store may be waited for."""
        self._store, self._job, self._node = store, job, node
        self._kinds = kinds
        self._closed = threading.Event()
        self._arrived: queue.SimpleQueue[Sequence[Change] | None] = queue.SimpleQueue()
        # A thread of its own: `zero-ctl stack` is for an agent whose loop hangs, too.
        self._thread = threading.Thread(target=self._run, name="zero-answers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nothing more."""
        self._closed.set()
        self._arrived.put(())  # ends the wait for a question
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._serve()
        except StoreError as error:  # an etcd user without access, or the agent ends
            log.debug("questions of zero-ctl are not answered: %s", error)
        except Exception:
            log.exception("questions of zero-ctl are not answered any more")

    def _serve(self) -> None:
        prefix = queries_prefix(self._job, self._node)
        found = retry.until_set(self._closed)(self._store.range, prefix)
        watch = self._store.watch(
            prefix,
            self._arrived.put,
            after=found.revision,
            cluster=found.cluster,
            on_compacted=lambda revision: self._arrived.put(None),
        )
        try:
            # What was asked before is answered, too: an asker does not know when an agent begins.
            asked = {item.key: item for item in found.items}
            while not self._closed.is_set():
                for item in asked.values():
                    self._answer(item)
                asked = self._next(prefix)
        finally:
            watch.cancel()

    def _next(self, prefix: str) -> dict[str, KeyValue]:
        """The questions that have come, of each asker the last."""
        changes = self._arrived.get()
        fresh: dict[str, KeyValue] = {}
        while True:
            if changes is None:  # etcd has compacted the changes: all questions are read
                items = retry.until_set(self._closed)(self._store.range, prefix).items
                fresh = {item.key: item for item in items}
            else:
                fresh |= {one.key: one.item for one in changes if one.item is not None}
            try:
                changes = self._arrived.get_nowait()
            except queue.Empty:
                return fresh

    def _answer(self, item: KeyValue) -> None:
        try:
            query = Query.from_json(item.value)
        except ValueError as error:  # of a zero-ctl of another version, which waits in vain
            log.debug("%s", error)
            return
        asker = item.key.rpartition("/")[2]
        key = answers_prefix(self._job, asker) + self._node
        value = pack(self._reply(query))
        with contextlib.suppress(StoreError):  # the asker is gone, or will see no answer
            # Under the asker's lease: an answer that nobody fetched ends with it.
            retry.within(query.within_s, cancelled=self._closed)(
                self._store.put, key, value, lease=item.lease
            )

    def _reply(self, query: Query) -> Answer:
        answer = Answer(node=self._node, number=query.number)
        reply = self._kinds.get(query.kind)
        if reply is None:
            text = f"this agent answers {', '.join(self._kinds)}, not {query.kind}"
            return replace(answer, problem=f"{text}: it is of another version than zero-ctl")
        try:
            return replace(answer, record=reply(query))
        except Exception as error:  # no question ends the thread
            log.exception("no answer to a question of zero-ctl (%s)", query.kind)
            return replace(answer, problem=repr(error))


def kinds_of(workers: NodeWorkers, agent: str) -> dict[str, Reply]:
    """The replies about an agent's workers, whose output has the numbers of this `agent`."""

    def stack(query: Query) -> dict[str, Any]:
        only = query.arguments.get("rank")
        processes = [one for one in workers.group.processes if only in (None, one.rank)]
        native = bool(query.arguments.get("native"))
        found = stacks.take(processes, native=native, within_s=query.within_s)
        waits = workers.waits(WAITS_S) if query.arguments.get("waits") else {}
        for one in found:
            if (wait := waits.get(one["rank"])) is not None:
                one["wait"] = wait
        return {"host": socket.gethostname(), "round": workers.group.round, "ranks": found}

    def logs(query: Query) -> dict[str, Any]:
        asked = query.arguments
        rank = asked.get("rank")
        # Each agent process numbers its output anew: numbers of another one mean nothing here.
        if asked.get("agent") == agent:
            page = workers.recent.after(int(asked["after"]), PAGE_BYTES, rank)
        else:
            page = workers.recent.last(int(asked["lines"]), PAGE_BYTES, rank)
        return output_record(page, agent)

    return {"stack": stack, "logs": logs}


def prober(ring: Ring, nodes: Callable[[], Sequence[Node]]) -> Reply:
    """The reply that measures the network to another node."""

    def probe_to(query: Query) -> dict[str, Any]:
        name = query.arguments.get("to")
        target = next((node for node in nodes() if node.id == name and node.ring), None)
        if target is None:
            return {"problem": f"node {name} does not take part any more"}
        try:
            # The port of the ring is open between all nodes already.
            with ring.dial(target) as connection:
                return asdict(probe.measure(connection))
        except OSError as error:
            return {"problem": f"{target.ring} cannot be probed: {error}"}

    return probe_to


def reacher(reach: Reach, rdzv: Rendezvous) -> Reply:
    """The reply that names the other members of the round which this agent does not reach."""

    def others(query: Query) -> dict[str, Any]:
        dead = reach(others_of(rdzv.snapshot, rdzv.node))
        return {"dead": [asdict(link) for link in dead]}

    return others


def output_record(page: Page, agent: str) -> dict[str, Any]:
    """Part of the workers' output as it travels to `zero-ctl`."""
    chunks = [chunk.to_record() for chunk in page.chunks]
    return {"agent": agent, "chunks": chunks, "number": page.number, "lost": page.lost}


def last_output(recent: RecentOutput, node: str, agent: str, limit_bytes: int) -> str:
    """The last output of a node's workers as a value of etcd, of up to about a size."""
    kept_bytes = 4 * limit_bytes  # text is compressed to less than a quarter
    while True:
        # A value that is too long is made again of half the text; one chunk is always kept.
        page = recent.last(sys.maxsize, kept_bytes)
        value = pack(Answer(node=node, number=0, record=output_record(page, agent)))
        if len(value) <= limit_bytes or len(page.chunks) <= 1:
            return value
        kept_bytes //= 2
