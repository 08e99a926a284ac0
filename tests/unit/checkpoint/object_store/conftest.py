"""What a directory promises, an object store promises: a real S3 server, or fsspec's own memory."""

from __future__ import annotations

import itertools

import pytest

from zero_checkpoint.files.place import place

_roots = itertools.count()


@pytest.fixture(params=["memory", "s3"])
def root(request):
    """A prefix that no other test uses, in either store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    return place(f"{request.param}://bucket/run-{next(_roots)}")


@pytest.fixture
def s3_root(s3):
    return place(f"s3://{s3.bucket}/run-{next(_roots)}")
