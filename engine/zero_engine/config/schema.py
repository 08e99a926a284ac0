"""The configuration as frozen dataclasses: DeepSpeed's names and defaults, and a few of ours.

Owns the keys that have an effect and their types. What depends on the world is checked when the
world is known (`global_batch.resolve_batch`).

Source: https://www.deepspeed.ai/docs/config-json/ and DeepSpeed 0.19.8, for the defaults.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from zero_checkpoint.options import Checkpoint
from zero_comm.determinism import Deterministic, mode_of
from zero_comm.exchange.comms_log import CommsLogger
from zero_contract.errors import ConfigError
from zero_contract.sections import MOST, Count, Finite, Number, Seed, Share, Spelled, Whole
from zero_engine.config.elasticity import Elasticity
from zero_step import options

NONE, CPU, NVME = "none", "cpu", "nvme"
Device = Annotated[
    str, Meta(pattern=f"^({NONE}|{CPU}|{NVME})$", description='"none", "cpu" or "nvme"')
]
FROM_BOOL = Spelled(lambda on: {"device": CPU if on else NONE} if isinstance(on, bool) else on)
"""DeepSpeed's older "cpu_offload"."""


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer:
    """Where master weights and optimizer state rest; the optimizer then steps on the CPU."""

    device: Device = NONE
    """Where they rest: "none", "cpu" (host memory) or "nvme" (a disk)."""
    nvme_path: str | None = None
    """With device "nvme": a directory on a local disk, the same path on every node."""
    pin_memory: bool = True
    """Allocate page-locked host memory, which makes copies from and to a GPU fast."""
    ratio: Share = 1.0
    """At stage 3: the part of the state, from 0 to 1, that does not stay on the device."""

    def __post_init__(self) -> None:
        _check_path("offload_optimizer", self.device, self.nvme_path)


@dataclass(frozen=True, kw_only=True)
class OffloadParam:
    """Where the weights rest that modules are gathered from, at stage 3."""

    device: Device = NONE
    """Where they rest: "none", "cpu" (host memory) or "nvme" (a disk)."""
    nvme_path: str | None = None
    """With device "nvme": a directory on a local disk, the same path on every node."""
    pin_memory: bool = True
    """Allocate page-locked host memory, which makes copies from and to a GPU fast."""
    max_in_cpu: Whole = 1_000_000_000
    """With device "nvme": elements of each rank that stay in the host's memory."""

    def __post_init__(self) -> None:
        _check_path("offload_param", self.device, self.nvme_path)


def _check_path(section: str, device: str, nvme_path: str | None) -> None:
    where = f"zero_optimization.{section}"
    if device == NVME and nvme_path is None:
        raise ConfigError(f'{where}.device "nvme" needs {where}.nvme_path, a directory on a disk')
    if device == NVME and nvme_path is not None and not Path(nvme_path).is_absolute():
        raise ConfigError(f"{where}.nvme_path: {nvme_path!r} is not an absolute path")


class Policy(StrEnum):
    """What is kept of a module's forward for its backward."""

    RECOMPUTE = "recompute"
    SELECTIVE = "selective"
    OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """What is kept between the forward and the backward of modules, and where. No bit changes.

    DeepSpeed's keys apply to its `checkpointing.checkpoint`; `modules` and `policy` are ours.
    """

    modules: tuple[str, ...] = ()
    """Classes of modules, such as "LlamaDecoderLayer", or patterns of their names, such as
    "layers.*.mlp": their activations are treated as `policy` says. Modules inside them are not
    treated once more."""
    policy: Policy = Policy.RECOMPUTE
    """"recompute" keeps the inputs of a module, and runs its forward again in backward. "selective"
    also keeps the results of matrix products, convolutions and attention, and recomputes the rest.
    "offload" keeps everything in host memory, and recomputes nothing."""
    cpu_checkpointing: bool = False
    """Keep in host memory the inputs that "recompute" and "selective" keep."""


