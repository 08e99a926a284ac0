"""Digests that a device computes are those of the xxhash library.

Integers have the same sums on every device, so the computation is shown here on the CPU, against
the library; `make gpu-test` repeats it on a device.
"""

from __future__ import annotations

import pytest
import torch
import xxhash

from zero_checkpoint.state.weight_hash import BLOCK_BYTES, block_digests, in_place

PATTERNS = {
    "random": None,
    "zero": 0x00,
    "ones": 0xFF,  # NaNs with a payload, and -1
    "-0.0": 0x80,
}
DTYPES = (
    *(torch.bool, torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16),
    *(torch.float32, torch.int64, torch.float64, torch.complex64),
)
SIZES = (0, 1, 240, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 77)


def of_the_library(data: torch.Tensor) -> bytes:
    every = data.numpy().tobytes()
    blocks = [every[at : at + BLOCK_BYTES] for at in range(0, len(every), BLOCK_BYTES)]
    return b"".join(map(xxhash.xxh3_64_digest, blocks))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_a_device_s_digests_are_those_of_the_library(pattern: str, offset: int) -> None:
    """For sizes around a block, wherever the tensor begins; two blocks at once and all at once."""
    generator = torch.Generator().manual_seed(3)
    for size in SIZES:
        data = torch.randint(256, (size + offset,), dtype=torch.uint8, generator=generator)
        if (byte := PATTERNS[pattern]) is not None:
            data.fill_(byte)
        data = data[offset:]
        expected = of_the_library(data)
        assert b"".join(in_place(data)) == expected, size
        assert b"".join(in_place(data, 2 * BLOCK_BYTES)) == expected, size
        assert block_digests(data) == expected, size


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digests_are_of_the_bytes_whatever_the_dtype(dtype: torch.dtype) -> None:
    """NaNs, infinities, -0.0 and subnormal numbers are bytes as all others."""
    generator = torch.Generator().manual_seed(4)
    data = torch.randint(256, (2 * BLOCK_BYTES + 16,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        data %= 2
    values = data.view(dtype)
    assert block_digests(values) == b"".join(in_place(data)) == of_the_library(data)
