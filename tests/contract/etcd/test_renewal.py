"""Certificates are renewed while a store is connected: nobody is restarted, and nothing is lost."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.etcd.client import ROOT, connect, put
from tests.support.cluster import COLD, TOGETHER, Cluster
from tests.support.etcd_server import EtcdServer
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tests.support.watching import Seen
from zero_agent.etcd.etcd_process import Member
from zero_orchestrator.errors import SpecError, StoreUnavailable
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore
from zero_orchestrator.store.join_token import TlsFiles, new_token, write_certificates

pytestmark = pytest.mark.etcd

NAMES = ["127.0.0.1", "localhost"]


class Files:
    """The certificates of a server and of its client, on disk."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.renewals = directory, 0
        self.server, self.client = (
            TlsFiles(**{part: directory / who / f"{part}.pem" for part in ("ca", "cert", "key")})
            for who in ("server", "client")
        )
        self.token = new_token()
        self.renew(self.token)

    def renew(self, token: str) -> None:
        """Copy others into their places, one by one, as people do."""
        self.renewals += 1
        for who, names in (("server", NAMES), ("client", [])):
            (fresh := self.directory / f"{who}-{self.renewals}").mkdir()
            write_certificates(fresh, token, names)
            shutil.copytree(fresh, self.directory / who, dirs_exist_ok=True)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@contextlib.contextmanager
def serving(files: Files, directory: Path):
    member = Member(data=directory / "data", client_port=free_port(), tls=files.server)
    with contextlib.closing(EtcdServer(directory, member)) as etcd:
        yield etcd.start()


def trusted(files: Files) -> Credentials:
    return Credentials(ca=files.client.ca, cert=files.client.cert, key=files.client.key)


def of_another(path: Path) -> None:
    (other := path.parent / "other").mkdir()
    shutil.copy(write_certificates(other, new_token()).key, path)


DAMAGES: dict[str, Callable[[TlsFiles], object]] = {
    "no certificate": lambda files: files.cert.unlink(),
    "an empty certificate": lambda files: files.cert.write_bytes(b""),
    "half a certificate": lambda files: files.cert.write_bytes(files.cert.read_bytes()[:200]),
    "an empty key": lambda files: files.key.write_bytes(b""),
    "the key of another": lambda files: of_another(files.key),
    "an empty authority": lambda files: files.ca.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.corners(damage=["an empty certificate"])
def test_a_store_lives_through_a_renewal_and_takes_the_new_files(tmp_path, files, caplog, damage):
    seen = Seen()
    with (
        serving(files, tmp_path) as etcd,
        connect(etcd.endpoint, credentials=trusted(files)) as store,
    ):
        store.watch(ROOT, seen, after=0)
        DAMAGES[damage](files.client)
        etcd.kill()
        with pytest.raises(StoreUnavailable):
            store.put(f"{ROOT}a", "nobody is there")
        etcd.start()
        put(store, f"{ROOT}a", "between two files")
        assert seen.wait_value("between two files") == ["between two files"]
        assert "going on with the certificates of before" in caplog.text
        files.renew(new_token())  # of another authority: the old ones would be refused
        etcd.kill()
        etcd.start()
        put(store, f"{ROOT}a", "renewed")
        assert seen.wait_value("renewed") == ["between two files", "renewed"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_wrong_from_the_beginning_is_named(files, damage):
    DAMAGES[damage](files.client)
    with pytest.raises(SpecError, match=str(files.client.cert.parent)):
        EtcdStore("127.0.0.1:1", credentials=trusted(files))


def test_an_etcd_shows_its_renewed_certificate_without_a_restart(tmp_path):
    files = Files(tmp_path)
    with serving(files, tmp_path) as etcd:
        files.renew(files.token)
        context = ssl.create_default_context(cafile=files.client.ca)
        context.load_cert_chain(files.client.cert, files.client.key)
        host, _, port = etcd.endpoint.rpartition(":")
        with (
            socket.create_connection((host, int(port))) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            shown = secure.getpeercert(binary_form=True)
    assert shown == ssl.PEM_cert_to_DER_cert(files.server.cert.read_text())


STEPS = """
import pathlib, sys, time
import zero_agent
step = 0
while not pathlib.Path(sys.argv[1], "finish").exists():
    zero_agent.heartbeat(step := step + 1)
    time.sleep(0.05)
"""


@pytest.mark.full
@pytest.mark.processes
def test_a_job_goes_on_when_all_its_certificates_are_renewed(tmp_path, files):
    (tmp_path / "steps.py").write_text(STEPS)
    client = files.client
    flags = (
        *("--nnodes=2", "--max-restarts=0", COLD, TOGETHER),
        *(f"--etcd-ca={client.ca}", f"--etcd-cert={client.cert}", f"--etcd-key={client.key}"),
    )
    with serving(files, tmp_path) as etcd:
        script = (str(tmp_path / "steps.py"), str(tmp_path))
        job = Cluster(tmp_path, etcd.endpoint, flags=flags, script=script)
        with contextlib.closing(job):
            job.start("a", "b")
            wait_for(lambda: len(job.events("worker")) == 2, 120, "two workers")
            files.renew(new_token())
            etcd.kill()
            etcd.start()
            with connect(etcd.endpoint, credentials=trusted(files)) as store:
                before = store.range("/zero/").revision
                wait_for(lambda: store.range("/zero/").revision > before, 120, "news of the job")
            (tmp_path / "finish").touch()
            job.wait_for_end()
            assert len(job.events("activate")) == 1
