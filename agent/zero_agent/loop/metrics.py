"""The metrics of one node for Prometheus, at `/metrics` of `--health-port`.

The metrics of a whole job are those of `zero-ctl metrics`. Must always hold: a metric whose value
is not known is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

from zero_agent.node.health_endpoint import Status, healthy, ready
from zero_agent.node.state import Workers
from zero_agent.workers.step_times import BOUNDS_S, Histogram, Saves, Spent
from zero_contract.worker import Progress
from zero_orchestrator.observe.events import MemoryUse
from zero_orchestrator.observe.goodput import Use
from zero_orchestrator.observe.metrics import (
    JOB,
    TIERS,
    TIME,
    Definition,
    Values,
    family,
    time_values,
)
from zero_orchestrator.observe.pace import Speed

NODE = "node"
"""The label that every metric of a node has, beside `JOB`."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Everything that the metrics of a node show."""

    status: Status
    used_ns: Mapping[Use, int]
    """The goodput ledger of this agent, without the step in progress."""
    progress: Progress | None
    step_times: Mapping[int, Histogram]
    spent: Mapping[int, Spent]
    etcd: Histogram
    """The calls of etcd on which the agent's loop waits."""
    memory: MemoryUse | None
    speed: Speed | None
    """Over the last minute of the round."""
    published: Mapping[bool, int]
    """In memory or not -> the checkpoints that were published for rank 0, if that is here."""


def _one(read: Callable[[Readings], float | None]) -> Callable[[Readings], Values]:
    return lambda now: [({}, read(now))]


def _of_step(read: Callable[[Progress], float | None]) -> Callable[[Readings], Values]:
    return lambda now: [({}, None if now.progress is None else read(now.progress))]


def _of_speed(read: Callable[[Speed], float | None]) -> Callable[[Readings], Values]:
    return lambda now: [({}, None if now.speed is None else read(now.speed))]


def _of_memory(read: Callable[[MemoryUse], float]) -> Callable[[Readings], Values]:
    return lambda now: [({}, None if now.memory is None else read(now.memory))]


def _of_ranks(
    reads: Mapping[str, Callable[[Spent], float | None]], label: str | None = None
) -> Callable[[Readings], Values]:
    """A value for each rank, or one for each of some values of a label."""

    def values(now: Readings) -> Values:
        for rank, spent in sorted(now.spent.items()):
            for name, read in reads.items():
                yield {"rank": str(rank), **({label: name} if label else {})}, read(spent)

    return values


def _of_saves(
    reads: Mapping[str, Callable[[Saves], float | None]], label: str | None = None
) -> Callable[[Readings], Values]:
    """As `_of_ranks`, of the saves to disk and of those in memory."""

    def values(now: Readings) -> Values:
        for rank, spent in sorted(now.spent.items()):
            for in_memory, saves in spent.saves.items():
                for name, read in reads.items():
                    labels = {"rank": str(rank), "tier": TIERS[in_memory]}
                    yield {**labels, **({label: name} if label else {})}, read(saves)

    return values


