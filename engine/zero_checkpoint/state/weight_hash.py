"""The weight hash: two runs with the same one have the same weights, bit for bit.

It depends on names, dtypes, shapes and values alone; not on how the weights were sharded, nor on
their order, nor on the device. One weight is hashed at a time, so a caller that gathers the weights
need not hold all of them, and weights on a device are hashed there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache

import torch
import xxhash
from torch import Tensor

from zero_checkpoint.format.dtypes import byte_view, elements, host_bytes


def weight_hash(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of the names, dtypes, shapes and bytes of weights.

    Args:
        weights: Name and whole tensor of each, on any device; a trained one in the highest
            precision there is. `model.state_dict().items()` is one such iterable.

    Returns:
        "v2:", the version of the hash, and 64 hexadecimal digits.
    """
    digests = {}
    for name, weight in weights:
        digest = hashlib.sha256(f"{name}\0{weight.dtype}\0{tuple(weight.shape)}\0".encode())
        digest.update(block_digests(elements(weight).reshape(-1)))
        digests[name] = digest.digest()
    whole = hashlib.sha256(b"".join(digests[name] for name in sorted(digests)))
    # With its version: hashes of two versions are not mistaken for those of other weights.
    return f"v2:{whole.hexdigest()}"


# ---- XXH3-64 of the blocks of a tensor, computed where the tensor is ----
# On a device only the digests and the bytes that fill no block are copied to the host. Integers are
# added modulo 2^64, so the digests do not depend on the order in which a device adds. torch has no
# unsigned integers to compute with: an int64 stands for the unsigned number of the same bits, and a
# shift to the right needs a mask.


BLOCK_BYTES = 1 << 16
AT_ONCE_BYTES = 1 << 26
"""Bytes that a device hashes at once; it takes twice this much of the device's memory."""

# XXH3 of more than 240 bytes, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md: each
# stripe of eight words is added to eight accumulators; after sixteen stripes they are scrambled.
_LANES, _STRIPES = 8, 16
_ROUNDS = BLOCK_BYTES // (8 * _LANES * _STRIPES)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIMES_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIMES_64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_BEGIN = (_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0])
_AVALANCHE = 0x165667919E3779F9
_LOW = (1 << 32) - 1


def block_digests(flat: Tensor) -> bytes:
    """The digest of each block, eight bytes each, with the most significant byte first.

    `flat` is contiguous, of one dimension, on any device; its last block may be shorter.
    """
    data = byte_view(flat)
    return b"".join(_on_host(data) if data.is_cpu else in_place(data))


def _on_host(data: Tensor) -> Iterator[bytes]:
    view = host_bytes(data)
    for at in range(0, len(view), BLOCK_BYTES):
        yield xxhash.xxh3_64_digest(view[at : at + BLOCK_BYTES])


def in_place(data: Tensor, at_once_bytes: int = AT_ONCE_BYTES) -> Iterator[bytes]:
    """The same digests of uint8, computed on the tensor's device.

    `at_once_bytes` is a multiple of `BLOCK_BYTES`.
    """
    whole = data.numel() - data.numel() % BLOCK_BYTES
    if data.storage_offset() % 8:  # words are read at multiples of their size
        data = data.clone()
    for start in range(0, whole, at_once_bytes):
        words = data[start : min(start + at_once_bytes, whole)].view(torch.int64)
        # A digest has the most significant byte first, a word of this machine the least.
        yield _of_whole_blocks(words).cpu().numpy().byteswap().tobytes()
    yield from _on_host(data[whole:].cpu())


def _of_whole_blocks(words: Tensor) -> Tensor:
    """XXH3-64 of each block of a device's words, int64 [blocks]."""
    keys, scramble, merge, begin = _constants(words.device)
    words = words.view(-1, _ROUNDS, _STRIPES, _LANES)
    # Each accumulator gets the product of the two halves of its word, mixed with the secret, and
    # the word of its neighbour.
    products = words ^ keys
    low = products & _LOW
    products = products.bitwise_right_shift_(32).bitwise_and_(_LOW).mul_(low)
    swapped = words.sum(2).view(-1, _ROUNDS, _LANES // 2, 2).flip(-1)
    sums = products.sum(2) + swapped.view(-1, _ROUNDS, _LANES)
    # The sums of a round are whole before the accumulators are scrambled for the next one.
    found = begin + sums[:, 0]
    for number in range(1, _ROUNDS):
        found = (found ^ _shift(found, 47) ^ scramble) * _PRIMES_32[0] + sums[:, number]
    # They are merged in pairs: the upper half of a product of 128 bits, xor the lower one. No type
    # of torch has 128 bits, so the product is added up from those of halves.
    pairs = (found ^ merge).view(-1, _LANES // 2, 2).unbind(-1)
    (a_low, a_high), (b_low, b_high) = ((each & _LOW, _shift(each, 32)) for each in pairs)
    lowest, middle = a_low * b_low, a_high * b_low
    cross = _shift(lowest, 32) + (middle & _LOW) + a_low * b_high
    upper = _shift(middle, 32) + _shift(cross, 32) + a_high * b_high
    folded = upper ^ (cross << 32 | lowest & _LOW)
    # The avalanche of XXH3.
    mixed = folded.sum(1) + _signed(BLOCK_BYTES * _PRIMES_64[0])
    mixed = (mixed ^ _shift(mixed, 37)) * _AVALANCHE
    return mixed ^ _shift(mixed, 32)


def _shift(words: Tensor, count: int) -> Tensor:
    """To the right, as an unsigned number."""
    return words >> count & (1 << 64 - count) - 1


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The secret of each word, of scrambling, and of merging; the first accumulators."""
    stripes = [_secret(8 * stripe) for stripe in range(_STRIPES)]
    keys = torch.tensor([stripes] * _ROUNDS, device="cpu")
    keys[-1, -1] = torch.tensor(_secret(121), device="cpu")  # of the last stripe
    others = (_secret(128), _secret(11), [_signed(each) for each in _BEGIN])
    scramble, merge, begin = (torch.tensor(each, device=device) for each in others)
    return keys.to(device), scramble, merge, begin


def _secret(start: int) -> list[int]:
    """Eight words of the secret, from a byte on."""
    places = range(start, start + 8 * _LANES, 8)
    return [int.from_bytes(_SECRET[at : at + 8], "little", signed=True) for at in places]


def _signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
