"""The page of a job as one HTML file: script, style and picture are inside, nothing is loaded."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources

from zero_orchestrator.ctl.page.picture import Json


def page(picture: Json, *, live: bool) -> str:
    """The page; a `live` one is served by the dashboard, which sends news to it."""
    files = resources.files("zero_orchestrator.ctl.page")
    css, js = ((files / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    parts = {
        "LIVE": "1" if live else "0",
        "CSP": html.escape(policy(css, js, live=live)),
        "TITLE": html.escape(f"Job {picture['job']['name']}"),
        "CSS": css,
        "JS": js,
        "PICTURE": embedded(picture),
    }
    # Split before anything is put in: an "@CSS@" in a text of the job stays what it is.
    pieces = (files / "page.html").read_text(encoding="utf-8").split("@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def policy(css: str, js: str, *, live: bool) -> str:
    """The Content-Security-Policy: this script and this style, and nothing from anywhere else."""
    allowed = {
        "default-src": "'none'",
        "script-src": f"'sha256-{_sha256(js)}'",
        "style-src": f"'sha256-{_sha256(css)}'",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def embedded(picture: Json) -> str:
    """The picture as JSON that may stand inside of a script element."""
    text = json.dumps(picture, separators=(",", ":"), allow_nan=False)
    # "</script>" or "<!--" in a text of the job would end the element, or change how it is read.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
