"""The documentation as a site: `make docs` builds it, warnings are errors, no network is used.

A page says where a file is by its path in the repository, so that its links work there, too. On
the site a link to another page of the repository (`STANDS_FOR`) leads to its page here, and a link
to any other file offers that file. The start page is the README.
"""

from __future__ import annotations

import os.path
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

STANDS_FOR = {
    "architecture": "ARCHITECTURE.md",
    "benchmarks": "benchmarks/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "deploy": "deploy/README.md",
    "index": "README.md",
    "security": "SECURITY.md",
}
"""Pages of the site that show a file outside docs/."""

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")

project = "Zero Elastic"
author = METADATA["authors"][0]["name"]
copyright = author
version = release = METADATA["version"]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
nitpicky = True
highlight_language = "none"  # of blocks that name no language
smartquotes = False  # "auto" is what is typed
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_title = f"{project} {version}"
html_show_sphinx = False
html_copy_source = False


def on_the_site(text: str, directory: Path, page: Path) -> str:
    """`text` of a file in `directory`, with its links as they are from the directory of `page`."""
    pages = {ROOT / path: f"{name}.md" for name, path in STANDS_FOR.items()}
    pages[ROOT / "deploy"] = "deploy.md"

    def link(found: re.Match[str]) -> str:
        target = (directory / found["path"]).resolve()
        stands = DOCS / pages[target] if target in pages else target
        return os.path.relpath(stands, page.parent) + (found["anchor"] or "")

    return LINK.sub(link, text)


def _read(app: Any, name: str, content: list[str]) -> None:
    path = ROOT / STANDS_FOR[name] if name in STANDS_FOR else DOCS / f"{name}.md"
    app.env.note_dependency(str(path))
    about = "---\norphan: true\n---\n" if name in STANDS_FOR else ""  # may be in no toctree
    contents = content[0][content[0].index("```{toctree}") :] if name == "index" else ""
    content[0] = about + on_the_site(path.read_text(), path.parent, DOCS / name) + contents


def setup(app: Any) -> None:
    """Sphinx calls this with itself. The pages that the site alone has are written now."""
    sys.path.insert(0, str(ROOT))
    from docs.json_output import PAGES

    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
    app.connect("source-read", _read)
