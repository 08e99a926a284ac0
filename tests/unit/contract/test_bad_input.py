"""Every flag that can be wrong: the message names the flag and the right form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from zero_agent.command import cli
from zero_agent.command.flags import FLAGS
from zero_orchestrator.arguments import variable_of
from zero_orchestrator.errors import SpecError

LENGTH = "write seconds, such as 30"
COUNT = "is not a whole number; write one"
STREAMS = "write 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both)"
NAME = "use letters, digits, '.', '_' and '-'"

WRONG: dict[str, tuple[tuple[str, str], ...]] = {
    "nnodes": (("x", "write 4, or 1:4"), ("4:2", "write 2:4"), ("0:2", "write 1:2")),
    "nproc-per-node": (("0", "write a number from 1"), ("some", "or auto, cpu, gpu")),
    "max-restarts": (("1.5", COUNT), ("-1", "must not be negative; write 0")),
    "refill-after-steps": (("x", COUNT), ("-1", "must not be negative; write 0")),
    "max-restarts-without-progress": (("x", COUNT), ("-1", "must not be negative; write 0")),
    "exclude-after": (("x", COUNT), ("-1", "must not be negative; write 0")),
    "grow-every": (("1y", LENGTH),),
    "exclude-for": (("1y", LENGTH), ("0", "write more than 0 seconds")),
    "node-unit": (("x", COUNT), ("0", "from 1"), ("3", "write --nnodes=3:3")),
    "rdzv-id": (("a/b", NAME), ("-x", NAME)),
    "preload": (
        ("json,nowhere", "there is no module nowhere; install it"),
        (".json", "there is no module .json; install it"),
    ),
    "rdzv-backend": (("zookeeper", "known are static, etcd-v3"),),
    "rdzv-endpoint": (
        ("a:b", "write HOST:PORT with a port"),
        ("http://a:1", "without the scheme"),
        (",", "write HOST:PORT[,HOST:PORT...]"),
    ),
    "rdzv-conf": (
        ("x", "write KEY=VALUE"),
        ("join_timeout=x", "write a number above 0, such as join_timeout=30"),
        ("jointimeout=3", "did you mean join_timeout?"),
    ),
    "master-addr": (
        ("10.0.0.1 --nnodes=1:2", "write --nnodes=2"),
        ("node..0", "write the address or the name of one machine"),
    ),
    "master-port": (("x", "write a number up to 65535"), ("70000", "is not a port")),
    "node-rank": (("x", COUNT), ("5 --nnodes=2", "with --nnodes=2 write 0 to 1")),
    "node-id": (("a/b", NAME), ("-a", NAME)),
    "local-addr": (
        ("192.0.2.1", "not an address of this machine; leave it out"),
        ("node..cluster", "write the address or the name of one machine"),
        ("0.0.0.0", "write the address or the name of one machine"),
    ),
    "join-timeout": (("soon", LENGTH), ("-1", LENGTH), ("nan", LENGTH)),
    "etcd-ca": (("/nowhere", "cannot be read"),),
    "etcd-cert": (("/nowhere", "cannot be read"), (__file__, "give both, or neither")),
    "etcd-key": (("/nowhere", "cannot be read"), (__file__, "give both, or neither")),
    "etcd-user": (("me", "give both, or neither"),),
    "etcd-password-file": (("/nowhere", "cannot be read"), (__file__, "give both, or neither")),
    "etcd-wait": (("soon", LENGTH), ("-1", LENGTH)),
    "etcd-grace": (("x", LENGTH), ("inf", LENGTH)),
    "log-dir": ((f"{__file__}/x", "name a directory that can be written"),),
    "redirects": (("9", STREAMS), ("0:9", STREAMS)),
    "tee": (("x", STREAMS), ("0:1,", STREAMS)),
    "log-format": (("xml", "choose from 'text'"),),
    "log-limit": (("x", "write 512Mi, 16Gi or 2Ti"), ("-1", "is not a size")),
    "local-ranks-filter": (("a", "write local ranks, such as 0,1,2"),),
    "shutdown-timeout": (("x", LENGTH),),
    "stop-exit-code": (("x", "is not an exit code"), ("256", "a number up to 255")),
    "port-range": (
        *((text, "at least 4 ports") for text in ("x", "9-8", "9-11", f"1-{10**20}")),
        ("0-9", "29600-29699"),
    ),
    "advertise-addr": (("a:1", "without a port"), ("0.0.0.0", "such as 203.0.113.7")),
    "lease-ttl": (("x", "is not a whole number"), ("1", "no shorter leases than 2 s")),
    "hang-timeout": (("soon", "or auto, or off"), ("0", "write seconds, such as 600")),
    "signals-to-handle": (("SIGKILL", "is not a signal that can be handled"), ("FOO", "SIGUSR1")),
    "numa-binding": (("x", "choose from 'node'"),),
    "health-check-timeout": (("x", LENGTH), ("0", "write more than 0 seconds")),
    "ram-budget": (("x", "write 512Mi, 16Gi or 2Ti"), ("-1", "is not a size")),
    "health-port": (("x", "is not a port"), ("70000", "is not a port")),
    "health-host": (("192.0.2.1 --health-port=0", "another --health-host"),),
    "start-method": (("x", "choose from 'spawn'"),),
    "monitor-interval": (("x", LENGTH),),
    "logs-specs": (("x", "use --log-dir, --redirects and --tee"),),
}
ANYTHING_GOES = {
    *("role", "duplicate-stdout-filters", "duplicate-stderr-filters"),
    *("health-check", "event-log-handler", "machine"),
}
"""Flags whose every text means something."""
CASES = [(flag, *case) for flag, cases in WRONG.items() for case in cases]


@pytest.fixture
def refusal(tmp_path, monkeypatch) -> Callable[[Sequence[str]], str]:
    """The message with which flags are refused, before anything is started."""

    def accepted(*arguments: object) -> None:
        raise AssertionError("accepted")

    def refuse(flags: Sequence[str]) -> str:
        with pytest.raises(SpecError) as refused:
            cli._run([*flags, str(script)])
        return str(refused.value)

    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(cli, "_endpoint", accepted)
    return refuse


each_wrong_value = pytest.mark.parametrize(
    ("flag", "value", "remedy"), CASES, ids=[f"{f}={v}" for f, v, _ in CASES]
)


@each_wrong_value
def test_a_wrong_value_is_refused_with_the_flag_and_the_right_form(flag, value, remedy, refusal):
    message = refusal(f"--{flag}={value}".split())
    assert f"--{flag}" in message
    assert remedy in message


@each_wrong_value
def test_a_wrong_value_from_the_environment_is_refused_with_the_name_of_the_variable(
    flag, value, remedy, refusal, monkeypatch
):
    wrong, *beside = value.split()
    monkeypatch.setenv(variable_of(flag), wrong)
    message = refusal(beside)
    assert re.search(rf"\b{variable_of(flag)}\b", message)
    assert not re.search(rf"--{flag}(?![\w-])", message)
    assert remedy.replace(f"--{flag}", variable_of(flag)) in message


def test_of_two_variables_for_one_flag_that_which_was_set_is_named(refusal, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "x")
    assert refusal([]) == (
        "TORCHELASTIC_HEALTH_CHECK_PORT: x is not a port; write a number up to 65535"
    )


def test_a_wrong_value_in_the_environment_does_no_harm_beside_the_flag(refusal, monkeypatch):
    monkeypatch.setenv("PET_MAX_RESTARTS", "x")
    assert "--max-restarts: y is not a whole number" in refusal(["--max-restarts=y"])


def test_mistakes_of_all_kinds_are_told_together(refusal, monkeypatch):
    monkeypatch.setenv("PET_EXCLUDE_AFTER", "-1")
    flags = ["--nprc=2", "--monitor-interval=soon", "--start-method=fast", "--nnodes=x"]
    flags += ["--tee=9", "--etcd-user=me", "--numa-binding", "socket", "--logs-specs=mine"]
    assert refusal(flags).splitlines() == [
        "--nprc: there is no such flag; --help lists the flags",
        "--monitor-interval: soon is not a length of time; write seconds, such as 30, or 10m, or "
        "2h, or 7d",
        "--start-method: invalid choice: 'fast' (choose from 'spawn', 'fork', 'forkserver')",
        "--nnodes=x: not a number of nodes; write 4, or 1:4 for 1 to 4 nodes",
        "PET_EXCLUDE_AFTER=-1: must not be negative; write 0",
        "--etcd-user and --etcd-password-file: give both, or neither",
        "--tee=9: write 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or one of them for each "
        "local rank, such as 0:1,1:3",
        "--logs-specs=mine: torchrun's plug-ins do not work here; use --log-dir, --redirects and "
        "--tee",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--nnodes=x --node-unit=3 --node-rank=7", ["--nnodes=x"]),
        ("--nnods=4 --node-unit=3 --standalone", ["--nnods"]),
        ("--rdzv-endpoint=a:b --etcd-user=me", ["--rdzv-endpoint=a:b", "--etcd-user"]),
        ("--etcd-cert=/nowhere --etcd-ca=/none", ["--etcd-ca=/none", "--etcd-cert=/nowhere"]),
        ("--nnodes=2 --standalone --node-unit=0", ["--node-unit=0", "--standalone"]),
        ("--foo 3", ["--foo"]),
    ],
)
def test_what_only_follows_from_another_mistake_is_not_told(line, told, refusal):
    lines = refusal(line.split()).splitlines()
    assert [re.split("[: ]", one, maxsplit=1)[0] for one in lines] == [
        re.split("[: ]", flag, maxsplit=1)[0] for flag in told
    ]


def test_a_script_that_cannot_be_looked_at_is_named_beside_the_other_mistakes():
    script = "a" * 300  # longer than a name may be; the error of a directory of others is alike
    with pytest.raises(SpecError) as refused:
        cli._run(["--max-restarts=-1", script])
    assert str(refused.value).splitlines() == [
        "--max-restarts=-1: must not be negative; write 0",
        f"{script}: cannot be read: File name too long",
    ]


def test_no_flag_is_forgotten():
    takes_a_value = {name for name, flag in FLAGS.items() if flag.kind is not None}
    assert set(WRONG) | ANYTHING_GOES == takes_a_value
    assert not set(WRONG) & ANYTHING_GOES
