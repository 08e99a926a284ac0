from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.models import make_model
from zero_engine.sharding.flat_unit import ALIGN, overlap, plan_layout, round_up
from zero_engine.sharding.partition import aliases, partition, wrapped_modules
from zero_step.gradients.norm import SHARD_GRAIN

shapes = st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=6)


@given(shapes=shapes, world=st.integers(1, 9))
def test_slots_are_aligned_in_order_and_apart_and_shards_are_whole_blocks(
    shapes: list[list[int]], world: int
) -> None:
    layout = plan_layout([(str(i), torch.Size(shape), 0) for i, shape in enumerate(shapes)])
    starts = [slot.start for slot in layout.slots]
    ends = [slot.stop for slot in layout.slots]
    assert all(start % ALIGN == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert [slot.numel for slot in layout.slots] == [torch.Size(s).numel() for s in shapes]
    padded = layout.padded(world)
    assert layout.numel <= padded < layout.numel + world * SHARD_GRAIN
    assert padded % (world * SHARD_GRAIN) == 0


def test_a_group_is_one_aligned_run_of_the_unit() -> None:
    layout = plan_layout(
        [("a", torch.Size([70]), 0), ("b", torch.Size([3]), 0), ("c", torch.Size([65]), 2)]
    )
    assert layout.runs() == {0: (0, 192), 2: (192, 320)}


def test_an_untrained_parameter_belongs_to_no_run() -> None:
    assert plan_layout([("a", torch.Size([5]), None)]).runs() == {}


def test_overlap_is_empty_at_the_point_where_intervals_miss() -> None:
    assert overlap(2, 9, 4, 20) == (4, 9)
    start, stop = overlap(2, 9, 12, 20)
    assert start == stop
    assert round_up(65, 64) == 128


def test_a_tied_parameter_belongs_to_the_root_and_is_stored_under_its_first_name() -> None:
    model = make_model()
    specs = partition(
        model, {id(p): 0 for p in model.parameters() if p.requires_grad}, torch.float32
    )
    names = {spec.name: [m.fqn for m in spec.members] for spec in specs}
    assert list(names) == [
        "blocks.0",
        "blocks.0 (untrained, float32)",
        "blocks.1",
        "blocks.1 (untrained, float32)",
        "root",
    ]
    assert names["root"] == ["position", "unused", "embed.weight", "norm.weight", "norm.bias"]
    assert names["blocks.1 (untrained, float32)"] == ["blocks.1.scale"]
    assert aliases(model) == {"head.weight": "embed.weight"}


def test_members_are_ordered_by_group_so_that_a_group_is_contiguous() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = {id(p): int(p.dim() < 2) for p in model.parameters()}
    (root,) = partition(model, groups, torch.float32)
    assert [m.fqn for m in root.members] == ["0.weight", "1.weight", "0.bias", "1.bias"]


def test_only_callable_elements_of_outermost_lists_become_units() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict(
                {"h": nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])])}
            )

        def forward(self) -> None: ...

    assert list(wrapped_modules(Stack())) == ["body.h.0", "body.h.1.0"]


def test_in_bf16_training_every_floating_parameter_narrows_and_others_do_not() -> None:
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    specs = partition(model, {id(model.weight): 0, id(model.bias): 0}, torch.bfloat16)
    assert {spec.dtype for spec in specs} == {torch.bfloat16, torch.int8}
