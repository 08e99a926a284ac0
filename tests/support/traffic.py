"""What the plan of a sum costs on the network: asked by benchmarks and tests, never in a run."""

from __future__ import annotations

from dataclasses import dataclass

from zero_comm.sums.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that each node sends in one step, by node."""

    inside_bytes: tuple[int, ...]
    """From rank to rank of the node."""
    between_bytes: tuple[int, ...]
    """To other nodes."""


def traffic(
    plan: Plan, elements: int, gradient_bytes: int, block_bytes: float | None = None
) -> Traffic:
    """The cost of the gradients of one step, of so many elements.

    Bytes are as in `Plan.most_under_way`; sums are in fp32.
    """
    inside, between = [0.0] * len(plan.nodes), [0.0] * len(plan.nodes)
    first = 0
    for node, size in enumerate(plan.nodes):
        ranks = range(first, first + size)
        near, far = _parts_to_owners(plan, ranks)
        for step in plan.micro_steps:
            to_owners = plan.bytes_of(step.nodes[node].gives, gradient_bytes, block_bytes)
            to_others = sum(plan.bytes_of(step.ranks[r].gives, gradient_bytes) for r in ranks)
            others = plan.parts - plan.parts // size  # of each piece, all but its own slice
            inside[node] += to_others * others + to_owners * near
            between[node] += to_owners * far
        first += size
    return Traffic(
        inside_bytes=tuple(int(parts * elements / plan.parts) for parts in inside),
        between_bytes=tuple(int(parts * elements / plan.parts) for parts in between),
    )


def _parts_to_owners(plan: Plan, ranks: range) -> tuple[int, int]:
    """Of one piece of a node, the parts that go to owners inside of it and outside."""
    near = far = 0
    for rank in ranks:
        for target, start, stop in plan.slices.routes(rank):
            if target not in ranks:
                far += stop - start
            elif target != rank:
                near += stop - start
    return near, far
