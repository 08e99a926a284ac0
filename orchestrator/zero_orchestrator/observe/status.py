"""The status of a job: its keys, read once, as rows for people and for tools.

Read-only, and of one revision of the job's keys; the progress of nodes, which has other keys, may
be a few seconds old.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, groupby
from typing import Any, TypeVar

from zero_contract.decoding import line_of
from zero_contract.errors import ZeroError
from zero_orchestrator.errors import SpecError, StoreRefused
from zero_orchestrator.membership import records
from zero_orchestrator.membership.dead_links import SetAside
from zero_orchestrator.membership.failures import Exclusion, fruitless
from zero_orchestrator.membership.job_state import ENDED, Head, Node, Published, Snapshot
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.parse import parse
from zero_orchestrator.membership.rounds import Observation, Timing, decide
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import events, pace
from zero_orchestrator.observe.goodput import add_up, goodput, to_record
from zero_orchestrator.observe.history import Failing, Saved
from zero_orchestrator.observe.pace import Quantiles, Speed
from zero_orchestrator.observe.verdicts import STOPS, Verdict, from_item
from zero_orchestrator.store.kv import KeyValue, KeyValueStore, Range

JOBS_PREFIX = "/zero/v1/"
LOST = "LOST"
"""State that is shown for a job that has not ended and has no live agent."""
UNREADABLE = "UNREADABLE"
"""State that is shown for a job whose keys cannot be parsed."""

_JUST_NOW = Observation(nodes_s=0.0, symptom_s=0.0)
"""The observation of a single look: no time has passed, so a wait for a time has not ended."""


class NoSuchJob(ZeroError):
    """The store has no job of this name; or no name is given, and there is not exactly one job."""


class NoSuchNode(ZeroError):
    """No live agent has this name, or agents of several jobs have it."""


class UnreadableJob(ZeroError):
    """The keys of a job are not in the format of this version."""


class Condition(StrEnum):
    """Condition of a node, as `zero-ctl status` shows it."""

    RUNNING = "running"
    DRAINING = "draining"
    LEFT = "left"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    GONE = "gone"
    EXCLUDED = "excluded"
    UNHEALTHY = "unhealthy"
    SPARE = "spare"


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One node of a job."""

    node: str
    condition: Condition
    alive: bool
    """Whether its agent holds its lease."""
    first_rank: int | None
    """Lowest rank of its workers; None for a spare."""
    slots: int
    """Number of workers."""
    address: str
    host: str = ""
    """Name of its machine."""
    devices: str = ""
    """Its accelerators, such as `8 x NVIDIA H100 80GB HBM3`; empty: none is known."""
    step: int | None = None
    step_time_s: float | None = None
    """When the node reported that step: its wall clock, seconds since the epoch."""
    loss: float | None = None
    """Loss of that step; null as well if it is not finite."""
    ram_used_bytes: int | None = None
    """Memory that in-memory checkpoints use; None: there are none."""
    ram_budget_bytes: int | None = None
    """Upper limit of `ram_used_bytes`; None: there are no in-memory checkpoints."""
    preparing: str = ""
    """What its workers do before their first step of the round; empty: they take steps."""
    ranks: dict[str, Quantiles] = dataclasses.field(default_factory=dict)
    """Rank -> how long its steps of this round take."""
    pids: dict[str, int] = dataclasses.field(default_factory=dict)
    """Rank -> process id of its worker on that node, while it runs."""

    @classmethod
    def gone(cls, node: str) -> NodeRow:
        """A node of which nothing but the name is known."""
        return cls(
            node=node, condition=Condition.GONE, alive=False, first_rank=None, slots=0, address=""
        )


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One job at one revision. Times are in seconds since the epoch, by wall clocks of agents."""

    job: str
    state: str
    """State of the current round, or LOST, or UNREADABLE; empty before the first round."""
    round: int = 0
    cause: str = ""
    """Why the job is in this state."""
    now: str
    """What the job does or waits for."""
    stop: str | None = None
    """The request to stop: by whom, and why."""
    min_nodes: int = 0
    max_nodes: int = 0
    world_size: int = 0
    members: tuple[NodeRow, ...] = ()
    """Nodes of the round, in rank order."""
    spares: tuple[NodeRow, ...] = ()
    """Live nodes outside of the round: spares, and nodes about to join or to leave."""
    restarts: int = 0
    """Restarts charged to the restart budget so far."""
    restarts_spent: int = 0
    """Restarts that still count against the restart budget."""
    restarts_without_progress: int = 0
    """Restarts since workers last finished a new step."""
    max_restarts: int = 0
    exclusions: tuple[Exclusion, ...] = ()
    """Hosts whose nodes no new round has."""
    aside: tuple[SetAside, ...] = ()
    """Nodes that no new round has until they reach the others again."""
    checkpoint: dict[str, Any] | None = None
    """The newest published checkpoint: step, tag, digest, samples, time."""
    owner: str = ""
    """`USER@HOST` of whoever started the job's first agent; empty: not known."""
    command: tuple[str, ...] = ()
    in_memory: dict[str, Any] | None = None
    """The newest in-memory checkpoint, with the keys of `checkpoint`."""
    state_time_s: float | None = None
    """When the round entered this state."""
    seen_time_s: float | None = None
    """When an agent was last known to be alive."""
    began: int = 0
    """Revision of the store at which the job began: a newer job has a higher one."""
    excluded_left_s: dict[str, int] = dataclasses.field(default_factory=dict)
    """Host -> seconds until its exclusion ends; without exclusions that have no time limit."""
    goodput: float | None = None
    """The part of the time of all nodes that useful steps took, 0 to 1; None: no time is known."""
    reduction: str = ""
    """How the engine sums gradients, if not in its fixed order: "native", by the backend."""
    time_ns: dict[str, int] = dataclasses.field(default_factory=dict)
    """Use -> time of all nodes, in nanoseconds; the keys are the names of `goodput.Use`."""
    verdicts: tuple[Verdict, ...] = ()
    """What holds about the ranks now: stragglers, a hang, slow storage, a slow link."""
    speed: Speed | None = None
    """Over the last minute of the round; None: it is not known."""
    step_times: Quantiles | None = None
    """How long the steps of all ranks in this round take."""
    run_step_times: Quantiles | None = None
    """How long the steps of one rank have taken in all rounds, up to the last record of the job."""
    samples: int | None = None
    """Samples that all steps have consumed; None: not known."""
    tokens: int | None = None
    """Tokens that all steps have consumed; None: the script does not count them."""
    total_steps: int | None = None
    """Steps of the whole job; None: the script does not say."""
    left_s: float | None = None
    """Seconds to the end of the last of these steps, at the speed of the last minute."""
    saved: int = 0
    """Number of checkpoints on disk that were published, up to the last record of the job."""
    kept: int = 0
    """The same of in-memory checkpoints."""
    last_save: Saved | None = None
    """The newest checkpoint on disk whose save has ended, up to the last record of the job."""
    last_save_in_memory: Saved | None = None
    """The same of in-memory checkpoints."""
    failing_saves: Failing | None = None
    """The saves to disk since the last one that succeeded, up to the last record of the job."""

    @property
    def stuck(self) -> bool:
        """Whether no step is taken, as a verdict says."""
        return any(verdict.kind in STOPS for verdict in self.verdicts)

    @property
    def ended(self) -> bool:
        """Whether the job has ended for good."""
        return self.state in ENDED

    @property
    def runs(self) -> bool:
        """Whether it has not ended, and has a live agent."""
        return not self.ended and bool(self.live_nodes)

    @property
    def live_nodes(self) -> tuple[str, ...]:
        """Nodes whose agents are alive, members first."""
        return tuple(row.node for row in (*self.members, *self.spares) if row.alive)

    def to_json(self) -> str:
        """The status as one line of JSON."""
        return line_of(self)