_OF_SAVES = ("rank", "tier")
NODE_METRICS: Sequence[tuple[Definition, Callable[[Readings], Values]]] = (
    (
        Definition(name="zero_agent_healthy", help="1 if the agent's loop turns, else 0."),
        _one(lambda now: healthy(now.status)[0]),
    ),
    (
        Definition(
            name="zero_agent_ready",
            help="1 if the workers of this node run in the round of the job, else 0.",
        ),
        _one(lambda now: ready(now.status)[0]),
    ),
    (
        Definition(
            name="zero_agent_etcd_silence_seconds",
            help="Time since the last answer of etcd; 0 while etcd answers.",
        ),
        _one(lambda now: now.status.store_silent_s or 0.0),
    ),
    (
        Definition(
            name="zero_agent_workers",
            help="1 for the state of the workers of this node, 0 for every other state.",
            labels=("state",),
        ),
        lambda now: [({"state": s}, float(now.status.workers is s)) for s in Workers],
    ),
    (
        Definition(name="zero_node_round", help="Round of the job, as this node knows it."),
        _one(lambda now: now.status.round),
    ),
    (
        Definition(name="zero_node_step", help="Last step that a worker has finished."),
        _of_step(lambda last: last.step),
    ),
    (
        Definition(name="zero_node_samples", help="Samples that the run has consumed up to it."),
        _of_step(lambda last: last.samples or None),
    ),
    (
        Definition(
            name="zero_node_tokens",
            help="Tokens that the run has consumed up to it, if the script counts them.",
        ),
        _of_step(lambda last: last.tokens or None),
    ),
    (
        Definition(
            name="zero_node_samples_per_second",
            help="Samples of all ranks that are trained in a second, over the last minute.",
        ),
        _of_speed(lambda speed: speed.samples),
    ),
    (
        Definition(
            name="zero_node_tokens_per_second",
            help="Tokens of all ranks that are trained in a second, over the last minute.",
        ),
        _of_speed(lambda speed: speed.tokens),
    ),
    (
        Definition(name="zero_node_loss", help="Mean loss of that step."),
        _of_step(lambda last: last.loss),
    ),
    (
        Definition(
            name="zero_node_gradient_norm",
            help="Norm of the gradient of that step, before clipping.",
        ),
        _of_step(lambda last: last.gradient_norm),
    ),
    (
        Definition(name="zero_node_loss_scale", help="Loss scale of fp16 training."),
        _of_step(lambda last: last.loss_scale),
    ),
    (
        Definition(
            name="zero_node_peer_memory_used_bytes",
            help="Memory that in-memory checkpoints use on this node.",
        ),
        _of_memory(lambda use: use.used_bytes),
    ),
    (
        Definition(
            name="zero_node_peer_memory_budget_bytes",
            help="Memory that in-memory checkpoints may use on this node.",
        ),
        _of_memory(lambda use: use.budget_bytes),
    ),
    (
        Definition(
            name="zero_node_rank_time_seconds",
            help="Time of a rank by what it does: it computes, waits for other ranks, or waits for "
            "a checkpoint. Workers under the engine and zero_torch report it.",
            counts=True,
            labels=("rank", "doing"),
        ),
        _of_ranks(
            {
                "computing": lambda rank: rank.compute_s,
                "waiting": lambda rank: rank.wait_s,
                "saving": lambda rank: rank.saving_s,
            },
            label="doing",
        ),
    ),
    (
        Definition(
            name="zero_node_saves",
            help="Saves to disk and in memory that have ended, by rank and outcome.",
            counts=True,
            labels=(*_OF_SAVES, "outcome"),
        ),
        _of_saves(
            {"committed": lambda saves: saves.committed, "failed": lambda saves: saves.failed},
            label="outcome",
        ),
    ),
    (
        Definition(
            name="zero_node_saved_bytes",
            help="Size of a rank's parts of all committed checkpoints.",
            counts=True,
            labels=_OF_SAVES,
        ),
        _of_saves({"": lambda saves: saves.size_bytes}),
    ),
    (
        Definition(
            name="zero_node_save_stall_seconds",
            help="Time for which training waited for the committed saves of a rank.",
            counts=True,
            labels=_OF_SAVES,
        ),
        _of_saves({"": lambda saves: saves.stall_s}),
    ),
    (
        Definition(
            name="zero_node_save_write_seconds",
            help="Time in which a rank wrote its parts of committed checkpoints, without waits for "
            "other ranks; in memory, the time of their digests and of copies to other nodes.",
            counts=True,
            labels=_OF_SAVES,
        ),
        _of_saves({"": lambda saves: saves.write_s}),
    ),
    (
        Definition(
            name="zero_node_save_publish_seconds",
            help="Time in which rank 0 checked the parts of all ranks and published checkpoints.",
            counts=True,
            labels=_OF_SAVES,
        ),
        _of_saves({"": lambda saves: saves.publish_s or None}),
    ),
    (
        Definition(
            name="zero_node_published_checkpoints",
            help="Checkpoints that were published for rank 0, on disk and in memory; only the "
            "node of rank 0 has them.",
            counts=True,
            labels=("tier",),
        ),
        lambda now: [
            ({"tier": TIERS[in_memory]}, count) for in_memory, count in now.published.items()
        ],
    ),
    (
        Definition(
            name="zero_node_restores",
            help="Checkpoints that all ranks have loaded, as rank 0 has reported.",
            counts=True,
            labels=("rank",),
        ),
        _of_ranks({"": lambda rank: rank.restores or None}),
    ),
    (
        Definition(
            name="zero_node_restore_seconds",
            help="Time in which rank 0 read and verified checkpoints that it loaded.",
            counts=True,
            labels=("rank",),
        ),
        _of_ranks({"": lambda rank: rank.restore_s or None}),
    ),
    (
        Definition(
            name="zero_node_restored_bytes",
            help="Bytes that rank 0 read and verified of these checkpoints.",
            counts=True,
            labels=("rank",),
        ),
        _of_ranks({"": lambda rank: rank.restored_bytes or None}),
    ),
    (
        Definition(
            name="zero_node_last_save_seconds",
            help="Time of the last committed save, from its beginning to its end in the "
            "background of training.",
            labels=_OF_SAVES,
        ),
        _of_saves({"": lambda saves: saves.last_s}),
    ),
    (TIME, lambda now: time_values(now.used_ns)),
)
"""Every metric of a node, and its samples."""


STEPS = Definition(
    name="zero_node_step_duration_seconds",
    help="Time of a step without saves, by rank; without the first step of a round.",
    labels=("rank",),
)
ETCD = Definition(
    name="zero_agent_etcd_call_duration_seconds",
    help="Time of a call of etcd on which the agent waits, until its answer.",
)


def of_node(now: Readings) -> Iterator[Metric]:
    """The metrics of a node."""
    common = {JOB: now.status.job, NODE: now.status.node}
    for definition, values in NODE_METRICS:
        samples = (({**common, **labels}, value) for labels, value in values(now))
        if (made := family(definition, samples, per=NODE)) is not None:
            yield made
    steps = {(str(rank),): histogram for rank, histogram in sorted(now.step_times.items())}
    for definition, histograms in ((STEPS, steps), (ETCD, {(): now.etcd})):
        made_of = HistogramMetricFamily(
            definition.name, definition.help, labels=[*common, *definition.labels]
        )
        for labels, histogram in histograms.items():
            counts = accumulate(histogram.counts)
            bounds = (*map(str, BOUNDS_S), "+Inf")
            buckets = list(zip(bounds, counts, strict=True))
            made_of.add_metric([*common.values(), *labels], buckets, histogram.sum_s)
        if made_of.samples:
            yield made_of
