"""`initialize`: from the user's model, optimizer, data and config to an engine.

Owns the order in which the parts are made. Everything afterwards belongs to `engine`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from zero_comm.determinism import Hardware, meet
from zero_comm.exchange.collectives import Collectives, node_exchanges
from zero_comm.exchange.comms_log import LOG
from zero_comm.exchange.cpu.malloc import keep_freed_memory
from zero_comm.topology import Topology
from zero_comm.waiting import Interrupt
from zero_comm.worker.agent_link import AgentLink, agent_link, exit_on_peer_loss
from zero_comm.worker.distributed import init_distributed, local_device
from zero_contract.clock import process_age_s
from zero_contract.errors import ConfigError
from zero_contract.worker import BEFORE_FIRST_STEP, Ability
from zero_data.global_batch import Cursor, resolve_batch
from zero_data.ledger import begin_ledger
from zero_data.position_loader import LoopCalls, PositionLoader
from zero_engine.config import Config, SchedulerConfig, load_config, read_json
from zero_engine.config.schema import CPU, NVME, OffloadOptimizer, OffloadParam
from zero_engine.core import activations
from zero_engine.core.engine import Engine
from zero_engine.core.loaders import training_loader
from zero_engine.core.precision import check_apart, check_dtypes, prepare_buffers
from zero_engine.core.rewrap import leave_weights, take_over, take_without_weights
from zero_engine.layout import Facts, Layout, of_the_model, resolve
from zero_engine.offload_states import Inconsistency, MovedStates
from zero_engine.optim.as_given import AsGiven
from zero_engine.optim.lr_schedules import make_schedule
from zero_engine.optim.optimizers import (
    Parameters,
    check_stepped_alike,
    describe,
    make_optimizer,
    trained_groups,
)
from zero_engine.optim.zero_optimizer import ZeroOptimizer
from zero_engine.parameters.initial_weights import InitialWeights
from zero_engine.parameters.initialisers import leave_meta
from zero_engine.parameters.places import adopt_parameters
from zero_engine.parameters.reads import watch
from zero_engine.parts import Core, Run
from zero_engine.sharding.flat_unit import FlatUnit, UnitTiers, Write, unit_facts
from zero_engine.sharding.grad_reducer import GradReducer, if_alive
from zero_engine.sharding.leaf_modules import mark_configured, mark_divided
from zero_engine.sharding.overlapped_gather import OverlappedGather
from zero_engine.sharding.param_coordinator import ParamCoordinator
from zero_engine.sharding.partition import DTYPES, Small, UnitSpec, aliases, partition
from zero_engine.tiers.nvme import Nvme
from zero_engine.tiers.places import Memory, Tier
from zero_engine.tiers.scratch import ScratchFile
from zero_step.checks import alike
from zero_step.forward_writes import ForwardWrites
from zero_step.gradients.pipeline import reduction_over
from zero_step.session import Session
from zero_step.staying import Staying, standing

_log = logging.getLogger(__name__)

_ALIKE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "seed",
)
"""Keys of the config, beside its section "elastic", that all ranks must be given alike."""
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
        training_data: The dataset of `engine.training_dataloader`: map-style, or whatever lanes
            read (`zero_data.lanes.adapters.source_of`); or a DataLoader of one, which then says the
            order of samples, and stands for collate_fn and num_workers.
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
    began = standing() if settings.elastic.in_place else None
    came_after_s = process_age_s()
    with exit_on_peer_loss():
        init_distributed()
    link = agent_link(dist.get_rank())
    link.preparing("making the engine")
    with exit_on_peer_loss(link):
        take_over(model)
        without_values = leave_meta(model)
        chosen = make_optimizer(optimizer, settings.optimizer, model_parameters, model)
        given = _Given(
            model=model,
            optimizer=chosen,
            groups=[list(group["params"]) for group in chosen.param_groups] if chosen else [],
            dtypes=[param.dtype for param in model.parameters()],
            dataset=training_data,
            collate_fn=collate_fn,
            num_workers=num_workers,
            scheduler=lr_scheduler,
            keys=keys,
            settings=settings,
            engine_class=engine_class,
        )
        engine = _make(given, link, without_values)
    if isinstance(loader := engine.training_dataloader, PositionLoader):
        loader.calls = LoopCalls(*(partial(if_alive(engine._hear_loop), loader),) * 3)
    if began is not None:
        why_not = ""
        if given.dataset is None:
            why_not = "its batches do not come from initialize(training_data=...)"
        elif engine.device.type != "cpu":
            why_not = f"it trains on {engine.device.type}, and only CPUs are tested"
        again = partial(_make_again, ref(engine), given)
        staying = engine._session.staying = Staying(again, began, came_after_s, why_not)
        if not staying.why_not:  # else no newcomer warms up for the sake of the others
            link.announce(Ability.BOUNDARY, Ability.REJOIN)
            staying.when_forbidden = partial(link.announce, Ability.BOUNDARY)
    if engine.device.type == "cpu":  # now: the long-lived buffers are to stay out of the heap
        keep_freed_memory()
    return engine


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What `initialize` was given, as far as an engine can be made of it once more."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    groups: Sequence[Sequence[nn.Parameter]]
    """Those of the optimizer, before the engine has put what it steps in their places."""
    dtypes: Sequence[torch.dtype]
    dataset: Dataset[Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    scheduler: Any
    keys: Mapping[str, Any]
    settings: Config
    engine_class: type[Engine]


def _make(
    given: _Given, link: AgentLink, without_values: frozenset[int], former: Engine | None = None
) -> Engine:
    """An engine over the process group that there is now. Collective."""
    found = _meet(given, link)
    layout, specs = _lay_out(given.model, given.optimizer, given.settings, found)
    core = _make_core(given.model, given.optimizer, layout, specs, found, without_values)
    if former is not None:  # the script has its scheduler, and its loader with the position
        scheduler, cursor = former.lr_scheduler, former._run.cursor
    else:
        scheduler = _make_scheduler(given.scheduler, given.settings.scheduler, given.optimizer)
        cursor = Cursor()
    run = _make_run(layout, core, given, link, cursor)
    if former is not None and run.loader is not None:
        assert former._run.loader is not None
        # The script is in a loop over the former loader: that gets the order of the new ranks.
        vars(former._run.loader.order).update(vars(run.loader.order))
        run.loader = former._run.loader
    engine = given.engine_class(core, run, scheduler, link, given.keys)
    link.preparing(BEFORE_FIRST_STEP)
    return engine


# ---- the same engine in another round ----


def _make_again(engine_of: Callable[[], Engine | None], given: _Given) -> Session:
    """Make an engine anew over the group that there is now, as the same object. Collective.

    Its weights and the state of its optimizer are undefined until a checkpoint is loaded.
    """
    engine = engine_of()
    assert engine is not None  # it is in a call of step() or save_checkpoint()
    engine._reporter.monitors.close()
    if engine._run.ledger is not None:
        engine._run.ledger.close()
    take_without_weights(given.model)
    # Undo what the engine has done to what it was given: the casts, and its own params in groups.
    for param, dtype in zip(given.model.parameters(), given.dtypes, strict=True):
        param.data = param.data.to(dtype)
    if given.optimizer is not None:
        for group, params in zip(given.optimizer.param_groups, given.groups, strict=True):
            group["params"] = list(params)
        # Of the shards of the former round.
        given.optimizer.state.clear()
    link = agent_link(dist.get_rank())
    link.preparing("making the engine")
    fresh = _make(given, link, frozenset(), engine)
    fresh.mean_loss, fresh._last = engine.mean_loss, engine._last
    fresh._micro_steps.applied = engine._micro_steps.applied
    # What the script, or a library, has set on the engine.
    of_others = {name: each for name, each in vars(engine).items() if name not in vars(fresh)}
    vars(fresh).update(of_others)
    link.announce(Ability.BOUNDARY, Ability.REJOIN)
    # Both are one from now on: the script has this one, and the new parts know the other.
    object.__setattr__(engine, "__dict__", vars(fresh))
    return fresh._session


# ---- the model ----


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What the ranks have found out about each other."""

    collectives: Collectives
    topology: Topology
    device: torch.device
    hardware: Hardware
    guard: Callable[[], AbstractContextManager[None]]
    interrupt: Interrupt


