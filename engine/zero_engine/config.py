"""The configuration: DeepSpeed's JSON keys as frozen dataclasses.

Owns the names, defaults and coercions. Must always hold: a key that nothing reads is an error
that names the nearest known key, never silence; a key that DeepSpeed users write but that has
no meaning here is listed below and mentioned once in the log; a feature that is asked for and
not there is an error. `engine` reads the result.

Source: DeepSpeed's config (https://www.deepspeed.ai/docs/config-json/), with the same defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_engine.errors import ConfigError
from zero_engine.stages import STAGES

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Bf16:
    """Compute in bfloat16; master weights, moments and gradient sums stay fp32."""

    enabled: bool = False


@dataclass(frozen=True, kw_only=True)
class Fp16:
    """Compute in float16: not supported yet."""

    enabled: bool = False

    def __post_init__(self) -> None:
        if self.enabled:
            raise ConfigError("fp16.enabled: fp16 is not supported yet; use bf16.enabled")


@dataclass(frozen=True, kw_only=True)
class ZeroOptimization:
    """Which state is divided among the ranks."""

    stage: int = 0

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ConfigError(f"zero_optimization.stage: {self.stage} is not one of 0, 1, 2, 3")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer by name; `optimizers.BY_NAME` has the names."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What this engine adds to DeepSpeed's keys."""

    sample_ledger: str | None = None
    """Directory for the record of consumed sample ids; None keeps none."""
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration."""

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    seed: int = 42
    """Decides sample order and dropout; not one of DeepSpeed's keys."""
    steps_per_print: int | None = None
    reduction: str = "ordered"
    """How gradients are summed; not one of DeepSpeed's keys."""
    dataloader_drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a global batch."""
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    optimizer: OptimizerConfig | None = None
    elastic: Elastic = Elastic()

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is less than 1")
        if self.gradient_clipping < 0:
            raise ConfigError(f"gradient_clipping: {self.gradient_clipping} is negative; 0 is off")
        if self.reduction != "ordered":
            raise ConfigError(f'reduction: {self.reduction!r} is not supported yet; use "ordered"')


_AT_LEAST_ONE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "steps_per_print",
)

_SECTIONS: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (Bf16, Fp16, ZeroOptimization, OptimizerConfig, Elastic)
}

_ALIASES = {"bfloat16": "bf16"}

# Known to DeepSpeed's users and without effect here: tuning of what this engine does in
# another way, or always.
_INERT: dict[str, frozenset[str]] = {
    "": frozenset(
        {
            "dump_state",
            "log_level",
            "wall_clock_breakdown",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        }
    ),
    "bf16": frozenset({"check_grad_overflow"}),
    "fp16": frozenset(
        {
            "auto_cast",
            "consecutive_hysteresis",
            "hysteresis",
            "initial_scale_power",
            "loss_scale",
            "loss_scale_window",
            "min_loss_scale",
        }
    ),
    "zero_optimization": frozenset(
        {
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "ignore_unused_parameters",
            "memory_efficient_linear",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "sub_group_size",
            "use_multi_rank_bucket_allreduce",
        }
    ),
}


def _offloads(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("device", "none") != "none"


# Features of DeepSpeed that change what happens and are not there: path -> does it ask for it?
_MISSING: dict[str, Callable[[Any], bool]] = {
    "scheduler": bool,
    "zero_optimization.offload_optimizer": _offloads,
    "zero_optimization.offload_param": _offloads,
    "zero_optimization.zero_hpz_partition_size": lambda value: value != 1,
    "zero_optimization.zero_quantized_gradients": bool,
    "zero_optimization.zero_quantized_weights": bool,
}


def load_config(source: Mapping[str, Any] | str | Path) -> Config:
    """The configuration from a dict, a JSON string or the path of a JSON file.

    A value of "auto" takes the default. Whole floats are taken for integers (2e8).

    Raises:
        ConfigError: Unreadable, an unknown or repeated key, or a value that is no good.
    """
    data = source if isinstance(source, Mapping) else _read(source)
    return _parse(Config, data, "")


def _read(source: str | Path) -> Mapping[str, Any]:
    text = str(source)
    if not text.lstrip().startswith("{"):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"config {str(source)!r} cannot be read: {error.strerror}") from error
    try:
        data = json.loads(text, object_pairs_hook=_no_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the config is not JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"the config is a JSON {type(data).__name__}; it must be an object")
    return data


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ConfigError(f"the config has the key {repeated[0]!r} more than once")
    return dict(pairs)


def _parse(cls: type[Any], data: Mapping[str, Any], path: str) -> Any:
    """One level of the config as an instance of `cls`; `path` is "" at the top."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values, inert = {}, []
    for written, value in data.items():
        key = _ALIASES.get(_join(path, written), written)
        where = _join(path, key)
        if key in _INERT.get(path, ()):
            inert.append(where)
        elif where in _MISSING:
            _refuse_missing(where, value)
        elif key not in fields:
            raise _unknown(path, written, set(fields))
        elif value != "auto":
            values[key] = _coerce(str(fields[key].type), value, where)
    if inert:
        _log.info("config keys without effect here: %s", ", ".join(sorted(inert)))
    missing = [
        f.name
        for f in fields.values()
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{_join(path, missing[0])}: missing")
    return cls(**values)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _refuse_missing(where: str, value: Any) -> None:
    if _MISSING[where](value):
        raise ConfigError(f"{where}: not supported yet; remove it")


def _unknown(path: str, key: str, fields: set[str]) -> ConfigError:
    prefix = f"{path}." if path else ""
    features = {name.removeprefix(prefix) for name in _MISSING if name.startswith(prefix)}
    near = difflib.get_close_matches(key, fields | _INERT.get(path, frozenset()) | features, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(fields))}"
    return ConfigError(f"{_join(path, key)}: unknown config key{hint}")


# ---- one value ----


def _as_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise TypeError
    return int(value)


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _exactly(cls: type[Any]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, cls):
            raise TypeError
        return value

    return check


_COERCE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("an integer", _as_int),
    "float": ("a number", _as_float),
    "bool": ("true or false", _exactly(bool)),
    "str": ("a string", _exactly(str)),
    "dict[str, Any]": ("an object", lambda value: dict(_exactly(Mapping)(value))),
}


def _coerce(annotation: str, value: Any, where: str) -> Any:
    """`value` as the type that a field's annotation names."""
    wanted = annotation.removesuffix(" | None")
    if value is None and wanted != annotation:
        return None
    if wanted == "ZeroOptimization" and isinstance(value, bool):
        value = {"stage": int(value)}  # DeepSpeed: true means stage 1
    if wanted in _SECTIONS:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {value!r} is not an object")
        return _parse(_SECTIONS[wanted], value, where)
    name, convert = _COERCE[wanted]
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {value!r} is not {name}") from None
