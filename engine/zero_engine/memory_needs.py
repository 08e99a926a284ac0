"""DeepSpeed's estimators of model states, with the figures of this engine.

Mixed precision with Adam, as there; in bytes. Host memory is that of a whole node, and holds the
model once per process until `initialize` has divided it. `additional_buffer_factor` is taken for
DeepSpeed's scripts, and multiplies host memory.

Called by scripts, through `runtime.zero.stage3` and `runtime.zero.stage_1_and_2`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zero_engine.config.offload import CPU, NONE, OffloadOptimizer, OffloadParam
from zero_engine.config.schema import ZeroOptimization
from zero_engine.memory import estimate
from zero_engine.sharding.partition import wrapped_modules

_GIB = 1 << 30
_FP32_BYTES = 4
_ADAM_STATES = 2
_BUFFER_FACTOR = 1.5


def _needs(
    zero: ZeroOptimization,
    total: int,
    largest: int | None,
    per_node: int,
    nodes: int,
    factor: float,
) -> tuple[int, int]:
    """(host memory of a node, device memory), in bytes."""
    memory = estimate(
        total,
        stage=zero.stage,
        compute="bf16",
        states=_ADAM_STATES,
        world=per_node * nodes,
        zero=zero,
        largest=largest,
    )
    host = per_node * max(_FP32_BYTES * total, memory.host)
    return int(host * factor), memory.total + (memory.in_flight if largest is not None else 0)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> tuple[int, int]:
    """Bytes of host memory per node and of device memory, at stage 2."""
    zero = ZeroOptimization(stage=2, offload_optimizer=_optimizer(cpu_offload))
    return _needs(zero, total_params, None, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> tuple[int, int]:
    """Bytes of host memory per node and of device memory, at stage 3.

    `zero_init` makes no difference: the model is whole in host memory until `initialize`.
    """
    del zero_init
    param = OffloadParam(device=CPU if cpu_offload and cpu_offload_params else NONE)
    zero = ZeroOptimization(stage=3, offload_optimizer=_optimizer(cpu_offload), offload_param=param)
    return _needs(
        zero,
        total_params,
        largest_layer_params,
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def _optimizer(offloaded: bool) -> OffloadOptimizer:
    return OffloadOptimizer(device=CPU if offloaded else NONE)


# ---- tables ----


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> None:
    """Print the needs of a model at stage 2, with and without offloading."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _count(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> None:
    """Print the needs of so many parameters at stage 2, with and without offloading."""
    place = (num_gpus_per_node, num_nodes)
    rows = [
        (
            estimate_zero2_model_states_mem_needs(
                total_params, *place, offload, additional_buffer_factor
            ),
            f"offload_optimizer={CPU if offload else NONE}",
        )
        for offload in (True, False)
    ]
    print("\n".join(_table(rows, *place, f"{total_params:,} parameters")))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> None:
    """Print the needs of a model at stage 3, with and without offloading."""
    total, largest = _count(model), _largest_unit(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> None:
    """Print the needs at stage 3 of so many parameters, so many of them in the largest module."""
    place = (num_gpus_per_node, num_nodes)
    rows = [
        (
            estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                *place,
                optimizer,
                param,
                additional_buffer_factor=additional_buffer_factor,
            ),
            f"offload_param={CPU if param else NONE}, "
            f"offload_optimizer={CPU if optimizer else NONE}",
        )
        for optimizer, param in ((True, True), (True, False), (False, False))
    ]
    what = f"{total_params:,} parameters, {largest_layer_params:,} of them in the largest module"
    print("\n".join(_table(rows, *place, what)))


def _table(
    rows: list[tuple[tuple[int, int], str]], per_node: int, nodes: int, what: str
) -> Iterator[str]:
    yield f"States of {what}, in bf16 with Adam, on {nodes} x {per_node} GPUs:"
    yield "  host, per node | per GPU    | options"
    for (host, device), options in rows:
        yield f"  {host / _GIB:10.2f} GiB | {device / _GIB:6.2f} GiB | {options}"


def _count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _largest_unit(model: nn.Module) -> int:
    """Parameters of the largest module that is gathered as one; the rest of the model is one."""
    units = [_count(module) for module in wrapped_modules(model).values()]
    return max([*units, _count(model) - sum(units)])
