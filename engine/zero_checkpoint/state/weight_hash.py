"""The weight hash: two runs with the same one have the same weights, bit for bit.

Must always hold: it depends on names, dtypes, shapes and values alone; not on how the weights were
sharded, nor on their order, nor on the device. One weight is hashed at a time, so a caller that
gathers the weights need not hold all of them, and weights on a device are hashed there. The hash
says of which version it is, so that those of two versions are not mistaken for other weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor

from zero_checkpoint.state.block_digests import block_digests


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
        digest.update(block_digests(weight.detach().contiguous().reshape(-1)))
        digests[name] = digest.digest()
    whole = hashlib.sha256(b"".join(digests[name] for name in sorted(digests)))
    return f"v2:{whole.hexdigest()}"
