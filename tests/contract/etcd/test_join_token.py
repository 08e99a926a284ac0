"""An etcd that we start for one job lets in who has the job's token, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys

import pytest

from tests.support.cluster import environment
from zero_agent.etcd.etcd_process import FoundEtcd, is_healthy, probe
from zero_agent.etcd.local_etcd import private_server
from zero_orchestrator.errors import SpecError, StoreUnavailable
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore
from zero_orchestrator.store.join_token import (
    ENV_JOIN_TOKEN,
    main,
    new_token,
    write_certificates,
)

pytestmark = pytest.mark.etcd


@contextlib.contextmanager
def store(endpoint: str, tls=None, timeout_s=60.0):
    who = Credentials(ca=tls.ca, cert=tls.cert, key=tls.key) if tls else None
    with contextlib.closing(EtcdStore(endpoint, timeout_s=timeout_s, credentials=who)) as opened:
        yield opened


@pytest.fixture
def files(tmp_path):
    """Certificates of a token, as a process of the job makes them for itself."""

    def make(token: str):
        directory = tmp_path / token[:8]
        directory.mkdir()
        return write_certificates(directory, token)

    return make


def test_whoever_has_the_token_gets_in_and_a_stranger_learns_and_changes_nothing(files):
    token, other = new_token(), new_token()
    mine, theirs = files(token), files(other)
    with private_server(["127.0.0.2"], token=token, names=["node-0"]) as endpoint:
        elsewhere = f"127.0.0.2:{endpoint.rpartition(':')[2]}"
        with store(elsewhere, mine) as member:
            member.put("/zero/secret/job/key", "x")
        for address in (endpoint, elsewhere):
            assert is_healthy(address, mine)
            assert probe(address) is not FoundEtcd.ETCD, "in plain text"
            assert probe(address, theirs) is not FoundEtcd.ETCD, "with another token"
            for who in (None, theirs):
                with store(address, who, 1.0) as stranger, pytest.raises(StoreUnavailable):
                    stranger.put("/zero/secret/job/key", "stolen")
            assert not lets_in(address, ssl._create_unverified_context()), "without a certificate"
        with store(endpoint, mine) as member:
            assert member.get("/zero/secret/job/key").value == "x"
        look = [sys.executable, "-m", "zero_orchestrator", "status", "--all"]
        done = subprocess.run(
            [*look, f"--rdzv-endpoint={elsewhere}"],
            env={**environment(), ENV_JOIN_TOKEN: token},
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr


def lets_in(endpoint: str, context: ssl.SSLContext) -> bool:
    host, _, port = endpoint.rpartition(":")
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), 5) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        return bool(connection.recv(100))
    return False


def test_another_etcd_is_not_taken_for_the_jobs(files):
    """Its authority is the token's: who sits on its address cannot show a certificate of it."""
    mine = files(new_token())
    with (
        private_server(token=new_token()) as anothers,
        store(anothers, mine, 1.0) as member,
        pytest.raises(StoreUnavailable),
    ):
        member.put("/zero/secret/job/key", "told to a stranger")


def test_certificates_are_for_this_user_alone(files):
    made = files(new_token())
    assert {path.stat().st_mode & 0o777 for path in (made.ca, made.cert, made.key)} == {0o600}


def test_a_token_that_could_be_guessed_is_refused_and_nothing_made(tmp_path, monkeypatch):
    with pytest.raises(SpecError, match=r"ZERO_JOIN_TOKEN has 6 characters and could be guessed"):
        write_certificates(tmp_path, "secret")
    monkeypatch.setenv(ENV_JOIN_TOKEN, "secret")
    monkeypatch.setattr(sys, "argv", ["zero-ctl certs", str(tmp_path / "tls"), "etcd-0"])
    with pytest.raises(SystemExit):
        main()
    assert list(tmp_path.iterdir()) == []
