"""Stock torchrun's rendezvous with an etcd that speaks TLS and asks for a login."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

pytest.importorskip("torch")
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tests.support.etcd_server import EtcdServer
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.etcd.etcd_process import Member
from zero_orchestrator.errors import SpecError, StoreError
from zero_orchestrator.store.etcd.client import Credentials, EtcdStore
from zero_torchrun.etcd_handler import create

pytestmark = pytest.mark.etcd


@pytest.fixture
def certificate(tmp_path):
    """For this machine, signed by itself: certificate and key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*words.split(), *names, *files], check=True, capture_output=True, timeout=120)
    return cert, key


def params(endpoint, **settings):
    return RendezvousParameters("zero-etcd", endpoint, "secure", 1, 1, "127.0.0.1", **settings)


def test_a_round_is_formed_over_tls_with_a_client_certificate(tmp_path, certificate):
    cert, key = certificate
    port = free_port()
    urls = [f"--{side}-client-urls=https://127.0.0.1:{port}" for side in ("listen", "advertise")]
    files = (f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={cert}")
    options = (*urls, *files, "--client-cert-auth")
    member = Member(data=tmp_path / "data", client_port=port, options=options)
    with contextlib.closing(EtcdServer(tmp_path, member)) as etcd:
        etcd.start(wait=False)
        who = Credentials(ca=cert, cert=cert, key=key)
        with contextlib.closing(EtcdStore(etcd.endpoint, credentials=who)) as probe:
            wait_for(lambda: answers(probe), 60, "etcd serves")
        settings = {"ca_cert": str(cert), "ssl_cert": str(cert), "ssl_cert_key": str(key)}
        before = dict(os.environ)
        handler = create(params(etcd.endpoint, **settings))
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert handler.shutdown()
        assert dict(os.environ) == before, "whoever called torchrun as a function has no agent"


def answers(store):
    try:
        return store.range("/")
    except StoreError:
        return None


def test_half_of_a_pair_and_a_missing_file_are_named():
    with pytest.raises(SpecError, match="both a user and a password"):
        create(params("127.0.0.1:1", user="alice"))
    with pytest.raises(SpecError, match=r"ca_cert=/nowhere: No such file"):
        create(params("127.0.0.1:1", ca_cert="/nowhere"))


@pytest.mark.parametrize("value", ["soon", "nan", "-1", "inf"])
def test_a_time_that_is_no_number_of_seconds_is_named(value):
    with pytest.raises(SpecError, match=rf"join_timeout={value}: give a number of seconds"):
        create(params("127.0.0.1:1", join_timeout=value))
