"""Files of whole models, written tensor by tensor."""

from __future__ import annotations

import io
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from zero_checkpoint.files.model_files import SafetensorsFile, TorchFile

WHOLE: dict[str, Tensor] = {
    "half": torch.arange(7.0).bfloat16(),
    "matrix": torch.arange(6.0).view(2, 3),
    "number": torch.tensor(3),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
}
TABLE = {name: (value.dtype, value.shape) for name, value in WHOLE.items()}


def test_a_safetensors_file_is_as_long_and_reads_as_the_one_its_own_library_writes() -> None:
    file = io.BytesIO()
    writer = SafetensorsFile(file, TABLE)
    for name in reversed(WHOLE):
        writer.put(name, WHOLE[name])
    writer.finish()
    theirs = save(WHOLE, metadata={"format": "pt"})
    assert len(file.getvalue()) == len(theirs)
    read = load(file.getvalue())
    assert read.keys() == WHOLE.keys()
    assert all(torch.equal(read[name], value) for name, value in WHOLE.items())
    assert all(read[name].dtype == value.dtype for name, value in WHOLE.items())


def test_a_torch_file_ties_names_and_tensors_share_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        writer = TorchFile(file, tmp_path, TABLE, {"tied": "matrix"})
        for name in reversed(WHOLE):
            writer.put(name, WHOLE[name])
        writer.finish()
    read = torch.load(path, weights_only=True)
    assert read.keys() == WHOLE.keys() | {"tied"}
    assert all(torch.equal(read[name], value) for name, value in WHOLE.items())
    assert read["tied"].data_ptr() == read["matrix"].data_ptr()
    assert read["half"].untyped_storage().nbytes() == 14
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.bin"]


@pytest.fixture
def small_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_torch_file_for_which_there_is_no_room_is_an_error_before_anything_is_kept(
    tmp_path: Path,
) -> None:
    table = {"large": (torch.float32, torch.Size([1 << 16]))}
    with (tmp_path / "model.bin").open("wb") as file, pytest.raises(OSError, match="too large"):
        TorchFile(file, tmp_path, table, {})
