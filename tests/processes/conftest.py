"""Fixtures for jobs that run as real processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.etcd_server import EtcdServer

_jobs = itertools.count()


@pytest.fixture
def cluster(
    etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, each with a job of its own; none outlives the test."""
    made: list[Cluster] = []

    def make(**facts: object) -> Cluster:
        # Two runs of the tests on one machine share /dev/shm, which has the job's name in it.
        job = f"{request.node.originalname[:40]}-{os.getpid()}-{next(_jobs)}"
        made.append(Cluster(tmp_path, etcd.endpoint, job.replace("_", "-"), **facts))
        return made[-1]

    yield make
    for one in made:
        one.close()
