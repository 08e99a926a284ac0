"""ARCHITECTURE.md is the tour: what it draws and names must be what is there."""

import re
from pathlib import Path

from zero_contract.user_files import is_own
from zero_orchestrator.membership.rounds import LEGAL

ROOT = Path(__file__).resolve().parents[3]
TOUR = (ROOT / "ARCHITECTURE.md").read_text()


def test_the_states_in_the_tour_are_those_of_the_round_machine():
    drawn = re.search(r"<!-- states -->\n```\n(.*?)```\n<!-- /states -->", TOUR, re.DOTALL)
    moves = [f"{source or '(nothing)'} --{move}--> {to}" for move, (source, to) in LEGAL.items()]
    assert drawn is not None
    assert drawn[1].splitlines() == moves


def test_every_path_named_in_the_tour_exists():
    paths = re.findall(r"\b((?:orchestrator|agent|engine|tests)/[\w/]+(?:\.py)?)", TOUR)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_decision_in_the_tour_is_where_the_tour_says():
    rows = re.findall(r"^\| .* \| `([\w.]+)` in `([\w/.]+)` \|$", TOUR, re.MULTILINE)
    assert len(rows) > 15
    for name, path in rows:
        text = (ROOT / path).read_text()
        missing = [
            part for part in name.split(".") if not re.search(rf"(def|class) {part}\b", text)
        ]
        assert missing == [], path


def test_every_invariant_in_the_tour_is_held_by_the_test_that_it_names():
    rows = re.findall(r"^\| (I\d+) \| .* \| `(\w+)` in `([\w/.]+)` \|$", TOUR, re.MULTILINE)
    assert [number for number, _, _ in rows] == [f"I{number}" for number in range(1, 13)]
    missing = [test for _, test, path in rows if f"def {test}(" not in (ROOT / path).read_text()]
    assert missing == []


def test_no_file_of_this_project_is_taken_for_the_users_own():
    """A verdict names the line of the script that waits, not that of a library under it."""
    packages = [path.parent for path in ROOT.glob("*/zero_*/__init__.py")]
    assert len(packages) > 10
    assert [package.name for package in packages if is_own(f"/x/{package.name}/a.py")] == []
