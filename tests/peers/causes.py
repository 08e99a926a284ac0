"""Why a case of a peer fails although nothing that is promised is missing: by name and text.

The first pattern that is found decides; a case that none fits is public behaviour.
"""

_INTERNAL_MODULES = (
    "autotuning|compile|comm.comm|comm.torch|runtime.(bf16_optimizer|comm|config_utils|eigenvalue"
    "|fp16|precision_config|sparse_tensor|state_dict_factory|torch_autocast|utils|zero.(config"
    "|contiguous|linear|mics|parameter_offload|partition|stage|utils))|utils.(comms_logging|nvtx"
    "|pin_memory|tensor_fragment|timer|z3_leaf)|runtime.engine._|runtime.config.(get_|Deep|_)"
)

CAUSES: tuple[tuple[str, str], ...] = (
    ("harness", r"not enough GPUs|No module named '(?!deepspeed|zero)|Can't load|ConnectionError"),
    ("harness", r"LocalEntryNotFound|OfflineMode|couldn't connect|Repository Not Found"),
    (
        "not offered",
        r"there is no (pipeline|tensor|expert|model|sequence) parallelism|each rank computes whole"
        r"|unit/v1/moe/|_moe\b|not here: deepspeed\.(moe|pipe|inference|module_inject|sequence"
        r"|linear|elasticity|launcher|compression|runtime\.(pipe|hybrid|data_pipeline|progressive))",
    ),
    ("not offered", r"DeepCompile|zenflow|super_offload|mics_shard_size|there are no kernels for"),
    ("internals", rf"not here: deepspeed\.({_INTERNAL_MODULES})"),
    (
        "internals",
        r"has no attribute '_(?!_version)|has no attribute '(fp16_|bit16_|averaged_|ipg_)",
    ),
    ("internals", r"has no attribute '(partition|parameter_offload|ds_tensor|param_coordinator)"),
)
