"""Metrics for Prometheus: the table of those of a job, and what makes metrics of a table.

A metric's name begins with `zero_`, and ends in its unit; a time is in seconds, a size in bytes. A
metric whose value is not known is left out, never 0. The table of the metrics of a node is
`zero_agent.loop.observed.metrics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from zero_orchestrator.membership.job_state import State
from zero_orchestrator.observe.goodput import Use, from_record
from zero_orchestrator.observe.history import Saved
from zero_orchestrator.observe.pace import HISTOGRAM_S, Histogram, Quantiles
from zero_orchestrator.observe.status import LOST, UNREADABLE, JobStatus
from zero_orchestrator.observe.story import Recovery
from zero_orchestrator.observe.verdicts import Kind

T = TypeVar("T")
R = TypeVar("R")
JOB = "zero_job"
"""The label that every metric has; Prometheus itself sets one named `job`."""
TIERS = MappingProxyType({False: "disk", True: "memory"})
"""In memory or not -> the value of the label `tier`."""


class Type(StrEnum):
    """The type of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    """It only grows; the names of its samples end in `_total`."""
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Row(Generic[T]):
    """One metric of a `T`: a row of a table."""

    name: str
    help: str
    read: Callable[[T], Any]
    """Returns the value, None if it is not known; with `labels`, tuples: their values and it."""
    labels: tuple[str, ...] = ()
    type: Type = Type.GAUGE


_FAMILIES: Mapping[Type, Any] = {
    Type.GAUGE: GaugeMetricFamily,
    Type.COUNTER: CounterMetricFamily,
    Type.HISTOGRAM: HistogramMetricFamily,
}


def collected(
    table: Iterable[Row[T]], common: Sequence[str], of: Sequence[tuple[Sequence[str], T]]
) -> Iterator[Metric]:
    """The metrics of a table with their samples, of each source; none without one.

    Each source comes with the values of the `common` labels.
    """
    for row in table:
        made: Any = _FAMILIES[row.type](row.name, row.help, labels=[*common, *row.labels])
        for shared, source in of:
            found = row.read(source)
            # With labels there are several values, each after those of its labels.
            for *values, value in found if row.labels else ((found,),):
                if isinstance(value, Histogram):
                    # A bucket of Prometheus counts all that is at most its bound.
                    bounds = (*map(str, HISTOGRAM_S), "+Inf")
                    buckets = list(zip(bounds, accumulate(value.counts), strict=True))
                    made.add_metric([*shared, *values], buckets, value.sum_s)
                elif value is not None:
                    made.add_metric([*shared, *values], value)
        if made.samples:
            yield made


def known(record: R | None, read: Callable[[R], float | None]) -> float | None:
    """A value of a record; None without the record."""
    return None if record is None else read(record)


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
        # It would collect once, at the start, to know the names.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry


def exposition(make: Callable[[], Iterable[Metric]]) -> bytes:
    """Metrics in Prometheus' text format."""
    return generate_latest(Metrics(make).registry)


def time_values(used_ns: Mapping[Use, int]) -> list[tuple[str, float]]:
    """A value for each use of time."""
    # Also for those without any: Prometheus does not see what a counter has at its first sample.
    return [(use, used_ns.get(use, 0) / 1e9) for use in Use]


def _of_quantiles(found: Quantiles | None, *labels: str) -> list[tuple[str | float, ...]]:
    """A value for each quantile."""
    if found is None:
        return []
    quantiles = (("0.5", found.p50_s), ("0.9", found.p90_s), ("0.99", found.p99_s))
    return [(*labels, quantile, value) for quantile, value in quantiles]


def _of_checkpoints(name: str) -> Callable[[JobStatus], Any]:
    """A number of the newest checkpoint on disk, and of the newest one in memory."""
    return lambda job: [
        (TIERS[in_memory], known(found, lambda record: record.get(name)))
        for in_memory, found in ((False, job.checkpoint), (True, job.in_memory))
    ]


def _of_saves(read: Callable[[Saved], float]) -> Callable[[JobStatus], Any]:
    """A number of the last save to disk, and of the last one in memory."""
    return lambda job: [
        (TIERS[in_memory], known(found, read))
        for in_memory, found in ((False, job.last_save), (True, job.last_save_in_memory))
    ]


