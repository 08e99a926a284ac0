"""The orthogonal factor of a matrix, roughly: all singular values brought near to 1.

Owns the iteration, as pure functions of one matrix or a stack of them. Must always hold: the
result depends on the values and the shape alone, so it is the same on whichever rank.

Called by `muon`. Source: K. Jordan, Muon (2024), for the quintic and its coefficients, which
leave singular values between 0.7 and 1.2; T. Dao et al., Gram Newton-Schulz (2026), for the second
way to compute the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7
_RESTART = 3
"""Steps on one Gram matrix: with more of them its rounding errors would grow too large."""


def orthogonalized(
    matrix: Tensor, steps: int, method: str = "gram", coefficients: Coefficients = QUINTIC
) -> Tensor:
    """The orthogonal factor.

    Args:
        matrix: [..., rows, columns] in fp32.
        steps: Of the iteration.
        method: A key of `METHODS`.
        coefficients: Of the odd quintic polynomial.

    Returns:
        [..., rows, columns] in fp32.
    """
    iterate, low_precision = METHODS[method]
    tall = matrix.size(-2) > matrix.size(-1)
    wide = matrix.mT if tall else matrix
    # On a GPU in 16 bits, as everybody does: what is left of 1 is coarser than the rounding.
    wide = wide.to(low_precision if matrix.is_cuda else torch.float32)
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + _EPSILON)
    wide = iterate(wide, steps, coefficients)
    return (wide.mT if tall else wide).to(matrix.dtype)


def _standard(wide: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide


def _gram(wide: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    """Iterate on the Gram matrix, which has the shorter side: the matrix is multiplied less often.

    A step multiplies the matrix with P = a + b G + c G G from the left, hence G with P from both
    sides.
    """
    if wide.size(-2) == wide.size(-1):
        return _standard(wide, steps, coefficients)
    a, b, c = coefficients
    for begin in range(0, steps, _RESTART):
        gram, product = wide @ wide.mT, None
        for _ in range(begin, min(begin + _RESTART, steps)):
            factor = b * gram + c * gram @ gram
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            gram = factor @ gram @ factor
            product = factor if product is None else factor @ product
        assert product is not None
        wide = product @ wide
    return wide


METHODS: dict[str, tuple[Callable[[Tensor, int, Coefficients], Tensor], torch.dtype]] = {
    # bf16 holds the products of the short way too coarsely; all of its values fit into fp16.
    "gram": (_gram, torch.float16),
    "standard": (_standard, torch.bfloat16),
}
"""Name in the config -> how, and the dtype on a GPU."""
