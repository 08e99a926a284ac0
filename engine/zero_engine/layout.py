"""The layout of a run: what is divided, in which dtypes, where it rests, and where sums are formed.

A pure function of the config and of the facts of a round, without a process group or a tensor;
`initialize` builds what it says. Equal facts give equal layouts, so all ranks have the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from zero_comm.sums.order import NATIVE_RUN
from zero_comm.sums.plan import DEFAULT_BLOCK, SUM_BYTES, Where
from zero_comm.topology import Topology, alone
from zero_contract.errors import ConfigError
from zero_engine.config.refusals import Refusal, refusals
from zero_engine.config.schema import CPU, DTYPE_NAMES, NONE, NVME, Config, OffloadOptimizer
from zero_engine.stages import STAGES, Stage
from zero_step.gradients.accumulation import Accumulation, why_owners

# ---- what a layout depends on ----


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFacts:
    """One unit of the model, as it is divided among the ranks."""

    shard: int
    """Elements of each rank."""
    dtype: str = "fp32"
    """The dtype in which modules read it; a short name, or torch's for one that is not trained."""
    trained: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """What is known of an optimizer."""

    name: str
    whole: bool = False
    """Whether it is given whole parameters, each on the rank that owns it."""
    advice: str = ""
    """What its author can declare, if the class is not known here."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything but the config."""

    topology: Topology
    """The ranks of each node."""
    device: str = "cpu"
    """The type of the device that computes."""
    any_order: bool = True
    """Whether exchanges of tensors there may begin in different orders on the ranks."""
    dtypes: frozenset[str] = frozenset({"float32"})
    """Of the floating-point parameters that the optimizer trains, by torch's names."""
    optimizer: OptimizerFacts | None = None
    """None: the script gives none, or it is not known yet."""
    units: Sequence[UnitFacts] = ()


# ---- the layout ----


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlaces:
    """Where the tensors of one unit are on each rank."""

    shard: int
    """Elements of each rank."""
    state: str
    """Where master weights and the optimizer's state rest: "none" is the device."""
    weights: str
    """Where the copy rests that modules are gathered from, if there is one."""
    offloaded: bool
    """Whether the optimizer's state is offloaded, and so stepped by sub-groups."""
    shared: bool
    """Whether the buffer that modules read is the master weights, too."""
    replica: bool
    """Whether each rank has all master weights."""
    source: str
    """What modules are gathered from: the "shard" of the master weights, a "copy" of it in the
    compute dtype, or this rank's part of the "buffer" that modules read."""
    rounded: bool
    """Whether weights are gathered as int8."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that was chosen."""

    what: str
    chosen: str
    reason: str = ""
    level: int = logging.DEBUG
    """At which it is logged: a warning if it is not what the config or the script asks for."""

    @property
    def sentence(self) -> str:
        """The line that is logged."""
        return f"{self.chosen}: {self.reason}" if self.reason else self.chosen

    def __str__(self) -> str:
        return f"{self.what}: {self.chosen}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is laid out in one round; equal on all ranks."""

    config: Config = field(repr=False)
    """The config, with what the model and the optimizer decide."""
    stage: Stage
    sums: Accumulation
    """Where gradients are added."""
    native: str | None
    """The dtype in which the backend sums gradients; None: they are summed in order."""
    alone: bool
    """Whether sums travel in a group of their own."""
    whole: bool
    """Whether the optimizer is given whole parameters."""
    secondary: int
    """ZeRO++: consecutive ranks that keep a secondary copy of all weights; 1: none do."""
    late_weights: bool
    """Whether a step leaves the new weights arriving."""
    units: tuple[UnitPlaces, ...]
    choices: tuple[Choice, ...] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(map(str, self.choices))


def resolve(config: Config, facts: Facts) -> Layout:
    """The layout of a run.

    Raises:
        ConfigError: The config, the model and the optimizer contradict each other.
    """
    config, choices = _decided(config, facts)
    for refusal in _refusals(config, facts):
        raise ConfigError(refusal.text)
    zero, native = config.zero_optimization, config.elastic.is_native
    stage = STAGES[zero.stage]
    sums, why = _sums(config, facts)
    asked, world = zero.zero_hpz_partition_size, sums.topology.world
    units = tuple(_places(config, facts, stage))
    # Where exchanges are matched by their order, sums and gathers need a group each.
    gathers = stage.shards_parameters and not facts.any_order
    layout = Layout(
        config=config,
        stage=stage,
        sums=sums,
        native=config.travelling if native else None,
        alone=native or gathers,
        whole=facts.optimizer is not None and facts.optimizer.whole,
        # Of a single group the secondary copy would be the primary one.
        secondary=asked if world % asked == 0 and world != asked else 1,
        late_weights=config.elastic.overlap_param_gather,
        units=units,
        choices=(),
    )
    return replace(layout, choices=(*choices, *_told(layout, why)))


