"""Versions of etcd: which are warned about, which are harmless, which binary an agent starts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from zero_agent.etcd import etcd_process
from zero_agent.etcd.etcd_process import find_etcd
from zero_orchestrator.store.etcd.connection import rpc
from zero_orchestrator.store.etcd.versions import complaint
from zero_orchestrator.store.kv import Change


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("3.3.27", "older than 3.4"),
        ("3.4.23", ""),
        ("3.5.0", "etcd#13766"),
        ("3.5.5", "etcd#13766"),
        ("3.5.6", ""),
        ("3.6.0-rc.3", ""),
        ("unknown", ""),
    ],
)
def test_versions_that_their_authors_advise_against_are_warned_about(version, why):
    said = complaint(version)
    assert (why in said) if why else said == ""


@pytest.mark.parametrize(("version", "is_preferred"), [("3.4.23", False), ("3.6.8", True)])
def test_an_etcd_on_the_path_is_started_if_it_is_newer_than_the_packages(
    tmp_path: Path, monkeypatch, version, is_preferred
):
    packaged = find_etcd()
    source = tmp_path / "etcd.c"
    source.write_text(f'#include <stdio.h>\nint main() {{ puts("etcd Version: {version}"); }}\n')
    installed = tmp_path / "etcd"
    compiled = shutil.which("cc") or pytest.skip("there is no C compiler")
    subprocess.run([compiled, str(source), "-o", str(installed)], check=True)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    etcd_process.find_etcd.cache_clear()
    try:
        assert find_etcd() == (installed if is_preferred else packaged)
    finally:
        etcd_process.find_etcd.cache_clear()


@pytest.mark.etcd
def test_a_watch_drops_what_an_etcd_before_3_6_2_delivers_again(etcd_store):
    """A watch that begins at a future revision may receive older events (etcd#20221)."""
    seen: list[Change] = []
    watch = etcd_store.watch("dropped/", seen.extend, after=1 << 40)
    events = [
        rpc.Event(kv=rpc.KeyValue(key=b"dropped/a", value=b"x", mod_revision=revision))
        for revision in (3, 1 << 40, (1 << 40) + 1)
    ]
    watch.deliver(events)
    watch.deliver(events)
    watch.cancel()
    assert [change.revision for change in seen] == [(1 << 40) + 1]
