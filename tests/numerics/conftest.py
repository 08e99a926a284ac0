from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.world import WorldPool


@pytest.fixture(scope="session")
def worlds() -> Iterator[WorldPool]:
    """Worlds of up to four ranks."""
    pool = WorldPool(4)
    yield pool
    pool.close()