def refused(config: Config, facts: Facts) -> str:
    """The name of the refusal with which `resolve` would end; empty: it gives a layout."""
    return next((each.name for each in _refusals(_decided(config, facts)[0], facts)), "")


def _refusals(config: Config, facts: Facts) -> Iterator[Refusal]:
    yield from refusals(config)
    optimizer = facts.optimizer
    if optimizer is not None and optimizer.whole and config.moments != "fp32":
        yield Refusal(
            "moments in 16 bits of whole parameters",
            f"bf16.bf16_optimizer_states: {_stays(optimizer)}; remove the key, or use {_SHARDED}"
            f"{optimizer.advice}",
        )


_SHARDED = "AdamW, Lion, Lamb or Muon of the config"


def _stays(optimizer: OptimizerFacts) -> str:
    return (
        f"{optimizer.name} is given whole parameters, and what it keeps of them stays in fp32 on "
        "the device of the rank that owns them"
    )


# ---- the choices ----


def _decided(config: Config, facts: Facts) -> tuple[Config, tuple[Choice, ...]]:
    """The config with what the model and the optimizer decide."""
    config, low = of_the_model(config, facts.dtypes)
    choices = [
        Choice(
            "precision",
            f"computes in {config.compute}, master weights rest in {config.master}, the "
            f"optimizer's state in {config.moments}; gradients are summed in fp32",
            low,
            logging.INFO if low or config.master != "fp32" else logging.DEBUG,
        )
    ]
    optimizer, zero = facts.optimizer, config.zero_optimization
    if optimizer is not None and optimizer.whole and zero.offload_optimizer.device != NONE:
        zero = replace(zero, offload_optimizer=OffloadOptimizer())
        config = replace(config, zero_optimization=zero)
        reason = f"{_stays(optimizer)}; to offload it, use {_SHARDED}{optimizer.advice}"
        text = "zero_optimization.offload_optimizer has no effect"
        choices.append(Choice("optimizer", text, reason, logging.WARNING))
    elif optimizer is not None and optimizer.whole:
        text = f"{optimizer.name} is given whole parameters{optimizer.advice}"
        level = logging.INFO if optimizer.advice else logging.DEBUG
        choices.append(Choice("optimizer", text, level=level))
    if zero.offload_param.device != NONE and not STAGES[zero.stage].shards_parameters:
        text = f"zero_optimization.offload_param has no effect at stage {zero.stage}"
        why = "only stage 3 divides the parameters"
        choices.append(Choice("parameters", text, why, logging.WARNING))
    wire = config.communication_data_type
    if wire is not None and DTYPE_NAMES[wire] not in ("fp32", config.compute):
        text = f"gradients are sent in {config.compute}, and not in {wire}"
        choices.append(Choice("gradients", text, "that would round them", logging.WARNING))
    return config, tuple(choices)


def of_the_model(config: Config, dtypes: frozenset[str]) -> tuple[Config, str]:
    """The config with the precision of a model in 16 bits, if it names none, and the reason."""
    if config.compute != "fp32" or config.data_types.param_dtype is not None:
        return config, ""
    if dtypes == {"bfloat16"}:
        found = replace(config, bf16=replace(config.bf16, enabled=True))
    elif dtypes == {"float16"}:
        fixed = config.fp16 if config.loss_scaling.enabled else replace(config.fp16, loss_scale=1.0)
        found = replace(config, fp16=replace(fixed, enabled=True))
    else:
        return config, ""
    scale = ", without a loss scale" if found.fp16.loss_scale == 1 else ""
    return found, f"the parameters are {min(dtypes)}, and the config sets no precision{scale}"


def _sums(config: Config, facts: Facts) -> tuple[Accumulation, str]:
    """The place where this round adds, and why that is not the one of the config."""
    native, stage = config.elastic.is_native, STAGES[config.zero_optimization.stage]
    topology = alone(facts.topology.world) if native else facts.topology
    where = Where(config.elastic.accumulate)
    reason = why_owners(where, topology)
    if where is not Where.OWNER and not reason and not config.managed_gradient_accumulation:
        reason = "the script decides where a step ends (managed_gradient_accumulation: false)"
    sums = Accumulation(
        where=Where.OWNER if reason else where,
        topology=topology,
        block=config.elastic.reduction_block or DEFAULT_BLOCK,
        # At stage 0 every rank adds where the whole sum is made: nothing is kept beside it.
        native_bytes=(SUM_BYTES if stage.shards_optimizer else 0) if native else None,
        rounds=config.zero_optimization.zero_quantized_gradients,
    )
    return sums, reason


