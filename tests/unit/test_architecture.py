"""ARCHITECTURE.md is the tour: what it draws and names must be what is there."""

import re
from pathlib import Path

from zero_orchestrator.membership.rounds import LEGAL

ROOT = Path(__file__).resolve().parents[2]
TOUR = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = {
    "orchestrator/zero_orchestrator",
    "orchestrator/zero_orchestrator/jobfile",
    "orchestrator/zero_orchestrator/membership",
    "orchestrator/zero_orchestrator/store",
    "orchestrator/zero_torchrun",
    "agent/zero_agent",
    "agent/zero_agent/command",
    "agent/zero_agent/etcd",
    "agent/zero_agent/fitness",
    "agent/zero_agent/launch",
    "agent/zero_agent/workers",
    "engine/zero_engine",
    "engine/zero_engine/exchange",
    "engine/zero_engine/optim",
    "engine/zero_engine/samples",
    "engine/zero_engine/sharding",
    "engine/zero_engine/state",
    "engine/zero_engine/checkpoint",
    "engine/zero_engine/checkpoint/files",
    "engine/zero_engine/checkpoint/format",
    "engine/zero_engine/checkpoint/ram",
    "engine/zero_engine/ops",
    "engine/zero_engine/runtime",
    "engine/zero_engine/moe",
    "engine/zero_engine/compression",
    "engine/zero_engine/as_deepspeed",
    "engine/zero_engine/utils",
    "engine/zero_engine/config",
    "engine/zero_engine/tiers",
    "engine/zero_engine/checkpoint/tools",
}


def test_the_states_in_the_tour_are_those_of_the_round_machine():
    drawn = re.search(r"<!-- states -->\n```\n(.*?)```\n<!-- /states -->", TOUR, re.DOTALL)
    moves = [f"{source or '(nothing)'} --{move}--> {to}" for move, (source, to) in LEGAL.items()]
    assert drawn is not None
    assert drawn[1].splitlines() == moves


def test_every_file_of_a_package_is_in_its_table_and_every_name_there_is_a_file():
    for heading, section in re.findall(r"^### (\S+?): .*?\n(.*?)(?=^##|\Z)", TOUR, re.M | re.S):
        assert heading in PACKAGES
        rows = [row for row in section.splitlines() if row.startswith("| `")]
        named = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row.split("|")[1])}
        there = {path.name for path in (ROOT / heading).glob("*.py")} - {
            "__init__.py",
            "__main__.py",
        }
        assert named == there, f"{heading}: {named ^ there}"


def test_every_test_file_named_in_the_tour_exists():
    for name in re.findall(r"`(tests/[\w/]+\.py)`", TOUR):
        assert (ROOT / name).is_file(), name
