"""What views of memory show that was given back."""

from __future__ import annotations

import pytest
import torch

from zero_engine.sharding.parameter_views import FreedStorage


def test_a_view_of_a_freed_storage_shows_nan_and_can_be_filled_again() -> None:
    data, freed = torch.ones(1000), FreedStorage()
    storage, size_bytes = data.untyped_storage(), data.nbytes
    freed.free(storage)
    assert data.isnan().all()
    assert storage.nbytes() == 0
    freed.fill(storage, size_bytes)
    assert data.fill_(2).sum() == 2000


def test_a_view_shows_nan_where_there_is_no_memory_to_fill_its_storage_again() -> None:
    data, freed = torch.ones(1000), FreedStorage()
    storage, size_bytes = data.untyped_storage(), data.nbytes
    freed.free(storage)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        freed.fill(storage, 1 << 60)
    assert data.isnan().all()
    freed.fill(storage, size_bytes)
    assert data.fill_(2).sum() == 2000


def test_where_torch_has_no_such_call_a_freed_storage_is_empty_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    data, freed = torch.ones(1000), FreedStorage()
    storage, size_bytes = data.untyped_storage(), data.nbytes
    freed.free(storage)
    assert (storage.nbytes(), storage.data_ptr()) == (0, 0)
    freed.fill(storage, size_bytes)
    assert data.fill_(2).sum() == 2000
