"""Who may use an etcd that asks for a login, or speaks TLS."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.etcd.client import ROOT, connect, put
from tests.support.etcd_server import EtcdServer
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tests.support.watching import SOON_S, Seen
from zero_agent.etcd.etcd_process import Member
from zero_orchestrator.errors import StoreRefused, StoreUnavailable
from zero_orchestrator.store.etcd.client import Credentials

pytestmark = pytest.mark.etcd


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that asks for a login and forgets it when it is not used for a second."""
    data, port = tmp_path / "data", free_port()
    member = Member(data=data, client_port=port, options=("--auth-token-ttl=1",))
    with contextlib.closing(EtcdServer(tmp_path, member).start()) as etcd:
        etcd.call("auth/user/add", name="root", password="secret")
        etcd.call("auth/role/add", name="root")
        etcd.call("auth/user/grant", user="root", role="root")
        etcd.call("auth/enable")
        yield etcd


def test_a_user_logs_in_and_again_when_the_login_is_forgotten(locked: EtcdServer) -> None:
    who = Credentials(user="root", password="secret")
    with connect(locked.endpoint, credentials=who) as store:
        put(store, f"{ROOT}a", "1")
        written = time.monotonic()
        wait_for(lambda: time.monotonic() - written > 3.0, SOON_S, "the end of the token")
        session = store._connection.session
        store.put(f"{ROOT}a", "2")
        assert store._connection.session is session  # logged in again, not connected again


def test_a_watch_of_a_user_outlives_a_restart_of_the_server(locked: EtcdServer) -> None:
    seen = Seen()
    who = Credentials(user="root", password="secret")
    with connect(locked.endpoint, credentials=who) as store:
        store.watch(ROOT, seen, after=0)
        put(store, f"{ROOT}a", "1")
        seen.wait_value("1")
        locked.kill()
        locked.start()
        put(store, f"{ROOT}a", "2")
        assert seen.wait_value("2") == ["1", "2"]


def test_who_may_not_write_is_refused(locked: EtcdServer) -> None:
    with connect(locked.endpoint) as store, pytest.raises(StoreRefused, match="give the user"):
        store.put(f"{ROOT}a", "1")
    wrong = Credentials(user="root", password="guessed")
    refused = pytest.raises(StoreRefused, match="invalid user ID or password")
    with connect(locked.endpoint, credentials=wrong) as store, refused:
        store.put(f"{ROOT}a", "1")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine and its key; it signs itself, so it is its authority."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    options = ["-addext", names, "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run([*command.split(), *options], check=True, capture_output=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("needs the openssl command")
    return cert, key


def test_a_server_is_reached_over_tls_by_those_who_know_its_authority(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    port = free_port()
    urls = [f"--{side}-client-urls=https://127.0.0.1:{port}" for side in ("listen", "advertise")]
    options = (*urls, f"--cert-file={cert}", f"--key-file={key}")
    member = Member(data=tmp_path / "data", client_port=port, options=options)
    with contextlib.closing(EtcdServer(tmp_path, member)) as etcd:
        etcd.start(wait=False)
        trusted = Credentials(ca=cert)
        with connect(etcd.endpoint, credentials=trusted) as store:
            put(store, f"{ROOT}a", "1")
        with connect(etcd.endpoint) as store, pytest.raises(StoreUnavailable):
            store.get(f"{ROOT}a")