def _meet(given: _Given, link: AgentLink) -> _Round:
    """Connect to the other ranks, which are given the same."""
    config = given.settings
    if config.comms_logger.enabled:
        LOG.configure(config.comms_logger)
    device, collectives = local_device(), Collectives(interrupt=link.interrupt)
    collectives.meet(device)
    facts = {
        **alike.of_module(given.model),
        **{key: getattr(config, key) for key in _ALIKE},
        "zero_optimization.stage": config.zero_optimization.stage,
        "the dtype to compute in": config.compute,
        **alike.of_data(given.dataset),
        **alike.of_settings(config.elastic),
    }
    alike.check(facts, collectives.everybodys)
    return _Round(
        hardware=meet(config.deterministic, device, collectives.everybodys, collectives.rank),
        collectives=collectives,
        topology=collectives.find_nodes(os.environ),
        device=device,
        guard=partial(exit_on_peer_loss, link),
        interrupt=link.interrupt,
    )


def _lay_out(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, found: _Round
) -> tuple[Layout, list[UnitSpec]]:
    """The layout, told on rank 0, and the units."""
    groups = trained_groups(optimizer, model)
    given = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
    dtypes = frozenset(
        str(param.dtype).removeprefix("torch.")
        for param in given or model.parameters()
        if param.is_floating_point()
    )
    dtype = DTYPES[of_the_model(config, dtypes)[0].compute]
    check_dtypes(model, groups, dtype)
    check_apart(model)
    zero = config.zero_optimization
    marks = zero.leaf_module
    mark_configured(model, marks.classes, marks.names, marks.name_suffixes)
    small = Small(
        zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
    ).names(model)
    specs = partition(model, groups, dtype, small)
    facts = Facts(
        topology=found.topology,
        device=found.device.type,
        any_order=found.collectives.any_order(found.device),
        dtypes=dtypes,
        optimizer=describe(optimizer) if optimizer is not None else None,
        units=[unit_facts(spec, found.collectives.world) for spec in specs],
    )
    layout = resolve(config, facts)
    if optimizer is not None and not layout.whole:
        check_stepped_alike(optimizer, model, groups)
    for choice in layout.choices if found.collectives.rank == 0 else ():
        _log.log(choice.level, "%s", choice.sentence)
    return layout, specs


