"""Versions of etcd: which are warned about, which are harmless, which binary an agent starts."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.etcd_server import EtcdServer
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tests.support.watching import SOON_S, Seen
from zero_agent.etcd import etcd_process
from zero_agent.etcd.etcd_process import Member, binaries, find_etcd
from zero_orchestrator.store import retry
from zero_orchestrator.store.etcd.client import EtcdStore
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
def test_a_server_that_comes_back_with_another_version_is_warned_about_once(tmp_path, caplog):
    versions = {etcd_process._version(path): path for path in binaries()}
    before, after = versions.get((3, 4, 23)), versions.get((3, 5, 1))
    if before is None or after is None:
        pytest.skip("needs the etcd 3.5.1 of the package, and Debian's 3.4.23 on the PATH")
    seen, member = Seen(), Member(data=tmp_path / "data", client_port=free_port())
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(contextlib.closing(EtcdServer(tmp_path, member, before)))
        new = stack.enter_context(contextlib.closing(EtcdServer(tmp_path, member, after)))
        store = EtcdStore(old.start().endpoint)
        stack.callback(store.close)
        store.watch("", seen, after=0)
        store.warn_of_versions()
        store.put("a", "1")
        seen.wait_value("1")
        assert caplog.messages == []
        for number in "23":
            (old if number == "2" else new).stop()
            new.start()
            retry.within(SOON_S)(store.put, "a", number)
            seen.wait_value(number)
        wait_for(lambda: caplog.messages, SOON_S, "a word about it")
    assert [f"at {new.endpoint}: etcd 3.5.1" in said for said in caplog.messages] == [True]


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
