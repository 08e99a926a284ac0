"""DeepSpeed's `deepspeed.elasticity`, for tools that ask it which worlds suit a config.

The engine itself trains at every world size; see `config.elasticity` for the choice of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_contract.errors import ConfigError
from zero_engine.config import load_config
from zero_engine.config.elasticity import choose_batch, largest_micro_batch

__all__ = ["compute_elastic_config"]


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The global batch, the worlds that divide it, and if asked for or with a world a micro-batch.

    Args:
        ds_config: With an "elasticity" section that is enabled.
        target_deepspeed_version: Without effect.
        world_size: 0, or the world that the micro-batch is chosen for.
        return_microbatch: Also without a world: the one that the engine uses.

    Raises:
        ConfigError: The section is missing, or the world does not divide the batch.
    """
    del target_deepspeed_version
    wanted = load_config({"elasticity": ds_config.get("elasticity", {})}).elasticity
    if not wanted.enabled:
        raise ConfigError("elasticity: missing or not enabled in this config")
    chosen = choose_batch(wanted)
    if not world_size:
        micro_batch = (chosen.micro_batch,) if return_microbatch else ()
        return chosen.samples, list(chosen.worlds), *micro_batch
    fitting = largest_micro_batch(chosen.samples, wanted.micro_batch_sizes, world_size)
    if fitting is None or world_size not in chosen.worlds:
        raise ConfigError(
            f"elasticity: world size {world_size} does not divide the batch of {chosen.samples} "
            f"(the engine trains there all the same); these do: {list(chosen.worlds)}"
        )
    return chosen.samples, list(chosen.worlds), fitting
