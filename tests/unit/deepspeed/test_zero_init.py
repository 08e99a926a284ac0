"""`zero.Init` reads of a config what `initialize` reads of it."""

from __future__ import annotations

import subprocess
import sys

_MADE = """
import torch.nn, zero_deepspeed
for section in {sections}:
    with zero_deepspeed.zero.Init(config={{"zero_optimization": section}}):
        layer = torch.nn.Linear(3, 2)
    print(hasattr(layer.weight, "ds_id"))
"""


def _divided(*sections: object) -> list[str]:
    """For each section of a config, whether a layer is divided that is made under `zero.Init`."""
    script = _MADE.format(sections=sections)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_a_model_stays_whole_below_stage_3_however_the_config_is_written() -> None:
    sections = (True, {"stage": "auto"}, {"stage": 1}, {"zero_stage": 2}, {"stage": None}, None)
    assert _divided(*sections) == ["False"] * 6


def test_a_model_is_divided_at_stage_3_however_the_config_is_written() -> None:
    sections = ({"stage": 3}, {"stage": "3"}, {"stage": 3.0}, {"zero_stage": 3})
    assert _divided(*sections) == ["True"] * 4
