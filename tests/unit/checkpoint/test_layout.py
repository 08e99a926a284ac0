"""What is copied and written of a state: as few runs of memory as there are."""

from __future__ import annotations

import torch

from zero_checkpoint.format.layout import parts
from zero_checkpoint.format.pieces import PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.saving.commit import own_layout

NAMES = ("a", "b", "c", "d")


def laid_out(flat: torch.Tensor, intervals: list[tuple[int, int]]):
    """The layout of a piece for each interval of a flat buffer."""
    ids = [TensorId(PARAM, name) for name in NAMES[: len(intervals)]]
    data = [flat[start:stop] for start, stop in intervals]
    tensors = {i: TensorInfo((d.numel(),), d.dtype) for i, d in zip(ids, data, strict=True)}
    pieces = tuple(Piece(i, 0, d) for i, d in zip(ids, data, strict=True))
    return own_layout(State(tensors, pieces, {}, {}), 0)


def test_pieces_that_follow_each_other_in_memory_are_one_run():
    flat = torch.arange(100, dtype=torch.float32)
    layout = laid_out(flat, [(0, 10), (10, 30), (32, 40), (40, 100)])
    head, *runs = parts(layout)
    assert head.numel() == len(layout.head)
    assert [run.view(torch.float32).tolist() for run in runs] == [
        flat[:30].tolist(),
        flat[32:].tolist(),
    ]


def test_pieces_in_another_order_or_of_other_memory_are_runs_of_their_own():
    flat = torch.arange(40, dtype=torch.float32)
    _, *runs = parts(laid_out(flat, [(20, 40), (0, 20)]))
    assert [run.numel() for run in runs] == [80, 80]
    whole = State(
        {TensorId(PARAM, n): TensorInfo((20,), torch.float32) for n in "ab"},
        tuple(Piece(TensorId(PARAM, n), 0, flat[:20].clone()) for n in "ab"),
        {},
        {},
    )
    assert [run.numel() for run in parts(own_layout(whole, 0))][1:] == [80, 80]


def test_a_run_is_the_memory_itself():
    flat = torch.zeros(8, dtype=torch.bfloat16)
    _, run = parts(laid_out(flat, [(0, 4), (4, 8)]))
    flat.fill_(1)
    assert run.view(torch.bfloat16).tolist() == [1] * 8
