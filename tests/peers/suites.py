"""The peers' own suites: where their sources lie, and which of their files we run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Test files of a peer, below a folder that the user has fetched."""

    name: str
    source: str
    """Where the user gets it."""
    folder: str
    """Where its tests run, below the folder of all peers."""
    files: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """Folders below that of all peers whose packages its tests import."""
    per_test: int = 3
    """So many cases of each parametrized test are sampled."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _below(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py".removeprefix("./") for name in names.split())


_DEEPSPEED = (
    *_below(
        "unit/runtime",
        "autocast data ds_config_dict ds_config_model ds_initialize engine_eigenvalue "
        "lr_schedulers multi_output_model multiple_models mup_optimizers no_sync_ctxt "
        "precision_config_dynamic_scale precision_config_loss_scale runtime_utils",
    ),
    *_below(
        "unit/runtime/zero",
        "ignore_unused_parameters nvme_checkpointing unwrap_model zero_allreduce_fetch_params "
        "zero_autocast_mixed_dtype zero_config zero_context zero_context_ancestry "
        "zero_context_return zero_dynamic_class zero_grad_clip zero_hook_attribute_delegation "
        "zero_late_module_attach zero_leaf_module zero_linear_direct_init zero_nesting_init "
        "zero_offloadpp zero_tensor_fragment zero_tiled zeropp",
    ),
    *_below(
        "unit/v1/zero",
        "offload_states stage2_flatten_on_gpu zero zero2_offload_multi_backward "
        "zero_activation_checkpoint_lifecycle zero_autocast zero_coalesce_grad_reduction "
        "zero_cpu_offload_grad_accum zero_functorch_linear zero_hook_count_regression "
        "zero_init_pg_contradiction zero_torch_func zero_user_backward",
    ),
    *_below("unit/runtime/half_precision", "dynamic_loss_scale fp16 zero_optim_overflow"),
    *_below(
        "unit/v1/half_precision",
        "bf16 gradient_clipping_default mixed_precision_dtype with_autocast",
    ),
    *_below(
        "unit/runtime/activation_checkpointing",
        "activation_checkpointing activation_checkpointing_non_reentrant offload_activations",
    ),
    *_below("unit/runtime/sparse_tensor", "averaging_sparse_gradients csr sparse_grads"),
    *_below(
        "unit/checkpoint",
        "convert_checkpoint latest_checkpoint lr_scheduler other_optimizer shared_weights sparse "
        "tag_validation universal_checkpoint zero_optimizer",
    ),
    *_below(
        "unit/utils", "byte_cast get_optim_files groups init_on_device nvtx partition_balanced"
    ),
    *_below("unit/monitor", "monitor"),
    *_below("unit/profiling/flops_profiler", "flops_profiler"),
    *_below("unit/comm", "comms_logger dist"),
    *_below("unit/ops/adam", "adamw cpu_adam hybrid_adam"),
    *_below("unit/ops/lion", "cpu_lion lion"),
    *_below("unit/ops/adagrad", "cpu_adagrad"),
    *_below("unit/ops/muon", "muon muon_partial_training"),
    *_below("unit/elasticity", "elastic"),
    *_below("unit/launcher", "ds_arguments multinode_runner run user_args"),
    *_below("unit/v1", "engine_log_level"),
    *_below("unit/v1/accelerator", "accelerator"),
    *_below("unit/v1/moe", "moe"),
)

SUITES = (
    Suite(
        name="deepspeed",
        source="https://github.com/deepspeedai/DeepSpeed",
        folder="deepspeed/tests",
        files=_DEEPSPEED,
        environment={
            "PEER_PRELOAD": "deepspeed",
            "DS_UNITTEST_TIMEOUT": "120",
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            "LOCAL_SIZE": "4",
        },
    ),
    Suite(
        name="accelerate",
        source="https://github.com/huggingface/accelerate",
        folder="accelerate",
        packages=("accelerate/src",),
        files=_below("tests/deepspeed", "deepspeed deepspeed_multiple_model"),
        per_test=100,
        environment={
            "PEER_IMPORTS": "hub",
            "PEER_DECORATORS": "accelerate.test_utils.testing:require_non_cpu",
        },
    ),
    Suite(
        name="transformers",
        source="https://github.com/huggingface/transformers",
        folder="transformers",
        packages=("transformers/src",),
        files=("tests/deepspeed/test_deepspeed.py",),
        per_test=100,
        environment={
            "PEER_IMPORTS": "hub",
            "PEER_DECORATORS": "transformers.testing_utils:require_torch_accelerator "
            "require_torch_fp16",
        },
    ),
    Suite(
        name="lightning",
        source="https://github.com/Lightning-AI/pytorch-lightning",
        folder="lightning/tests",
        packages=("lightning/src",),
        files=(
            *_below("tests_fabric/strategies", "deepspeed deepspeed_integration"),
            *_below("tests_pytorch/strategies", "deepspeed"),
        ),
        per_test=100,
        environment={"PEER_IMPORTS": "lightning_on_a_cpu"},
    ),
    Suite(
        name="torchrun",
        source="https://github.com/pytorch/pytorch, test/distributed/launcher",
        folder="pytorch/test/distributed/launcher",
        files=("test_run.py",),
        environment={"PEER_IMPORTS": "torchrun"},
    ),
    Suite(
        name="dcp",
        source="https://github.com/pytorch/pytorch, test/distributed/checkpoint",
        folder="pytorch/test/distributed/checkpoint",
        files=(
            *_below(
                ".",
                "checkpoint compatibility dedup_tensors dtensor_checkpoint dtensor_resharding "
                "file_system_checkpoint file_system_checkpoint_cpu format_utils fsdp_model_state "
                "fsdp_optim_state fsdp_tp_checkpoint_conversion hsdp_checkpoint nested_dict "
                "planner save_load_api state_dict_utils tp_checkpoint traverse utils",
            ),
            *_below("e2e", "e2e_save_and_load fine_tuning fsdp_ep pipeline"),
            *_below("fsdp", "fsdp_dsd"),
        ),
        per_test=100,
        environment={
            "PEER_EVERYWHERE": "dcp",
            "PEER_PRELOAD": "torch.testing._internal.common_fsdp "
            "torch.testing._internal.distributed._tensor.common_dtensor",
        },
    ),
)
