"""`zero-ctl launch`: what a hostfile, filters, files of variables and exit codes come to."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zero_agent.launch.command import main
from zero_agent.launch.environment import exported, parse_assignments
from zero_agent.launch.hosts import parse_hostfile, read_hostfile, select
from zero_agent.launch.plan import LaunchPlan
from zero_agent.launch.runners import RUNNERS, Remote
from zero_agent.node.network import is_local
from zero_contract.exit_codes import LOST, verdict
from zero_orchestrator.errors import SpecError

HOSTS = {"w1": (0, 1, 2, 3), "w2": (0, 1), "w3": (0, 1)}


def test_a_hostfile_may_have_comments_and_blank_lines_and_keeps_its_order():
    lines = ["# all", "w2 slots=2", "", "  w1   slots=1 # the small one"]
    found = parse_hostfile(lines, "hosts")
    assert list(found.items()) == [("w2", (0, 1)), ("w1", (0,))]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["w1 slots=2", "w1 slots=4"], "hosts:2: host w1 is there twice; leave one out"),
        (["w1 slot=2"], "hosts:1: 'w1 slot=2': write HOST slots=N, with N from 1"),
        (["w1 slots=0"], "hosts:1: 'w1 slots=0': write HOST slots=N, with N from 1"),
        (["", "# nobody"], "hosts: names no host; write one a line, as HOST slots=N"),
        *(
            ([f"{bad} slots=1"], f"hosts:1: {bad!r} does not name one host; write NAME, USER@NAME ")
            for bad in (
                *("-oProxyCommand=id", "me@-oProxyCommand=id", "-", "^/etc/hosts", "a,b", "a;id"),
                *("w[1-9]", "$(id)", "a`id`", "@w1"),
            )
        ),
    ],
)
def test_a_bad_hostfile_is_refused_by_its_line(lines, message):
    with pytest.raises(SpecError) as error:
        parse_hostfile(lines, "hosts")
    assert str(error.value).startswith(message)


def test_hosts_are_names_and_addresses_with_or_without_a_user():
    names = ["w1", "me@node-2.rack_3.example.com", "10.0.0.1", "[fd00::1]", "fe80::1%eth0"]
    assert list(parse_hostfile([f"{name} slots=1" for name in names], "hosts")) == names


def test_a_hostfile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"--hostfile=.*/none: cannot be read"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ({}, HOSTS),
        ({"include": "w3@w1:1,0"}, {"w1": (0, 1), "w3": (0, 1)}),
        ({"exclude": "w2@w1:3"}, {"w1": (0, 1, 2), "w3": (0, 1)}),
        ({"exclude": "w2:0,1"}, {"w1": (0, 1, 2, 3), "w3": (0, 1)}),
        ({"num_nodes": 2, "num_slots": 1}, {"w1": (0,), "w2": (0,)}),
    ],
)
def test_filters_choose_hosts_and_slots_in_the_order_of_the_hostfile(wanted, chosen):
    assert list(select(HOSTS, **wanted).items()) == list(chosen.items())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"include": "w1", "exclude": "w2"}, "--include and --exclude: give one of them"),
        ({"include": "w1", "num_nodes": 1}, "--num-nodes beside --include or --exclude"),
        ({"exclude": "w1", "num_slots": 1}, "--num-gpus beside --include or --exclude"),
        ({"include": "w9"}, "--include=w9: 'w9' is not in the hostfile, which has w1, w2, w3"),
        ({"include": "w2:0,5"}, "--include=w2:0,5: host w2 has slots 0 to 1, not 5"),
        ({"include": "w1:"}, "--include=w1:: 'w1:': write HOST or HOST:0,1"),
        ({"exclude": "w1@w2@w3"}, "--exclude=w1@w2@w3: no host is left"),
        ({"num_nodes": 4}, "--num-nodes=4: the hostfile has 3; write 1 to that"),
        ({"num_slots": 3}, "--num-gpus=3: host w2 has 2 slots"),
    ],
)
def test_a_filter_that_asks_for_what_is_not_there_is_refused(wanted, message):
    with pytest.raises(SpecError) as error:
        select(HOSTS, **wanted)
    assert message in str(error.value)


def test_variables_come_by_prefix_and_from_files_of_home_and_working_directory(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / ".deepspeed_env").write_text("A=home\nB=home\n")
    (here / ".zero_env").write_text("\n# why\nexport A='with = and spaces'\n")
    environ = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "SECRET": "mine"}
    assert exported(environ, (home, here)) == {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/x",
        "A": "with = and spaces",
        "B": "home",
    }


def test_a_line_that_is_no_assignment_is_named():
    with pytest.raises(SpecError) as error:
        parse_assignments(["A=1", "just words"], ".zero_env")
    assert str(error.value) == ".zero_env:2: 'just words': write NAME=VALUE"


def a_plan(**changes):
    return LaunchPlan(
        **{
            "hosts": {"w1": (0, 1), "w2": (0, 1)},
            "job": "gpt",
            "endpoint": "10.0.0.1:2379",
            "program": ("train.py", "--text=it's one"),
            "env": {"NCCL_DEBUG": "INFO"},
            "python": "/opt/python",
            "directory": Path("/srv/job"),
            **changes,
        }
    )


AGENT = [
    *("/opt/python", "-m", "zero_agent", "--nnodes=1:2", "--nproc-per-node=2"),
    *("--max-restarts=3", "--rdzv-endpoint=10.0.0.1:2379", "--rdzv-id=gpt"),
    "--rdzv-conf=last_call_timeout=3",
]
PROGRAM = ["train.py", "--text=it's one"]
SSH = (
    "-oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=5 -oServerAliveCountMax=3 "
    "-oLogLevel=ERROR"
)


def test_ssh_runs_one_agent_on_each_host_with_its_own_slots():
    plan = a_plan(hosts={"w1": (0, 1), "me@w2": (3,)})
    first, second = RUNNERS["ssh"](plan, Remote(port=2222, arguments=("-v",)))
    assert first.argv[:-1] == ("ssh", "-tt", *SSH.split(), "-p", "2222", "-v", "--", "w1")
    agent = " ".join([*AGENT, "--node-id=w1", "train.py"]) + " '--text=it'\"'\"'s one'"
    assert first.argv[-1].startswith("cd /srv/job || exit 8; exec /bin/sh -c ")
    assert first.argv[-1].endswith(f" sh {agent}")
    assert first.stdin == "export CUDA_VISIBLE_DEVICES=0,1\\nexport NCCL_DEBUG=INFO\\n\n"
    assert (second.where, second.argv[-2]) == ("me@w2", "me@w2")
    assert "export CUDA_VISIBLE_DEVICES=3\\n" in second.stdin
    assert "--nproc-per-node=1 " in second.argv[-1]


# Plays ssh and the host behind it: a terminal, and a shell on it.
SSH_STAND_IN = """
import os, pty, select, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv("/bin/sh", ["sh", "-c", sys.argv[-1]])
sources = [0, terminal]
while terminal in sources:
    for source in select.select(sources, [], [])[0]:
        try:
            data = os.read(source, 65536)
        except OSError:
            data = b""
        if data:
            os.write(terminal if source == 0 else 1, data)
        else:
            sources.remove(source)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
