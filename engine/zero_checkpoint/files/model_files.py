"""Files of a whole model for other tools, written tensor by tensor: safetensors, torch.save.

One tensor is in memory at a time, as far as the writer is concerned.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from zero_checkpoint.format.dtypes import byte_view, elements, host_bytes, name_of

Table = Mapping[str, tuple[torch.dtype, torch.Size]]
"""By name, the dtype and the shape of a tensor."""


class ModelFile(Protocol):
    """A file that is being written."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor. Raises OSError."""

    def finish(self) -> None:
        """Note that all tensors have been put. Raises OSError, and RuntimeError of torch.save."""


class SafetensorsFile:
    """A safetensors file, in which tensors share nothing: each name has bytes of its own."""

    def __init__(self, file: BinaryIO, table: Table) -> None:
        """Write the header. Raises OSError, and CheckpointError for a dtype that it cannot have."""
        self._file = file
        self._places: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        # The widest elements first, so that all are aligned.
        for name in sorted(table, key=lambda each: (-table[each][0].itemsize, each)):
            dtype, shape = table[name]
            begin, end = end, end + shape.numel() * dtype.itemsize
            self._places[name] = begin
            offsets = [begin, end]
            header[name] = {"dtype": name_of(dtype), "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(self._data + end)  # tensors come in any order

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor. Raises OSError."""
        self._file.seek(self._data + self._places[name])
        flat = elements(tensor.cpu()).view(-1)
        self._file.write(host_bytes(byte_view(flat)))

    def finish(self) -> None:
        """Write what is buffered. Raises OSError."""
        self._file.flush()


class TorchFile:
    """A file of torch.save; tied names are one tensor."""

    def __init__(self, file: BinaryIO, directory: Path, table: Table, ties: Mapping[str, str]):
        """Reserve the space for a file of tensors, on the disk of `directory`.

        `ties`: by further name, the name in the table.

        Raises:
            OSError: The disk is full, for example.
        """
        self._file = file
        self._ties = ties
        # torch.save wants all tensors at once: they are in a file without a name meanwhile, and in
        # memory only as long as the kernel has room for them. 64 bytes align any element.
        sizes = {name: -(-s.numel() * d.itemsize // 64) * 64 for name, (d, s) in table.items()}
        with tempfile.TemporaryFile(dir=directory) as scratch:
            total = max(1, sum(sizes.values()))
            os.posix_fallocate(scratch.fileno(), 0, total)  # a full disk is no SIGBUS later
            memory = mmap.mmap(scratch.fileno(), total)
        self._tensors: dict[str, Tensor] = {}
        at = 0
        for name, (dtype, shape) in table.items():
            count = shape.numel()
            flat = (
                torch.frombuffer(memory, dtype=dtype, count=count, offset=at)
                if count
                else torch.empty(0, dtype=dtype, device="cpu")
            )
            self._tensors[name] = flat.view(shape)
            at += sizes[name]

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor until `finish`."""
        self._tensors[name].copy_(tensor.detach())

    def finish(self) -> None:
        """Write the file. Raises OSError, and RuntimeError of torch.save."""
        whole = self._tensors | {name: self._tensors[first] for name, first in self._ties.items()}
        torch.save(whole, self._file)
