"""Fixtures for an etcd that is in trouble; every fault is a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd_server import EtcdServer, server
from zero_agent.etcd.etcd_process import binaries, find_etcd


@pytest.fixture(params=["an agent's", pytest.param("the system's", marks=pytest.mark.full)])
def binary(request: pytest.FixtureRequest) -> Path:
    """The etcd that an agent starts, and the one on the PATH, such as Debian's 3.4."""
    if request.param == "an agent's":
        return find_etcd()
    others = [path for path in binaries() if path != find_etcd()]
    return others[0] if others else pytest.skip("there is no other etcd on the PATH")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that the test may hurt."""
    with server(tmp_path) as etcd:
        yield etcd
