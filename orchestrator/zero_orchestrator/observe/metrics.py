"""Metrics for Prometheus: those of a job, from its status, and what its agents share with them.

A metric's name begins with `zero_`, and ends in its unit; a time is in seconds, a size in bytes.
Every metric has the label `zero_job`: Prometheus itself sets a label `job`.

Must always hold: a metric whose value is not known is left out, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from zero_orchestrator.membership.job_state import State
from zero_orchestrator.observe.goodput import Use, from_record
from zero_orchestrator.observe.history import Saved
from zero_orchestrator.observe.pace import Quantiles
from zero_orchestrator.observe.status import LOST, UNREADABLE, JobStatus
from zero_orchestrator.observe.story import Recovery
from zero_orchestrator.observe.verdicts import Kind

Labels = Mapping[str, str]
Values = Iterable[tuple[Labels, float | None]]
"""The labels of each sample, and its value; None: not known."""
JOB = "zero_job"
"""The label that every metric has."""
TIERS = MappingProxyType({False: "disk", True: "memory"})
"""In memory or not -> the value of the label `tier`."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One metric."""

    name: str
    help: str
    counts: bool = False
    """Whether it only grows: a counter, whose sample ends in `_total`; otherwise a gauge."""
    labels: tuple[str, ...] = ()
    """Names of its labels beside `JOB`."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One value of a metric, for `zero-ctl metrics --json`."""

    name: str
    """Name of the metric; that of a counter ends in `_total`."""
    labels: dict[str, str]
    value: float | None
    """null: it is not finite, such as a loss that is NaN."""


def samples(metrics: Iterable[Metric]) -> Iterator[Sample]:
    """All values of some metrics."""
    for metric in metrics:
        for one in metric.samples:
            yield Sample(name=one.name, labels=dict(one.labels), value=one.value)


def family(definition: Definition, values: Values, *, per: str = "") -> Metric | None:
    """A metric with its samples; None without one. `per`: one more label, which all have."""
    kind: type[CounterMetricFamily | GaugeMetricFamily]
    kind = CounterMetricFamily if definition.counts else GaugeMetricFamily
    names = [JOB, *filter(None, [per]), *definition.labels]
    made = kind(definition.name, definition.help, labels=names)
    for labels, value in values:
        if value is not None:
            made.add_metric([labels[name] for name in names], value)
    return made if made.samples else None


class Metrics(Collector):
    """Metrics that are made anew whenever Prometheus asks."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        yield from self._make()

    @property
    def registry(self) -> CollectorRegistry:
        """A registry of these metrics alone."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry


def exposition(make: Callable[[], Iterable[Metric]]) -> bytes:
    """Metrics in Prometheus' text format."""
    return generate_latest(Metrics(make).registry)


TIME = Definition(
    name="zero_node_time_seconds",
    help="Time of nodes by its use; all uses together are the wall time of all nodes.",
    counts=True,
    labels=("use",),
)


def time_values(used_ns: Mapping[Use, int]) -> Values:
    """The samples of `TIME`, one for each use, so that each of them begins at 0."""
    return [({"use": use}, used_ns.get(use, 0) / 1e9) for use in Use]


# ---- the metrics of a job ----


def _one(read: Callable[[JobStatus], float | None]) -> Callable[[JobStatus], Values]:
    return lambda job: [({}, read(job))]


def _of_quantiles(
    found: Quantiles | None, labels: Labels = MappingProxyType({})
) -> Iterator[tuple[Labels, float | None]]:
    """A sample for each quantile."""
    if found is not None:
        for quantile, value in (("0.5", found.p50_s), ("0.9", found.p90_s), ("0.99", found.p99_s)):
            yield {**labels, "quantile": quantile}, value


def _of_checkpoints(name: str) -> Callable[[JobStatus], Values]:
    """A number of the newest checkpoint on disk, and of the newest one in memory."""

    def values(job: JobStatus) -> Values:
        for in_memory, found in ((False, job.checkpoint), (True, job.in_memory)):
            yield {"tier": TIERS[in_memory]}, None if found is None else found.get(name)

    return values


def _of_last_saves(read: Callable[[Saved], float]) -> Callable[[JobStatus], Values]:
    """A number of the last save to disk, and of the last one in memory."""

    def values(job: JobStatus) -> Values:
        for in_memory, found in ((False, job.last_save), (True, job.last_save_in_memory)):
            yield {"tier": TIERS[in_memory]}, None if found is None else read(found)

    return values


