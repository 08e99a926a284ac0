"""The memory that a rank needs for the state of training, before anything is allocated.

The arithmetic on the layout of a run; tests compare it with what an engine really allocates.
Activations are left out, as are the gradients of the module that backward is in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zero_comm.topology import described
from zero_engine.config.schema import CPU, NONE, NVME, Config, OptimizerConfig
from zero_engine.layout import Facts, Layout, OptimizerFacts, UnitFacts, resolve
from zero_engine.optim.sub_groups import SUB_GROUP, UNDER_WAY

_FP32_BYTES = 4
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

_STATES: dict[str, int] = {
    "adadelta": 2,
    "adafactor": 0,  # next to none: rows and columns of matrices
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "asgd": 1,
    "lamb": 2,
    "lion": 1,
    "muon": 1,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "rprop": 2,
    "sgd": 0,
}
"""Optimizer -> the number of fp32 values that it keeps per parameter."""

_OPTIONAL_STATES = ("amsgrad", "centered", "momentum")
"""Options with a further value each when they are on."""

_STEPPED_WHOLE = frozenset({"adafactor"})
"""Optimizers that are given whole parameters; see `owner_steps`."""
_WHOLES = 2
"""The fp32 copies of a parameter on its owner during a step: weights and gradient."""

_GATHERED = 2
"""Units that are gathered at a time: the one that computes and the next one."""
_REDUCED = 3
"""Gradients of units at a time: being filled, being sent, being received."""
_FILLED = 1
"""Of those, the ones that are being filled."""
_BROUGHT = 5
"""Weights of units in memory: those that are gathered, and four that are read ahead."""
_PUTS = 2
"""Writes of stepped weights that may be under way; see `tiers.nvme`."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one rank. Without a GPU, the device's memory and the host's are one."""

    weights: int
    """On the device: the weights that forward and backward read."""
    master: int
    """On the device: master weights beside those."""
    moments: int
    """On the device: the optimizer's state."""
    gradients: int
    """On the device: the sums of gradients."""
    host: int = 0
    """In host memory: state that rests there, and buffers for state that rests on the disk."""
    disk: int = 0
    in_flight: int = 0
    """On the device, at most: units that are being gathered and reduced, with the root; or in a
    step fp32 copies of state in 16 bits, or whole parameters with their gradients."""

    @property
    def total(self) -> int:
        """The sum of what stays on the device."""
        return self.weights + self.master + self.moments + self.gradients


