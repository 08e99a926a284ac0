"""torchdata's loader is taken at its begin, and refused with a position that would be left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_torch
from zero_contract.errors import ConfigError
from zero_data import Lanes

pytestmark = pytest.mark.filterwarnings("ignore")  # its own, when it is imported
REFUSED = r"load_state_dict\(\) of the DataLoader was called"


@pytest.fixture
def loader() -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(range(8), batch_size=2)


def test_a_loader_that_was_given_a_position_is_refused_with_the_remedy(loader: Any) -> None:
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match=REFUSED):
        Lanes(loader, lanes=2)


def test_a_loader_that_a_run_reads_takes_no_position_any_more(loader: Any) -> None:
    Lanes(loader, lanes=2)
    with pytest.raises(ConfigError, match=REFUSED):
        loader.load_state_dict(loader.state_dict())


def test_a_loader_among_the_objects_that_a_run_keeps_is_refused(loader: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"stateful\['data'\] is the loader, .*: leave it out"):
        zero_torch.protect(model, optimizer, loader, microbatches=2, stateful={"data": loader})
