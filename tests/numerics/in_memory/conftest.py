"""Where the nodes of a test meet."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)
