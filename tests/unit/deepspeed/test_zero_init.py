"""`zero.Init` reads of a config what `initialize` reads of it."""

from __future__ import annotations

from typing import Any

from torch import nn

import zero_deepspeed
from tests.support.world import WorldPool


def _divided(*sections: Any) -> list[bool]:
    """For each section of a config, whether a layer is divided that is made under `zero.Init`."""
    found = []
    for section in sections:
        with zero_deepspeed.zero.Init(config={"zero_optimization": section}):
            layer = nn.Linear(3, 2)
        found.append(hasattr(layer.weight, "ds_id"))
    return found


def test_a_model_stays_whole_below_stage_3_however_the_config_is_written(
    worlds: WorldPool,
) -> None:
    sections = (True, {"stage": "auto"}, {"stage": 1}, {"zero_stage": 2}, {"stage": None}, None)
    assert worlds.run(1, _divided, *sections) == [[False] * 6]


def test_a_model_is_divided_at_stage_3_however_the_config_is_written(worlds: WorldPool) -> None:
    sections = ({"stage": 3}, {"stage": "3"}, {"stage": 3.0}, {"zero_stage": 3})
    assert worlds.run(1, _divided, *sections) == [[True] * 4]
