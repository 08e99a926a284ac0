"""DeepSpeed's keys that have no effect here, with the reasons, and those of missing features.

Every key of DeepSpeed's documentation is a field of `schema`, or in one of these two tables. A key
without effect changes no result, so a run may ignore it; one that enables a missing feature is
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from zero_contract.sections import Count, Finite, Share, Whole

_FIXED_ORDER = "gradients are exchanged unit by unit in one fixed order, overlapping backward"
_UNIT = "stage 3 gathers the parameters of one module at a time"
_WHOLE = "disks are read and written a sub-group at a time, past the page cache"
_TORCH = "torch's optimizers step on every device"
_CHECKED = "the result is checked by other means"
_ALWAYS = "always so here"
_STREAMS = "while a part is stepped, the next is read and the one before is written"
_READS = "up to four tensors are read ahead from the disk, in the order of the last pass"

WITHOUT_EFFECT: dict[str, str] = {
    "activation_checkpointing.contiguous_memory_optimization": (
        "torch's allocator keeps memory in large blocks"
    ),
    "activation_checkpointing.number_checkpoints": "memory is allocated as it is needed",
    "activation_checkpointing.partition_activations": "there is no model parallelism",
    "activation_checkpointing.profile": "torch.profiler shows what is recomputed",
    "activation_checkpointing.synchronize_checkpoint_boundary": (
        "a wait for the device at each boundary only takes time"
    ),
    "aio": _WHOLE,
    "bf16.immediate_grad_update": _ALWAYS,
    "checkpoint.load_universal": "every checkpoint loads at every world size",
    "checkpoint.parallel_write": "every rank writes its own share",
    "checkpoint.writer": "see checkpoint.async",
    "comet": "there are csv_monitor, tensorboard and wandb",
    "cuda_visible_devices": "which devices a worker sees is decided before it starts",
    "data_types.grad_accum_dtype": "gradients are summed in fp32",
    "disable_allgather": _FIXED_ORDER,
    "elasticity.min_time": "a worker resumes in about a second",
    "elasticity.num_gpus_per_node": "there is no model parallelism",
    "elasticity.version": "the batch is that of version 0.2",
    "flops_profiler.recompute_fwd_factor": "what is recomputed in backward is counted there",
    "flops_profiler.step": "profile_step is the step that is counted",
    "flops_profiler.top_modules": "all modules are shown, the largest first",
    "gradient_predivide_factor": "the loss is weighted before backward and summed in fp32",
    "graph_harvesting": "torch.cuda.graph works on a module",
    "memory_breakdown": "python -m zero_engine estimates the memory",
    "optimizer.legacy_fusion": _TORCH,
    "optimizer.torch_adam": _TORCH,
    "pipeline": "there is no pipeline parallelism",
    "prescale_gradients": "the loss is weighted before backward and summed in fp32",
    "seq_parallel_communication_data_type": "there is no sequence parallelism",
    "sparse_gradients": "gradients of embeddings travel with those of their unit",
    "timers": "torch.profiler works on an engine",
    "torch_autocast.lower_precision_safe_modules": "torch.autocast chooses by operation",
    "use_data_before_expert_parallelism": "there is no expert parallelism",
    "zero_allow_untested_optimizer": "any elementwise optimizer works; LAMB and Muon, too",
    "zero_force_ds_cpu_optimizer": _TORCH,
    "zero_optimization.allgather_bucket_size": _UNIT,
    "zero_optimization.allgather_partitions": _ALWAYS,
    "zero_optimization.contiguous_gradients": _ALWAYS,
    "zero_optimization.cpu_offload_use_pin_memory": "see offload_optimizer.pin_memory",
    "zero_optimization.elastic_checkpoint": "every checkpoint loads at every world size",
    "zero_optimization.enable_sanity_checks": _CHECKED,
    "zero_optimization.gather_16bit_weights_on_model_save": "save_16bit_model always does",
    "zero_optimization.grad_hooks": _ALWAYS,
    "zero_optimization.ignore_unused_parameters": "unused parameters count as zero gradients",
    "zero_optimization.legacy_stage1": _FIXED_ORDER,
    "zero_optimization.load_from_fp32_weights": "checkpoints hold fp32 weights, which are loaded",
    "zero_optimization.log_trace_cache_warnings": "there is no trace",
    "zero_optimization.max_live_parameters": _UNIT,
    "zero_optimization.max_reuse_distance": _UNIT,
    "zero_optimization.memory_efficient_linear": "torch's own linear is used",
    "zero_optimization.module_granularity_threshold": _UNIT,
    "zero_optimization.offload_optimizer.buffer_count": _STREAMS,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _TORCH,
    "zero_optimization.offload_optimizer.fast_init": _ALWAYS,
    "zero_optimization.offload_optimizer.pipeline": _STREAMS,
    "zero_optimization.offload_optimizer.pipeline_read": _STREAMS,
    "zero_optimization.offload_optimizer.pipeline_write": _STREAMS,
    "zero_optimization.offload_param.buffer_count": _READS,
    "zero_optimization.offload_param.buffer_size": _READS,
    "zero_optimization.overlap_comm": _FIXED_ORDER,
    "zero_optimization.override_module_apply": _UNIT,
    "zero_optimization.pipeline_loading_checkpoint": "checkpoints are read by ranges",
    "zero_optimization.reduce_bucket_size": _FIXED_ORDER,
    "zero_optimization.reduce_scatter": _ALWAYS,
    "zero_optimization.round_robin_gradients": _FIXED_ORDER,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "it rests with the other state",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "save_16bit_model always does",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "save_16bit_model always does",
    "zero_optimization.stage3_max_live_parameters": _UNIT,
    "zero_optimization.stage3_max_reuse_distance": _UNIT,
    "zero_optimization.stage3_module_granularity_threshold": _UNIT,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _UNIT,
    "zero_optimization.sub_group_size": "offloaded state is stepped in parts of 16 Mi elements",
    "zero_optimization.use_all_reduce_for_fetch_params": _UNIT,
    "zero_optimization.use_multi_rank_bucket_allreduce": _FIXED_ORDER,
}
"""Path of the key -> why it has no effect."""

COMMENT = ("_", "//", "#")
"""The beginnings of keys that are comments, such as "_comment"."""

INSIDE: dict[str, frozenset[str]] = {
    section: frozenset(names.split())
    for section, names in {
        "aio": (
            "block_size intra_op_parallelism overlap_events queue_depth single_submit "
            "thread_count use_gds"
        ),
        "comet": (
            "api_key enabled experiment_key experiment_name mode online project "
            "samples_log_interval workspace"
        ),
    }.items()
}
"""The keys of sections without effect: a misspelt key there is still an error."""


def _enabled(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get("enabled", False))


def _asks(key: str, default: Any) -> Callable[[Any], bool]:
    """Whether a section sets `key` to something else than `default`."""
    return lambda section: isinstance(section, Mapping) and section.get(key, default) != default


@dataclass(frozen=True, slots=True)
class Missing:
    """A missing feature."""

    asks: Callable[[Any], bool]
    """Whether a value of the key enables the feature."""
    why: str
    """Why it is missing, and what to do instead."""


MISSING: dict[str, Missing] = {
    "amp": Missing(_enabled, "Apex is not maintained any more; use bf16, fp16 or torch_autocast"),
    "autotuning": Missing(
        _enabled,
        "nothing tunes itself; python -m zero_engine FILE estimates the memory of a config",
    ),
    "checkpoint.use_node_local_storage": Missing(
        bool,
        "a checkpoint on one node's disk is lost with the node, and other nodes cannot read it "
        "when the world changes; save to storage that all nodes share, or to s3:// or gs://, and "
        "set checkpoint.ram for checkpoints in the nodes' memory, with copies",
    ),
    "compile": Missing(
        _asks("deepcompile", False),
        "DeepCompile rewrites the graphs of DeepSpeed's own stages; remove it",
    ),
    "compression_training": Missing(
        bool, "the model is trained as it is; compress what save_16bit_model exports"
    ),
    "curriculum_learning": Missing(
        _enabled,
        "what a step trains on follows from seed and position alone; order and cut samples in the "
        "dataset, and set elastic.shuffle to false",
    ),
    "data_efficiency": Missing(
        _enabled,
        "what a step trains on follows from seed and position alone; select and order samples in "
        "the dataset, and set elastic.shuffle to false",
    ),
    "elasticity.model_parallel_size": Missing(
        lambda value: value != 1, "there is no model parallelism; remove it"
    ),
    "eigenvalue": Missing(_enabled, "it steers compression, of which there is none; remove it"),
    "hybrid_engine": Missing(
        _enabled, "there are no kernels for inference; generate with the trained module itself"
    ),
    "progressive_layer_drop": Missing(
        _enabled, "the model decides what runs; leave layers out in its forward"
    ),
    "quantize_training": Missing(
        _enabled, "the model is trained as it is; quantize what save_16bit_model exports"
    ),
    "sequence_parallel_size": Missing(
        lambda value: value != 1,
        "each rank computes whole sequences; remove it, and recompute activations",
    ),
    "sparse_attention": Missing(
        bool, "DeepSpeed has removed it, too; call torch's flex_attention in the model"
    ),
    "tensor_parallel": Missing(
        _asks("autotp_size", 0),
        "there is no model parallelism; stage 3 divides what one rank cannot hold",
    ),
    "weight_quantization": Missing(
        _enabled, "it is for inference; quantize what save_16bit_model exports"
    ),
    "zero_optimization.mics_shard_size": Missing(
        lambda value: value != -1,
        "weights are divided among all ranks; zero_hpz_partition_size keeps them within a node",
    ),
    "zero_optimization.offload_optimizer.super_offload": Missing(
        bool,
        "it steps before the norm of the gradients is known, and rolls back; remove it: sub-groups "
        "are read, stepped and written at the same time",
    ),
    "zero_optimization.zenflow": Missing(
        bool, "it applies some gradients steps later than others; use offload_optimizer alone"
    ),
    "zero_optimization.zeropp_loco_param": Missing(
        bool,
        "the errors that it carries on are a rank's, and ranks come and go; use "
        "zero_quantized_gradients alone",
    ),
}
"""Path of the key -> the missing feature."""

ALIASES = {
    "bfloat16": "bf16",
    "checkpoint.async": "asynchronous",
    "zero_optimization.cpu_offload": "offload_optimizer",
    "zero_optimization.cpu_offload_param": "offload_param",
    "zero_optimization.cpu_offload_params": "offload_param",
    "zero_optimization.model_persistence_threshold": "stage3_model_persistence_threshold",
    "zero_optimization.param_persistence_threshold": "stage3_param_persistence_threshold",
    "zero_optimization.prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "zero_optimization.zero_stage": "stage",
}
"""Path of another spelling -> the key."""

WRITTEN = {"checkpoint.asynchronous": "checkpoint.async"}
"""Path of a field whose key is a word of Python -> the path of the key."""

INERT_NUMBERS: Mapping[str, Any] = {
    "activation_checkpointing.number_checkpoints": Count,
    **{
        f"aio.{name}": Count
        for name in ("block_size", "intra_op_parallelism", "queue_depth", "thread_count")
    },
    "comet.samples_log_interval": Count,
    "elasticity.min_time": Whole,
    "elasticity.num_gpus_per_node": Count,
    "elasticity.version": Finite,
    "flops_profiler.recompute_fwd_factor": Finite,
    "flops_profiler.top_modules": Count,
    # A divisor: at 0 it would divide by zero, and so would what rounds to it in fp32.
    "gradient_predivide_factor": Annotated[float, Meta(ge=1e-30, le=sys.float_info.max)],
    **{
        f"zero_optimization.{name}": Whole
        for name in (
            "allgather_bucket_size",
            "offload_optimizer.buffer_count",
            "offload_param.buffer_count",
            "offload_param.buffer_size",
            "reduce_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_module_granularity_threshold",
        )
    },
    "zero_optimization.sub_group_size": Count,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Share,
}
"""Path of a key without effect -> the type of its value, beside null and "auto".

A number that makes no sense (a bucket of -1 elements) is a typo, also where nothing reads it: its
author believes that it has an effect.
"""