DTYPE_NAMES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "bfp16": "bf16",
}
INFINITY_IS_NEVER = Spelled(lambda steps: None if steps == math.inf else steps)  # accelerate's
TRUE_IS_STAGE_ONE = Spelled(lambda on: {"stage": int(on)} if isinstance(on, bool) else on)
Dtype = Annotated[
    str, Meta(pattern=f"^({'|'.join(DTYPE_NAMES)})$", description='"fp32", "bf16" or "fp16"')
]


@dataclass(frozen=True, kw_only=True)
class Bf16:
    """Compute in bfloat16; gradient sums stay fp32, as do master weights and moments by default."""

    enabled: bool = False
    """Whether the model computes in bfloat16."""
    bf16_master_weights_and_grads: bool = False
    """Keep the master weights in bfloat16. Gradients are summed in fp32 all the same."""
    bf16_optimizer_states: bool = False
    """Keep the optimizer's state in bfloat16 as well; needs `bf16_master_weights_and_grads`."""
    check_grad_overflow: bool = True
    """Whether a step is skipped if the norm of its gradients is not finite. If it is not, NaN
    reaches all weights, without a word."""


@dataclass(frozen=True, kw_only=True)
class Fp16:
    """Compute in float16, with the loss scaled so that small gradients do not vanish."""

    enabled: bool = False
    """Whether the model computes in float16."""
    auto_cast: bool = False
    """Cast floating-point inputs of the model to float16."""
    loss_scale: Finite = 0.0
    """A fixed loss scale; 0 makes the scale dynamic, so that it follows the overflows."""
    initial_scale_power: Annotated[int, Meta(ge=0, le=127)] = 16
    """The dynamic loss scale begins at 2 to this power, a number of fp32."""
    loss_scale_window: Whole = 1000
    """Steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: Whole = 2
    """Overflows until the dynamic loss scale halves."""
    consecutive_hysteresis: bool = False
    """Every step without overflow restores the hysteresis, not only a doubling."""
    min_loss_scale: Finite = 1.0
    """The dynamic loss scale never becomes smaller than this."""
    fp16_master_weights_and_grads: bool = False
    """Keep the master weights in float16. Gradients are summed in fp32 all the same."""

    def __post_init__(self) -> None:
        if self.enabled and self.loss_scale == 0:  # dynamic; else nothing reads them
            for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
                if getattr(self, name) == 0:
                    raise ConfigError(f"fp16.{name}: 0 is not more than 0")


@dataclass(frozen=True, kw_only=True)
class TorchAutocast:
    """Run forward under torch.autocast, also in bf16, for the operations that it runs in fp32."""

    enabled: bool = False
    """Whether forward runs under torch.autocast."""
    dtype: str = "bfloat16"
    """The dtype of torch.autocast: "bfloat16", or "float16", with the loss scale of "fp16"."""

    def __post_init__(self) -> None:
        if self.enabled and self.compute not in ("bf16", "fp16"):
            raise ConfigError(
                f'torch_autocast.dtype: {self.dtype!r} is not supported; use "bfloat16" or '
                '"float16"'
            )

    @property
    def compute(self) -> str | None:
        """The dtype by its short name."""
        return DTYPE_NAMES.get(self.dtype.removeprefix("torch."))


@dataclass(frozen=True, kw_only=True)
class DataTypes:
    """The dtypes of parameters and buffers, where they differ from the rest."""

    param_dtype: Dtype | None = None
    """The dtype of the parameters. It must be that of bf16.enabled or fp16.enabled, else fp32."""
    buffer_dtype: Dtype | None = None
    """The dtype of floating-point buffers. Without it they keep their own."""

    @property
    def params(self) -> str | None:
        """The dtype of the parameters by its short name, if it is given."""
        return DTYPE_NAMES.get(self.param_dtype or "")

    @property
    def buffers(self) -> str | None:
        """The dtype of floating-point buffers by its short name, if it is given."""
        return DTYPE_NAMES.get(self.buffer_dtype or "")


@dataclass(frozen=True, kw_only=True)
class LeafModule:
    """Modules whose parameters are gathered together at stage 3, those of their children too."""

    classes: tuple[str, ...] = ()
    """Names of classes, such as "MixtralSparseMoeBlock"; all their modules are meant."""
    names: tuple[str, ...] = ()
    """Names of modules, such as "model.layers.0.mlp"."""
    name_suffixes: tuple[str, ...] = ()
    """Ends of the names of modules, such as "mlp.experts"."""


@dataclass(frozen=True, kw_only=True)
class ZeroOptimization:
    """ZeRO: which state is sharded over the ranks, and where it rests between uses."""

    stage: Literal[0, 1, 2, 3] = 0
    """0 shards nothing, 1 the optimizer's state, 2 also the gradients, 3 also the parameters."""
    leaf_module: LeafModule = LeafModule()
    offload_optimizer: Annotated[OffloadOptimizer, FROM_BOOL] = OffloadOptimizer()
    offload_param: Annotated[OffloadParam, FROM_BOOL] = OffloadParam()
    zero_hpz_partition_size: Count = 1
    """ZeRO++, at stage 3: this number of consecutive ranks, those of a node, keep a secondary copy
    of all weights, sharded over them. 1 keeps none."""
    zero_quantized_weights: bool = False
    """ZeRO++, at stage 3: gather weights as int8. The bits differ from those without it."""
    zero_quantized_nontrainable_weights: bool = False
    """ZeRO++, at stage 3: gather as int8 only the weights that are not trained."""
    zero_quantized_gradients: bool = False
    """ZeRO++: round the sum of each block of `elastic.reduction_block` micro-batches to int8, and
    send it as int8 between nodes if one node has all of them. The bits differ from those without
    it."""
    stage3_prefetch_bucket_size: Whole | None = None
    """The number of elements that stage 3 prefetches. Null is one module, 0 is nothing."""
    stage3_param_persistence_threshold: Whole = 100_000
    """Parameters of at most this number of elements stay whole at stage 3. Scripts may write to
    them between steps, at every stage; all ranks must write the same."""
    stage3_model_persistence_threshold: Whole = sys.maxsize
    """The most elements of all such parameters together."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer by name. Without this section the script gives one to `initialize`."""

    type: str
    """The optimizer's name, such as "AdamW"."""
    params: dict[str, Any] = field(default_factory=dict)
    """Its arguments, such as `lr`. Those that are "auto" keep the optimizer's own defaults."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """A learning-rate schedule by name. Without this section the rate stays as it is."""

    type: str | None = None
    """The schedule's name, such as "WarmupLR"."""
    params: dict[str, Any] = field(default_factory=dict)
    """Its arguments, such as `warmup_num_steps`."""


