"""The table of the metrics of one node for Prometheus, at `/metrics` of `--health-port`.

Must always hold: a metric whose value is not known is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from zero_agent.node.health_endpoint import Status, healthy, ready
from zero_agent.node.state import Workers
from zero_agent.workers.step_times import Saves, Spent
from zero_contract.worker import Progress
from zero_orchestrator.observe.events import MemoryUse
from zero_orchestrator.observe.goodput import Use
from zero_orchestrator.observe.metrics import JOB, TIERS, Row, Type, collected, known, time_values
from zero_orchestrator.observe.pace import Histogram, Speed

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


def _of_step(read: Callable[[Progress], float | None]) -> Callable[[Readings], float | None]:
    return lambda now: known(now.progress, read)


def _of_ranks(read: Callable[[Spent], float | None]) -> Callable[[Readings], Any]:
    return lambda now: [(str(rank), read(spent)) for rank, spent in sorted(now.spent.items())]


def _saves(now: Readings) -> list[tuple[str, str, Saves]]:
    """Rank and tier, and the saves of the rank to disk or in memory."""
    return [
        (str(rank), TIERS[in_memory], saves)
        for rank, spent in sorted(now.spent.items())
        for in_memory, saves in spent.saves.items()
    ]


def _of_saves(read: Callable[[Saves], float | None]) -> Callable[[Readings], Any]:
    return lambda now: [(rank, tier, read(saves)) for rank, tier, saves in _saves(now)]


_OF_SAVES = ("rank", "tier")
NODE_METRICS: Sequence[Row[Readings]] = (
    Row(
        "zero_agent_healthy",
        "1 if the agent's loop turns, else 0.",
        lambda now: healthy(now.status)[0],
    ),
    Row(
        "zero_agent_ready",
        "1 if the workers of this node run in the round of the job, else 0.",
        lambda now: ready(now.status)[0],
    ),
    Row(
        "zero_agent_etcd_silence_seconds",
        "Time since the last answer of etcd; 0 while etcd answers.",
        lambda now: now.status.store_silent_s or 0.0,
    ),
    Row(
        "zero_agent_workers",
        "1 for the state of the workers of this node, 0 for every other state.",
        lambda now: [(state, float(now.status.workers is state)) for state in Workers],
        ("state",),
    ),
    Row(
        "zero_node_round", "Round of the job, as this node knows it.", lambda now: now.status.round
    ),
    Row(
        "zero_node_step", "Last step that a worker has finished.", _of_step(lambda last: last.step)
    ),
    # No samples or tokens: the script does not count them, so they are not known.
    Row(
        "zero_node_samples",
        "Samples that the run has consumed up to it.",
        _of_step(lambda last: last.samples or None),
    ),
    Row(
        "zero_node_tokens",
        "Tokens that the run has consumed up to it, if the script counts them.",
        _of_step(lambda last: last.tokens or None),
    ),
    Row(
        "zero_node_samples_per_second",
        "Samples of all ranks that are trained in a second, over the last minute.",
        lambda now: known(now.speed, lambda speed: speed.samples),
    ),
    Row(
        "zero_node_tokens_per_second",
        "Tokens of all ranks that are trained in a second, over the last minute.",
        lambda now: known(now.speed, lambda speed: speed.tokens),
    ),
    Row("zero_node_loss", "Mean loss of that step.", _of_step(lambda last: last.loss)),
    Row(
        "zero_node_gradient_norm",
        "Norm of the gradient of that step, before clipping.",
        _of_step(lambda last: last.gradient_norm),
    ),
    Row(
        "zero_node_loss_scale",
        "Loss scale of fp16 training.",
        _of_step(lambda last: last.loss_scale),
    ),
    Row(
        "zero_node_peer_memory_used_bytes",
        "Memory that in-memory checkpoints use on this node.",
        lambda now: known(now.memory, lambda use: use.used_bytes),
    ),
    Row(
        "zero_node_peer_memory_budget_bytes",
        "Memory that in-memory checkpoints may use on this node.",
        lambda now: known(now.memory, lambda use: use.budget_bytes),
    ),
    Row(
        "zero_node_rank_time_seconds",
        "Time of a rank by what it does: it computes, waits for other ranks, or waits for a "
        "checkpoint. Workers under the engine and zero_torch report it.",
        lambda now: [
            (str(rank), doing, time_s)
            for rank, spent in sorted(now.spent.items())
            for doing, time_s in (
                ("computing", spent.compute_s),
                ("waiting", spent.wait_s),
                ("saving", spent.saving_s),
            )
        ],
        ("rank", "doing"),
        Type.COUNTER,
    ),
    Row(
        "zero_node_saves",
        "Saves to disk and in memory that have ended, by rank and outcome.",
        lambda now: [
            (rank, tier, outcome, count)
            for rank, tier, saves in _saves(now)
            for outcome, count in (("committed", saves.committed), ("failed", saves.failed))
        ],
        (*_OF_SAVES, "outcome"),
        Type.COUNTER,
    ),
    Row(
        "zero_node_saved_bytes",
        "Size of a rank's parts of all committed checkpoints.",
        _of_saves(lambda saves: saves.size_bytes),
        _OF_SAVES,
        Type.COUNTER,
    ),
    Row(
        "zero_node_save_stall_seconds",
        "Time for which training waited for the committed saves of a rank.",
        _of_saves(lambda saves: saves.stall_s),
        _OF_SAVES,
        Type.COUNTER,
    ),
    Row(
        "zero_node_save_write_seconds",
        "Time in which a rank wrote its parts of committed checkpoints, without waits for other "
        "ranks; in memory, the time of their digests and of copies to other nodes.",
        _of_saves(lambda saves: saves.write_s),
        _OF_SAVES,
        Type.COUNTER,
    ),
    Row(
        "zero_node_save_publish_seconds",
        "Time in which rank 0 checked the parts of all ranks and published checkpoints.",
        _of_saves(lambda saves: saves.publish_s or None),
        _OF_SAVES,
        Type.COUNTER,
    ),
    Row(
        "zero_node_published_checkpoints",
        "Checkpoints that were published for rank 0, on disk and in memory; only the node of rank "
        "0 has them.",
        lambda now: [(TIERS[in_memory], count) for in_memory, count in now.published.items()],
        ("tier",),
        Type.COUNTER,
    ),
    Row(
        "zero_node_restores",
        "Checkpoints that all ranks have loaded, as rank 0 has reported.",
        _of_ranks(lambda rank: rank.restores or None),
        ("rank",),
        Type.COUNTER,
    ),
    Row(
        "zero_node_restore_seconds",
        "Time in which rank 0 read and verified checkpoints that it loaded.",
        _of_ranks(lambda rank: rank.restore_s or None),
        ("rank",),
        Type.COUNTER,
    ),
    Row(
        "zero_node_restored_bytes",
        "Bytes that rank 0 read and verified of these checkpoints.",
        _of_ranks(lambda rank: rank.restored_bytes or None),
        ("rank",),
        Type.COUNTER,
    ),
    Row(
        "zero_node_last_save_seconds",
        "Time of the last committed save, from its beginning to its end in the background of "
        "training.",
        _of_saves(lambda saves: saves.last_s),
        _OF_SAVES,
    ),
    Row(
        "zero_node_time_seconds",
        "Time of nodes by its use; all uses together are the wall time of all nodes.",
        lambda now: time_values(now.used_ns),
        ("use",),
        Type.COUNTER,
    ),
    Row(
        "zero_node_step_duration_seconds",
        "Time of a step without saves, by rank; without the first step of a round.",
        lambda now: [(str(rank), found) for rank, found in sorted(now.step_times.items())],
        ("rank",),
        Type.HISTOGRAM,
    ),
    Row(
        "zero_agent_etcd_call_duration_seconds",
        "Time of a call of etcd on which the agent waits, until its answer.",
        lambda now: now.etcd,
        (),
        Type.HISTOGRAM,
    ),
)
"""Every metric of a node."""


def of_node(now: Readings) -> Iterator[Metric]:
    """The metrics of a node."""
    return collected(NODE_METRICS, [JOB, NODE], [((now.status.job, now.status.node), now)])
