"""The weight hash of plain tensors, against bytes that are written out by hand."""

from __future__ import annotations

import hashlib
import struct

import torch

from zero_checkpoint.weight_hash import weight_hash


def test_the_weight_hash_of_plain_tensors_is_the_published_one() -> None:
    """SHA-256 over the digests of (name, dtype, shape, little-endian bytes), sorted by name."""
    weight = b"layer.weight\0torch.float32\0(2, 3)\0" + struct.pack("<6f", *range(6))
    bias = b"layer.bias\0torch.bfloat16\0(2,)\0" + b"\x80\x3f" + b"\x00\xc0"  # 1.0, -2.0
    scale = b"scale\0torch.float32\0()\0" + struct.pack("<f", 0.5)
    digests = [hashlib.sha256(each).digest() for each in (bias, weight, scale)]
    expected = hashlib.sha256(b"".join(digests)).hexdigest()

    tensors = [
        ("scale", torch.tensor(0.5, requires_grad=True)),
        ("layer.weight", torch.arange(6.0).reshape(2, 3)),
        ("layer.bias", torch.tensor([1.0, -2.0], dtype=torch.bfloat16)),
    ]

    assert weight_hash(tensors) == expected


def test_the_weight_hash_does_not_depend_on_how_a_tensor_lies_in_memory() -> None:
    """A transposed view has the hash of the same values in one block."""
    view = torch.arange(6.0).reshape(2, 3).T

    assert weight_hash({"w": view}.items()) == weight_hash({"w": view.contiguous()}.items())
    assert weight_hash({"w": view}.items()) != weight_hash({"w": view.T}.items())
