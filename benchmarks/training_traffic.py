"""What a step sends, between nodes and inside of them, and how long that takes: a model.

    python benchmarks/training_traffic.py --nodes 8x8,128x8 --parameters 7e9 --accumulation 1,8

The bytes of our gradients are those of `zero_comm.sums.plan`, the others follow from the
algorithms. `training.py --nodes` prints the model beside what the interfaces of real ranks have
counted. A time is bytes / rate, as if computation hid nothing: what is shorter than the computation
of a step can be hidden by it. A ring, and NCCL's, is assumed to cross each node once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from training_systems import NODE_BLOCK

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.traffic import traffic
from zero_comm.sums.plan import DEFAULT_BLOCK, Where, plan_reduction
from zero_comm.sums.quantization import PACKED_BYTES
from zero_comm.topology import Topology
from zero_data.global_batch import contiguous, node_turns, strided

FP32_BYTES = 4
COMPUTE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and where."""

    nodes: tuple[int, ...]
    """Ranks of each node."""
    elements: int
    """Parameters."""
    regathered: int
    """Of these, those that stage 3 and FSDP2 gather for backward again: all but the root's."""
    dtype: str
    accumulation: int
    """Micro-batches of each rank in one step."""
    block: int = DEFAULT_BLOCK

    @property
    def world(self) -> int:
        return sum(self.nodes)

    @property
    def weight_bytes(self) -> int:
        return COMPUTE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes of one step, all nodes together."""

    between: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(between=self.between + other.between, inside=self.inside + other.inside)

    def times(self, factor: float) -> Sent:
        return Sent(between=self.between * factor, inside=self.inside * factor)


# ---- ours ----


def gradients(job: Job, where: Where, block_bytes: float | None = None) -> Sent:
    """All gradients to the owners of their sums, as the plan says.

    Args:
        job: What is trained.
        where: The sums of several micro-steps are formed.
        block_bytes: Of an element of a whole block, if those are rounded; otherwise None.
    """
    micro_batches = job.world * job.accumulation
    assignment = {
        Where.OWNER: lambda: strided(job.world),
        Where.NODE: lambda: node_turns(job.nodes, job.block),
        Where.LOCAL: lambda: contiguous(job.world),
    }[where]()
    plan = plan_reduction(
        assignment.rows(micro_batches), block=job.block, nodes=job.nodes, where=where
    )
    sent = traffic(plan, job.elements, job.weight_bytes, block_bytes)
    return Sent(between=sum(sent.between_bytes), inside=sum(sent.inside_bytes))


def gather(job: Job, size: float) -> Sent:
    """An all-gather: each shard to each other node once, then inside of it, if nodes have ranks."""
    if Topology(nodes=job.nodes).divides:
        return nested(job, size)
    shard, world = size / job.world, job.world
    return Sent(
        between=sum(ranks * (world - ranks) for ranks in job.nodes) * shard,
        inside=sum(ranks * (ranks - 1) for ranks in job.nodes) * shard,
    )


def ours(job: Job, stage: int, where: Where = Where.OWNER) -> Sent:
    size = job.weight_bytes * job.elements
    if stage == 0:  # the sums of gradients, in place of weights
        return gradients(job, where) + gather(job, FP32_BYTES * job.elements)
    if stage < 3:
        return gradients(job, where) + gather(job, size)
    again = job.weight_bytes * job.regathered
    return gradients(job, where) + gather(job, size + again).times(job.accumulation)


# ---- others ----


def ring(job: Job, size: float) -> Sent:
    """An all-gather or reduce-scatter of `size` bytes in one ring of all ranks."""
    part = size * (job.world - 1) / job.world
    count = len(job.nodes) if len(job.nodes) > 1 else 0
    return Sent(between=part * count, inside=part * (job.world - count))


def nested(job: Job, size: float) -> Sent:
    """The same in two parts: inside of nodes, and between ranks of the same number."""
    count = len(job.nodes)
    return Sent(between=size * (count - 1), inside=size * (job.world - count))


def ddp(job: Job) -> Sent:
    """One all-reduce in fp32 a step; autocast leaves gradients in it."""
    return ring(job, FP32_BYTES * job.elements).times(2)


def hierarchical_ring(job: Job) -> Sent:
    """The reduce-scatter in fp32 of every micro-step that ours is compared with."""
    return nested(job, FP32_BYTES * job.elements).times(job.accumulation)


def fsdp2(job: Job, reduce_bytes: int) -> Sent:
    weights = ring(job, job.weight_bytes * (job.elements + job.regathered))
    return (weights + ring(job, reduce_bytes * job.elements)).times(job.accumulation)


def hsdp(job: Job, reduce_bytes: int) -> Sent:
    """Shards inside of nodes, replicas between them."""
    inside, count = job.world - len(job.nodes), len(job.nodes)
    moved = job.weight_bytes * (job.elements + job.regathered) + reduce_bytes * job.elements
    between = 2 * (count - 1) * reduce_bytes * job.elements
    return Sent(between=between, inside=moved * inside).times(job.accumulation)


MODELS: Mapping[str, Callable[[Job], Sent]] = {
    "ddp": ddp,
    "hierarchical fp32 ring": hierarchical_ring,
    "fsdp2": lambda job: fsdp2(job, FP32_BYTES),
    "fsdp2-default": lambda job: fsdp2(job, job.weight_bytes),
    "hsdp": lambda job: hsdp(job, FP32_BYTES),
    "hsdp-default": lambda job: hsdp(job, job.weight_bytes),
    **{f"zero{stage}": lambda job, stage=stage: ours(job, stage) for stage in range(4)},
    **{f"zero{stage}-overlap": lambda job, stage=stage: ours(job, stage) for stage in (1, 2)},
    "zero0-local": lambda job: ours(replace(job, block=NODE_BLOCK), 0, Where.LOCAL),
    "zero1-local": lambda job: ours(replace(job, block=NODE_BLOCK), 1, Where.LOCAL),
    "zero2-node": lambda job: ours(replace(job, block=NODE_BLOCK), 2, Where.NODE),
    "zero3-node": lambda job: ours(replace(job, block=NODE_BLOCK), 3, Where.NODE),
    "our gradients": lambda job: gradients(job, Where.OWNER),
    "our gradients, int8": lambda job: gradients(job, Where.OWNER, PACKED_BYTES),
}
"""By the names of `training_systems`, and three parts alone."""


def nodes_of(text: str) -> tuple[int, ...]:
    """2x4 is two nodes of four ranks; 3,1 cannot be told from a list and is not known here.

    Raises:
        ValueError: It is no such product.
    """
    count, _, ranks = text.partition("x")
    return (int(ranks),) * int(count)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", default="8x8,128x8", help="nodes x ranks of each, in a list")
    parser.add_argument("--parameters", type=float, default=7e9)
    parser.add_argument("--root", type=float, default=0.04, help="their part that stays gathered")
    parser.add_argument("--dtype", default="bf16", choices=COMPUTE_BYTES)
    parser.add_argument("--accumulation", default="1,8", help="micro-batches of a rank and step")
    parser.add_argument("--block", type=int, default=DEFAULT_BLOCK)
    parser.add_argument("--nic-gb-s", type=float, default=45.0, help="GB/s of one network card")
    parser.add_argument("--nics", default="8,1", help="cards of a node, in a list")
    parser.add_argument("--link-gb-s", type=float, default=370.0, help="GB/s of a GPU in its node")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    for text in args.nodes.split(","):
        for accumulation in map(int, args.accumulation.split(",")):
            job = Job(
                nodes=nodes_of(text),
                elements=round(args.parameters),
                regathered=round(args.parameters * (1 - args.root)),
                dtype=args.dtype,
                accumulation=accumulation,
                block=args.block,
            )
            cards = list(map(int, args.nics.split(",")))
            Console(width=120).print(_table(job, text, cards, args.nic_gb_s, args.link_gb_s))


def _table(job: Job, nodes: str, cards: Sequence[int], nic_gb_s: float, link_gb_s: float) -> Table:
    table = Table(
        title=f"{nodes}, {job.elements / 1e9:.1f} B parameters, {job.dtype}, accumulation "
        f"{job.accumulation}; of each node and step"
    )
    for column in ("", "GB between", "GB inside", *(f"s, {n} cards" for n in cards), "s inside"):
        table.add_column(column, justify="right" if column else "left")
    for name, model in MODELS.items():
        sent = model(job).times(1 / len(job.nodes))
        between, inside = sent.between / 1e9, sent.inside / 1e9
        table.add_row(
            name,
            f"{between:.2f}",
            f"{inside:.2f}",
            *(f"{between / (number * nic_gb_s):.2f}" for number in cards),
            f"{inside / job.nodes[0] / link_gb_s:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
