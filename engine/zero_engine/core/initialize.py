"""`initialize`: from the user's model, optimizer, data and config to an engine.

Owns the order in which the parts are made, and what is done to the user's model: parameters
become views of flat buffers, and floating-point ones are cast in bf16 and fp16 training; buffers
keep their dtype unless the config names one. Everything afterwards belongs to `engine`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from zero_comm.determinism import Hardware, meet
from zero_comm.exchange.collectives import Collectives
from zero_comm.exchange.comms_log import LOG
from zero_comm.exchange.cpu.malloc import keep_freed_memory
from zero_comm.exchange.node_group import node_exchanges
from zero_comm.sums.order import NATIVE_RUN
from zero_comm.sums.plan import DEFAULT_BLOCK
from zero_comm.waiting import Interrupt
from zero_comm.worker.agent_link import (
    BEFORE_FIRST_STEP,
    AgentLink,
    agent_link,
    exit_on_peer_loss,
)
from zero_comm.worker.distributed import init_distributed, local_device
from zero_contract.errors import ConfigError
from zero_data.global_batch import Cursor, resolve_batch
from zero_data.ledger import Ledger, round_of_start
from zero_engine.accumulation import Accumulation, choose
from zero_engine.config import Config, SchedulerConfig, load_config, read_json
from zero_engine.core import activations
from zero_engine.core.choose_tiers import Tiers, unit_sizes
from zero_engine.core.engine import Engine
from zero_engine.core.loaders import training_loader
from zero_engine.core.precision import DTYPES, check_dtypes, of_the_model, prepare_buffers
from zero_engine.core.rewrap import leave_weights, take_over
from zero_engine.offload_states import Inconsistency, MovedStates
from zero_engine.optim.as_given import AsGiven
from zero_engine.optim.loss_scaler import LossScaling
from zero_engine.optim.lr_schedules import make_schedule
from zero_engine.optim.optimizers import (
    Parameters,
    check_whole,
    kept_here,
    make_optimizer,
    needs_whole,
    trained_groups,
)
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.parameters.initial_weights import InitialWeights
from zero_engine.parameters.initialisers import leave_meta
from zero_engine.parameters.places import adopt_parameters
from zero_engine.parts import Core, Run
from zero_engine.sharding.flat_unit import FlatUnit, Write
from zero_engine.sharding.grad_reducer import GradReducer, skip
from zero_engine.sharding.leaf_modules import mark_configured, mark_divided
from zero_engine.sharding.overlapped_gather import OverlappedGather
from zero_engine.sharding.param_coordinator import ParamCoordinator
from zero_engine.sharding.partition import Small, UnitSpec, aliases, partition
from zero_engine.stages import STAGES, Stage
from zero_step.gradients import own_groups, reduction_over

_log = logging.getLogger(__name__)

_NOT_LOADED = (
    'elastic.initial_weights is "checkpoint", and no checkpoint has been loaded into the '
    "parameters that were on the meta device"
)

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def initialize(
    model: nn.Module,
    optimizer: OptimizerLike | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    config: Mapping[str, Any] | str | Path,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    engine_class: type[Engine] = Engine,
) -> Engine:
    """Make an engine. Every rank calls it, with the same arguments.

    Args:
        model: The module to train. The weights of rank 0 are broadcast. A module that another
            engine has trained keeps its weights, and that engine cannot be used any more.
            Parameters on the meta device get values unit by unit (elastic.initial_weights).
        optimizer: A torch optimizer on the model's parameters, or a callable that makes one from
            `model_parameters`. None: that of the config.
        model_parameters: Parameters or param groups; by default all that require gradients.
        training_data: The dataset of `engine.training_dataloader`: map-style, cut into shards
            (`zero_data.shards`), or any iterable (`zero_data.streams`).
        lr_scheduler: A torch scheduler, or a callable that makes one from the optimizer. It is
            stepped with every optimizer step that is applied.
        config: A dict, a JSON string or the path of a JSON file.
        collate_fn: As for torch's DataLoader.
        num_workers: As for torch's DataLoader.
        engine_class: `Engine`, or a subclass.

    Raises:
        ConfigError: The arguments or the config contradict each other or are incomplete.
        PeerLost: A peer is lost; under an agent the process exits instead.
    """
    keys = config if isinstance(config, Mapping) else read_json(config)
    settings = load_config(keys)
    with exit_on_peer_loss():
        init_distributed()
    link = agent_link(dist.get_rank())
    link.preparing("making the engine")
    with exit_on_peer_loss(link):
        take_over(model)
        without_values = leave_meta(model)
        chosen = make_optimizer(optimizer, settings.optimizer, model_parameters, model)
        settings = of_the_model(settings, chosen, model)
        if chosen is not None and needs_whole(chosen):
            check_whole(chosen, settings)
            settings = kept_here(chosen, settings)
        core = _make_core(model, chosen, settings, link, without_values)
        scheduler = _make_scheduler(lr_scheduler, settings.scheduler, chosen)
        run = _make_run(settings, core, training_data, collate_fn, num_workers, link)
        engine = engine_class(settings, core, run, scheduler, link, keys)
    link.preparing(BEFORE_FIRST_STEP)
    if core.device.type == "cpu":
        keep_freed_memory()
    return engine


# ---- the model ----


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What all parts of one core are made with."""

    config: Config
    stage: Stage
    collectives: Collectives
    device: torch.device
    guard: Callable[[], AbstractContextManager[None]]
    interrupt: Interrupt
    accumulation: Accumulation
    hardware: Hardware


