"""What `zero-ckpt --json` prints is what the page of the site says: every key, no other."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch

from docs.json_output import ckpt
from tests.support.json_pages import closed, schemas
from tests.unit.checkpoint.support import adam_state, flip, saved
from zero_checkpoint import find
from zero_checkpoint.tools import cli
from zero_checkpoint.tools.parser import make_parser

SCHEMAS = schemas(ckpt())
ERROR = "an error"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints, the last of them damaged, and an unfinished one."""
    for step in (1, 2, 3):
        full = adam_state(seed=step, width=400)  # any bits: some numbers are not finite
        saved(tmp_path / "ck", full, step=step, tag=f"t{step}")
    (tmp_path / "ck" / "step-000000009.g0.abcd").mkdir()
    newest = find(tmp_path / "ck").candidates[0].path
    flip(newest / "r00000.safetensors", 10_000)
    return tmp_path


def test_every_command_is_on_the_page_and_an_error_as_well() -> None:
    groups = make_parser()._subparsers._group_actions  # type: ignore[union-attr]
    assert set(SCHEMAS) == {*groups[0].choices, ERROR}
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("line", "code", "printed"),
    [
        ("ls ck --verify", 1, "ls"),
        ("show ck@t2 --norms", 0, "show"),
        ("show ck@t2", 0, "show"),
        ("verify ck --all", 1, "verify"),
        ("diff ck@t1 ck@t2", 1, "diff"),
        ("export ck@t2 m.pt --to=torch", 0, "export"),
        ("prune ck --keep-last=2 --dry-run", 0, "prune"),
        ("repair ck --older-than=0s", 0, "repair"),
        ("show ck@t9", 2, ERROR),
    ],
)
def test_what_is_printed_has_the_keys_of_the_page_and_no_other(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    code: int,
    printed: str,
) -> None:
    monkeypatch.chdir(root)
    assert cli.main([*line.split(), "--json"]) == code
    check(capsys.readouterr().out, printed)


def test_what_an_import_prints_has_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(3)}, "m.pt")
    assert cli.main(["import", "m.pt", "made", "--from=torch", "--json"]) == 0
    check(capsys.readouterr().out, "import")


def check(text: str, printed: str) -> None:
    schema = closed(SCHEMAS[printed])
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
