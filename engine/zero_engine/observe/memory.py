"""The memory that a rank needs for the state of training, before anything is allocated.

Owns the arithmetic, which follows `flat_unit`, `zero_optimizer`, `grad_reducer` and `tiers` line by
line; tests compare it with what an engine really allocates. Activations are left out, as are the
gradients of the module that backward is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_comm.topology import described
from zero_engine.config.offload import CPU, NONE, NVME
from zero_engine.config.schema import Config, OptimizerConfig, ZeroOptimization
from zero_engine.layout import Facts, OptimizerFacts, resolve
from zero_engine.optim.sub_groups import SUB_GROUP, UNDER_WAY
from zero_engine.stages import STAGES

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

_OPTIONAL_STATES = {"amsgrad": 1, "centered": 1, "momentum": 1}
"""Option -> the number of further values when it is on."""

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

    @property
    def without_gpu(self) -> int:
        """The sum of all memory if device and host are one."""
        return self.total + self.host


def estimate(  # noqa: PLR0913 - a fact each
    parameters: int,
    *,
    stage: int,
    compute: str,
    resting: tuple[str, str] = ("fp32", "fp32"),
    states: int,
    world: int,
    zero: ZeroOptimization | None = None,
    largest: int | None = None,
    root: int = 0,
    gpu: bool = True,
    whole: bool = False,
    kept: int = 0,
    travelling: float | None = None,
) -> Estimate:
    """The bytes on one rank for the state of training.

    Args:
        parameters: Trained parameters of the whole model.
        stage: ZeRO stage.
        compute: "fp32", "bf16" or "fp16".
        resting: The dtypes in which master weights and the optimizer's state rest.
        states: Values that the optimizer keeps per parameter.
        world: The number of ranks.
        zero: The config of the offload; None: no offload.
        largest: Parameters of the largest unit; None: all of the model.
        root: Parameters outside of these units, such as embeddings and the head: their weights stay
            gathered, and their gradients are collected, during a whole pass.
        gpu: Whether the device has separate memory.
        whole: Whether the optimizer is given whole parameters.
        kept: Bytes of gradient sums that are kept between micro-steps, beside the sums themselves;
            see `Accumulation.most_kept_bytes`.
        travelling: Bytes for each element of a gradient on its way, where sums begin inside of
            nodes, see `Accumulation.most_under_way`; None: gradients are sent to their owners.

    Source of the formulas: ZeRO (arXiv 1910.02054), section 3, with fp32 gradient sums;
    ZeRO-Offload and ZeRO-Infinity for the tiers.
    """
    policy, size = STAGES[stage], _BYTES[compute]
    shard = -(-parameters // world)
    stepped = shard if policy.shards_optimizer else parameters
    unit = largest or parameters
    # In elements. The root is reduced last, when the buffers of the units are still held.
    reduced = _REDUCED if travelling is None else _FILLED + travelling / size
    under_way = reduced * unit + (reduced - 1) * root
    if policy.shards_parameters:
        under_way = max((_GATHERED + reduced) * unit + 2 * root, under_way + root)
    zero = zero or ZeroOptimization(stage=stage)
    plan = _Resting(zero, compute, stepped, *resting, gpu=gpu)
    places = plan.master() + plan.moments(states) + plan.weights()
    part = -(-unit // world)
    buffers = plan.buffers(states, part) + plan.at(CPU, plan.widened(states, part))
    node = plan.zero.zero_hpz_partition_size
    secondary = size * -(-parameters // node) if 1 < node < world and world % node == 0 else 0
    return Estimate(
        weights=plan.at(NONE, plan.weights())
        + secondary
        + (0 if policy.shards_parameters else size * parameters),
        master=plan.at(NONE, plan.master()),
        moments=plan.at(NONE, plan.moments(states)),
        gradients=_FP32_BYTES * stepped + kept,
        host=plan.at(CPU, places) + buffers,
        disk=plan.at(NVME, places),
        in_flight=max(
            round(size * under_way),
            plan.at(NONE, plan.widened(states, part)),
            _FP32_BYTES * _WHOLES * shard if whole else 0,
        ),
    )


_Placed = list[tuple[str, float]]
"""(device as the config names it, bytes there)."""


@dataclass(frozen=True, slots=True)
class _Resting:
    """The bytes of the shards of all units, by the place where they rest."""

    zero: ZeroOptimization
    compute: str
    stepped: int
    master_in: str = "fp32"
    moments_in: str = "fp32"
    gpu: bool = True

    @staticmethod
    def at(device: str, places: _Placed) -> int:
        return round(sum(bytes_ for place, bytes_ in places if place == device))

    def master(self) -> _Placed:
        """Master weights, unless they are the buffer that the model computes with."""
        home, away = self._parts()
        size, alike = _BYTES[self.master_in], self.compute == self.master_in
        shared = alike and not STAGES[self.zero.stage].shards_parameters
        aliased_away = shared and not self.gpu
        return [
            (NONE, 0 if shared else size * home),
            (self._device, 0 if aliased_away else size * away),
        ]

    def moments(self, states: int) -> _Placed:
        home, away = self._parts()
        size = _BYTES[self.moments_in] * states
        return [(NONE, size * home), (self._device, size * away)]

    def widened(self, states: int, unit_shard: int) -> _Placed:
        """The fp32 copies, during its step, of a sub-group that rests in 16 bits."""
        if self.master_in == "fp32":
            return []
        count = min(unit_shard, SUB_GROUP)
        rows = 1 + (states if self.moments_in != "fp32" else 0)
        on_host = self._device != NONE and self.gpu
        return [(CPU if on_host else NONE, float(_FP32_BYTES * rows * count))]

    def weights(self) -> _Placed:
        """The copy that modules are gathered from, of units whose master weights are far."""
        size, alike = _BYTES[self.compute], self.compute == self.master_in
        return [
            (device, 0 if alike and device == self._device else size * count)
            for device, count in self._gathered()
        ]

    def _gathered(self) -> _Placed:
        """The elements, not bytes, that are gathered from a copy of the master weights."""
        _, away = self._parts()
        param = self.zero.offload_param
        near = self._device == NONE or (self._device == CPU and not self.gpu)
        if near or not STAGES[self.zero.stage].shards_parameters:
            return []
        in_cpu = min(away, param.max_in_cpu) if param.device == NVME else 0.0
        return [(CPU, in_cpu), (param.device, away - in_cpu)]

    def buffers(self, states: int, unit_shard: int) -> int:
        """Host memory for transfers from and to the disk."""
        size, total = _BYTES[self.compute], 0
        sub_group = min(unit_shard, SUB_GROUP)
        if self._device == NVME:
            row = _BYTES[self.master_in] + _BYTES[self.moments_in] * states
            total += UNDER_WAY * row * sub_group
        if self.at(NVME, self._gathered()):
            total += _BROUGHT * size * unit_shard + _PUTS * size * sub_group
        return total

    @property
    def _device(self) -> str:
        return self.zero.offload_optimizer.device

    def _parts(self) -> tuple[float, float]:
        """The elements whose state stays on the device, and those whose state is offloaded."""
        if self._device == NONE:
            return self.stepped, 0.0
        away = self.zero.offload_optimizer.ratio * self.stepped
        return self.stepped - away, away


def optimizer_states(optimizer: OptimizerConfig | None) -> int | None:
    """The fp32 values per parameter; None if the optimizer is not in the config or unknown."""
    if optimizer is None:
        return None
    states = _STATES.get(optimizer.type.lower())
    params: Mapping[str, Any] = optimizer.params
    return (
        None
        if states is None
        else states
        + sum(
            extra
            for option, extra in _OPTIONAL_STATES.items()
            if params.get(option) not in (None, "auto", 0, False)
        )
    )


def is_stepped_whole(optimizer: OptimizerConfig | None) -> bool:
    """Whether an optimizer of the config is given whole parameters."""
    return optimizer is not None and optimizer.type.lower() in _STEPPED_WHOLE


def handed_over(compute: str, summed: str, world: int) -> float:
    """Bytes of each element of a gradient that the backend sums.

    The gradient, its copy in the dtype of the sum, and the sum of this micro-step.
    """
    copied = _BYTES[summed] if summed != compute else 0
    return _BYTES[compute] + copied + _BYTES[summed] / world


def estimate_for(
    config: Config,
    parameters: int,
    world: int,
    largest: int | None = None,
    node_ranks: int | None = None,
) -> Estimate:
    """The estimate for a config, on GPUs; an unknown optimizer counts as Adam.

    Without `largest` the model is one unit, and without `node_ranks` there is one node.
    """
    whole, nodes = is_stepped_whole(config.optimizer), described(str(node_ranks or world), world)
    optimizer = OptimizerFacts(name="the optimizer", whole=whole)
    layout = resolve(config, Facts(topology=nodes, device="cuda", optimizer=optimizer))
    topology, sums = layout.sums.topology, layout.sums
    states = optimizer_states(config.optimizer)
    batch, micro_batch = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if batch is not None and micro_batch is not None:
        micro_batches = -(-batch // micro_batch)  # of a step
    else:
        micro_batches = (config.gradient_accumulation_steps or 1) * world
    kept = max(
        sums.most_kept_bytes(micro_batches, topology.ranks(node).start, parameters)
        for node in range(len(topology.nodes))
    )
    if layout.native:
        travelling: float | None = handed_over(config.compute, layout.native, world)
    else:
        travelling = sums.most_under_way(micro_batches, _BYTES[config.compute])
    zero = layout.config.zero_optimization
    return estimate(
        parameters,
        stage=zero.stage,
        compute=config.compute,
        resting=(config.master, config.moments),
        states=2 if states is None else states,
        world=world,
        zero=zero,
        largest=largest,
        whole=whole,
        travelling=travelling,
        kept=kept,
    )