def _make_core(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    link: AgentLink,
    without_values: frozenset[int],
) -> Core:
    shared = _meet(config, link)
    dtype = DTYPES[config.compute]
    groups, as_given = trained_groups(optimizer, model), AsGiven(optimizer, model)
    check_dtypes(model, groups, dtype)
    source = config.elastic.initial_weights
    initial = InitialWeights(model, without_values, shared.collectives, source)
    initial.set_buffers()
    buffers = config.data_types.buffers
    prepare_buffers(model, DTYPES[buffers] if buffers else None, shared.device, shared.collectives)
    activations.apply(model, config.activation_checkpointing)
    settings = config.zero_optimization
    marks = settings.leaf_module
    mark_configured(model, marks.classes, marks.names, marks.name_suffixes)
    tied = aliases(model)
    small = Small(
        settings.stage3_param_persistence_threshold, settings.stage3_model_persistence_threshold
    )
    specs = partition(model, groups, dtype, small.names(model))
    units = _make_units(shared, specs, initial.write)
    initial.finish()
    coordinator = ParamCoordinator(
        model,
        units if shared.stage.shards_parameters else (),
        shared.collectives,
        settings.stage3_prefetch_bucket_size,
        shared.guard,
    )
    zero, reducer = _make_stepper(shared, optimizer, units, coordinator)
    arriving = zero.units if zero is not None and zero.overlaps_gather else ()
    overlap = OverlappedGather(model, arriving, shared.guard)
    core = Core(
        module=model,
        device=shared.device,
        dtype=dtype,
        stage=shared.stage,
        collectives=shared.collectives,
        units=units,
        aliases=tied,
        zero=zero,
        reducer=reducer,
        coordinator=coordinator,
        overlap=overlap,
        accumulation=shared.accumulation,
        guard=shared.guard,
        hardware=shared.hardware,
        moved=MovedStates(units, zero, overlap.wait),
        as_given=as_given,
    )
    if initial.awaits_checkpoint:
        core.moved.inconsistent = Inconsistency(_NOT_LOADED, optimizer=False)
    adopt_parameters(core)
    leave_weights(core)
    mark_divided(model)
    return core


def _meet(config: Config, link: AgentLink) -> _Shared:
    """Connect to the other ranks."""
    if config.comms_logger.enabled:
        LOG.configure(config.comms_logger)
    stage, device = STAGES[config.zero_optimization.stage], local_device()
    collectives = Collectives(interrupt=link.interrupt)
    collectives.meet(device)
    hardware = meet(config.deterministic, device, collectives.everybodys, collectives.rank)
    _find_nodes(config, collectives)
    return _Shared(
        config=config,
        stage=stage,
        collectives=collectives,
        device=device,
        guard=partial(exit_on_peer_loss, link),
        interrupt=link.interrupt,
        accumulation=_accumulate(config, collectives),
        hardware=hardware,
    )


def _find_nodes(config: Config, collectives: Collectives) -> None:
    """Let sums begin inside of nodes, where they can."""
    if config.elastic.is_native:
        if dist.get_rank() == 0:
            _log.warning("%s", NATIVE_RUN)
        return
    collectives.lay_out(collectives.find_nodes(os.environ))
    collectives.divide(local_device())
    if collectives.topology.divides and dist.get_rank() == 0:
        _log.info(
            "gradients are added inside each node before they travel to others; ranks of the "
            "nodes: %s",
            ", ".join(map(str, collectives.topology.nodes)),
        )


def _accumulate(config: Config, collectives: Collectives) -> Accumulation:
    """Choose where the sums of several micro-steps are formed."""
    chosen = choose(config, collectives.topology)
    if chosen.reason and dist.get_rank() == 0:
        _log.info(
            'elastic.accumulate: "%s" acts as "owner" in this round: %s',
            config.elastic.accumulate,
            chosen.reason,
        )
    return chosen


