from __future__ import annotations

import base64
import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero_contract.errors import ConfigError
from zero_contract.sections import join, keys_of, words
from zero_engine.config import Config, keys, load_config
from zero_engine.config.nearest import check_params


def test_an_empty_config_has_deepspeeds_defaults() -> None:
    config = load_config({})
    assert config == Config()
    assert (config.gradient_clipping, config.zero_optimization.stage, config.seed) == (1.0, 0, 42)


def test_a_dict_a_json_string_base64_and_a_file_give_the_same_config(tmp_path: Path) -> None:
    data = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    assert load_config(data) == load_config(json.dumps(data)) == load_config(str(path))
    encoded = base64.urlsafe_b64encode(path.read_bytes()).decode()
    assert load_config(encoded) == load_config(data)
    assert load_config(path).zero_optimization.stage == 3


def test_comments_and_missing_commas_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{\n  // the whole batch\n  "train_batch_size": 8\n  bf16: {"enabled": true,}\n}'
    )
    config = load_config(path)
    assert (config.train_batch_size, config.bf16.enabled) == (8, True)
    path.write_text("{seed: 1\nseed: 2}")
    with pytest.raises(ConfigError, match="the config has the key 'seed' more than once"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{\n"seed": 1, # of all\n}', "comments (line 2), a comma after the last entry (line 2)"),
        ('{"seed": 1\n"log_level": "info"}', "no quotes, or a line break for a comma (line 2)"),
        ("{seed: 1}", "no quotes, or a line break for a comma (line 1)"),
    ],
)
def test_what_is_no_strict_json_is_named_in_the_log(
    text: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="zero_engine.config"):
        assert load_config(text).seed == 1
    assert caplog.messages == [f"the config is read as DeepSpeed reads it, with {told}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{\n"seed":\xa01}',
            "line 2: no-break space (U+00A0), as in a web page; type a plain space",
        ),
        ('{\n\n\xa0"seed": 1}', "line 3: no-break space (U+00A0)"),
        (
            "{\u201cseed\u201d: 1}",
            "left double quotation mark (U+201C), as in a web page; type plain",
        ),
        ('{"seed":\u200b1}', "line 1: zero width space (U+200B), as in a web page; delete it"),
        (
            '{"seed": 1 "log_level": "info"}',
            'line 1: a comma is missing before "log_level": "info"',
        ),
        ('{seed: 1 "log_level": "info"}', 'line 1: a comma is missing before "log_level": "info"'),
        ('{"fp16": {} "seed": 1}', 'line 1: a comma is missing before "seed": 1}'),
        (
            '{# why\n"optimizer": {"params": {"betas": [0.9 0.95]}}}',
            "comma is missing before 0.95]",
        ),
        ('{"seed" 1}', "line 1: a colon is missing before 1}"),
        ('{"seed": 1', "line 1: it ends here, and a bracket is still open"),
        ('{"seed": "1\n}', "line 1: a line break or a tab is within quotes"),
    ],
)
def test_a_config_from_a_web_page_is_refused_with_line_and_character(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    assert message in str(caught.value)


def test_what_is_in_quotes_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"wandb": {"project": "1\xa02 # \u201c"},\n"//": "s3://x",}', "utf-8-sig")
    assert load_config(path).wandb.project == "1\xa02 # \u201c"


@pytest.mark.parametrize(
    ("data", "name", "value"),
    [
        ({"train_batch_size": 2e3}, "train_batch_size", 2000),
        ({"train_batch_size": "auto"}, "train_batch_size", None),
        ({"train_batch_size": None}, "train_batch_size", None),
        ({"train_batch_size": "64"}, "train_batch_size", 64),
        ({"dataloader_drop_last": "true"}, "dataloader_drop_last", True),
        ({"gradient_clipping": "0.5"}, "gradient_clipping", 0.5),
        ({"gradient_clipping": 2}, "gradient_clipping", 2.0),
        ({"gradient_clipping": np.float64(0.5)}, "gradient_clipping", 0.5),
        ({"gradient_clipping": "auto"}, "gradient_clipping", 1.0),
    ],
)
def test_numbers_are_taken_as_deepspeed_takes_them(
    data: dict[str, Any], name: str, value: object
) -> None:
    taken = getattr(load_config(data), name)
    assert (taken, type(taken)) == (value, type(value))


