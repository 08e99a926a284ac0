"""DeepSpeed's `deepspeed.elasticity`: what a config's "elasticity" section chooses.

For programs that plan how many workers a job is given; the engine trains at every world size.
Source of the signature: DeepSpeed 0.19.6, deepspeed/elasticity; removed in 0.19.8.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from zero_deepspeed.elasticity import config
from zero_deepspeed.elasticity.config import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from zero_engine.config.elasticity import choose_batch
from zero_engine.config.parse import load_config

__all__ = ["compute_elastic_config", "config"]

_FIRST_RELEASE = (0, 3, 8)
_NEWEST_VERSION = 0.2


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The batch of a config's "elasticity" section, and the worlds that divide it.

    Args:
        ds_config: The config, with its section "elasticity".
        target_deepspeed_version: A version of DeepSpeed, which must know this section.
        world_size: The number of ranks, for their micro-batch.
        return_microbatch: Return the micro-batch for WORLD_SIZE of the environment.

    Returns:
        The samples of a step, the worlds that divide them, and with `world_size` or
        `return_microbatch` the largest micro-batch that a rank's samples consist of.

    Raises:
        ElasticityError: The section is missing, disabled or wrong, or newer than the version.
        ElasticityIncompatibleWorldSize: `world_size` does not divide the batch.
    """
    section = ds_config.get("elasticity")
    if not isinstance(section, Mapping) or not section.get("enabled"):
        raise ElasticityError('elasticity: give a section "elasticity" with "enabled": true')
    release = tuple(int(part) for part in re.findall(r"\d+", target_deepspeed_version)[:3])
    if release < _FIRST_RELEASE:
        raise ElasticityError(
            f"elasticity: DeepSpeed {target_deepspeed_version} has none; use 0.3.8 or newer"
        )
    wanted = load_config({"elasticity": section}).elasticity
    version = float(section.get("version", _NEWEST_VERSION))
    if version > _NEWEST_VERSION:
        raise ElasticityConfigError(
            f"elasticity.version: {version} is not known; the newest is {_NEWEST_VERSION}"
        )
    chosen = choose_batch(wanted)
    world = world_size or (int(os.environ.get("WORLD_SIZE", "1")) if return_microbatch else 0)
    if not world:
        return chosen.samples, list(chosen.worlds)
    if world not in chosen.worlds:
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: {world} ranks do not divide the batch of {chosen.samples}; these do: "
            f"{', '.join(map(str, chosen.worlds))}"
        )
    fitting = (m for m in wanted.micro_batch_sizes if chosen.samples // world % m == 0)
    return chosen.samples, list(chosen.worlds), max(fitting)
