"""The fingerprint of data: of the first micro-batch of a run, by which its checkpoints know them.

No more is read for it in the run that begins, and one micro-batch by rank 0 in a job that resumes.
Must always hold: the same samples have the same fingerprint, on any device and in any process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Of a run that resumes; {anew}: how to begin another one.
_OTHER = (
    "the first micro-batch of {dataset} is another one than the run began with, so it resumes in "
    "the middle of other data; give the same dataset, or {anew}"
)
_BY_CHANCE = (
    "the first micro-batch of {dataset} is another one each time it is read, so no run is repeated "
    "exactly: draw what is random in a sample from torch, numpy.random or random, which have a "
    "seed for each micro-batch"
)


def difference(look: Callable[[], int | None], known_as: int, **words: str) -> str:
    """The difference from the data of a checkpoint, with the remedy; empty if none is known.

    `look` reads the first micro-batch, for its fingerprint (None: cannot); `words` see above.
    """
    found = look()
    if found in (None, known_as):
        return ""
    # Only samples that follow from their number can show that these are others.
    return (_OTHER if look() == found else _BY_CHANCE).format(**words)


def fingerprint(batch: Any) -> int:
    """A number that is not 0; tensors, arrays, numbers and text count, others by their type."""
    # Of 56 bits: ranks exchange it as a signed number of 64, in which 0 says that there is none.
    found = hashlib.sha256()
    for part in _parts(batch):
        found.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(found.digest()[:7], "little") or 1


def _parts(value: Any) -> Iterator[bytes]:
    match value:
        case Tensor(layout=torch.strided):
            yield f"{value.dtype} {list(value.shape)}".encode()
            plain = value.detach().cpu().resolve_conj().contiguous().reshape(-1)
            yield plain.view(torch.uint8).numpy().tobytes()
        case np.ndarray() if not value.dtype.hasobject:
            yield f"{value.dtype} {list(value.shape)}".encode()
            yield value.tobytes()
        case Mapping():
            for key in value:
                yield repr(key).encode()
                yield from _parts(value[key])
        case list() | tuple():
            yield str(len(value)).encode()
            for each in value:
                yield from _parts(each)
        case str() | bytes() | bool() | int() | float() | complex() | None:
            yield repr(value).encode()
        case _:
            yield type(value).__qualname__.encode()
