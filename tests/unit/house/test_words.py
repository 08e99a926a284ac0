"""Words that were given up for the field's own stay away: strangers search for those they know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIST = ROOT / "tests/support/retired_words.txt"
NOT_OURS = ("tests/data/", "deploy/locks/")
"""Scripts as users of other projects write them, and lists of packages."""


def retired() -> list[tuple[str, str]]:
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split(" -> ") for line in lines]
    assert [pair for pair in pairs if len(pair) != 2] == []
    return [(word, instead) for word, instead in pairs]


def texts() -> dict[str, str]:
    """Every text file of the project, by its path; without those that are ignored."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout, so its files are not known from those made here")
    kept = {}
    for name in found.splitlines():
        path = ROOT / name
        if path != LIST and not name.startswith(NOT_OURS) and path.is_file():
            kept[name] = path.read_bytes().decode("utf-8", errors="replace")
    return kept


def test_a_word_that_was_given_up_is_in_no_file_and_no_files_name():
    found = []
    files = texts()
    assert len(files) > 500
    for word, instead in retired():
        pattern = re.compile(word, re.IGNORECASE)
        for name, text in files.items():
            if pattern.search(name):
                found.append(f"{name}: the name has {word!r}; write {instead}")
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{line}: {match[0]!r}; write {instead}")
    assert found == []