def test_never_is_an_interval_as_accelerate_writes_it() -> None:
    assert load_config({"steps_per_print": float("inf")}).steps_per_print is None
    assert load_config({"steps_per_print": 5e1}).steps_per_print == 50
    for value in (0, 0.5, "often"):
        with pytest.raises(ConfigError, match="steps_per_print"):
            load_config({"steps_per_print": value})


def test_a_dtype_may_have_torchs_name() -> None:
    for dtype, short in (("torch.bfloat16", "bf16"), ("torch.float16", "fp16")):
        config = load_config({"torch_autocast": {"enabled": True, "dtype": dtype}})
        assert config.torch_autocast.compute == short


def test_keys_for_readers_are_passed_over_at_every_level() -> None:
    section = {"stage": 2, "_why": "it fits", "//": "measured", "#note": 1}
    config = load_config({"_comment": "of a tool", "zero_optimization": section})
    assert config == load_config({"zero_optimization": {"stage": 2}})


def test_a_key_with_the_path_of_a_section_is_not_read_and_said_to_be_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """trl adds such keys to a config that it has read, and no DeepSpeed has ever seen them."""
    written = {"zero_optimization.stage3_prefetch_bucket_size": 921.6}
    assert load_config({"train_batch_size": 8} | written) == load_config({"train_batch_size": 8})
    assert "'stage3_prefetch_bucket_size' stands in the section 'zero_optimization'" in caplog.text
    with pytest.raises(ConfigError, match="unknown key"):
        load_config({"zero_optimisation.stage": 3})


def test_all_mistakes_of_a_config_are_told_at_once() -> None:
    wrong = {"gradient_cliping": 1, "zero_optimization": {"stge": 2, "stage": "two"}, "seed": "x"}
    with pytest.raises(ConfigError) as caught:
        load_config(wrong)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "gradient_cliping",
        "zero_optimization.stge",
        "zero_optimization.stage",
        "seed",
    ]


@pytest.mark.parametrize(("switch", "stage"), [(True, 1), (False, 0), ({"stage": 2}, 2)])
def test_zero_optimization_true_is_stage_one(switch: object, stage: int) -> None:
    assert load_config({"zero_optimization": switch}).zero_optimization.stage == stage


def test_bfloat16_is_another_name_for_bf16() -> None:
    assert load_config({"bfloat16": {"enabled": True}}).bf16.enabled


