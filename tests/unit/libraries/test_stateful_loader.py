"""torchdata's loader is taken at its begin, and refused with a position that would be left out."""

from __future__ import annotations

import pytest

from zero_contract.errors import ConfigError
from zero_data import Lanes


@pytest.mark.filterwarnings("ignore")  # its own, when it is imported
def test_a_loader_that_was_given_a_position_is_refused_with_the_remedy() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    loader = loaders.StatefulDataLoader(range(8), batch_size=2)
    Lanes(loader, lanes=2)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match=r"load_state_dict\(\) of the StatefulDataLoader was "):
        Lanes(loader, lanes=2)
