"""Parse a job's keys, as of one revision of the store, into a `Snapshot`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter

from zero_orchestrator.membership.dead_links import LinkReport, SetAside
from zero_orchestrator.membership.failures import Charge, Exclusion
from zero_orchestrator.membership.job_state import (
    NOBODY,
    DrainOrder,
    Failure,
    Head,
    Members,
    Node,
    Published,
    Snapshot,
)
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.records import read
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.store.kv import KeyValue, Range


def parse(keys: Keys, found: Range, spec: JobSpec) -> Snapshot:
    """The snapshot in a job's keys, all of them or some, as of one revision.

    Raises:
        SpecMismatch: A record is damaged, or lacks a field that every version writes.
    """
    items = {item.key: item for item in found.items}
    head, stop = items.get(keys.round), items.get(keys.stop)
    request = read(str, stop.value) if stop else None
    # By the first part of a key after the job's prefix: a large job has thousands, of few kinds.
    start = len(keys.prefix)
    kinds: defaultdict[str, list[KeyValue]] = defaultdict(list)
    for item in found.items:
        kinds[item.key[start:].partition("/")[0]].append(item)
    # In order of arrival: a record that an agent writes again keeps the revision of its creation.
    live = sorted(kinds["nodes"], key=attrgetter("create_revision"))
    nodes = tuple(_node(item.value) for item in live)
    excluded = tuple(Exclusion.from_json(item.value) for item in kinds["excluded"])
    aside = tuple(_aside(i.value) for i in kinds["rounds"] if i.key.startswith(keys.aside("")))
    if head is None:
        return Snapshot(spec=spec, nodes=nodes, stop=request, exclusions=excluded)
    charges = (Charge.from_json(item.value) for item in kinds["charged"])
    orders = (item for item in kinds["cmd"] if item.key.startswith(keys.drain("")))
    latest, reports = items.get(keys.latest), kinds["reports"]
    published = Published.from_json(latest.value) if latest else Published(step=0)
    current = Head.from_json(head.value)
    n = current.n
    master, yielded = (items.get(keys.of_round(n, part)) for part in ("master", "yield"))
    written = items.get(keys.of_round(n, "members"))
    members = _members(written.value) if written else NOBODY
    return Snapshot(
        spec=spec,
        n=n,
        state=current.state,
        cause=current.cause,
        fence=head.mod_revision,
        store=f"{found.cluster:x}" if found.cluster else "",
        nodes=nodes,
        members=members,
        master=master.value if master else None,
        yielding=read(str, yielded.value) if yielded else None,
        yield_revision=yielded.create_revision if yielded else 0,
        quiet=_names(reports, keys.report(n, "quiet/")),
        done=_names(reports, keys.report(n, "done/")),
        # Another agent may be in its place since, under the same id: that one leaves nothing.
        leaving=frozenset(
            node.id
            for node in members.nodes
            if (told := items.get(keys.report(n, "leaving", node.id)))
            and told.value in ("", node.incarnation)  # empty in a record of before
        ),
        failures=failures(reports, keys.report(n, "fail/"), keys.report(n, "symptom/")),
        links=tuple(_links(i.value) for i in reports if i.key.startswith(keys.report(n, "links/"))),
        charged=tuple(sorted(charges, key=attrgetter("n"))),
        took_s=current.took_s,
        by=current.by,
        at_s=current.at,
        failed=current.failed,
        committed=published.step,
        committed_root=published.root,
        committed_revision=latest.mod_revision if latest else 0,
        stop=request,
        drains=tuple(DrainOrder.from_json(item.value) for item in orders),
        exclusions=excluded,
        aside=aside,
    )


# Agents parse often, and of a large job only a few records change from one snapshot to the next.
_aside = lru_cache(maxsize=64)(SetAside.from_json)
_links = lru_cache(maxsize=1024)(LinkReport.from_json)
_node = lru_cache(maxsize=8192)(Node.from_json)
_members = lru_cache(maxsize=4)(Members.from_json)


def _names(items: Sequence[KeyValue], prefix: str) -> frozenset[str]:
    start = len(prefix)
    return frozenset(item.key[start:] for item in items if item.key.startswith(prefix))


def failures(items: Sequence[KeyValue], *prefixes: str) -> tuple[Failure, ...]:
    """The reports under these prefixes, in the order in which they were written."""
    reports = [item for item in items if item.key.startswith(prefixes)]
    reports.sort(key=lambda item: item.create_revision)  # the range is in the order of the names
    return tuple(
        replace(Failure.from_json(item.value), revision=item.create_revision) for item in reports
    )