# ---- reading ----


def read(store: KeyValueStore, job: str) -> JobStatus:
    """The present status of a job.

    Raises:
        NoSuchJob: The job has no keys.
        UnreadableJob: The keys are of another version.
    """
    found, prefix = store.range(Keys(job).prefix), events.progress_prefix(job)
    items = store.range(prefix).items
    kept = {item.key: item for item in items}
    in_memory = Keys(job).in_memory
    ledgers = (item for item in items if item.key.startswith(events.goodput_prefix(job)))
    used_ns = add_up(map(events.read_goodput, ledgers))
    history = events.read_history(kept.get(events.history_key(job)))
    progress = events.by_node(prefix, items)
    status = _understood(job, found, progress)
    if status is None:
        raise NoSuchJob(f"there is no job {job}")
    excluded = Keys(job).excluded("")
    # One that an operator has made may have no end.
    leased = (item for item in found.items if item.key.startswith(excluded) and item.lease)
    verdicts = from_item(kept.get(events.verdicts_key(job)))
    # No step is taken: the speed of the last minute is that of before.
    if any(verdict.kind in STOPS for verdict in verdicts):
        status = dataclasses.replace(status, speed=None, left_s=None)
    return dataclasses.replace(
        status,
        # Of another version, or damaged: then the job is shown without it.
        in_memory=None
        if records.kept(Published, kept.get(in_memory)) is None
        else progress[_below_progress(in_memory)] or None,
        excluded_left_s={
            i.key.removeprefix(excluded): round(store.time_left(i.lease)) for i in leased
        },
        goodput=goodput(used_ns),
        time_ns=to_record(used_ns),
        verdicts=verdicts,
        saved=history.saved,
        kept=history.kept,
        run_step_times=pace.quantiles(history.durations),
        last_save=history.written,
        last_save_in_memory=history.in_memory,
        failing_saves=history.failing,
        # Of the history as well: the progress of a node ends with the lease of its agent.
        samples=_latest(status.samples, *(p.samples or None for p in history.points[-1:])),
        tokens=_latest(status.tokens, *(p.tokens or None for p in history.points[-1:])),
    )