FROM_MODULES, FROM_CHECKPOINT = "modules", "checkpoint"
"""Values of `elastic.initial_weights`."""


@dataclass(frozen=True, kw_only=True)
class Elastic(options.Elastic):
    """Keys that DeepSpeed does not have."""

    shuffle: bool = True
    """Whether a map-style dataset is shuffled anew in every epoch."""
    max_skipped_steps: Count = 20
    """A run ends after this many skipped steps in a row, with no smaller loss scale left to try."""
    initial_weights: str = FROM_MODULES
    """What parameters on the meta device begin with. "modules": what their modules' initialisers
    draw, with seeds from the script's seed and the modules' names. "checkpoint": nothing, because
    load_checkpoint follows; anything else before it is an error. Another value: the path of a
    safetensors file, or of a directory of them, that holds the parameters under their names."""
    overlap_param_gather: bool = False
    """Stages 1 and 2: `step()` begins to all-gather the new weights and does not wait for them; the
    next forward waits, module by module. Until then parameters show NaN, as at stage 3. The bits
    are the same."""


@dataclass(frozen=True, kw_only=True)
class FileMonitor:
    """Write curves into files below `output_path`/`job_name`."""

    enabled: bool = False
    """Whether curves are written."""
    output_path: str = ""
    """The directory of all jobs' curves."""
    job_name: str = "DeepSpeedJobName"
    """The directory of this job's curves, within `output_path`."""


@dataclass(frozen=True, kw_only=True)
class WandbMonitor:
    """Send curves to Weights & Biases."""

    enabled: bool = False
    """Whether curves are sent."""
    group: str | None = None
    """The group of this run."""
    team: str | None = None
    """The team (entity) that the run belongs to."""
    project: str = "deepspeed"
    """The project that the run belongs to."""