def _make_core(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layout: Layout,
    specs: Sequence[UnitSpec],
    found: _Round,
    without_values: frozenset[int],
) -> Core:
    config, collectives, device = layout.config, found.collectives, found.device
    # Now: the engine is going to put its own parameters into the groups of the optimizer.
    as_given = AsGiven(optimizer, model)
    if not layout.native:
        collectives.lay_out(layout.sums.topology)
        collectives.divide(device)
    initial = InitialWeights(model, without_values, collectives, config.elastic.initial_weights)
    # Rank 0 alone sets them; `prepare_buffers` sends them to the others.
    initial.set_buffers()
    prepare_buffers(model, DTYPES.get(config.data_types.buffers or ""), device, collectives)
    activations.apply(model, config.activation_checkpointing)
    tied = aliases(model)
    # Each unit gets its weights as it is made: at stage 3 a rank then holds one unit whole.
    units = _make_units(layout, specs, found, initial.write)
    initial.finish()
    coordinator = ParamCoordinator(
        model,
        units if layout.stage.shards_parameters else (),
        collectives,
        config.zero_optimization.stage3_prefetch_bucket_size,
        found.guard,
    )
    zero, reducer = _make_stepper(layout, optimizer, units, coordinator, found)
    arriving = zero.units if zero is not None and layout.late_weights else ()
    overlap = OverlappedGather(model, arriving, found.guard)
    core = Core(
        layout=layout,
        module=model,
        device=device,
        collectives=collectives,
        units=units,
        aliases=tied,
        zero=zero,
        reducer=reducer,
        coordinator=coordinator,
        overlap=overlap,
        guard=found.guard,
        hardware=found.hardware,
        moved=MovedStates(units, zero, overlap.wait),
        as_given=as_given,
        writes=ForwardWrites(model, collectives),
    )
    if initial.awaited:
        core.moved.inconsistent = Inconsistency(_NOT_LOADED, False, initial.awaited)
    adopt_parameters(core)
    watch(core)  # finds a parameter's unit by its place
    leave_weights(core)
    mark_divided(model)
    return core


