"""The weight hash of plain tensors, against bytes that are written out by hand."""

from __future__ import annotations

import hashlib
import struct

import torch
import xxhash

from zero_checkpoint.state.weight_hash import weight_hash

TENSORS = [
    ("scale", torch.tensor(0.5, requires_grad=True)),
    ("layer.weight", torch.arange(6.0).reshape(2, 3)),
    ("layer.bias", torch.tensor([1.0, -2.0], dtype=torch.bfloat16)),
    ("big", torch.arange(20_000, dtype=torch.int32)),
]
BYTES = {
    b"big\0torch.int32\0(20000,)\0": struct.pack("<20000i", *range(20_000)),
    b"layer.bias\0torch.bfloat16\0(2,)\0": b"\x80\x3f\x00\xc0",
    b"layer.weight\0torch.float32\0(2, 3)\0": struct.pack("<6f", *range(6)),
    b"scale\0torch.float32\0()\0": struct.pack("<f", 0.5),
}
"""What is hashed, in the order of the names."""


def test_the_weight_hash_of_plain_tensors_is_the_published_one() -> None:
    """SHA-256 over those of (name, dtype, shape, XXH3-64 of blocks of 64 KiB), sorted by name."""
    whole = hashlib.sha256()
    for head, data in BYTES.items():
        blocks = [data[at : at + 65536] for at in range(0, len(data), 65536)]
        whole.update(hashlib.sha256(head + b"".join(map(xxhash.xxh3_64_digest, blocks))).digest())

    assert weight_hash(TENSORS) == "v2:" + whole.hexdigest()


def test_the_weight_hash_does_not_depend_on_how_a_tensor_lies_in_memory() -> None:
    """A transposed view has the hash of the same values in one block."""
    view = torch.arange(6.0).reshape(2, 3).T

    assert weight_hash({"w": view}.items()) == weight_hash({"w": view.contiguous()}.items())
    assert weight_hash({"w": view}.items()) != weight_hash({"w": view.T}.items())


def test_every_flipped_bit_and_every_two_swapped_blocks_change_the_weight_hash() -> None:
    """Each bit of some words, and one bit in each region of blocks that are equal but for it."""
    weights = torch.zeros(3 * 16384 + 5, dtype=torch.int32)  # three blocks and a short one
    words = [0, 1, 15, 16383, 16384, 20_000, 3 * 16384, 3 * 16384 + 4]
    found = {weight_hash({"w": weights.view(torch.float32)}.items())}
    for word in words:
        for bit in range(32):
            weights[word] = 1 << bit if bit < 31 else -(1 << 31)  # NaNs, -0.0 and small numbers
            found.add(weight_hash({"w": weights.view(torch.float32)}.items()))
        weights[word] = 0
    assert len(found) == 1 + 32 * len(words)

    weights.copy_(torch.arange(weights.numel(), dtype=torch.int32) // 16384)
    first, second, third, rest = weights.split(16384)
    swapped = [weights, torch.cat([second, first, third, rest])]
    swapped += [torch.cat([first, third, second, rest]), torch.cat([third, second, first, rest])]
    assert len({weight_hash({"w": each}.items()) for each in swapped}) == 4
