"""docs/deepspeed.md shows the tables that the parser reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zero_engine.config import keys, load_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md"


def drawn(name: str) -> list[str]:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def test_the_keys_without_effect_are_in_the_docs_with_their_reasons() -> None:
    rows = [f"| `{path}` | {reason} |" for path, reason in sorted(keys.WITHOUT_EFFECT.items())]
    assert drawn("without effect") == ["| key | why |", "| --- | --- |", *rows]


def test_the_missing_features_are_in_the_docs() -> None:
    assert drawn("missing") == [f"- `{path}`" for path in sorted(keys.MISSING)]


@pytest.mark.parametrize("path", sorted(keys.WITHOUT_EFFECT))
def test_a_key_of_the_table_is_accepted(path: str) -> None:
    config: object = 1
    for name in reversed(path.split(".")):
        config = {name: config}
    assert isinstance(config, dict)
    load_config(config)
