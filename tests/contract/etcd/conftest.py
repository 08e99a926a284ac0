"""Fixtures for an etcd that is in trouble; every fault is a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd_server import EtcdServer, server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that the test may hurt."""
    with server(tmp_path) as etcd:
        yield etcd
