"""A store that cannot be used: what is wrong is named, with the remedy."""

from __future__ import annotations

import re
import sys

import fsspec
import pytest

from tests.unit.checkpoint.support import adam_state, blank, load_all, save_all, saved
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.objects import ObjectPath
from zero_checkpoint.files.place import place
from zero_checkpoint.tools.cli import main

OLD, NEW = adam_state(seed=1, width=3000), adam_state(seed=2, width=3000)


def test_credentials_that_are_refused_are_no_empty_store(s3, s3_root, capsys):
    """A run whose credentials have expired must not start from scratch."""
    saved(s3_root, OLD, 2, step=1)
    s3.check_credentials(True)
    try:
        for error in load_all(s3_root, blank(OLD), 2):
            assert type(error) is CheckpointError
            assert "the store refuses" in str(error)
            assert "check the credentials" in str(error)
        for error in save_all(s3_root, NEW, 2, step=2):
            assert "check the credentials" in str(error)
        assert main(["ls", str(s3_root)]) == 2
        assert f"zero-ckpt: {s3_root}: the store refuses" in capsys.readouterr().err
    finally:
        s3.check_credentials(False)


def test_a_bucket_that_does_not_exist_is_named(s3):
    root = place("s3://no-such-bucket/run")
    for error in [*save_all(root, NEW, 2), *load_all(root, blank(NEW), 2)]:
        assert "s3://no-such-bucket/run" in str(error)
        assert "there is no such bucket; create it, or mend the URL" in str(error)


def test_a_store_out_of_reach_is_named(s3_root, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for error in load_all(s3_root, blank(NEW), 1):
        assert "the store cannot be reached (Could not connect to the endpoint" in str(error)
        assert "check the network, and AWS_ENDPOINT_URL" in str(error)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("azure://bucket/dir", "under s3://, s3a://, gs://, gcs://, memory://; mount other"),
        ("s3://", "write s3://BUCKET/DIRECTORY"),
        ("s3://bucket/../other", "write s3://BUCKET/DIRECTORY"),
        ("s3:/bucket/dir", "a URL in a Path loses a slash; give it as text: 's3://bucket/dir'"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_the_remedy(text, says):
    with pytest.raises(CheckpointError, match=re.escape(says)):
        place(text)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'zero-elastic[gcs]'")):
        place("gs://bucket/dir")


@pytest.mark.parametrize("text", ["s3://bucket/run", "s3://bucket//run/", "s3://bucket/run//"])
def test_slashes_do_not_make_another_place(s3, text):
    assert place(text) == ObjectPath("s3://bucket/run")


def test_a_path_and_a_file_url_are_directories(tmp_path):
    assert place(tmp_path) == place(str(tmp_path)) == place(f"file://{tmp_path}") == tmp_path
