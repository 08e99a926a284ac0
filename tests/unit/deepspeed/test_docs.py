"""docs/deepspeed.md shows the tables that the parser reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zero_contract.errors import ConfigError
from zero_engine.config import keys, load_config

PAGE = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"


def drawn(name: str) -> list[str]:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def test_the_keys_without_effect_are_in_the_docs_with_their_reasons() -> None:
    rows = [f"| `{path}` | {reason} |" for path, reason in sorted(keys.WITHOUT_EFFECT.items())]
    assert drawn("without effect") == ["| key | why |", "| --- | --- |", *rows]


def test_the_missing_features_are_in_the_docs_with_what_to_do_instead() -> None:
    rows = [f"| `{path}` | {feature.why} |" for path, feature in sorted(keys.MISSING.items())]
    assert drawn("missing") == ["| key | why not; instead |", "| --- | --- |", *rows]
    assert [path for path, feature in keys.MISSING.items() if "; " not in feature.why] == []


ASKING: dict[str, object] = {
    "compile": {"deepcompile": True},
    "elasticity.model_parallel_size": 2,
    "sequence_parallel_size": 2,
    "tensor_parallel": {"autotp_size": 2},
    "zero_optimization.mics_shard_size": 2,
}


@pytest.mark.parametrize("path", sorted(keys.MISSING))
def test_who_asks_for_a_missing_feature_is_told_what_the_docs_say(path: str) -> None:
    feature = keys.MISSING[path]
    value = ASKING.get(path, {"enabled": True})
    with pytest.raises(ConfigError, match=re.escape(f"{path}: not supported: {feature.why}")):
        load_config(nested(path, value))


def nested(path: str, value: object) -> dict[str, object]:
    *sections, name = path.split(".")
    config = {name: value}
    for section in reversed(sections):
        config = {section: config}
    return config


@pytest.mark.parametrize("path", sorted(keys.WITHOUT_EFFECT))
def test_a_key_of_the_table_is_accepted(path: str) -> None:
    config = nested(path, 1)
    if "optimizer" in config:  # a section that needs a type
        config["optimizer"] = {"type": "Adam", path.removeprefix("optimizer."): 1}
    load_config(config)