# Plays the agent: what it was given, and every command line of this machine.
AGENT_STAND_IN = """
import os, json
from pathlib import Path
lines = []
for path in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lines.append(path.read_text(errors="replace"))
    except OSError:
        pass
given = {name: value for name, value in os.environ.items() if "GREETING" in name}
Path("seen.json").write_text(json.dumps([given, lines]))
"""


def test_no_value_of_a_variable_is_on_any_command_line_or_in_the_output(tmp_path):
    # Unlikely things: longer than a terminal's line, and all that a shell or a terminal acts on.
    value = "sesame'\"\\n\x03\x04\x11$HOME`id`%s\t" + "x" * 6000 + "; two\nlines\\"
    (tmp_path / "ssh").write_text(f"#!{sys.executable}\n{SSH_STAND_IN}")
    (tmp_path / "agent").write_text(f"#!{sys.executable}\n{AGENT_STAND_IN}")
    for name in ("ssh", "agent"):
        (tmp_path / name).chmod(0o755)
    plan = a_plan(
        hosts={"w1": (0,)},
        env={"GREETING": value},
        python=str(tmp_path / "agent"),
        directory=tmp_path,
    )
    (command,) = RUNNERS["ssh"](plan, Remote())
    command = dataclasses.replace(command, argv=(str(tmp_path / "ssh"), *command.argv[1:]))
    driver = "import pickle, sys; from zero_agent.launch.session import Session; " + (
        "sys.exit(Session([pickle.load(sys.stdin.buffer)], print).run())"
    )
    done = subprocess.run(
        [sys.executable, "-c", driver],
        input=pickle.dumps(command),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    given, lines = json.loads((tmp_path / "seen.json").read_text())
    assert given == {"GREETING": value}
    assert any("sh -c" in line.replace("\0", " ") for line in lines)
    assert [line for line in lines if "sesame" in line] == []
    assert done.stdout == b""


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_hosts_that_only_ssh_knows_are_asked_of_ssh_and_others_are_refused(tmp_path, capsys):
    (tmp_path / "hosts").write_text("zero-a slots=1\nzero-b slots=1\n")
    (tmp_path / "ssh").write_text("Host zero-a\n  HostName 127.0.0.2\n")
    (tmp_path / "s.py").touch()
    words = ["--dry-run", f"--hostfile={tmp_path}/hosts", str(tmp_path / "s.py")]
    with pytest.raises(SystemExit):
        main([f"--launcher-args=-F {tmp_path}/ssh", *words])
    assert "--rdzv-endpoint=127.0.0.1:PORT " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(words)
    assert "--rdzv-endpoint=ADDRESS:PORT " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    assert ended.value.code == 2
    assert "zero-a, zero-b: only the launcher can resolve these names" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
@pytest.mark.skipif(not is_local("::1"), reason="needs IPv6")
def test_hosts_with_ipv6_are_told_of_the_jobs_etcd_in_brackets(tmp_path, capsys):
    (tmp_path / "hosts").write_text("zero-a slots=1\nzero-b slots=1\n")
    (tmp_path / "ssh").write_text("Host zero-a\n  HostName ::1\n")
    (tmp_path / "s.py").touch()
    reach = f"--launcher-args=-F {tmp_path}/ssh"
    with pytest.raises(SystemExit):
        main([reach, "--dry-run", f"--hostfile={tmp_path}/hosts", str(tmp_path / "s.py")])
    assert "'--rdzv-endpoint=[::1]:PORT'" in capsys.readouterr().out


def test_srun_is_one_command_for_all_hosts():
    (command,) = RUNNERS["slurm"](a_plan(), Remote(arguments=("-v",)))
    words = (
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=w1,w2 "
        "--kill-on-bad-exit=0 --label --chdir=/srv/job --export=ALL -v"
    )
    assert command.argv == (*words.split(), *AGENT, *PROGRAM)
    assert command.env == {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_pdsh_gets_one_line_for_the_shell_of_every_host():
    (command,) = RUNNERS["pdsh"](a_plan(), Remote(port=2222))
    assert command.argv[:-1] == ("pdsh", "-S", "-f", "1024", "-w", "w1,w2")
    file = Path("/srv/job/.zero-launch-gpt.env")
    assert command.argv[-1].endswith(" ".join(["train.py", "'--text=it'\"'\"'s one'"]))
    assert f"; . {file}; " in command.argv[-1]
    assert command.files == {file: "export CUDA_VISIBLE_DEVICES=0,1\nexport NCCL_DEBUG=INFO\n"}
    assert command.env == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": f"{SSH} -p 2222"}


def test_different_slots_need_a_launcher_that_can_tell_hosts_apart():
    with pytest.raises(SpecError, match=r"slots differ: w1:0,1, w2:0; use --launcher=ssh"):
        RUNNERS["slurm"](a_plan(hosts={"w1": (0, 1), "w2": (0,)}), Remote())


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, LOST], 0),
        ([91, 0, LOST], 0),
        ([91, 70, 1], 91),
        ([1, 70, LOST], 70),
        ([143, LOST], 143),
        ([4, 4], 4),
        ([LOST, LOST], LOST),
    ],
)
def test_the_exit_code_is_that_of_an_agent_that_saw_the_jobs_end(codes, code):
    assert verdict(codes) == code


