"""Fixtures of tests that train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # it imports torch
    from tests.support.staying import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs whose workers stay in their processes: of a script, and what that is given."""
    from tests.support.staying import Job

    made: list[Job] = []

    def make(script: Callable[..., Any], *given: Any) -> Job:
        made.append(Job(tmp_path, script, *given))
        return made[-1]

    yield make
    for each in made:
        each.close()
