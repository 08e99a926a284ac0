"""Fixtures for jobs that run as real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.etcd_server import EtcdServer


@pytest.fixture
def cluster(
    etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, each with a job of its own; none outlives the test."""
    made: list[Cluster] = []

    def make(**facts: object) -> Cluster:
        job = f"{request.node.originalname[:40]}-{len(made)}-{tmp_path.name[-8:]}"
        made.append(Cluster(tmp_path, etcd.endpoint, job.replace("_", "-"), **facts))
        return made[-1]

    yield make
    for one in made:
        one.close()
