"""The weight hash: two runs with the same one have the same weights, bit for bit.

Must always hold: it depends on names, dtypes, shapes and values alone; not on how the weights were
sharded, nor on their order. One weight is hashed at a time, so a caller that gathers the weights
need not hold all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor

from zero_checkpoint.format.dtypes import byte_view, host_bytes


def weight_hash(weights: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 (hex) over the digest of each weight, in the order of their names.

    A digest covers the weight's name, dtype, shape and bytes.

    Args:
        weights: Name and whole tensor of each, on any device; a trained one in the highest
            precision there is. `model.state_dict().items()` is one such iterable.
    """
    digests = {}
    for name, weight in weights:
        digest = hashlib.sha256(f"{name}\0{weight.dtype}\0{tuple(weight.shape)}\0".encode())
        digest.update(host_bytes(byte_view(weight.detach().cpu().contiguous().reshape(-1))))
        digests[name] = digest.digest()
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()