def test_tuning_keys_without_effect_are_accepted_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tuning = {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 5e8}
    with caplog.at_level(logging.INFO, logger="zero_engine.config"):
        load_config({"zero_optimization": tuning})
    assert caplog.messages == [
        "config keys without effect here: zero_optimization.overlap_comm, "
        "zero_optimization.reduce_bucket_size; python -m zero_engine FILE shows why"
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"gradient_cliping": 1},
            "gradient_cliping: unknown key; did you mean 'gradient_clipping'?",
        ),
        (
            {"zero_optimization": {"stge": 1}},
            "zero_optimization.stge: unknown key; did you mean 'stage'?",
        ),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'overlap_comm'?"),
        ({1: True}, "1: unknown key; known: "),
        ({"elastic": {"xyz": 1}}, "elastic.xyz: unknown key; known: accumulate, "),
        ({"elastic": {"reduction_block": 0}}, "elastic.reduction_block: 0 is less than 1"),
        ({"elastic": {"reduction_block": 6}}, "6, which is not a power of two; set it to 4 or 8"),
        ({"elastic": {"accumulate": "rank"}}, '\'rank\' is not "owner", "node" or "local"'),
        (
            {"elastic": {"accumulate": "local"}, "zero_optimization": {"stage": 2}},
            "as large as the whole gradient on every rank, which stage 2 shards; use stage 0 or 1",
        ),
        (
            {"elastic": {"accumulate": "node", "reduction": "native"}},
            'which elastic.reduction "native" leaves to others; remove one of the two',
        ),
        (
            {"elastic": {"overlap_param_gather": True}},
            "at stage 0 every rank steps all weights, and none are gathered; set zero_opti",
        ),
        (
            {"elastic": {"overlap_param_gather": True}, "zero_optimization": {"stage": 3}},
            "elastic.overlap_param_gather: stage 3 does so already",
        ),
        ({"train_batch_size": 2.5}, "train_batch_size: 2.5 is not an integer"),
        ({"train_batch_size": True}, "train_batch_size: True is not an integer"),
        ({"train_batch_size": float("inf")}, "train_batch_size: inf is not an integer"),
        ({"train_batch_size": 0}, "train_batch_size: 0 is less than 1"),
        ({"gradient_clipping": -1}, "gradient_clipping: -1 is less than 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: nan is not a number"),
        ({"fp16": {"initial_scale_power": -1}}, "fp16.initial_scale_power: -1 is less than 0"),
        ({"flops_profiler": {"profile_step": -1}}, "flops_profiler.profile_step: -1 is less than"),
        ({"gradient_allreduce_op": "max"}, '\'max\' is not "mean" or "sum"'),
        ({"bf16": True}, 'bf16: True is not an object; write {"enabled": true}'),
        ({"optimizer": "Lion"}, 'optimizer: \'Lion\' is not an object; write {"type": "Lion"}'),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled: 'yes' is not true or false"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is not 0, 1, 2 or 3"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16 and bf16 are both enabled; keep one",
        ),
        (
            {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}},
            "fp16 and torch_autocast with bfloat16 are both enabled; keep one",
        ),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: -1 is less than 0"),
        (
            {"fp16": {"enabled": True, "loss_scale_window": 0}},
            "fp16.loss_scale_window: 0 is not more than 0",
        ),
        ({"communication_data_type": "fp8"}, "communication_data_type: 'fp8' is not"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp8"}}, "torch_autocast.dtype: 'fp8'"),
        (
            {"aio": {"block_sze": 1}},
            "aio.block_sze: unknown key; did you mean 'block_size'?",
        ),
        ({"amp": {"enabled": True}}, "amp: not supported: Apex is not maintained"),
        ({"elasticity": {"enabled": True}}, "elasticity.micro_batch_sizes: give numbers of"),
        ({"bfloat16": {}, "bf16": {}}, "bf16: bf16 is given twice; keep one"),
        ({"optimizer": {"params": {}}}, "optimizer.type: is missing; write a string"),
        ({"optimizer": {"_why": "it fits"}}, "optimizer.type: is missing; write a string"),
        ({"elastic": {"reduction": "any"}}, '\'any\' is not "ordered" or "native"'),
        (
            {"elastic": {"reduction": "native", "reduction_block": 4}},
            'elastic.reduction_block: with elastic.reduction "native" the backend chooses',
        ),
        (
            {
                "elastic": {"reduction": "native"},
                "zero_optimization": {"zero_quantized_gradients": True},
            },
            'zero_quantized_gradients: not with elastic.reduction "native"',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
            'zero_optimization.offload_optimizer.device: \'gpu\' is not "none", "cpu" or "nvme"',
        ),
        (
            {"data_types": {"param_dtype": "fp16"}},
            "data_types.param_dtype: 'fp16', but the model computes in fp32; set bf16.enabled or",
        ),
        ({"data_types": {"buffer_dtype": "fp8"}}, "data_types.buffer_dtype: 'fp8' is not"),
        ({"data_types": {"dtype": "fp16"}}, "data_types.dtype: unknown key"),
        ("[1]", "cannot be read"),
        ('{"a": ', "the config is not JSON"),
        ('{"seed": 1, "seed": 2}', "the config has the key 'seed' more than once"),
        ("/nowhere/config.json", "'/nowhere/config.json' cannot be read: No such file"),
    ],
)
def test_a_mistake_is_an_error_that_names_place_and_remedy(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(data)
    assert message in str(caught.value)


INERT_NUMBERS = sorted(keys.INERT_NUMBERS)


def nested(path: str, value: object) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("value", [-1, "a lot", True, float("nan")])
@pytest.mark.parametrize("path", INERT_NUMBERS)
def test_a_number_without_effect_that_nobody_can_mean_is_refused_by_name(
    path: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {value!r} is ")):
        load_config(nested(path, value))


def test_numbers_without_effect_are_taken_as_deepspeed_takes_them() -> None:
    for path in INERT_NUMBERS:
        for value in (1, 1.0, "1", "auto", None):
            assert load_config(nested(path, value)) == Config()
    assert load_config(nested("zero_optimization.reduce_bucket_size", "5e8")) == Config()


def whole_numbers(section: type[Any], path: str = "") -> Iterator[str]:
    """The paths of all keys that have an integer, or several."""
    for name, key in keys_of(section).items():
        where = join(path, name)
        if key.section is not None:
            yield from whole_numbers(key.section, where)
        elif words(key.kind) in ("an integer", "a list of integers"):
            yield where


@pytest.mark.parametrize("value", [1 << 70, -(1 << 70), 1e30])
def test_an_integer_that_64_bits_do_not_hold_is_refused_by_name(value: float) -> None:
    paths = list(whole_numbers(Config))
    assert {"seed", "train_batch_size", "zero_optimization.offload_param.max_in_cpu"} < set(paths)
    for path in paths:
        written = [value] if path.endswith("sizes") else value
        with pytest.raises(ConfigError) as caught:
            load_config(nested(path, written))
        told = re.fullmatch(
            r"([^\[]+?)(\[0\])?: (\S+) is (less|more) than -?\d+", str(caught.value).splitlines()[0]
        )
        assert told is not None
        assert (told[1], float(told[3])) == (path, float(value))


def test_a_seed_is_64_bits_without_a_sign() -> None:
    for seed in (0, (1 << 64) - 1):
        assert load_config({"seed": seed}).seed == seed
    for seed in (-1, 1 << 64):
        with pytest.raises(
            ConfigError, match=f"^seed: {seed} is (less than 0|more than {(1 << 64) - 1})$"
        ):
            load_config({"seed": seed})


def test_a_feature_that_is_named_but_switched_off_is_accepted() -> None:
    off = {"offload_optimizer": {"device": "none"}, "zero_quantized_weights": False}
    assert load_config({"zero_optimization": off, "fp16": {"enabled": False}}) == Config()


def make_something(
    _: object,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    rates: float | Sequence[float] = 0.0,
    steps: int = 5,
    nesterov: bool = False,
    kind: str | None = None,
) -> None:
    """As an optimizer or a schedule."""


@pytest.mark.parametrize(
    ("name", "written", "taken"),
    [
        ("lr", "1e-4", 1e-4),
        ("betas", ["0.9", 0.95], [0.9, 0.95]),
        ("rates", [1, "0.5"], [1, 0.5]),
        ("steps", 5e0, 5),
        ("nesterov", "false", False),
        ("kind", None, None),
        ("kind", "log", "log"),
    ],
)
def test_a_free_param_is_taken_as_the_type_that_it_is(name: str, written: Any, taken: Any) -> None:
    (got,) = check_params("params", make_something, {name: written}).values()
    assert (got, type(got)) == (taken, type(taken))


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("lr", None, "params.lr: None is not a number"),
        ("lr", True, "params.lr: True is not a number"),
        ("lr", [1e-3], "params.lr: [0.001] is not a number"),
        ("lr", {"a": 1}, "params.lr: {'a': 1} is not a number"),
        ("lr", math.inf, "params.lr: inf is not a number"),
        ("betas", 0.9, "params.betas: 0.9 is not a list of 2 numbers"),
        ("betas", [0.9], "params.betas: [0.9] is not a list of 2 numbers"),
        ("betas", [0.9, "x"], "params.betas[1]: 'x' is not a number"),
        ("steps", 0.5, "params.steps: 0.5 is not an integer"),
        ("nesterov", "yes", "params.nesterov: 'yes' is not true or false"),
    ],
)
def test_a_free_param_of_another_type_is_named(name: str, written: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_params("params", make_something, {name: written})
    assert str(caught.value) == message


def test_an_error_names_a_key_as_the_file_has_it() -> None:
    for section, key in (("checkpoint", "async"), ("zero_optimization", "zero_stage")):
        with pytest.raises(ConfigError, match=rf"^{section}\.{key}: 'often' is not "):
            load_config({section: {key: "often"}})
