"""Quantization to int8: blocks of 256 values, each with its own scale.

Owns the format. A row of n values is sent as n codes and then n / 256 scales in fp32, in one buffer
of bytes: a quarter of fp32, half of bf16. Blocks lie on the flat grid, so the result depends
neither on the world size nor on the sender.

It serves weights (qwZ) and gradients (qgZ). Source of the idea: ZeRO++ (arXiv 2306.10209), which
quantizes gradients to int4 and reduces them in two hops; here the sum of a block of micro-batches
is quantized once, wherever it is formed, and these are added in fp32, as `ordered_sum` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUANT_BLOCK = 256
"""Elements; a divisor of 1024, in multiples of which shards are cut."""
_LARGEST = 127
_SCALE_BYTES = 4
PACKED_BYTES = 1 + _SCALE_BYTES / QUANT_BLOCK
"""Of each value."""


def packed_size(numel: int) -> int:
    """Bytes of a row of `numel` values, a multiple of the block."""
    return numel + numel // QUANT_BLOCK * _SCALE_BYTES


def pack(values: Tensor, into: Tensor) -> None:
    """Quantize floating-point rows [rows, n] into uint8 [rows, packed_size(n)]."""
    codes, scales = _parts(into)
    for row, row_codes, row_scales in zip(values, codes, scales, strict=True):
        blocks = row.float().view(-1, QUANT_BLOCK)
        scale = torch.linalg.vector_norm(blocks, float("inf"), dim=1).div_(_LARGEST)
        row_scales.copy_(scale)
        # Codes must be numbers, also where the scale is zero or not finite.
        usable = torch.isfinite(scale) & (scale > 0)
        divisor = torch.where(usable, scale, 1.0).unsqueeze(1)
        steps = torch.where(usable.unsqueeze(1), blocks / divisor, 0.0).round_()
        # The scale of subnormal numbers is rounded, perhaps down: the largest are saturated then.
        steps.clamp_(-_LARGEST, _LARGEST)
        row_codes.copy_(steps.flatten())


def unpack(packed: Tensor, into: Tensor) -> Tensor:
    """Dequantize uint8 [rows, packed_size(n)], rounded to the dtype of `into` [rows, n]."""
    codes, scales = _parts(packed)
    for row, row_codes, row_scales in zip(into, codes, scales, strict=True):
        blocks = row_codes.view(-1, QUANT_BLOCK).float()
        # One value that is not finite makes the block NaN: an overflow is seen as without
        # quantization.
        scale = torch.where(torch.isfinite(row_scales), row_scales, float("nan"))
        row.copy_(blocks.mul_(scale.unsqueeze(1)).flatten())
    return into


def rounded(values: Tensor, into: Tensor) -> Tensor:
    """Pack flat values, and unpack them again; `into` may be the same memory."""
    packed = torch.empty(1, packed_size(values.numel()), dtype=torch.uint8, device=values.device)
    pack(values.view(1, -1), packed)
    return unpack(packed, into.view(1, -1)).view(-1)


def _parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, n] and scales fp32 [rows, n / 256]: views of the bytes."""
    numel = packed.shape[1] * QUANT_BLOCK // (QUANT_BLOCK + _SCALE_BYTES)
    return packed[:, :numel].view(torch.int8), packed[:, numel:].view(torch.float32)