def offloaded(units: Sequence[UnitFacts], ratio: float) -> list[bool]:
    """For each unit whether its state is offloaded: the first ones, up to `ratio` of all."""
    trained = [unit.shard if unit.trained else 0 for unit in units]
    wanted = ratio * sum(trained)
    before = accumulate(trained, initial=0)
    # `before` is one longer than the units: its last number is the sum of all.
    return [unit.trained and begun < wanted for unit, begun in zip(units, before, strict=False)]


def kept_in_cpu(units: Sequence[UnitFacts], max_in_cpu: int) -> list[bool]:
    """For each unit whether its weights stay in host memory: the first `max_in_cpu` elements."""
    return [end <= max_in_cpu for end in accumulate(unit.shard for unit in units)]


def _places(config: Config, facts: Facts, stage: Stage) -> Iterator[UnitPlaces]:
    zero = config.zero_optimization
    optimizer, param = zero.offload_optimizer, zero.offload_param
    away = offloaded(facts.units, optimizer.ratio if optimizer.device != NONE else 0.0)
    in_cpu = kept_in_cpu(facts.units, param.max_in_cpu)
    for unit, is_away, stays in zip(facts.units, away, in_cpu, strict=True):
        weights = CPU if param.device == NVME and stays else param.device
        state = (optimizer.device if is_away else NONE) if unit.trained else weights
        alike = unit.dtype == (config.master if unit.trained else unit.dtype)
        # Far is what kernels cannot read in place.
        far = state == NVME or (state == CPU and facts.device != "cpu")
        # The buffer serves as master weights only where the optimizer steps.
        is_buffer = alike and not stage.shards_parameters and (not far or facts.device == "cpu")
        path = optimizer.nvme_path if unit.trained else param.nvme_path
        # What rests in one place in one dtype serves as both; else there is a copy to gather from.
        same_place = state == weights and (state != NVME or path == param.nvme_path)
        replica = is_buffer or not stage.shards_optimizer
        near = replica or not far or (same_place and alike)
        rounds = zero.zero_quantized_weights or (
            zero.zero_quantized_nontrainable_weights and not unit.trained
        )
        yield UnitPlaces(
            shard=unit.shard,
            state=state,
            weights=weights,
            offloaded=is_away,
            shared=is_buffer,
            replica=replica,
            source="shard" if near else "copy" if stage.shards_parameters else "buffer",
            rounded=rounds and stage.shards_parameters,
        )


# ---- in words ----


def _told(layout: Layout, why_not_asked: str) -> Iterator[Choice]:
    sums, config = layout.sums, layout.config
    topology, stage = sums.topology, layout.stage
    divided = [
        name
        for name, is_divided in (
            ("the optimizer's state", stage.shards_optimizer),
            ("gradients", stage.shards_gradients),
            ("parameters", stage.shards_parameters),
        )
        if is_divided
    ]
    yield Choice(
        f"stage {stage.number}",
        f"{', '.join(divided) or 'nothing'} divided among {topology.world} ranks",
    )
    if layout.native:
        yield Choice("sums", NATIVE_RUN, level=logging.WARNING)
    else:
        yield Choice("sums", f"in order, by blocks of {sums.block} micro-batches")
        inside = f"ranks of the nodes: {', '.join(map(str, topology.nodes))}"
        text = "gradients are added inside each node before they travel to others"
        if topology.divides:
            yield Choice("nodes", text, inside, logging.INFO)
        else:
            yield Choice("nodes", "gradients travel to their owners", topology.reason or inside)
    if why_not_asked:
        text = f'"{config.elastic.accumulate}" acts as "owner" in this round'
        yield Choice("elastic.accumulate", text, why_not_asked, logging.INFO)
    else:
        yield Choice("elastic.accumulate", f'"{sums.where}"')
    if layout.alone:
        why = "the backend sums them" if layout.native else "weights are gathered at the same time"
        yield Choice("exchanges", "sums travel in a group of their own", why)
    if stage.shards_optimizer and not stage.shards_parameters:
        text = "arrive during the next forward" if layout.late_weights else "arrive within step()"
        why = "" if layout.late_weights else "a script may read them after it"
        yield Choice("weights", text, why)
    for place in (CPU, NVME):
        states = sum(unit.state == place for unit in layout.units)
        weights = sum(unit.weights == place for unit in layout.units)
        if states or weights:
            text = f"the state of {states} and the weights of {weights} units"
            yield Choice(place, f"{text}, of {len(layout.units)}")
    asked = config.zero_optimization.zero_hpz_partition_size
    if layout.secondary != asked:
        reason = (
            f"zero_hpz_partition_size {asked}: {topology.world} ranks are not several such groups"
        )
        yield Choice("secondary copies", "none", reason, logging.INFO)
