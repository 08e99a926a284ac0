"""Operator requests: drain, stop, exclude, include: keys, which the job's agents carry out."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from zero_contract.errors import ZeroError
from zero_orchestrator.errors import LeaseLost
from zero_orchestrator.membership.failures import FOR_EVER_S, Exclusion
from zero_orchestrator.membership.job_state import DrainOrder, Node, Snapshot
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.parse import parse
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe.status import NoSuchJob, NoSuchNode
from zero_orchestrator.store.kv import NO_LEASE, KeyValueStore, Put, absent, unchanged


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What has become of a request."""

    command: str
    """The command of `zero-ctl`: drain, stop, exclude, include, gc or report."""
    job: str
    """Name of the job; empty if there is none."""
    target: str | None = None
    """The node, the host or the file; None: the whole job."""
    done: bool
    """Whether it is complete. False: the agents of the job carry it out, or it was not done."""
    text: str
    """The outcome in words."""


class TooFewNodes(ZeroError):
    """The request would leave the job with fewer nodes than it needs."""


def ask_to_drain(store: KeyValueStore, job: str, node: str, by: str) -> str:
    """Request a drain from the agent that now runs under this name; returns its incarnation.

    Raises:
        NoSuchNode: The agent has just exited, or registered again.
    """
    keys = Keys(job)
    agent = store.get(keys.node(node))
    if agent is not None:
        order = DrainOrder(node, Node.from_json(agent.value).incarnation, by)
        # Only the agent that was read: another one of that name has not been meant.
        same = unchanged(agent.key, agent.mod_revision)
        # Under the agent's lease the request vanishes with it, for whatever reason it exits: the
        # next agent of that name cannot take the request for its own.
        put = Put(keys.drain(node), order.to_json(), agent.lease)
        with contextlib.suppress(LeaseLost):
            if store.txn([same], [put]).succeeded:
                return order.incarnation
    raise NoSuchNode(f"node {node} of job {job} has just gone or come back; look, and try again")


def ask_to_stop(store: KeyValueStore, job: str, by: str, reason: str) -> bool:
    """Request the end of a job; False if there is such a request already."""
    key = Keys(job).stop
    request = f"stop asked by {by}" + (f" ({reason})" if reason else "")
    return store.txn([absent(key)], [Put(key, json.dumps(request))]).succeeded


def exclude(store: KeyValueStore, job: str, name: str, why: str, for_s: int) -> Exclusion:
    """Exclude a host from a job, by the store's clock for `for_s`; 0: until `include`.

    Raises:
        NoSuchNode: The job has no such node or host, or the name is that of one of several nodes
            on a host.
        TooFewNodes: Without the host the job has fewer nodes than it needs.
    """
    view = _look(store, job)
    for_s = min(for_s, FOR_EVER_S)
    found = Exclusion(host=_host(view, name), why=why, for_s=for_s, by_user=True)
    # Whoever names a node may not know that others share its host.
    there = [node.id for node in view.nodes if node.machine == found.host]
    if name != found.host and len(there) > 1:
        raise NoSuchNode(
            f"{name} is a node of host {found.host}, which runs {', '.join(there)}, and an "
            f"exclusion is of a whole host: `zero-ctl exclude {found.host}`; to let this node "
            f"alone leave, `zero-ctl drain {name}`"
        )
    left = [node for node in view.eligible if node.machine != found.host]
    if not view.spec.is_enough(len(left)):
        raise TooFewNodes(
            f"job {job} needs {view.spec.fewest} nodes, and without those of host {found.host} "
            f"({', '.join(there) or 'none'}) it has {len(left)}: start an agent on another host "
            "first; or let a node leave with `zero-ctl drain NODE`, and the job waits for another; "
            f"or end the job with `zero-ctl stop {job}`"
        )
    # The store ends it: no machine's clock counts, and none has to be there.
    lease = store.grant(for_s) if for_s else NO_LEASE
    store.put(Keys(job).excluded(found.host), found.to_json(), lease=lease)
    return found


def include(store: KeyValueStore, job: str, name: str) -> str:
    """End an exclusion; returns the host whose nodes may take part again.

    Raises:
        NoSuchNode: The host is not excluded; the message names the excluded ones.
    """
    view = _look(store, job)
    hosts = [exclusion.host for exclusion in view.exclusions]
    # An excluded host need not have a node any more.
    host = name if name in hosts else _host(view, name)
    if not store.delete(Keys(job).excluded(host)):
        raise NoSuchNode(f"{host} is not excluded in job {job}; {', '.join(hosts) or 'no host'} is")
    return host


def _look(store: KeyValueStore, job: str) -> Snapshot:
    keys = Keys(job)
    found = store.range(keys.prefix)
    spec = next((item.value for item in found.items if item.key == keys.spec), None)
    if spec is None:
        raise NoSuchJob(f"there is no job {job}")
    return parse(keys, found, JobSpec.from_json(spec))


def _host(view: Snapshot, name: str) -> str:
    """The host of that name, or of the live or member node of that name. Raises NoSuchNode."""
    known: tuple[Node, ...] = (*view.nodes, *view.members.nodes)
    for node in known:
        if name in (node.id, node.machine):
            return node.machine
    there = ", ".join(dict.fromkeys(node.id for node in known)) or "none"
    raise NoSuchNode(f"there is no node or host {name}; there are: {there}")
