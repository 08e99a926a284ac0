"""The reference pages say what the code says, and the tables behind them are complete."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.environment import VARIABLES
from docs.generate import DOCS, PAGES
from zero_contract.journal import EVENTS
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.observe.verdicts import Kind

ROOT = DOCS.parent
MODULES = [
    path for room in ("orchestrator", "agent", "engine") for path in (ROOT / room).rglob("*.py")
]
COMMON = {"time", "node", "round", "event", "text"}


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "make reference"


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_every_event_that_an_agent_tells_is_in_the_table_with_its_fields() -> None:
    told: dict[str, set[str]] = {move: {"nodes", "revision"} for move in Move}
    for path in MODULES:
        for call in calls(path):
            if not (isinstance(call.func, ast.Attribute) and call.func.attr == "tell"):
                continue
            if "journal" in ast.unparse(call.func.value) and isinstance(call.args[0], ast.Constant):
                facts = {word.arg for word in call.keywords if word.arg} - {"level"}
                told.setdefault(call.args[0].value, set()).update(facts)
    told["exit"].add("symptom")  # by **facts
    for end in (Move.FORM, Move.INTERRUPT):
        told[end].add("idle_s")  # as well
    of_verdicts = set(Kind)  # what their events have is compared in test_detectors
    assert {name: facts - COMMON for name, facts in told.items()} == {
        name: set(event.facts) for name, event in EVENTS.items() if name not in of_verdicts
    }


def environment_of(path: Path) -> Iterator[str]:
    """The names that a module looks up in an environment, or defines as constants for it."""
    for node in ast.walk(ast.parse(path.read_text())):
        name: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if ast.unparse(node.func.value).endswith(("environ", "env")):
                name = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            name = node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            name = node.left
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("ENV_"):
            name = node.value
        if isinstance(name, ast.Constant) and str(name.value).isupper():
            yield name.value


def test_every_environment_variable_that_the_code_knows_is_in_the_table() -> None:
    known = {name for variables in VARIABLES.values() for name in variables}
    found = {name for path in MODULES for name in environment_of(path)}
    assert len(found) > 20
    assert found - known == set()