def find(store: KeyValueStore, name: str | None) -> JobStatus:
    """The job that a command is for, as `choose_job`; with a name, only that job's keys are read.

    Raises:
        NoSuchJob: There is no such job, or more than one; the message names the jobs there are.
        StoreRefused: No job is named, and this etcd user may not list all jobs.
    """
    if name is None:
        return choose_job(read_all(store), None)
    try:
        return read(store, name)
    except NoSuchJob:
        # The message names the jobs there are; an etcd user may see the keys of one job alone.
        try:
            jobs = read_all(store)
        except StoreRefused:
            jobs = ()
        if not jobs:
            raise
        return choose_job(jobs, name)


def by_job(items: Sequence[KeyValue]) -> Iterator[tuple[str, tuple[KeyValue, ...]]]:
    """The keys of each job among those below `JOBS_PREFIX`, by name."""

    def job_of(item: KeyValue) -> str:
        return item.key.removeprefix(JOBS_PREFIX).partition("/")[0]

    # Sorted anew: "gpt-2/" comes before "gpt/" among the keys.
    return ((job, tuple(of)) for job, of in groupby(sorted(items, key=job_of), job_of))


def read_all(store: KeyValueStore) -> tuple[JobStatus, ...]:
    """All jobs of the store by name, without the progress of their nodes.

    A job whose keys cannot be parsed has the state UNREADABLE.

    Raises:
        StoreRefused: This etcd user may not list all jobs.
    """
    try:
        found = store.range(JOBS_PREFIX)
    except StoreRefused as error:
        raise StoreRefused(f"{error}; name a job whose keys this user may read") from error
    statuses = []
    for job, items in by_job(found.items):
        try:
            status = _understood(job, Range(found.revision, items), {})
        except UnreadableJob as error:  # that must not hide the other jobs
            status = JobStatus(job=job, state=UNREADABLE, now=str(error))
        if status is not None and status.state == LOST:
            # One more read, of these jobs alone: of others no listing shows it.
            seen = events.seen_s(store.get(events.seen_key(job)))
            status = dataclasses.replace(status, seen_time_s=_latest(status.seen_time_s, seen))
        if status is not None:
            statuses.append(status)
    return tuple(statuses)


def read_each(store: KeyValueStore) -> list[JobStatus]:
    """All jobs of the store by name, with the progress of their nodes.

    Raises:
        StoreRefused: This etcd user may not list all jobs.
    """
    found = []
    for job in read_all(store):
        with contextlib.suppress(NoSuchJob, UnreadableJob):  # its keys have just been deleted
            found.append(job if job.state == UNREADABLE else read(store, job.job))
    return found


T = TypeVar("T", int, float)


def _latest(*values: T | None) -> T | None:
    return max((value for value in values if value is not None), default=None)


def _below_progress(key: str) -> str:
    """`/zero/progress/gpt/job/seen` -> `job/seen`."""
    return key.split("/", 4)[4]


def _understood(job: str, found: Range, progress: Mapping[str, Any]) -> JobStatus | None:
    try:
        return _status(job, found, progress)
    except (SpecError, KeyError, TypeError, ValueError) as error:
        raise UnreadableJob(
            f"the keys of job {job} cannot be understood ({error}); use the zero-ctl of the same "
            f"version as its agents, or, if the job is over, delete {Keys(job).prefix}"
        ) from error