_TIER = ("tier",)
JOB_METRICS: Sequence[Row[JobStatus]] = (
    Row(
        "zero_job_state",
        "1 for the state of the job, 0 for every other state.",
        lambda job: [(s, float(job.state == s)) for s in (*State, LOST, UNREADABLE)],
        ("state",),
    ),
    Row("zero_job_rounds", "Rounds that have begun.", lambda job: job.round, (), Type.COUNTER),
    Row("zero_job_world_size", "Workers of the round.", lambda job: job.world_size),
    Row("zero_job_nodes", "Nodes of the round.", lambda job: len(job.members)),
    Row("zero_job_live_nodes", "Nodes whose agents are alive.", lambda job: len(job.live_nodes)),
    Row("zero_job_min_nodes", "The least nodes that a round needs.", lambda job: job.min_nodes),
    Row("zero_job_excluded_hosts", "Hosts that are excluded.", lambda job: len(job.exclusions)),
    Row(
        "zero_job_restarts",
        "Failures that have cost a restart.",
        lambda job: job.restarts,
        (),
        Type.COUNTER,
    ),
    Row(
        "zero_job_restart_budget_spent",
        "Restarts that count against the restart budget now.",
        lambda job: job.restarts_spent,
    ),
    Row(
        "zero_job_restart_budget",
        "Restarts that the job may spend: --max-restarts.",
        lambda job: job.max_restarts,
    ),
    Row(
        "zero_job_step",
        "Last step that a node has finished.",
        lambda job: [(row.node, row.step) for row in job.members],
        ("node",),
    ),
    Row(
        "zero_job_loss",
        "Mean loss of that step.",
        lambda job: [(row.node, row.loss) for row in job.members],
        ("node",),
    ),
    Row("zero_job_samples", "Samples that the run has consumed.", lambda job: job.samples),
    Row(
        "zero_job_tokens",
        "Tokens that the run has consumed, if the script counts them.",
        lambda job: job.tokens,
    ),
    Row(
        "zero_job_samples_per_second",
        "Samples that are trained in a second, over the last minute of the round.",
        lambda job: known(job.speed, lambda speed: speed.samples),
    ),
    Row(
        "zero_job_tokens_per_second",
        "Tokens that are trained in a second, over the last minute of the round.",
        lambda job: known(job.speed, lambda speed: speed.tokens),
    ),
    Row(
        "zero_job_step_duration_seconds",
        "Quantiles of the time of a step without saves, of all ranks in this round.",
        lambda job: _of_quantiles(job.step_times),
        ("quantile",),
    ),
    Row(
        "zero_job_rank_step_duration_seconds",
        "The same for each rank.",
        lambda job: [
            values
            for row in job.members
            for rank, found in row.ranks.items()
            for values in _of_quantiles(found, rank, row.node)
        ],
        ("rank", "node", "quantile"),
    ),
    Row(
        "zero_job_published_checkpoints",
        "Checkpoints that were published, on disk and in memory, up to the last record of the job.",
        lambda job: [(TIERS[False], job.saved), (TIERS[True], job.kept)],
        _TIER,
        Type.COUNTER,
    ),
    Row(
        "zero_job_checkpoint_step", "Step of the newest checkpoint.", _of_checkpoints("step"), _TIER
    ),
    Row(
        "zero_job_checkpoint_samples",
        "Samples that the newest checkpoint has consumed.",
        _of_checkpoints("samples"),
        _TIER,
    ),
    Row(
        "zero_job_checkpoint_timestamp_seconds",
        "When the newest checkpoint was published, by the clock of its node.",
        _of_checkpoints("time"),
        _TIER,
    ),
    Row(
        "zero_job_last_save_size_bytes",
        "Size of the checkpoint of the last save that has ended, of all ranks.",
        _of_saves(lambda saved: saved.size_bytes),
        _TIER,
    ),
    Row(
        "zero_job_last_save_stall_seconds",
        "Time for which training waited for the last save that has ended.",
        _of_saves(lambda saved: saved.stall_s),
        _TIER,
    ),
    Row(
        "zero_job_last_save_write_seconds",
        "Time in which rank 0 wrote its file in the last save that has ended.",
        _of_saves(lambda saved: saved.write_s),
        _TIER,
    ),
    Row(
        "zero_job_last_save_publish_seconds",
        "Time in which rank 0 checked and published the files of all ranks in the last save that "
        "has ended.",
        _of_saves(lambda saved: saved.publish_s),
        _TIER,
    ),
    Row(
        "zero_job_seen_timestamp_seconds",
        "When an agent of the job was last known to be alive, by its clock.",
        lambda job: job.seen_time_s,
    ),
    Row(
        "zero_job_goodput_ratio",
        "Part of the time of all nodes that useful steps took.",
        lambda job: job.goodput,
    ),
    Row(
        "zero_job_verdicts",
        "Verdicts about the ranks of the job that hold now, by kind.",
        lambda job: [(kind, sum(one.kind is kind for one in job.verdicts)) for kind in Kind],
        ("kind",),
    ),
    Row(
        "zero_job_straggler_ratio",
        "How many times as long as the other ranks a straggler computes in a step; without a "
        "straggler, no sample.",
        lambda job: [
            (str(one.rank), one.node, one.factor)
            for one in job.verdicts
            if one.kind is Kind.STRAGGLER
        ],
        ("rank", "node"),
    ),
    Row(
        "zero_job_node_time_seconds",
        "Time of all nodes by its use; the time of a step in progress counts as if the step were "
        "about to end.",
        lambda job: time_values(from_record(job.time_ns)) if job.time_ns else (),
        ("use",),
    ),
)
"""Every metric of a job."""
RECOVERY_METRICS: Sequence[Row[Sequence[Recovery]]] = (
    Row(
        "zero_job_recoveries",
        "Ends of rounds among the events that are kept, by the kind of event that was their first "
        "sign; the kinds are those of docs/reference-events.md.",
        lambda found: Counter(one.cause for one in found).items(),
        ("cause",),
    ),
    Row(
        "zero_job_last_detection_seconds",
        "From the last step before the last recovery to the decision to end the round, by the "
        "clocks of nodes.",
        lambda found: [(last.cause, last.detection_s) for last in found[-1:]],
        ("cause",),
    ),
    Row(
        "zero_job_last_recovery_seconds",
        "From the last step before the last recovery to the start of the next round's workers, by "
        "the clocks of nodes.",
        lambda found: [(last.cause, last.took_s) for last in found[-1:]],
        ("cause",),
    ),
)
"""Every metric of a job's recoveries, oldest first."""
ETCD_UP: Row[bool] = Row(
    "zero_etcd_up",
    "1 if `zero-ctl metrics` could read the jobs, else 0: then it has no other metric.",
    float,
)
"""The only metric that is about no job."""


def of_jobs(
    jobs: Sequence[JobStatus], recovered: Mapping[str, Sequence[Recovery]] = MappingProxyType({})
) -> Iterator[Metric]:
    """The metrics of some jobs and their recoveries, each with the samples of all of them."""
    yield from collected(JOB_METRICS, [JOB], [((job.job,), job) for job in jobs])
    yield from collected(RECOVERY_METRICS, [JOB], [((job,), of) for job, of in recovered.items()])
