from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.ports import free_port
from zero_orchestrator.errors import SpecError, StoreUnavailable
from zero_orchestrator.store.etcd.client import EtcdStore
from zero_orchestrator.store.etcd.connection import Credentials, parse_endpoints


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("a:1", ("a:1",)),
        ("a", ("a:2379",)),
        ("10.0.0.1:1, 10.0.0.2:2,", ("10.0.0.1:1", "10.0.0.2:2")),
        ("[::1]:5", ("[::1]:5",)),
        ("[::1]", ("[::1]:2379",)),
    ],
)
def test_endpoints_are_hosts_with_ports(text: str, endpoints: tuple[str, ...]) -> None:
    assert parse_endpoints(text) == endpoints


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "HOST:PORT"),
        (" , ", "HOST:PORT"),
        ("http://a:1", "without the scheme"),
        ("::1", r"\[ADDRESS\]:PORT"),
        ("a:b", "port"),
        ("a:0", "port"),
        ("a:65536", "port"),
        (":1", "HOST:PORT"),
    ],
)
def test_a_wrong_endpoint_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        parse_endpoints(text)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"user": "a"}, "password"),
        ({"ca": Path("ca"), "cert": Path("cert")}, "key"),
        ({"cert": Path("cert"), "key": Path("key")}, "ca file"),
    ],
)
def test_half_a_credential_is_refused(given: dict[str, str], missing: str) -> None:
    with pytest.raises(SpecError, match=missing):
        Credentials(**given)  # type: ignore[arg-type]


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(Credentials(user="a", password="secret"))


def test_grpc_comes_with_the_etcd_store_and_with_nothing_else() -> None:
    """The agent starts fast, and a process without gRPC threads may fork."""
    script = """
import sys
from zero_orchestrator.store import kv, lease, retry
import zero_agent.etcd.local_etcd, zero_agent.etcd.etcd_keeper
assert not {"grpc", "etcd3", "torch"} & set(sys.modules)
import zero_orchestrator.store.etcd.client
assert {"grpc", "etcd3"} <= set(sys.modules) and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_endpoints_that_refuse_connections_are_named_in_one_short_sentence() -> None:
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with closing(EtcdStore(f"{first},{second}")) as store, pytest.raises(StoreUnavailable) as told:
        store.get("a key")
    refused = "(Connection refused)"
    assert str(told.value) in {  # it begins with either
        f"cannot reach etcd at {a} {refused}, {b} {refused}; is it running there?"
        for a, b in ((first, second), (second, first))
    }