_NODE = ("node",)
_TIER = ("tier",)
_QUANTILE = ("quantile",)
JOB_METRICS: Sequence[tuple[Definition, Callable[[JobStatus], Values]]] = (
    (
        Definition(
            name="zero_job_state",
            help="1 for the state of the job, 0 for every other state.",
            labels=("state",),
        ),
        lambda job: [({"state": s}, float(job.state == s)) for s in (*State, LOST, UNREADABLE)],
    ),
    (
        Definition(name="zero_job_rounds", help="Rounds that have begun.", counts=True),
        _one(lambda job: job.round),
    ),
    (
        Definition(name="zero_job_world_size", help="Workers of the round."),
        _one(lambda job: job.world_size),
    ),
    (
        Definition(name="zero_job_nodes", help="Nodes of the round."),
        _one(lambda job: len(job.members)),
    ),
    (
        Definition(name="zero_job_live_nodes", help="Nodes whose agents are alive."),
        _one(lambda job: len(job.live_nodes)),
    ),
    (
        Definition(name="zero_job_min_nodes", help="The least nodes that a round needs."),
        _one(lambda job: job.min_nodes),
    ),
    (
        Definition(name="zero_job_excluded_hosts", help="Hosts that are excluded."),
        _one(lambda job: len(job.exclusions)),
    ),
    (
        Definition(
            name="zero_job_restarts", help="Failures that have cost a restart.", counts=True
        ),
        _one(lambda job: job.restarts),
    ),
    (
        Definition(
            name="zero_job_restart_budget_spent",
            help="Restarts that count against the restart budget now.",
        ),
        _one(lambda job: job.restarts_spent),
    ),
    (
        Definition(
            name="zero_job_restart_budget", help="Restarts that the job may spend: --max-restarts."
        ),
        _one(lambda job: job.max_restarts),
    ),
    (
        Definition(name="zero_job_step", help="Last step that a node has finished.", labels=_NODE),
        lambda job: [({"node": row.node}, row.step) for row in job.members],
    ),
    (
        Definition(name="zero_job_loss", help="Mean loss of that step.", labels=_NODE),
        lambda job: [({"node": row.node}, row.loss) for row in job.members],
    ),
    (
        Definition(name="zero_job_samples", help="Samples that the run has consumed."),
        _one(lambda job: job.samples),
    ),
    (
        Definition(
            name="zero_job_tokens",
            help="Tokens that the run has consumed, if the script counts them.",
        ),
        _one(lambda job: job.tokens),
    ),
    (
        Definition(
            name="zero_job_samples_per_second",
            help="Samples that are trained in a second, over the last minute of the round.",
        ),
        _one(lambda job: None if job.speed is None else job.speed.samples),
    ),
    (
        Definition(
            name="zero_job_tokens_per_second",
            help="Tokens that are trained in a second, over the last minute of the round.",
        ),
        _one(lambda job: None if job.speed is None else job.speed.tokens),
    ),
    (
        Definition(
            name="zero_job_step_duration_seconds",
            help="Quantiles of the time of a step without saves, of all ranks in this round.",
            labels=_QUANTILE,
        ),
        lambda job: _of_quantiles(job.step_times),
    ),
    (
        Definition(
            name="zero_job_rank_step_duration_seconds",
            help="The same for each rank.",
            labels=("rank", "node", *_QUANTILE),
        ),
        lambda job: [
            sample
            for row in job.members
            for rank, found in row.ranks.items()
            for sample in _of_quantiles(found, {"rank": rank, "node": row.node})
        ],
    ),
    (
        Definition(
            name="zero_job_published_checkpoints",
            help="Checkpoints that were published, on disk and in memory, up to the last record "
            "of the job.",
            counts=True,
            labels=_TIER,
        ),
        lambda job: [({"tier": TIERS[False]}, job.saved), ({"tier": TIERS[True]}, job.kept)],
    ),
    (
        Definition(
            name="zero_job_checkpoint_step", help="Step of the newest checkpoint.", labels=_TIER
        ),
        _of_checkpoints("step"),
    ),
    (
        Definition(
            name="zero_job_checkpoint_samples",
            help="Samples that the newest checkpoint has consumed.",
            labels=_TIER,
        ),
        _of_checkpoints("samples"),
    ),
    (
        Definition(
            name="zero_job_checkpoint_timestamp_seconds",
            help="When the newest checkpoint was published, by the clock of its node.",
            labels=_TIER,
        ),
        _of_checkpoints("time"),
    ),
    (
        Definition(
            name="zero_job_last_save_size_bytes",
            help="Size of the checkpoint of the last save that has ended, of all ranks.",
            labels=_TIER,
        ),
        _of_last_saves(lambda saved: saved.size_bytes),
    ),
    (
        Definition(
            name="zero_job_last_save_stall_seconds",
            help="Time for which training waited for the last save that has ended.",
            labels=_TIER,
        ),
        _of_last_saves(lambda saved: saved.stall_s),
    ),
    (
        Definition(
            name="zero_job_last_save_write_seconds",
            help="Time in which rank 0 wrote its file in the last save that has ended.",
            labels=_TIER,
        ),
        _of_last_saves(lambda saved: saved.write_s),
    ),
    (
        Definition(
            name="zero_job_last_save_publish_seconds",
            help="Time in which rank 0 checked and published the files of all ranks in the last "
            "save that has ended.",
            labels=_TIER,
        ),
        _of_last_saves(lambda saved: saved.publish_s),
    ),
    (
        Definition(
            name="zero_job_seen_timestamp_seconds",
            help="When an agent of the job was last known to be alive, by its clock.",
        ),
        _one(lambda job: job.seen_time_s),
    ),
    (
        Definition(
            name="zero_job_goodput_ratio",
            help="Part of the time of all nodes that useful steps took.",
        ),
        _one(lambda job: job.goodput),
    ),
    (
        Definition(
            name="zero_job_verdicts",
            help="Verdicts about the ranks of the job that hold now, by kind.",
            labels=("kind",),
        ),
        lambda job: [
            ({"kind": kind}, sum(one.kind is kind for one in job.verdicts)) for kind in Kind
        ],
    ),
    (
        Definition(
            name="zero_job_straggler_ratio",
            help="How many times as long as the other ranks a straggler computes in a step; "
            "without a straggler, no sample.",
            labels=("rank", "node"),
        ),
        lambda job: [
            ({"rank": str(one.rank), "node": one.node}, one.factor)
            for one in job.verdicts
            if one.kind is Kind.STRAGGLER
        ],
    ),
    (
        Definition(
            name="zero_job_node_time_seconds",
            help="Time of all nodes by its use; the time of a step in progress counts as if the "
            "step were about to end.",
            labels=("use",),
        ),
        lambda job: time_values(from_record(job.time_ns)) if job.time_ns else (),
    ),
)
"""Every metric of a job, and its samples."""


