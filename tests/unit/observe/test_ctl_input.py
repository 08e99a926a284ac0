"""`zero-ctl` with something wrong in what was typed: one message, the flag and the remedy."""

from __future__ import annotations

import logging

import pytest

from zero_contract.exit_codes import CtlExit
from zero_orchestrator.ctl.cli import main


@pytest.fixture(autouse=True)
def level_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    """What `main` sets for its process ends with the test."""
    caplog.set_level(logging.CRITICAL, "zero_orchestrator")


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ("--etcd-ca=/none", "--etcd-ca=/none: cannot be read: No such file or dir", CtlExit.USAGE),
        ("--etcd-key=/", "--etcd-key=/: cannot be read: Is a directory", CtlExit.USAGE),
        ("--rdzv-endpoint=a:b", "write HOST:PORT with a port", CtlExit.USAGE),
        (
            "--rdzv-endpoint=no.invalid:1",
            "; is it running there? --rdzv-endpoint names it\n",
            CtlExit.NO_STORE,
        ),
    ],
)
def test_what_is_wrong_about_etcd_is_one_line_that_names_the_flag(words, message, code, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["status", words])
    error = capsys.readouterr().err
    assert ended.value.code == code
    assert message in error
    assert error.count("\n") == 1


def test_a_report_without_etcd_names_the_flag_that_makes_it_of_files(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", "--rdzv-endpoint=no.invalid:1"])
    assert ended.value.code == CtlExit.NO_STORE
    assert capsys.readouterr().err.endswith(
        "; is it running there? --rdzv-endpoint names it; --log-dir=DIR makes the report without "
        "etcd, of the files that agents wrote there\n"
    )


def test_what_is_wrong_in_the_environment_is_said_of_the_variable(capsys, monkeypatch):
    for name, value in (("PET_RDZV_ENDPOINT", "a:b"), ("PET_ETCD_CA", "/none")):
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(["status"])
        assert ended.value.code == CtlExit.USAGE
        assert capsys.readouterr().err.startswith(f"zero-ctl: {name}={value}: ")


def test_every_command_is_listed_and_launch_among_them(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "launch    start agents on the hosts of a hostfile" in capsys.readouterr().out


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "é" * 70])
@pytest.mark.parametrize("command", ["dashboard", "metrics"])
def test_a_host_that_is_no_name_is_named_with_the_remedy(command, host, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "gpt", f"--host={host}", "--port=0"])
    assert ended.value.code == CtlExit.USAGE
    assert capsys.readouterr().err.endswith(
        f"--host: {host} is no name of a host; write a name, or a numeric address\n"
    )
