"""torchrun's rendezvous settings, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_agent.etcd.rdzv_conf import RdzvConf, check_backend, parse_rdzv_conf
from zero_orchestrator.errors import SpecError


@pytest.mark.parametrize(
    ("text", "conf"),
    [
        ("", RdzvConf()),
        ("join_timeout=60", RdzvConf(join_timeout_s=60)),
        ("'join_timeout=60, last_call_timeout=5'", RdzvConf(join_timeout_s=60, settle_s=5)),
        ('"read_timeout=7,"', RdzvConf(read_timeout_s=7)),
        ("keep_alive_interval=2", RdzvConf(lease_ttl_s=6)),
        ("keep_alive_interval=1,keep_alive_max_attempt=4", RdzvConf(lease_ttl_s=4)),
        ("keep_alive_max_attempt=2", RdzvConf(lease_ttl_s=10)),
        ("keep_alive_interval=0.1", RdzvConf(lease_ttl_s=2)),
        ("ca_cert=/ca,ssl_cert=/c", RdzvConf(ca=Path("/ca"), cert=Path("/c"))),
        ("ssl_cert_key=/k", RdzvConf(key=Path("/k"))),
    ],
)
def test_a_setting_with_a_meaning_here_is_used(text, conf):
    assert parse_rdzv_conf(text) == conf


def test_a_setting_without_a_meaning_here_is_named_and_ignored():
    conf = parse_rdzv_conf("close_timeout=1,is_host=true")
    assert conf.notes == (
        "--rdzv-conf: close_timeout, is_host: without meaning in etcd v3, and ignored",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("join_timout=3", "join_timout: there is no such setting; did you mean join_timeout?"),
        ("color=blue", "color: there is no such setting; known are join_timeout"),
        ("join_timeout", "'join_timeout': write KEY=VALUE"),
        ("join_timeout=", "'join_timeout=': write KEY=VALUE"),
        ("=3", "'=3': write KEY=VALUE"),
        ("join_timeout=soon", "join_timeout=soon: write a number above 0"),
        ("read_timeout=0", "read_timeout=0: write a number above 0"),
        ("keep_alive_interval=nan", "keep_alive_interval=nan: write a number above 0"),
    ],
)
def test_a_wrong_setting_is_named_with_the_right_form(text, message):
    with pytest.raises(SpecError) as refused:
        parse_rdzv_conf(text)
    assert str(refused.value).startswith(f"--rdzv-conf: {message}")


def test_those_who_ask_for_another_backend_are_told_what_they_get():
    assert check_backend("static") == check_backend("etcd-v3") == ""
    assert check_backend("etcd") == "--rdzv-backend=etcd: the v3 API of that etcd is used"
    assert "exists already" in check_backend("c10d")
    with pytest.raises(SpecError, match=r"--rdzv-backend=c10: .* did you mean c10d"):
        check_backend("c10")
