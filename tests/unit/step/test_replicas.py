"""Which parts of the weights a step compares."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from zero_step.checks.replicas import PIECE, _pieces


def test_every_element_is_compared_once_in_a_round_of_small_pieces() -> None:
    sizes = [3, PIECE, 1, 0, 2 * PIECE + 5, 7, PIECE - 7]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    parameters.insert(2, nn.Parameter(torch.zeros(9, dtype=torch.float64)))
    pieces = _pieces(parameters)
    compared: Counter[tuple[int, int]] = Counter()
    for piece in pieces:
        assert sum(part.stop - part.start for _, part in piece) <= PIECE
        assert len({each.dtype for each, _ in piece}) == 1
        for each, part in piece:
            compared.update((id(each), at) for at in range(part.start, part.stop))
    assert compared == Counter((id(each), at) for each in parameters for at in range(each.numel()))
