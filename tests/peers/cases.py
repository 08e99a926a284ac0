"""Outcomes of cases, their causes, and the files that keep them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.peers.causes import CAUSES


class Outcome(StrEnum):
    """What a case of a peer shows."""

    PASSED = "passed"
    PUBLIC = "public behaviour"
    """It asks for what the peer documents, and does not get it."""
    INTENDED = "intended"
    """It asks for what the table of intended differences says is otherwise here, and why."""
    INTERNALS = "internals"
    """It reads or replaces parts of the peer that scripts do not see."""
    NOT_OFFERED = "not offered"
    WORKS = "works here"
    """It asks for an error where this engine does what is asked."""
    HARNESS = "harness"
    """It needs something that is not on this machine."""
    SKIPPED = "skipped"
    ABSENT = "absent"
    """These sources of the peer do not have it."""


@dataclass(frozen=True)
class Case:
    """A case that was run."""

    name: str
    outcome: Outcome
    reason: str = ""


def judge(name: str, outcome: str, text: str) -> Case:
    """The case of what pytest reports."""
    if outcome == "passed":
        return Case(name, Outcome.PASSED)
    if outcome == "absent":
        return Case(name, Outcome.ABSENT)
    if outcome == "skipped":
        return Case(name, Outcome.SKIPPED, last_line(text))
    reason = "did not end" if outcome == "began" else last_line(text)
    for cause, pattern in CAUSES:
        if re.search(pattern, f"{name}\n{text}", re.MULTILINE):
            return Case(name, Outcome(cause), reason)
    return Case(name, Outcome.PUBLIC, reason)


def last_line(text: str) -> str:
    """The line of a traceback that says what was wrong, without the places of this machine."""
    errors = re.findall(
        r"^(?:E +)?((?:[\w.]+(?:Error|Exception|Exit|Failed|Skipped)\b|Skipped|Failed).*)$",
        text,
        re.M,
    )
    lines = errors or text.strip().splitlines() or [""]
    line = re.sub(r"(/[\w.+-]+)+/", "", re.sub(r"\s+", " ", lines[-1]))
    return line.strip()[:200]


def read(path: Path) -> dict[str, Case]:
    """The cases of a file."""
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    return {name: Case(name, Outcome(outcome), *rest) for name, outcome, *rest in lines}


def write(path: Path, cases: Mapping[str, Case]) -> None:
    """Write a file of cases."""
    path.parent.mkdir(exist_ok=True)
    lines = ["\t".join(filter(None, (c.name, c.outcome, c.reason))) for c in cases.values()]
    path.write_text("".join(f"{line}\n" for line in lines))
