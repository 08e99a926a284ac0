"""An etcd with locks: agents with the right key work, the others are told which one is wrong."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import environment
from tests.support.etcd_server import EtcdServer
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import Member
from zero_orchestrator.errors import StoreError
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore

pytestmark = [pytest.mark.processes, pytest.mark.etcd]


def agent(endpoint: str, job: str, *flags: object) -> subprocess.CompletedProcess[str]:
    program = ("--no-python", "echo", "ran")
    where = (f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job}")
    command = [sys.executable, "-m", "zero_agent", *where, *map(str, flags), *program]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One message, which says what to do, and the exit code of an etcd out of reach."""
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


class Authority:
    """Signs certificates, good and expired ones."""

    def __init__(self, directory: Path, name: str) -> None:
        self._at = directory / name
        self.ca = Path(f"{self._at}.pem")
        self._openssl(
            "req -x509 -newkey rsa:2048 -nodes -days 2",
            *("-subj", f"/CN={name}", "-keyout", f"{self._at}.key", "-out", str(self.ca)),
        )

    def sign(self, name: str, *, days: int = 2) -> tuple[Path, Path]:
        """A certificate for this machine, and its key."""
        at = f"{self._at}-{name}"
        names = Path(f"{at}.ext")
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        self._openssl(
            "req -newkey rsa:2048 -nodes -subj /CN=localhost",
            *("-keyout", f"{at}.key", "-out", f"{at}.csr"),
        )
        self._openssl(
            f"x509 -req -days {days} -CAcreateserial",
            *("-CA", str(self.ca), "-CAkey", f"{self._at}.key", "-extfile", str(names)),
            *("-in", f"{at}.csr", "-out", f"{at}.pem"),
        )
        return Path(f"{at}.pem"), Path(f"{at}.key")

    @staticmethod
    def _openssl(command: str, *options: str) -> None:
        try:
            subprocess.run(
                ["openssl", *command.split(), *options],
                check=True,
                capture_output=True,
                timeout=120,
            )
        except FileNotFoundError:
            pytest.skip("needs the openssl command")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Ours, and somebody else's."""
    directory = tmp_path_factory.mktemp("certificates")
    return Authority(directory, "ours"), Authority(directory, "theirs")


@contextlib.contextmanager
def encrypted(directory: Path, cert: Path, key: Path, *options: str) -> Iterator[str]:
    """A server that speaks TLS; its endpoint."""
    port = free_port()
    urls = [f"--{side}-client-urls=https://127.0.0.1:{port}" for side in ("listen", "advertise")]
    own = (*urls, f"--cert-file={cert}", f"--key-file={key}", *options)
    member = Member(data=directory / "data", client_port=port, options=own)
    with contextlib.closing(EtcdServer(directory, member)) as etcd:
        etcd.start(wait=False)
        wait_for(lambda: listens(port), 150, "the server")
        yield etcd.endpoint


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, authorities: tuple[Authority, Authority]
) -> Iterator[str]:
    """A server that asks its clients for a certificate as well."""
    ours, _ = authorities
    cert, key = ours.sign("server")
    asks = ("--client-cert-auth", f"--trusted-ca-file={ours.ca}")
    with encrypted(tmp_path_factory.mktemp("guarded"), cert, key, *asks) as endpoint:
        who = Credentials(ca=ours.ca, cert=cert, key=key)
        wait_for(lambda: answers(endpoint, who), 150, "the server")
        yield endpoint


def answers(endpoint: str, who: Credentials) -> bool:
    with contextlib.closing(EtcdStore(endpoint, credentials=who)) as store:
        try:
            store.get("/zero/")
        except StoreError:
            return False
        return True


def test_a_client_certificate_lets_an_agent_in(guarded, authorities):
    ours, _ = authorities
    cert, key = ours.sign("client")
    done = agent(guarded, "in", f"--etcd-ca={ours.ca}", f"--etcd-cert={cert}", f"--etcd-key={key}")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_an_agent_without_a_certificate_is_told_to_bring_one(guarded, authorities):
    done = agent(guarded, "without", f"--etcd-ca={authorities[0].ca}")
    assert_refused(done, "that it trusts: give --etcd-cert and --etcd-key")


def test_a_certificate_of_another_authority_is_refused_either_way(guarded, authorities):
    ours, theirs = authorities
    cert, key = theirs.sign("client")
    mine = (f"--etcd-cert={cert}", f"--etcd-key={key}")
    assert_refused(
        agent(guarded, "their-client", f"--etcd-ca={ours.ca}", *mine), "that it trusts: give"
    )
    assert_refused(
        agent(guarded, "their-ca", f"--etcd-ca={theirs.ca}", *mine),
        "--etcd-ca is not the authority that signed etcd's certificate",
    )


def test_an_expired_certificate_is_named(tmp_path, authorities):
    ours, _ = authorities
    with encrypted(tmp_path, *ours.sign("expired", days=-1)) as endpoint:
        begun = time.monotonic()
        done = agent(endpoint, "expired", f"--etcd-ca={ours.ca}")
        assert_refused(done, "the certificate has expired: renew it")
        assert time.monotonic() - begun < 25  # --etcd-wait lasts for 30 s


def test_an_agent_that_does_not_use_tls_is_told_to(guarded):
    """Its server looks like one that is only starting."""
    assert_refused(agent(guarded, "plain", "--etcd-wait=0"), "--etcd-ca if it uses TLS")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A server that asks for a login; `trainer` may write below /zero/ only."""
    with contextlib.closing(EtcdServer(tmp_path_factory.mktemp("locked")).start()) as etcd:
        for user, role in (("root", "root"), ("trainer", "zero"), ("guest", "")):
            etcd.call("auth/user/add", name=user, password=f"secret of {user}")
            if role:
                etcd.call("auth/role/add", name=role)
                etcd.call("auth/user/grant", user=user, role=role)
        prefix = {"key": "L3plcm8v", "range_end": "L3plcm8w", "permType": "READWRITE"}  # /zero/
        etcd.call("auth/role/grant", name="zero", perm=prefix)
        etcd.call("auth/enable")
        yield etcd


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("trainer", "guessed", ["invalid user ID or password", "check --etcd-user and"]),
        ("nobody", "secret of nobody", ["invalid user ID or password", "check --etcd-user and"]),
        ("guest", "secret of guest", ["permission denied", "readwrite on the prefix /zero/"]),
    ],
)
@pytest.mark.corners(user=["trainer", "guest"])
def test_a_wrong_login_is_one_message(locked, tmp_path, user, password, words):
    file = tmp_path / "password"
    file.write_text(password)
    login = (f"--etcd-user={user}", f"--etcd-password-file={file}")
    done = agent(locked.endpoint, "wrong", *login)
    assert_refused(done, *words)
    assert password not in done.stderr


def test_an_agent_logs_in_and_needs_no_more_than_its_prefix(locked, tmp_path):
    file = tmp_path / "password"
    file.write_text("secret of trainer\n")
    login = ("--etcd-user=trainer", f"--etcd-password-file={file}")
    done = agent(locked.endpoint, "right", *login)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert_refused(agent(locked.endpoint, "none"), "give --etcd-user and --etcd-password-file")
