from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.world import WorldPool


@pytest.fixture(scope="session")
def worlds() -> Iterator[WorldPool]:
    """Worlds of any number of ranks, of which five are there from the begin."""
    pool = WorldPool(5)
    yield pool
    pool.close()
