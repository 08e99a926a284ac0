"""`deepspeed.initialize`, with its arguments and its tuple, around the engine's own.

Source of the signature: deepspeed.initialize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset

from zero_contract.errors import ConfigError
from zero_deepspeed import checkpointing
from zero_deepspeed.comm import init_distributed
from zero_deepspeed.engine import Asserted, DeepSpeedEngine
from zero_deepspeed.ops.adam import name_as_deepspeed
from zero_deepspeed.shown import show
from zero_deepspeed.utils.logging import log_dist, logger
from zero_deepspeed.version import __version__
from zero_deepspeed.zero import computes_in
from zero_engine.core import initialize as core
from zero_engine.core.initialize import OptimizerLike
from zero_engine.optim.optimizers import Parameters
from zero_engine.parameters.access import owner_of
from zero_engine.parameters.early_shards import share_of

Config = Mapping[str, Any] | str | Path
Initialized = tuple[DeepSpeedEngine, torch.optim.Optimizer | None, Any, Any]


def initialize(  # noqa: PLR0913 - DeepSpeed's arguments
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    config_params: Config | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    mesh_param: Any = None,
    num_workers: int = 0,
) -> Initialized:
    """Make an engine. Every rank calls it, with the same arguments.

    Args:
        args: The parsed command line; its `deepspeed_config` is the config if none is given.
        model: The module to train; see `zero_engine.initialize`, as for the next four.
        optimizer: A torch optimizer, or a callable that makes one. None: that of the config.
        model_parameters: Parameters or param groups; by default all that require gradients.
        training_data: The dataset of the returned loader.
        lr_scheduler: A torch scheduler, or a callable that makes one from the optimizer.
        collate_fn: As for torch's DataLoader.
        config: A dict, a JSON string or the path of a JSON file.
        config_params: DeepSpeed's older name of `config`.
        distributed_port: Without effect: the group is that of the environment, or an existing one.
        mpu: Must be None: there is no model parallelism.
        dist_init_required: False: the script has made the process group.
        mesh_param: Must be None: there is no model parallelism.
        num_workers: As for torch's DataLoader.

    Returns:
        The engine, the optimizer (the one given, if one was), the loader or None, the scheduler
        or None.

    Raises:
        ConfigError: The arguments or the config contradict each other or are incomplete.
        Asserted: There is no model, no config, or with `dist_init_required=False` no process group.
        PeerLost: A peer is lost; under an agent the process exits instead.
    """
    if model is None:
        raise Asserted("initialize() needs a model")
    del distributed_port
    if dist_init_required is False:
        init_distributed(dist_init_required=False)  # raises if there is no process group
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu, mesh_param: there is no model parallelism; leave them out")
    log_dist(f"DeepSpeed info: version={__version__}, which is the ZeRO engine's", ranks=[0])
    chosen = _the_one(config, config_params, args)
    _cast(model, computes_in(chosen))
    engine = core.initialize(
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        config=chosen,
        collate_fn=collate_fn,
        num_workers=num_workers,
        engine_class=DeepSpeedEngine,
    )
    stepped = engine.optimizer
    # It has frozen parameters only, which the engine does not step; the script unpacks it.
    if stepped is None and isinstance(optimizer, torch.optim.Optimizer):
        stepped = optimizer
    made = cast(DeepSpeedEngine, engine)
    if made._config.log_level is not None:
        logger.setLevel(made._config.log_level.upper())
    if "activation_checkpointing" in engine.config:
        checkpointing.use(made._config.activation_checkpointing)
    if made.optimizer is not None and made._core.zero is not None:
        show(made.optimizer, made._core.zero, made.zero_optimization_stage())
        if optimizer is None:
            name_as_deepspeed(made.optimizer, made._config)
    return made, stepped, engine.training_dataloader, engine.lr_scheduler


def _cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Round the weights before masters are made of them: DeepSpeed's first steps begin so."""
    for param in model.parameters() if dtype is not None else ():
        is_here = not param.is_meta and share_of(param) is None and owner_of(param) is None
        if is_here and param.is_floating_point():
            param.data = param.data.to(dtype)


def _the_one(config: Config | None, config_params: Config | None, args: Any) -> Config:
    sources: dict[str, Config | None] = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {name: source for name, source in sources.items() if source is not None}
    if len(given) > 1:
        raise ConfigError(f"a config is given as {' and as '.join(given)}; keep one")
    if not given:
        raise Asserted("initialize() needs a config: a dict, a JSON string or a path")
    return next(iter(given.values()))