def _status(job: str, found: Range, progress: Mapping[str, Any]) -> JobStatus | None:
    """The status that a job's keys describe; None without a job specification."""
    keys = Keys(job)
    items = {item.key: item.value for item in found.items}
    if keys.spec not in items:
        return None
    spec = JobSpec.from_json(items[keys.spec])
    view, latest = parse(keys, found, spec), items.get(keys.latest)
    checkpoint = json.loads(latest) if latest else None
    moved_s = Head.from_json(items[keys.round]).at if keys.round in items else None
    seen = progress.get(_below_progress(events.seen_key(job)), {})
    saved_s = checkpoint.get("time") if checkpoint else None
    members, spares = rows(view, progress)
    is_lost = not view.nodes and view.state not in ENDED
    if is_lost:
        now = "no agent is alive; the job goes on when one is started"
    else:  # by the agents' own decision, which a status thus cannot contradict
        now = decide(view, _JUST_NOW, Timing()).reason
    return JobStatus(
        job=job,
        state=LOST if is_lost else view.state or "",
        state_time_s=moved_s,
        seen_time_s=_latest(moved_s, saved_s, seen.get("time")),
        began=next(item.create_revision for item in found.items if item.key == keys.spec),
        round=view.n,
        cause=view.cause,
        now=now,
        stop=view.stop,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        world_size=view.members.world_size,
        members=members,
        spares=spares,
        restarts=view.charges,
        restarts_spent=view.spent,
        restarts_without_progress=fruitless(view.charged, view.reached),
        exclusions=view.exclusions,
        aside=view.aside,
        max_restarts=spec.max_restarts,
        checkpoint=checkpoint,
        owner=spec.owner,
        command=spec.command,
        **_trained([progress.get(row.node, {}) for row in members]),
    )


