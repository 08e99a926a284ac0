"""docs/libraries.md names the versions that were tried: `make test-libraries` installs no other."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version

import pytest

from tests.support.cluster import ROOT
from zero_libraries.versions import TRIED

PAGE = (ROOT / "docs" / "libraries.md").read_text()
TABLE = {
    name: versions.split(", ")
    for name, versions in re.findall(r"^\| `([a-z-]+)` \| ([\d., ]+) \|", PAGE, re.MULTILINE)
}
"""The versions of each distribution."""
ASKED = dict(re.findall(r"(-\w+)/\.installed: LIBRARIES = (.*)", (ROOT / "Makefile").read_text()))
"""What the Makefile installs in an environment, by the end of its name; the rest comes with it."""


@pytest.mark.full
@pytest.mark.parametrize("library", TABLE)
def test_the_version_that_is_installed_stands_in_the_table_of_those_that_were_tried(
    library: str,
) -> None:
    here = (names for end, names in ASKED.items() if sys.prefix.endswith(end))
    if library not in re.findall(r"[a-z-]{2,}", next(here, "")):
        pytest.skip(f"this environment was not asked for {library}")
    installed = version(library)
    assert ".".join(installed.split(".")[:2]) in TABLE[library], (
        f"{library} {installed} is new: when the rest of `make test-libraries` passes with it, "
        "add it to the table of docs/libraries.md, and to zero_libraries/versions.py"
    )


def test_a_version_to_install_is_the_newest_of_the_table() -> None:
    assert {library: TABLE[library][-1] for library in TRIED} == TRIED