def test_a_host_that_is_not_in_the_hostfile_is_refused_with_the_numbers_there_are(tmp_path, capsys):
    (tmp_path / "hosts").write_text("zero-a slots=1\nzero-b slots=1\n")
    where = ["--no-ssh", f"--hostfile={tmp_path}/hosts", "--master-addr=zero-a"]
    with pytest.raises(SystemExit) as ended:
        main([*where, "--node-rank=2", "s.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "zero-ctl launch: --node-rank=2: with 2 hosts write 0 to 1\n"


@pytest.mark.parametrize(
    ("flags", "workers", "devices"),
    [
        (("--include=zero-a:2,3@zero-b:0", "--node-rank=0"), 2, "2,3"),
        (("--include=zero-a:2,3@zero-b:1", "--node-rank=1"), 1, "1"),
        (("--include=zero-a:2,3@zero-b:2,3", "--rdzv-endpoint=etcd:2379"), 2, "2,3"),
        (("--exclude=zero-a:1@zero-b", "--node-rank=0"), 3, "0,2,3"),
        (("--node-rank=1",), 4, None),
        (("--rdzv-endpoint=etcd:2379",), 4, None),
    ],
)
def test_a_host_that_is_started_by_itself_uses_the_slots_that_are_chosen(
    tmp_path, capsys, monkeypatch, flags, workers, devices
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "hosts").write_text("zero-a slots=4\nzero-b slots=4\n")
    where = ["--no-ssh", f"--hostfile={tmp_path}/hosts", "--master-addr=zero-a", "--dry-run"]
    with pytest.raises(SystemExit):
        main([*where, *flags, "s.py"])
    assert f" --nproc-per-node={workers} " in capsys.readouterr().out
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == devices


def test_a_host_among_others_with_other_slots_must_say_which_it_is(tmp_path, capsys):
    (tmp_path / "hosts").write_text("zero-a slots=4\nzero-b slots=2\n")
    where = ["--no-ssh", f"--hostfile={tmp_path}/hosts", "--rdzv-endpoint=etcd:2379", "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        main([*where, "s.py"])
    assert ended.value.code == 2
    assert "give --node-rank, the number of this host in the hostfile" in capsys.readouterr().err


WRITTEN = {"user@w1": (0, 1), "w1": (0, 1), "fe80::1": (0, 1), "fe80::1:1": (0,), "[::2]": (0, 1)}


@pytest.mark.parametrize("flag", ["include", "exclude"])
@pytest.mark.parametrize("slots", ["", ":0"])
@pytest.mark.parametrize("chosen", [*itertools.permutations(WRITTEN, 2)])
def test_each_host_that_a_hostfile_may_name_can_be_named_by_a_filter(flag, slots, chosen):
    found = select(WRITTEN, **{flag: "@".join(f"{host}{slots}" for host in chosen)})
    named = {host: (0,) if slots else WRITTEN[host] for host in WRITTEN if host in chosen}
    left = {host: tuple({*all_} - {*named.get(host, ())}) for host, all_ in WRITTEN.items()}
    assert found == (named if flag == "include" else {h: s for h, s in left.items() if s})


def test_every_host_may_be_started_by_itself_with_their_number_instead_of_a_hostfile(capsys):
    where = ["--no-ssh", "--num-nodes=2", "--node-rank=1", "--master-addr=zero-a"]
    with pytest.raises(SystemExit) as ended:
        main([*where, "--dry-run", "s.py"])
    assert ended.value.code == 0
    assert " --nnodes=2 --node-rank=1 --master-addr=zero-a " in capsys.readouterr().out
