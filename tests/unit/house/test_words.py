"""Words that were given up for the field's own stay away: strangers search for those they know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIST = "tests/support/retired_words.txt"
OURS = (".", f":!{LIST}", ":!tests/data", ":!deploy/locks")
"""Not scripts as users of other projects write them, and lists of packages."""


def retired() -> list[tuple[str, str]]:
    lines = (ROOT / LIST).read_text().splitlines()
    pairs = [line.split(" -> ") for line in lines if line and not line.startswith("#")]
    assert [pair for pair in pairs if len(pair) != 2] == []
    return [(word, instead) for word, instead in pairs]


def git(*arguments: str) -> list[str]:
    """The lines that git prints of the files of the project, without those that are ignored."""
    command = ["git", *arguments, "--", *OURS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        pytest.skip(f"this is no git checkout, or its git has no such search: {done.stderr}")
    return done.stdout.splitlines()


def test_a_word_that_was_given_up_is_in_no_file_and_no_files_name():
    words = retired()
    names = git("ls-files", "--cached", "--others", "--exclude-standard")
    assert len(names) > 500
    # One search by git in the place of one by `re` for each word and file, which takes seconds.
    patterns = [part for word, _ in words for part in ("-e", word)]
    lines = git("grep", "--untracked", "-I", "-n", "-i", "-P", *patterns)
    assert [
        f"{line}: write {instead}"
        for word, instead in words
        for line in (*names, *lines)
        if re.search(word, line, re.IGNORECASE)
    ] == []
