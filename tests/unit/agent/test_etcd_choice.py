"""Where the agents of a job meet, as their flags say."""

from __future__ import annotations

import pytest

from tests.support.flags import parse
from zero_agent.etcd.etcd_access import Access, explain, mistake
from zero_agent.etcd.etcd_choice import Static, Way, choose, endpoints_of
from zero_agent.etcd.rdzv_conf import RdzvConf
from zero_orchestrator.addresses import split_host_port
from zero_orchestrator.errors import SpecError


@pytest.mark.parametrize(
    ("line", "way", "note"),
    [
        ("", Way.PRIVATE, ""),
        ("--master-port=29501", Way.PRIVATE, ""),
        ("--nnodes=1:4", Way.SHARED, ""),
        ("--nnodes=1:4 --standalone", Way.PRIVATE, ""),
        ("--nnodes=2 --rdzv-endpoint=e:1", Way.NAMED, ""),
        ("--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=head", Way.OWN, ""),
        ("--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0", Way.PRIVATE, ""),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=e:1,f:1", Way.OWN, ""),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=e:1 --etcd-ca=ca.pem", Way.NAMED, ""),
        ("--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=e:1", Way.NAMED, ""),
        ("--nnodes=2 --node-rank=0", Way.STATIC, ""),
        ("--nnodes=2 --master-addr=a --master-port=5", Way.STATIC, ""),
        (
            "--nnodes=2 --rdzv-endpoint=e:1 --node-rank=1 --master-addr=a",
            Way.NAMED,
            "--node-rank, --master-addr: without effect beside --rdzv-endpoint",
        ),
        (
            "--standalone --rdzv-endpoint=e:1",
            Way.PRIVATE,
            "--rdzv-endpoint: without effect beside --standalone",
        ),
    ],
)
def test_the_flags_say_where_to_meet_and_which_of_them_do_nothing(line, way, note):
    assert choose(parse([*line.split(), "s.py"], {})) == (way, note)


def static(line: str) -> Static:
    return Static.of(parse([*line.split(), "s.py"], {}), 60.0)


def test_a_fixed_world_has_torchruns_defaults():
    world = static("--nnodes=2 --node-rank=1")
    assert (world.rank, world.nodes, world.endpoint) == (1, 2, "127.0.0.1:29500")
    assert static("--nnodes=2 --master-addr=[::1] --master-port=7").endpoint == "[::1]:7"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nnodes=1:3 --node-rank=0", "such a world is fixed; write --nnodes=3"),
        ("--nnodes=2 --node-rank=2", "--node-rank=2: with --nnodes=2 write 0 to 1"),
        ("--nnodes=2 --node-rank=-1", "--node-rank=-1: with --nnodes=2 write 0 to 1"),
    ],
)
def test_a_world_that_cannot_be_is_refused(line, message):
    with pytest.raises(SpecError) as refused:
        static(line)
    assert message in str(refused.value)


def access(line: str, conf: RdzvConf | None = None) -> Access:
    return Access.of(parse([*line.split(), "s.py"], {}), conf or RdzvConf(), "e:1")


def test_the_password_is_the_first_line_of_its_file_and_is_never_shown(tmp_path):
    (tmp_path / "password").write_text("se cret\r\nnot this\n")
    found = access(f"--etcd-user=me --etcd-password-file={tmp_path}/password")
    assert (found.user, found.password, found.is_secure) == ("me", "se cret", True)
    assert "cret" not in repr(found)


def test_the_files_of_tls_may_come_from_rdzv_conf_and_flags_win(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("")
    conf = RdzvConf(ca=tmp_path / "a", read_timeout_s=7.0)
    assert access("", conf).ca == tmp_path / "a"
    assert access("", conf).timeout_s == 7.0
    assert access(f"--etcd-ca={tmp_path}/b", conf).ca == tmp_path / "b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--etcd-ca=/no/where.pem", "--etcd-ca=/no/where.pem: cannot be read: [Errno 2]"),
        ("--etcd-cert=/dev/null", "--etcd-cert and --etcd-key: give both, or neither"),
        ("--etcd-cert=/dev/null --etcd-key=/dev/null", "--etcd-cert: give --etcd-ca as well"),
        ("--etcd-user=me", "--etcd-user and --etcd-password-file: give both, or neither"),
        ("--etcd-password-file=/no/where", "--etcd-password-file=/no/where: cannot be read"),
    ],
)
def test_half_of_a_pair_or_a_file_that_is_not_there_is_named(line, message):
    with pytest.raises(SpecError) as refused:
        access(line)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("said", "is_secure", "shown"),
    [
        ("etcd: user name is empty", False, "; give --etcd-user and --etcd-password-file"),
        ("x: CERTIFICATE_VERIFY_FAILED: certificate has expired", True, "expired: renew it"),
        ("cannot reach etcd at e:1; is it running there?", True, "there? --rdzv-endpoint names it"),
        ("cannot reach etcd at e:1; is it running there?", False, "--etcd-ca if it uses TLS"),
        ("etcd: no such thing", False, "etcd: no such thing"),
    ],
)
def test_what_etcd_says_is_explained_in_terms_of_our_flags(said, is_secure, shown):
    assert shown in explain(said, is_secure)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("cannot reach etcd at e:1 (Connection refused); is it running there?", ""),
        ("cannot reach etcd at e:1 (Domain name not found); is it running there?", ""),
        ("etcd at e:1 did not answer in time", ""),
        ("etcd at e:1: etcdserver: no leader", ""),
        ("etcd at e:1: CERTIFICATE_VERIFY_FAILED: certificate has expired", "renew it"),
        ("cannot reach etcd at e:1 (SSL: WRONG_VERSION_NUMBER)", "leave out --etcd-ca"),
        ("etcd at e:1: invalid user ID or password", "check --etcd-user"),
    ],
)
def test_only_an_etcd_that_may_come_by_itself_is_waited_for(said, remedy):
    assert remedy in mistake(said)
    assert bool(mistake(said)) == bool(remedy)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("head", "head", 29400),
        ("head:7", "head", 7),
        ("localhost:0", "localhost", 0),
        ("[fd00::1]", "fd00::1", 29400),
        ("[fd00::1]:7", "fd00::1", 7),
    ],
)
def test_the_etcd_of_a_jobs_own_has_torchruns_default_port(text, host, port):
    (found,) = endpoints_of(text)
    assert split_host_port(found) == (host, port)


@pytest.mark.parametrize("text", [":7", "head:70000"])
def test_a_malformed_endpoint_is_refused(text):
    with pytest.raises(SpecError, match=f"--rdzv-endpoint={text}: write HOST or HOST:PORT"):
        endpoints_of(text)