def estimate(
    config: Config,
    parameters: int,
    world: int,
    largest: int | None = None,
    node_ranks: int | None = None,
    *,
    root: int = 0,
    device: str = "cuda",
) -> Estimate:
    """The bytes on one rank for the state of training; an unknown optimizer counts as Adam.

    Args:
        config: The resolved config.
        parameters: Trained parameters of the whole model.
        world: The number of ranks.
        largest: Parameters of each unit, the largest; None: all of the model.
        node_ranks: Ranks of each node, the last of which may have fewer; None: there is one node.
        root: Parameters outside of these units, such as embeddings and the head: their weights stay
            gathered, and their gradients are collected, during a whole pass.
        device: The type of the device.

    Source of the formulas: ZeRO (arXiv 1910.02054), section 3, with fp32 gradient sums;
    ZeRO-Offload and ZeRO-Infinity for the tiers.
    """
    unit, whole = largest or parameters, is_stepped_whole(config.optimizer)
    sizes = [unit] * (parameters // unit) + [parameters % unit] * bool(parameters % unit)
    facts = Facts(
        topology=described(str(node_ranks or world), world),
        device=device,
        optimizer=OptimizerFacts(name="the optimizer", whole=whole),
        units=[UnitFacts(shard=-(-each // world), dtype=config.compute) for each in sizes],
    )
    layout = resolve(config, facts)
    stage, size = layout.stage, _BYTES[config.compute]
    at = _at_rest(layout, device)
    if layout.secondary > 1:
        at["weights", NONE] += size * -(-parameters // layout.secondary)
    kept, travelling = _sums(layout, parameters)
    # In elements. The root is reduced last, when the buffers of the units are still held.
    reduced = _REDUCED if travelling is None else _FILLED + travelling / size
    under_way = reduced * unit + (reduced - 1) * root
    if stage.shards_parameters:
        under_way = max((_GATHERED + reduced) * unit + 2 * root, under_way + root)
    shard = -(-parameters // world)
    return Estimate(
        weights=at["weights", NONE],
        master=at["master", NONE],
        moments=at["moments", NONE],
        gradients=_FP32_BYTES * (shard if stage.shards_optimizer else parameters) + kept,
        host=sum(count for (_, place), count in at.items() if place == CPU),
        disk=sum(count for (_, place), count in at.items() if place == NVME),
        in_flight=max(
            round(size * under_way),
            at["widened", NONE],
            _FP32_BYTES * _WHOLES * shard if whole else 0,
        ),
    )


def _at_rest(layout: Layout, device: str) -> Counter[tuple[str, str]]:
    """Bytes by purpose and by the place where they rest; and of buffers for what is far."""
    config, stage, world = layout.config, layout.stage, layout.sums.topology.world
    states, at = optimizer_states(config.optimizer), Counter[tuple[str, str]]()
    size, master = _BYTES[config.compute], _BYTES[config.master]
    moments = _BYTES[config.moments] * (2 if states is None else states)
    for each in layout.units:
        stepped = each.shard * (1 if stage.shards_optimizer else world)
        at["master", each.state] += 0 if each.shared else master * stepped
        at["moments", each.state] += moments * stepped
        at["weights", NONE] += 0 if stage.shards_parameters else size * each.shard * world
        at["weights", each.weights] += size * each.shard if each.source == "copy" else 0
    away = [each for each in layout.units if each.offloaded]
    shard = max(each.shard for each in layout.units)
    sub_group = min(shard, SUB_GROUP)
    if config.master != "fp32":  # fp32 copies of a sub-group that rests in 16 bits
        row = _FP32_BYTES + (0 if config.moments == "fp32" else 2 * moments)
        at["widened", CPU if away and device != "cpu" else NONE] += row * sub_group
    stepped = any(each.state == NVME for each in away) * UNDER_WAY * (master + moments) * sub_group
    copied = any(each.source == "copy" and each.weights == NVME for each in away)
    read = copied or (stepped and any(each.source == "shard" for each in away))
    weights = size * _BROUGHT * shard if read and stage.shards_parameters else 0
    # A directory has one pool of buffers: those of a step are idle while weights are read.
    zero = config.zero_optimization
    apart = copied and zero.offload_param.nvme_path != zero.offload_optimizer.nvme_path
    at["buffers", CPU] += stepped + weights if apart else max(stepped, weights)
    at["buffers", CPU] += copied * size * _PUTS * sub_group
    return at


def _sums(layout: Layout, parameters: int) -> tuple[int, float | None]:
    """Bytes of sums that are kept between micro-steps, and of each element on its way."""
    config, sums, topology = layout.config, layout.sums, layout.sums.topology
    batch, micro_batch = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if batch is not None and micro_batch is not None:
        micro_batches = -(-batch // micro_batch)  # of a step
    else:
        micro_batches = (config.gradient_accumulation_steps or 1) * topology.world
    firsts = [topology.ranks(node).start for node in range(len(topology.nodes))]
    kept = max(sums.most_kept_bytes(micro_batches, rank, parameters) for rank in firsts)
    if layout.native is None:
        return kept, sums.most_under_way(micro_batches, _BYTES[config.compute])
    # The gradient, its copy in the dtype of the sum, and the sum of this micro-step.
    copied = _BYTES[layout.native] if layout.native != config.compute else 0
    return kept, _BYTES[config.compute] + copied + _BYTES[layout.native] / topology.world


def optimizer_states(optimizer: OptimizerConfig | None) -> int | None:
    """The fp32 values per parameter; None if the optimizer is not in the config or unknown."""
    if optimizer is None or (states := _STATES.get(optimizer.type.lower())) is None:
        return None
    off = (None, "auto", 0, False)
    return states + sum(optimizer.params.get(option) not in off for option in _OPTIONAL_STATES)


def is_stepped_whole(optimizer: OptimizerConfig | None) -> bool:
    """Whether an optimizer of the config is given whole parameters."""
    return optimizer is not None and optimizer.type.lower() in _STEPPED_WHOLE