_CAUSE = ("cause",)
RECOVERY_METRICS: Sequence[tuple[Definition, Callable[[Sequence[Recovery]], Values]]] = (
    (
        Definition(
            name="zero_job_recoveries",
            help="Ends of rounds among the events that are kept, by the kind of event that was "
            "their first sign; the kinds are those of docs/reference-events.md.",
            labels=_CAUSE,
        ),
        lambda found: [
            ({"cause": cause}, count) for cause, count in Counter(r.cause for r in found).items()
        ],
    ),
    (
        Definition(
            name="zero_job_last_detection_seconds",
            help="From the last step before the last recovery to the decision to end the round, by "
            "the clocks of nodes.",
            labels=_CAUSE,
        ),
        lambda found: [({"cause": last.cause}, last.detection_s) for last in found[-1:]],
    ),
    (
        Definition(
            name="zero_job_last_recovery_seconds",
            help="From the last step before the last recovery to the start of the next round's "
            "workers, by the clocks of nodes.",
            labels=_CAUSE,
        ),
        lambda found: [({"cause": last.cause}, last.took_s) for last in found[-1:]],
    ),
)
"""Every metric of a job's recoveries, oldest first, and its samples."""


ETCD_UP = Definition(
    name="zero_etcd_up",
    help="1 if `zero-ctl metrics` could read the jobs, else 0: then it has no other metric.",
)


def etcd_up(is_up: bool) -> Metric:
    """The metric `ETCD_UP`, the only one that is about no job."""
    return GaugeMetricFamily(ETCD_UP.name, ETCD_UP.help, value=float(is_up))


def of_jobs(
    jobs: Sequence[JobStatus], recovered: Mapping[str, Sequence[Recovery]] = MappingProxyType({})
) -> Iterator[Metric]:
    """The metrics of some jobs, each metric with the samples of all of them.

    Args:
        jobs: The jobs.
        recovered: By job, its recoveries, oldest first.
    """
    for definition, values in JOB_METRICS:
        samples = (({JOB: j.job, **labels}, value) for j in jobs for labels, value in values(j))
        if (made := family(definition, samples)) is not None:
            yield made
    for definition, of_recoveries in RECOVERY_METRICS:
        samples = (
            ({JOB: job, **labels}, value)
            for job, found in recovered.items()
            for labels, value in of_recoveries(found)
        )
        if (made := family(definition, samples)) is not None:
            yield made
