"""Fixtures for jobs that run as they are deployed."""

from __future__ import annotations

import pytest

from tests.deploy.job import ARGUMENTS
from tests.support.cluster import run_alone


@pytest.fixture(scope="session")
def undisturbed_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the example trained by one process to which nothing happens."""
    return run_alone(tmp_path_factory.mktemp("undisturbed"), *ARGUMENTS)