@dataclass(frozen=True, kw_only=True)
class FlopsProfiler:
    """Count the floating-point operations of one step, by module."""

    enabled: bool = False
    """Whether a step is profiled."""
    profile_step: Whole = 1
    """The number of steps before the profiled one."""
    module_depth: Annotated[int, Meta(ge=-1, le=MOST)] = -1
    """The largest depth of the modules that are shown. -1 shows all."""
    detailed: bool = True
    """Whether each module is shown."""
    output_file: str | None = None
    """A file to write the profile into, besides the log."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration."""

    train_batch_size: Count | None = None
    """Samples of one optimizer step, over all ranks: the global batch, at every world size."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Samples of one forward and backward of one rank: the micro-batch."""
    gradient_accumulation_steps: Count | None = None
    """Micro-batches of each rank in one step, for the world that the run begins with."""
    managed_gradient_accumulation: bool = True
    """Whether the global batch decides where a step ends. If false, the script calls `step()`."""
    gradient_clipping: Number = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    gradient_allreduce_op: Annotated[
        str, Meta(pattern="(?i)^(mean|sum)$", description='"mean" or "sum"')
    ] = "mean"
    """Gradients are averaged over the ranks ("mean"), or summed ("sum") over the ranks of the run's
    first round."""
    communication_data_type: Dtype | None = None
    """With elastic.reduction "native", gradients are sent and summed in the compute dtype if this
    is not "fp32" or null. Otherwise they are sent as they are computed, so nothing rounds them."""
    seed: Seed = 42
    """Decides the order of samples and dropout. DeepSpeed does not have this key."""
    steps_per_print: Annotated[Count | None, INFINITY_IS_NEVER] = None
    """Log step, loss, gradient norm and learning rates every this many steps."""
    wall_clock_breakdown: bool = False
    """Log the time of forward, backward and step."""
    dump_state: bool = False
    """Log the resolved config at the beginning."""
    log_level: str | None = None
    """The level of the logger `zero_engine`, such as "info"."""
    dataloader_drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a global batch."""
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    zero_optimization: Annotated[ZeroOptimization, TRUE_IS_STAGE_ONE] = ZeroOptimization()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    checkpoint: Checkpoint = Checkpoint()  # noqa: RUF009, it is frozen
    elastic: Elastic = Elastic()
    elasticity: Elasticity = Elasticity()  # noqa: RUF009, it is frozen
    csv_monitor: FileMonitor = FileMonitor()
    tensorboard: FileMonitor = FileMonitor()
    wandb: WandbMonitor = WandbMonitor()
    comms_logger: CommsLogger = CommsLogger()  # noqa: RUF009, it is frozen
    flops_profiler: FlopsProfiler = FlopsProfiler()

    @property
    def compute(self) -> str:
        """The dtype that the model computes in: "fp32", "bf16" or "fp16"."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def deterministic(self) -> Deterministic:
        """Whether kernels must repeat themselves, and ranks be equal."""
        return mode_of(self.elastic.deterministic, ordered=not self.elastic.is_native)

    @property
    def loss_scaling(self) -> Fp16:
        """The rules of the loss scale; it is 1 unless they are enabled."""
        autocast = self.torch_autocast
        scales = self.fp16.enabled or (autocast.enabled and autocast.compute == "fp16")
        return replace(self.fp16, enabled=scales)

    @property
    def travelling(self) -> str:
        """The dtype in which the backend sums gradients, with elastic.reduction "native"."""
        wide = DTYPE_NAMES[self.communication_data_type or "fp32"] == "fp32"
        return "fp32" if wide else self.compute

    @property
    def master(self) -> str:
        """The dtype in which master weights rest: "fp32", or that of the model."""
        low_precision = {
            "bf16": self.bf16.bf16_master_weights_and_grads,
            "fp16": self.fp16.fp16_master_weights_and_grads,
        }
        return self.compute if low_precision.get(self.compute, False) else "fp32"

    @property
    def moments(self) -> str:
        """The dtype in which the optimizer's state rests: "fp32" or "bf16"."""
        return "bf16" if self.bf16.enabled and self.bf16.bf16_optimizer_states else "fp32"