def _make_units(shared: _Shared, specs: Sequence[UnitSpec], write: Write) -> tuple[FlatUnit, ...]:
    zero = shared.config.zero_optimization
    order = shared.collectives.order
    node = node_exchanges(zero.zero_hpz_partition_size, shared.interrupt, order)
    tiers = Tiers(zero, shared.device).choose(unit_sizes(specs, shared.collectives.world))
    return tuple(
        FlatUnit(
            spec,
            shared.stage,
            shared.collectives,
            shared.device,
            resting,
            master=DTYPES[shared.config.master],
            quantized=zero.zero_quantized_weights
            or (zero.zero_quantized_nontrainable_weights and not spec.trained),
            node=node,
            write=write,
        )
        for spec, resting in zip(specs, tiers, strict=True)
    )


def _make_stepper(
    shared: _Shared,
    optimizer: torch.optim.Optimizer | None,
    units: Sequence[FlatUnit],
    coordinator: ParamCoordinator,
) -> tuple[ZeroOptimizer, GradReducer] | tuple[None, None]:
    """The optimizer and the reducer; neither if no parameter is trained."""
    trained = [unit for unit in units if unit.trained]
    if optimizer is None or not trained:
        return None, None
    config, stage, native = shared.config, shared.stage, shared.config.elastic.is_native
    if config.master != "fp32" and dist.get_rank() == 0:
        _log.info(
            "master weights rest in %s, the optimizer's state in %s; gradients are summed in fp32",
            *(config.master, config.moments),
        )
    zero = ZeroOptimizer(
        optimizer,
        trained,
        stage,
        shared.collectives,
        config.gradient_clipping,
        LossScaling.of(config.loss_scaling),
        DTYPES[config.moments],
        whole=needs_whole(optimizer),
        block=None if native else config.elastic.reduction_block or DEFAULT_BLOCK,
    )
    zero.spill.budget_bytes = config.elastic.accumulate_device_bytes
    zero.overlaps_gather = config.elastic.overlap_param_gather
    for each in zero.sums:
        each.rounds = config.zero_optimization.zero_quantized_gradients
    groups = _own_groups(shared) or [shared.collectives]
    travelling = DTYPES[config.travelling] if native else None
    reducer = GradReducer(
        trained,
        zero.sums,
        reduction_over(groups, shared.device, travelling),
        zero.wholes,
        coordinator.release_trained if stage.shards_parameters else None,
        shared.guard,
        gathers=stage.shards_parameters,
    )
    coordinator.on_skipped = partial(skip, weakref.ref(reducer))
    return zero, reducer


def _own_groups(shared: _Shared) -> list[Collectives]:
    """The groups that sums have for themselves; at stage 3 weights travel at the same time."""
    collectives, device = shared.collectives, shared.device
    gathers = shared.stage.shards_parameters and not collectives.any_order(device)
    return own_groups(
        collectives,
        device,
        shared.interrupt,
        alone=shared.config.elastic.is_native or gathers,
        two=shared.accumulation.has_two_exchanges,
    )


def _make_scheduler(
    given: Any, config: SchedulerConfig | None, optimizer: torch.optim.Optimizer | None
) -> Any:
    # A scheduler object has a step(). A function that makes one has none; a class makes one.
    if given is not None and config is not None and config.type and dist.get_rank() == 0:
        _log.warning(
            "the lr_scheduler given to initialize() is used, as in DeepSpeed, and not the config's "
            '"scheduler": {"type": "%s"}; remove one of the two',
            config.type,
        )
    if hasattr(given, "step") and not isinstance(given, type):
        return given
    if given is None and (config is None or config.type is None):
        return None
    if optimizer is None:
        raise ConfigError("lr_scheduler: there is no optimizer to schedule")
    if given is not None:
        return given(optimizer)
    assert config is not None
    return make_schedule(config, optimizer)


# ---- the run ----


def _make_run(
    config: Config,
    core: Core,
    dataset: Dataset[Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
    link: AgentLink,
) -> Run:
    rank, world = dist.get_rank(), dist.get_world_size()
    batch, from_world = resolve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        world,
        first_round=link.round <= 1,
    )
    run = Run(
        batch=batch,
        batch_from_world=from_world,
        cursor=Cursor(),
        rank=rank,
        world=world,
        accumulation=core.accumulation,
        managed=config.managed_gradient_accumulation,
        summed_over=world if config.sums_gradients else None,
    )
    if rank == 0 and run.managed:
        _log.info(
            "a step: %d samples in %d micro-batches of %d; %d micro-steps on %d ranks",
            *(batch.samples, batch.microbatches, batch.micro_batch),
            *(run.plan().micro_steps(world), world),
        )
    if dataset is not None:
        run.loader = training_loader(config, run, dataset, collate_fn, num_workers)
    if config.elastic.sample_ledger is not None:
        directory = Path(config.elastic.sample_ledger)
        start = round_of_start(directory, link.round, core.collectives.everybodys)
        run.ledger = Ledger(directory, round=start, rank=rank, world=world)
    return run