def _make_units(
    layout: Layout, specs: Sequence[UnitSpec], found: _Round, write: Write
) -> tuple[FlatUnit, ...]:
    zero, collectives, device = layout.config.zero_optimization, found.collectives, found.device
    node = None
    if layout.secondary > 1:
        # One for all units: it makes a process group.
        node = node_exchanges(layout.secondary, found.interrupt, collectives.order)

    @cache
    def tier(place: str, path: str | None, pins: bool) -> Tier:
        """One for all tensors there; on NVMe one for each directory."""
        pin = pins and device.type == "cuda"
        if place == NVME:
            return Nvme(ScratchFile(Path(path or "")), pin=pin)
        rests_on = torch.device("cpu") if place == CPU else device
        return Memory(rests_on, used_on=device, pin=pin)

    def there(place: str, section: OffloadOptimizer | OffloadParam) -> Tier:
        return tier(place, section.nvme_path if place == NVME else None, section.pin_memory)

    units = []
    for spec, places in zip(specs, layout.units, strict=True):
        weights = there(places.weights, zero.offload_param)
        state = there(places.state, zero.offload_optimizer) if spec.trained else weights
        tiers = UnitTiers(state, weights, places.offloaded)
        units.append(FlatUnit(spec, layout, places, tiers, collectives, device, node, write))
    return tuple(units)


def _make_stepper(
    layout: Layout,
    optimizer: torch.optim.Optimizer | None,
    units: Sequence[FlatUnit],
    coordinator: ParamCoordinator,
    found: _Round,
) -> tuple[ZeroOptimizer, GradReducer] | tuple[None, None]:
    """The optimizer and the reducer; neither if no parameter is trained."""
    trained = [unit for unit in units if unit.spec.trained]
    if optimizer is None or not trained:
        return None, None
    collectives, device, gathers = found.collectives, found.device, layout.stage.shards_parameters
    zero = ZeroOptimizer(optimizer, trained, layout, collectives)
    two = layout.sums.has_two_exchanges
    native = DTYPES[layout.native] if layout.native else None
    reducer = GradReducer(
        trained,
        zero.sums,
        reduction_over(
            collectives, device, found.interrupt, alone=layout.alone, two=two, native=native
        ),
        zero.wholes,
        coordinator.release_trained if gathers else None,
        found.guard,
        gathers=gathers,
    )
    # Weakly: the coordinator lives in hooks of the module, which may outlive the engine.
    coordinator.on_skipped = if_alive(reducer.skip)
    return zero, reducer


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


def _make_run(layout: Layout, core: Core, given: _Given, link: AgentLink, cursor: Cursor) -> Run:
    config, rank, world = layout.config, dist.get_rank(), dist.get_world_size()
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
        cursor=cursor,
        rank=rank,
        world=world,
        accumulation=layout.sums,
        managed=config.managed_gradient_accumulation,
        summed_over=world if config.gradient_allreduce_op.lower() == "sum" else None,
    )
    if rank == 0 and run.managed:
        _log.info(
            "a step: %d samples in %d micro-batches of %d; %d micro-steps on %d ranks",
            *(batch.samples, batch.microbatches, batch.micro_batch),
            *(run.plan().micro_steps(world), world),
        )
    if given.dataset is not None:
        run.loader = training_loader(
            config, run, core.collectives, given.dataset, given.collate_fn, given.num_workers
        )
    directory, everybodys = config.elastic.sample_ledger, core.collectives.everybodys
    run.ledger = begin_ledger(directory, link.round, everybodys, rank=rank, world=world)
    return run