def _trained(progress: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The training as the members of a round have published it, taken together."""
    words = (str(of.get("reduction", "")) for of in progress)
    paced = [pace.from_record(of.get("pace")) for of in progress]
    fastest = (of.speed for of in paced if of.speed is not None)
    speed = max(fastest, key=lambda speed: speed.steps, default=None)
    total_steps = _latest(*(of.get("total_steps") or None for of in progress))
    step = _latest(*(of.get("step") for of in progress))
    left_s = None
    if total_steps is not None and step is not None and speed is not None and speed.steps > 0:
        left_s = max(0, total_steps - step) / speed.steps
    return {
        "total_steps": total_steps,
        "left_s": left_s,
        "reduction": next(filter(None, words), ""),
        "speed": speed,
        "step_times": pace.quantiles(pace.add_up(of.counts for of in paced)),
        "samples": _latest(*(of.get("samples") or None for of in progress)),
        "tokens": _latest(*(of.get("tokens") or None for of in progress)),
    }


def rows(
    view: Snapshot, progress: Mapping[str, Any]
) -> tuple[tuple[NodeRow, ...], tuple[NodeRow, ...]]:
    """The members of the round in rank order, and the live nodes outside of the round."""
    known, members = _Known(view), view.members.nodes
    # It has one value more, the world size, which `zip` leaves.
    ranks = accumulate((node.slots for node in members), initial=0)
    return (
        tuple(
            _row(known, node, rank, progress) for node, rank in zip(members, ranks, strict=False)
        ),
        tuple(_row(known, n, None, progress) for n in view.nodes if not view.has_member(n)),
    )


def slowest_ranks(job: JobStatus) -> list[tuple[str, str, Quantiles]]:
    """Each rank with its node and how long its steps of this round take, the slowest first."""
    ranks = [(rank, row.node, of) for row in job.members for rank, of in row.ranks.items()]
    return sorted(ranks, key=lambda one: (-one[2].p50_s, -one[2].p99_s, int(one[0])))


class _Known:
    """Sets that each node's condition is looked up in, made once for up to thousands of nodes."""

    def __init__(self, view: Snapshot) -> None:
        self.view = view
        self.failed = {failure.node for failure in view.failures}
        self.lost = {node.agent for node in view.lost}
        self.draining = {node.id for node in view.nodes if node.draining}
        self.ordered = {(order.node, order.incarnation) for order in view.drains}
        self.unhealthy = {node.id for node in view.nodes if node.unhealthy}


def _row(known: _Known, node: Node, rank: int | None, progress: Mapping[str, Any]) -> NodeRow:
    last = progress.get(node.id, {})
    ram = last.get("ram", {})
    return NodeRow(
        node=node.id,
        condition=next(name for name, fits in _CONDITIONS if fits(known, node)),
        alive=node.agent in known.view.alive,
        first_rank=rank,
        slots=node.slots,
        address=node.address,
        host=node.machine,
        devices=str(last.get("devices", "")),
        step=last.get("step"),
        # The time is that of the record, which a node writes before its first step as well.
        step_time_s=last.get("time") if "step" in last else None,
        loss=last.get("loss"),
        ram_used_bytes=ram.get("used_bytes"),
        ram_budget_bytes=ram.get("budget_bytes"),
        preparing=str(last.get("preparing", "")),
        ranks=dict(pace.from_record(last.get("pace")).ranks),
        pids=dict(last.get("pids", {})),
    )


_CONDITIONS: Sequence[tuple[Condition, Callable[[_Known, Node], bool]]] = (
    (Condition.DONE, lambda known, node: node.id in known.view.done),
    (Condition.FAILED, lambda known, node: node.id in known.failed),
    (Condition.GONE, lambda known, node: known.view.state in ENDED),
    (Condition.LOST, lambda known, node: node.agent in known.lost),
    (Condition.GONE, lambda known, node: node.agent not in known.view.alive),
    (
        Condition.DRAINING,
        lambda known, node: node.id in known.draining or node.agent in known.ordered,
    ),
    (Condition.EXCLUDED, lambda known, node: known.view.barred(node) is not None),
    (Condition.UNHEALTHY, lambda known, node: node.id in known.unhealthy),
    (Condition.SPARE, lambda known, node: not known.view.has_member(node)),
    (Condition.LEFT, lambda known, node: node.id in known.view.quiet),
    (Condition.RUNNING, lambda known, node: True),
)
"""The condition of a node is the first of these whose test holds."""


# ---- choosing ----


def choose_job(jobs: Sequence[JobStatus], name: str | None) -> JobStatus:
    """The job that a command is for: the named one, the only one that runs, or the only one.

    Raises:
        NoSuchJob: There is no such job, or more than one; the message names the jobs there are.
    """
    if name is not None:
        found = [job for job in jobs if job.job == name]
    else:
        found = [job for job in jobs if job.runs] or list(jobs)
    if len(found) == 1:
        return found[0]
    names = ", ".join(job.job for job in jobs)
    if not jobs:
        raise NoSuchJob("no job has been started with this etcd; --rdzv-endpoint names another")
    if name is not None:
        raise NoSuchJob(f"there is no job {name}; there are: {names}")
    which = "several jobs run" if found[0].runs else "no job runs"
    raise NoSuchJob(f"{which}; name one of: {', '.join(job.job for job in found)}")


def is_open(jobs: Sequence[JobStatus]) -> bool:
    """Whether a name is needed to choose a job: several run, or none runs and several exist."""
    return len([job for job in jobs if job.runs] or jobs) > 1


OR_NEWEST = (
    "name of the job (default: the running job that started last; if no job runs, the job that "
    "started last)"
)
"""The help of an argument without which `newest_job` chooses."""


def newest_job(jobs: Sequence[JobStatus]) -> JobStatus:
    """The running job that began last; if none runs, the job that began last.

    Raises:
        NoSuchJob: There is no job.
    """
    if not jobs:
        return choose_job(jobs, None)  # raises
    # By the store's revisions, since clocks of machines differ.
    return max([job for job in jobs if job.runs] or jobs, key=lambda job: job.began)


def choose_node(jobs: Sequence[JobStatus], node: str, name: str | None) -> JobStatus:
    """The job that has a live node of this name.

    Raises:
        NoSuchJob: There is no job of this name.
        NoSuchNode: No job has such a node, or several jobs have one; the message names them.
    """
    within = [choose_job(jobs, name)] if name is not None else [j for j in jobs if j.live_nodes]
    found = [job for job in within if node in job.live_nodes]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(job.job for job in found)
        raise NoSuchNode(f"node {node} is in several jobs ({names}); name one after the node")
    there = "; ".join(f"{job.job}: {', '.join(job.live_nodes) or 'none'}" for job in within)
    raise NoSuchNode(f"there is no live node {node}; there are: {there or 'none'}")


def choose_members(job: JobStatus, rank: int | None) -> list[str]:
    """The live members of a job's round, or the one that has a rank.

    Raises:
        NoSuchJob: The job has no live member.
        NoSuchNode: No live member has the rank.
    """
    live = [row for row in job.members if row.alive]
    if not live:
        raise NoSuchJob(f"no workers of job {job.job} run: {job.now}")
    found = [
        row.node
        for row in live
        if rank is None
        or (row.first_rank is not None and row.first_rank <= rank < row.first_rank + row.slots)
    ]
    if not found:
        raise NoSuchNode(
            f"no live node of job {job.job} has rank {rank}: the world size is {job.world_size}"
        )
    return found
