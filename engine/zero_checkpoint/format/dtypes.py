"""Names of element types on disk, and the bytes behind a tensor.

Must always hold: a dtype has one name, the one of the safetensors format, so that any safetensors
reader opens the files of a checkpoint; a dtype without a name is refused by name, never cast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zero_checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_SAFETENSORS_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in _SAFETENSORS_NAMES.items()
    if hasattr(torch, attribute)
}
"""On-disk name -> torch dtype, for the dtypes that this torch has."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype.

    Raises:
        CheckpointError: The format does not have this element type.
    """
    try:
        return NAMES[dtype]
    except KeyError:
        known = ", ".join(NAMES.values())
        raise CheckpointError(
            f"{dtype} cannot be stored; cast the tensor to one of {known}"
        ) from None


def elements(tensor: Tensor) -> Tensor:
    """The values of a tensor as bytes in memory, contiguous; a copy if they are not there so."""
    # A view may conjugate or negate what is in memory when it is read.
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def byte_view(data: Tensor) -> Tensor:
    """The bytes of a contiguous 1-D tensor: uint8 [numel * itemsize], a view on its device."""
    return data.detach().view(torch.uint8)


def host_bytes(data: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D uint8 CPU tensor, writable and sharing its memory."""
    return data.numpy().data
