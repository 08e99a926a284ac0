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

from zero_checkpoint.format.dtypes import byte_view, host_bytes
from zero_checkpoint.state.block_digests import block_digests


def weight_hash(weights: Iterable[tuple[str, Tensor]], *, version: int = 2) -> str:
    """A hash of the names, dtypes, shapes and bytes of weights.

    Args:
        weights: Name and whole tensor of each, on any device; a trained one in the highest
            precision there is. `model.state_dict().items()` is one such iterable.
        version: 1: the hash of earlier checkpoints, to compare with one of these. It copies all
            weights to the host.

    Returns:
        "v2:" and 64 hexadecimal digits; those of version 1 alone.

    Raises:
        ValueError: There is no such version.
    """
    if version not in (1, 2):
        raise ValueError(f"version is {version!r}; there are weight hashes of versions 1 and 2")
    digests = {}
    for name, weight in weights:
        digest = hashlib.sha256(f"{name}\0{weight.dtype}\0{tuple(weight.shape)}\0".encode())
        if version == 1:
            digest.update(host_bytes(byte_view(weight.detach().cpu().contiguous().reshape(-1))))
        else:
            digest.update(block_digests(weight.detach().contiguous().reshape(-1)))
        digests[name] = digest.digest()
    whole = hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()
    return whole if version == 1 else f"v{version}:{whole}"
