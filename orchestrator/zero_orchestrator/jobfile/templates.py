"""The files of deploy/: what is rendered is made from them, so there is one truth.

They travel with the package. Who calls it: the renderers.
"""

from __future__ import annotations

from pathlib import Path

DEPLOY = (Path(__file__).parent / "deploy").resolve()
"""In a checkout a link to deploy/ at its top."""
KUBERNETES = DEPLOY / "kubernetes"


def read(name: str) -> str:
    """The text of one of them."""
    return (DEPLOY / name).read_text(encoding="utf-8")
