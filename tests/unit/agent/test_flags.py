"""The command line: what torchrun takes is taken, and the script's own arguments are left alone."""

from __future__ import annotations

import contextlib
import io
import re
import sys

import pytest
from torch.distributed.run import get_args_parser

from tests.support.flags import parse
from zero_agent.command.command_line import _find, make_parser
from zero_agent.command.flags import FLAGS, OURS
from zero_agent.command.resolve import program_of
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.errors import SpecError

TORCHRUNS = {
    option.removeprefix("--")
    for action in get_args_parser()._actions
    for option in action.option_strings
    if option.startswith("--") and "_" not in option and option != "--help"
}


def test_a_module_is_looked_for_without_an_import_of_its_package(tmp_path, monkeypatch):
    """Which may need a GPU: its failure is one of the workers, and not of every agent."""
    inner = tmp_path / "fails" / "no_package"
    inner.mkdir(parents=True)
    (tmp_path / "fails" / "__init__.py").write_text("raise RuntimeError('it needs a GPU')")
    (inner / "train.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module = "fails.no_package.train"
    program = program_of(parse(["-m", module], {}), {})
    assert (program.target, program.is_module, "fails" in sys.modules) == (module, True, False)
    with pytest.raises(SpecError, match=r"-m fails\.trian: there is no such module"):
        program_of(parse(["-m", "fails.trian"], {}), {})


def test_every_flag_of_torchrun_is_known():
    assert set(FLAGS) - TORCHRUNS == OURS
    assert TORCHRUNS - set(FLAGS) == set()


@pytest.mark.parametrize("flag", sorted(TORCHRUNS))
def test_what_is_short_for_a_flag_in_torchrun_is_short_for_it_here(flag):
    for end in range(1, len(flag) + 1):
        fitting = [name for name in TORCHRUNS if name.startswith(flag[:end])]
        if flag[:end] == flag or fitting == [flag]:
            assert _find(f"--{flag[:end]}")[0].name == flag


@pytest.mark.parametrize(
    "line",
    [
        "--nproc-per-node=4 s.py",
        "--nproc_per_node 4 s.py",
        "--nproc 4 s.py",
        "--nproc-per_node=4 -- s.py",
        "--nproc-per-node=2 --nproc-per-node=4 s.py",
    ],
)
def test_a_flag_may_be_written_in_torchruns_ways(line):
    args = parse(line.split(), {})
    assert (args.nproc_per_node, args.script, args.arguments) == ("4", "s.py", [])


@pytest.mark.parametrize("short", ["-t3", "-t=3", "-t 3", "--tee 3", "--te=3"])
def test_a_short_flag_takes_its_value_with_or_without_a_space(short):
    assert parse([*short.split(), "s.py"], {}).tee == "3"


def test_what_follows_the_script_is_the_scripts_whatever_it_looks_like():
    line = ["-m", "tool", "--nnodes_of_mine=1", "--no", "--help", "--", "-t", "--max_restarts", "x"]
    args = parse(line, {})
    assert (args.module, args.script, args.arguments) == (True, "tool", line[2:])
    assert args.tee == "0"


def test_each_flag_can_be_set_in_the_environment_and_the_command_line_wins():
    values = {"module": "1", "numa-binding": "socket", "start-method": "fork"}
    values |= {"port-range": "29600-29699", "log-format": "json"}
    for name, flag in FLAGS.items():
        value = values.get(name, "1" if flag.kind is None else "7")
        variable = f"PET_{name.replace('-', '_').upper()}"
        got = getattr(parse(["s.py"], {variable: value}), name.replace("-", "_"))
        assert got == (True if flag.kind is None else flag.kind(value)), name
        assert got != flag.default, name
    assert parse(["--max-restarts=2", "s.py"], {"PET_MAX_RESTARTS": "5"}).max_restarts == 2
    assert parse(["s.py"], {"PET_STANDALONE": "0", "PET_ROLE": ""}).standalone is False


def test_a_doubled_comma_in_a_filter_is_a_comma():
    args = parse(["--duplicate-stdout-filters=a,b,,c,d", "s.py"], {})
    assert args.duplicate_stdout_filters == ("a", "b,c", "d")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no script is given; write zero-agent [FLAG ...] SCRIPT"),
        ("--nnodess=3 s.py", "--nnodess: there is no such flag; did you mean --nnodes?"),
        ("--num_gpus=2 s.py", "--num_gpus: there is no such flag; did you mean --nproc-per-node?"),
        ("--hostfile=h s.py", "--hostfile: there is no such flag; zero-ctl launch has it, which"),
        ("--use_env s.py", "--use_env: there is no such flag; leave it out: LOCAL_RANK is in the"),
        ("--xyz s.py", "--xyz: there is no such flag; --help lists the flags"),
        ("-x s.py", "-x: there is no such flag"),
        ("--etcd-c s.py", "--etcd-c: could be any of --etcd-ca, --etcd-cert"),
        ("--standalone=1 s.py", "--standalone=1: a switch; write it without a value"),
        ("--nnodes", "--nnodes: a value must follow"),
        ("--max-restarts=x s.py", "--max-restarts: x is not a whole number; write one, such as 3"),
        ("--master-port=70000 s.py", "--master-port: 70000 is not a port"),
        ("--etcd-grace=soon s.py", "--etcd-grace: soon is not a length of time; write seconds"),
        ("--join-timeout=-1 s.py", "--join-timeout: -1 is not a length of time"),
        ("--start-method=fast s.py", "--start-method: invalid choice: 'fast' (choose from"),
    ],
)
def test_a_wrong_flag_is_named_with_the_right_form(line, message):
    with pytest.raises(SpecError) as refused:
        parse(line.split(), {})
    assert str(refused.value).startswith(message)


def test_all_wrong_flags_are_named_at_once():
    line = "--nprocs_per_node 2 --max-restart=x --foo=3 --master-port=-1 --standalone=1 s.py --tee"
    with pytest.raises(SpecError) as refused:
        parse(line.split(), {"PET_NO_PYTHON": "maybe", "PET_MONITOR_INTERVAL": "soon"})
    assert [message.partition(" ")[0] for message in str(refused.value).splitlines()] == [
        "--nprocs_per_node:",
        "--foo:",
        "--standalone=1:",
        "PET_NO_PYTHON=maybe:",
        "PET_MONITOR_INTERVAL:",
        "--max-restarts:",
        "--master-port:",
    ]


def test_torchruns_own_variable_opens_the_health_endpoint_and_the_flag_wins():
    theirs = {"TORCHELASTIC_HEALTH_CHECK_PORT": "8081"}
    assert parse(["s.py"], theirs).health_port == 8081
    assert parse(["s.py"], theirs | {"PET_HEALTH_PORT": "8082"}).health_port == 8082
    assert parse(["--health-port=8083", "s.py"], theirs).health_port == 8083


def test_a_switch_in_the_environment_is_0_or_1():
    with pytest.raises(SpecError, match="PET_STANDALONE=yes: write 1 for yes or 0 for no"):
        parse(["s.py"], {"PET_STANDALONE": "yes"})


def test_the_help_names_every_flag_once():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit, match="0"):
        parse(["--help"], {})
    named = re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?--([\w-]+)", shown.getvalue(), re.MULTILINE)
    assert sorted(named) == sorted(["help", "version", *FLAGS])


def test_the_help_names_every_exit_code_of_the_agent_and_no_other():
    epilog = make_parser().epilog
    named = re.findall(r"(?:: |, )(\d+) ", epilog[epilog.index("Exit codes") :])
    assert sorted(map(int, named)) == sorted(AgentExit)
