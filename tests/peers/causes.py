"""Why a case of a peer fails although nothing that is promised is missing: by name and text.

The first pattern that is found decides; a case that none fits is public behaviour.
"""

_INTERNAL_MODULES = (
    "autotuning|checkpoint.utils|compile|comm.comm|comm.torch|runtime.(bf16_optimizer|comm|config_utils|eigenvalue"
    "|fp16|precision_config|sparse_tensor|state_dict_factory|torch_autocast|utils|zero.(config"
    "|contiguous|linear|mics|parameter_offload|partition|stage|utils))|utils.(comms_logging|nvtx"
    "|pin_memory|tensor_fragment|timer|z3_leaf|zero_to_fp32)|runtime.engine._|runtime.config.(get_"
    "|Deep|_)"
)

_INTERNAL_NAMES = (
    "fp16_|bit16_|averaged_|ipg_|partition|parameter_offload|ds_tensor|ds_active_sub|param_coord"
    "|pipeline_parallelism|sparse_tensor_module_names|basic_optimizer|accumulated_grads_in_cpu"
    "|single_partition_of|loss_scale_config|param_dtype|step_subgroup|rollback_subgroup"
)

CAUSES: tuple[tuple[str, str], ...] = (
    ("internals", r"'(record|shutdown)' to (have been|be) called once|MockException not raised"),
    ("harness", r"contiguous_checkpointing needs num_checkpoints"),  # DeepSpeed asserts it, too
    (
        "harness",  # the cases of Lightning that look at the device itself
        r"test_error_with_invalid_accelerator|only_compatible_with_cuda|optimizer_device_set"
        r"|stage_3_save_warning",
    ),
    ("internals", r"_(model|optim)_states\.pt is not found"),  # DeepSpeed's files
    (
        "internals",
        r"_Placeholder\b|param does not have autocast_dtype|LinearInitContextPersistence",
    ),
    ("internals", r"fp32_flat_groups|test_deepspeed_multi_save_same_filepath"),  # files
    ("internals", r"nelement\(\) == 0"),
    ("harness", r"test_nproc_[gx]pu_launch_configurations"),  # a mock of this process's GPUs
    ("harness", r"not enough GPUs|No module named '(?!deepspeed|zero)|Can't load|ConnectionError"),
    ("harness", r"LocalEntryNotFound|OfflineMode|couldn't connect|Repository Not Found"),
    (
        "not offered",
        r"there is no (pipeline|tensor|expert|model|sequence) parallelism|each rank computes whole"
        r"|unit/v1/moe/|_moe\b|not here: deepspeed\.(moe|pipe|inference|module_inject|sequence"
        r"|linear|launcher|compression|runtime\.(pipe|hybrid|data_pipeline|progressive|activation_"
        r"checkpointing\.offload_activations))|pickle <class 'sitecustomize\.top"
        r"|'zero_deepspeed\.launcher\.runner' has no attribute"
        r"|No such file or directory: 'deepspeed'",
    ),
    ("not offered", r"DeepCompile|zenflow|super_offload|mics_shard_size|there are no kernels for"),
    ("internals", rf"not here: deepspeed\.({_INTERNAL_MODULES})"),
    (
        "internals",
        r"'zero_deepspeed\.runtime\.(utils|zero\.partition_parameters)' has no attribute"
        r"|deepspeed\.runtime\.zero\.partition_parameters has no attribute",
    ),
    ("internals", r"there is no (zero_)?deepspeed\.runtime\.zero\.stage"),
    ("internals", r"isinstance\([\s\S]{1,600}, (DeepSpeedZeroOpt|ZeROOpt)|be ZeROOptimizer"),
    ("internals", r"isinstance\(.*, ZeROOrderedDict\)"),
    ("internals", rf"has no attribute '(_(?!_version)|{_INTERNAL_NAMES})"),
)
