"""What several ranks have alike is divided among them, and every element is read once."""

from __future__ import annotations

import itertools

import pytest
import torch

from zero_checkpoint.format.pieces import PARAM, Piece, TensorId
from zero_torch.state.shared_reads import Box, SharedReads, clip, divide

TENSORS = [(7, 4), (0, 4), (1, 8), (300, 2), (5, 4)]
"""Elements, and the bytes of one."""


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_parts_are_all_elements_once_and_of_nearly_as_many_bytes(parts: int) -> None:
    divided = divide(TENSORS, parts)
    read = [
        (tensor, at)
        for part in divided
        for tensor, start, stop in part
        for at in range(start, stop)
    ]
    assert read == [(number, at) for number, (size, _) in enumerate(TENSORS) for at in range(size)]
    sizes = [sum((stop - start) * TENSORS[t][1] for t, start, stop in part) for part in divided]
    assert max(sizes) - min(sizes) <= 2 * 8


def test_a_part_has_the_runs_of_a_box() -> None:
    """Rows 4 and 5 of columns 2 to 4, elements 1 to 4 of them."""
    tensor = TensorId(PARAM, "w")
    box = Box(
        id=tensor, shape=(9, 7), offsets=(4, 2), data=torch.arange(6.0).view(2, 3), ranks=(0,)
    )
    found = [(piece.start, piece.data.tolist()) for piece in clip(box.pieces(), 1, 5)]
    assert found == [(4 * 7 + 3, [1.0, 2.0]), (5 * 7 + 2, [3.0, 4.0])]


def test_ranks_that_have_different_boxes_read_for_themselves() -> None:
    """Of four ranks in two pairs of replicas, each pair divides its own."""

    def reads(rank: int) -> list[Piece]:
        pair = rank % 2
        boxes = [
            Box(
                id=TensorId(PARAM, name),
                shape=(8,),
                offsets=(4 * pair,),
                data=torch.zeros(4),
                ranks=(pair, pair + 2),
            )
            for name in ("a", "b")
        ]
        return list(SharedReads(boxes, rank, 4).pieces)

    found = [[(p.id.fqn, p.start, p.data.numel()) for p in reads(rank)] for rank in range(4)]
    assert found == [[("a", 0, 4)], [("a", 4, 4)], [("b", 0, 4)], [("b", 4, 4)]]
    assert len(set(itertools.chain(*found))) == 4
