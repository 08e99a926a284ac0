"""`zero-agent` in the place of `torchrun`: its flags mean what they mean there."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.cluster import COLD, environment, is_alive, light_imports
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_agent.workers.numa import parse_cpus
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe import status

pytestmark = pytest.mark.processes

# Programs without Python start at once: the workers' imports are not what is tested here.
TALK = ("--no-python", "sh", "-c", 'echo out "$LOCAL_RANK" "$@"; echo err "$LOCAL_RANK" >&2', "sh")
WAIT = ("--no-python", "sh", "-c", "echo ready; while :; do sleep 0.05; done")
SLURMS = signal.SIGUSR1
"""That of `sbatch --signal=USR1@90`, which Lightning's requeue handler waits for."""
NO_NOHUP = ("env", "--default-signal=HUP")
"""Under nohup the tests ignore SIGHUP, and so would the agents that they start."""
OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MEET = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([dist.get_rank()])
dist.all_reduce(ranks)
where = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
names = "RANK LOCAL_RANK GROUP_RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE".split()
print(*(os.environ[name] for name in names), "at", *where, "sum", ranks.item())
dist.destroy_process_group()
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zero_agent", *map(str, arguments)]


def agent(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


REDIRECTED = (
    *("-r", "0:3,1:2", "--tee=2:1", "--local-ranks-filter=0,2"),
    *("--duplicate-stdout-filters=out 0,out 2", "--role=chief", *TALK, "x${local_rank}"),
)


def kept(logs: Path) -> dict[str, str]:
    """The log files of the one run below a directory."""
    own = next(path for path in logs.glob("*_*"))
    return {str(path.relative_to(own)): path.read_text() for path in own.rglob("*.log")}


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.fixture
def start():
    """Starts agents in the background; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object, by: Sequence[str] = NO_NOHUP) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        whole = [*by, *command(*arguments)]
        process = subprocess.Popen(whole, env=environment(), text=True, **pipes)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.full
def test_nodes_with_given_ranks_meet_without_an_etcd_of_the_users(tmp_path, start):
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    port = free_port()
    world = ["--nnodes=3", "--master-addr=127.0.0.1", f"--master-port={port}"]
    roles = ["ps", "trainer", "trainer"]
    agents = [
        start(*world, f"--node-rank={n}", f"--nproc_per_node={n + 1}", f"--role={roles[n]}", script)
        for n in (2, 1, 0)  # the order of arrival must not matter
    ]
    ended = [process.communicate(timeout=120) for process in agents]
    assert [process.returncode for process in agents] == [0, 0, 0], ended
    places = ["0 0 0 ps 0 1", *(f"{n} {n - 1} 1 trainer {n - 1} 5" for n in (1, 2))]
    places += [f"{n} {n - 3} 2 trainer {n - 1} 5" for n in (3, 4, 5)]
    printed = [line for out, _ in reversed(ended) for line in sorted(out.splitlines())]
    assert printed == [f"{place} at 127.0.0.1 {port} sum 15" for place in places]


def test_the_master_port_of_a_single_node_is_that_of_its_workers_store():
    shows = ("--no-python", "sh", "-c", "echo $MASTER_ADDR $MASTER_PORT")
    port = free_port()
    assert printed(agent(f"--master-port={port}", *shows)) == [f"127.0.0.1 {port}"]


@pytest.mark.full
def test_the_workers_of_the_next_round_find_their_store_at_the_same_port(tmp_path):
    script, port = tmp_path / "meet.py", free_port()
    fails = "\nraise SystemExit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))"
    script.write_text(MEET + fails)
    flags = ("--max-restarts=1", "--nproc-per-node=2", f"--master-port={port}")
    places = [f"{n} {n} 0 default {n} 2 at 127.0.0.1 {port} sum 1" for n in (0, 1)]
    assert printed(agent(*flags, script)) == sorted(2 * places)


def test_the_workers_store_has_a_port_of_the_range():
    first = free_port()
    shows = ("--no-python", "sh", "-c", "echo $MASTER_PORT")
    (port,) = printed(agent("--standalone", f"--port-range={first}-{first + 50}", *shows))
    assert first <= int(port) <= first + 50


def test_a_node_whose_first_node_never_comes_says_so_and_ends():
    where = f"--master-port={free_port()}"
    done = agent("--nnodes=2", "--node-rank=1", where, "--rdzv-conf=join_timeout=1", *TALK)
    assert done.returncode == 4
    assert "node 0 has not appeared at 127.0.0.1:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_port_of_node_0_must_be_free(etcd):
    port = etcd.member.client_port
    done = agent("--nnodes=2", "--node-rank=0", f"--master-port={port}", *TALK)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--master-port={port}: cannot listen on 127.0.0.1: Address already in" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--master-addr=192.0.2.1"], "start --node-rank=0 on the machine that --master-addr"),
        (["--master-addr=no.such.host.invalid"], "--master-addr=no.such.host.invalid: "),
        (["--local-addr=192.0.2.1"], "--local-addr=192.0.2.1: not an address of this machine"),
    ],
)
@pytest.mark.corners(flags=[["--master-addr=192.0.2.1"]])
def test_an_address_of_another_machine_is_named(flags, message):
    done = agent("--nnodes=2", "--node-rank=0", f"--master-port={free_port()}", *flags, *TALK)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_output_goes_where_redirects_tee_and_filters_send_it(tmp_path):
    done = agent(
        *("--standalone", "--nproc-per-node=3", "--rdzv-id=j", f"--log-dir={tmp_path}/logs"),
        *REDIRECTED,
    )
    assert printed(done) == ["[chief2]:out 2 x2"]  # 0 is redirected, 1 is filtered out
    assert [line for line in done.stderr.splitlines() if line.startswith("err")] == ["err 2"]
    assert kept(tmp_path / "logs") == {
        "attempt_0/0/stdout.log": "out 0 x0\n",
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/1/stderr.log": "err 1\n",
        "attempt_0/2/stdout.log": "out 2 x2\n",
        "attempt_0/filtered_stdout.log": "[chief2]:out 2 x2\n",
    }


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        REDIRECTED,
        ("-r3", "--duplicate-stderr-filters=err", *TALK),
        ("--tee=3", "--duplicate-stderr-filters=err 1", "--duplicate-stdout-filters=out", *TALK),
        ("--local-ranks-filter=1", "-t", "0:1,1:1", *TALK),
    ],
)
def test_the_files_are_those_of_torchrun(tmp_path, flags):
    found, shown = [], []
    for launcher in ("zero_agent", "torch.distributed.run"):
        logs = tmp_path / launcher
        command = [sys.executable, "-m", launcher, "--nproc-per-node=3", "--rdzv-id=j"]
        done = subprocess.run(
            [*command, f"--log-dir={logs}", *flags],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        files = kept(logs).items()
        found.append({name: sorted(text.splitlines()) for name, text in files if text})
        shown.append(sorted(done.stdout.splitlines()))
    assert found[0] == found[1]
    assert shown[0] == shown[1]


def test_lines_are_copied_without_tee_or_a_log_directory():
    done = agent("--standalone", "--duplicate-stderr-filters=nothing,err", *TALK)
    assert printed(done) == ["out 0"]
    directory = re.search(r"output is kept in (\S+)", done.stderr)
    assert directory is not None
    copies = list(Path(directory[1]).rglob("filtered_stderr.log"))
    assert [copy.read_text() for copy in copies] == ["[default0]:err 0\n"]


def test_any_program_runs_without_python():
    script = 'echo "$RANK of $WORLD_SIZE: $1"'
    done = agent("--standalone", "--nproc=2", "--no-python", "sh", "-c", script, "sh", "--tee")
    assert printed(done) == ["0 of 2: --tee", "1 of 2: --tee"]


def test_another_interpreter_runs_the_script_unless_run_path_asks_for_ours(tmp_path):
    script = tmp_path / "which.py"
    script.write_text("import os, sys; print(os.environ.get('MARK'), 'torch' in sys.modules)")
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\nMARK=other exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    done = agent("--standalone", script, PYTHON_EXEC=str(other))
    assert printed(done) == ["other False"]
    light = light_imports(tmp_path)["PYTHONPATH"]
    done = agent("--standalone", "--run-path", script, PYTHON_EXEC=str(other), PYTHONPATH=light)
    assert printed(done) == ["None True"]


def test_a_program_that_cannot_be_executed_fails_as_in_a_shell(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    done = agent("--standalone", "--no-python", broken)
    assert done.returncode == AgentExit.JOB_FAILED
    assert "cannot be executed: No such file or directory" in done.stderr
    assert "exit code 127" in done.stderr


def test_each_worker_with_a_virtual_local_rank_has_a_device_of_its_own():
    shows = ("--no-python", "sh", "-c", "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES")
    flags = ("--standalone", "--nproc=2", "--virtual-local-rank")
    assert printed(agent(*flags, *shows, CUDA_VISIBLE_DEVICES="4,6")) == ["0 0 4", "1 0 6"]


def test_workers_are_bound_to_cores_of_their_own():
    shows = ("--no-python", "sh", "-c", "grep Cpus_allowed_list: /proc/self/status")
    done = agent("--standalone", "--nproc=2", "--numa-binding=exclusive", *shows)
    if "share the" in done.stderr:
        pytest.skip("needs two physical cores")
    one, two = (parse_cpus(line.split()[1]) for line in printed(done))
    assert one
    assert two
    assert not one & two


def test_several_workers_get_one_thread_each_and_the_user_is_told_once():
    env = environment()
    del env["OMP_NUM_THREADS"]
    shows = ("--no-python", "sh", "-c", "echo $OMP_NUM_THREADS")
    done = subprocess.run(
        command("--standalone", "--nproc=2", *shows),
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert printed(done) == ["1", "1"]
    assert done.stderr.count("OMP_NUM_THREADS is not set") == 1


def test_who_started_the_agent_finds_the_root_cause_in_the_agents_own_error_file(tmp_path):
    script, record = tmp_path / "fails.py", tmp_path / "error.json"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise KeyError('why')")
    variables = {
        "TORCHELASTIC_ERROR_FILE": str(record),
        "PYTHONPATH": light_imports(tmp_path)["PYTHONPATH"],
    }
    done = agent("--standalone", "--nproc=2", script, **variables)
    assert done.returncode == AgentExit.JOB_FAILED
    message = json.loads(record.read_text())["message"]
    assert "rank 1: KeyError: 'why' (exit code 1)" in message["message"]
    assert message["extraInfo"]["py_callstack"].endswith("KeyError: 'why'\n")
    assert message["errorCode"] == AgentExit.JOB_FAILED
    start = "Root Cause (first observed failure):"
    block = done.stderr[done.stderr.index(start) :].splitlines()
    assert [re.sub(r"pid: \d+", "pid: 7", line) for line in block[1:5] if "node" not in line] == [
        f"  host      : {socket.gethostname()}",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : 1 (pid: 7)",
    ]
    assert block[-2:] == ["    KeyError: 'why'", "=" * 60]


def test_a_node_leaves_on_the_signals_it_is_told_to_handle(start):
    process = start("--standalone", "--signals-to-handle=SIGUSR1,SIGTERM", *WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGUSR1
    assert "SIGUSR1: leaving at the next step boundary" in said


def test_a_node_started_with_nohup_stays_when_its_terminal_is_closed(start):
    process = start("--standalone", *WAIT, by=("nohup",))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, said


@pytest.mark.parametrize(
    "number", [SLURMS, *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)]
)
def test_a_plain_script_gets_the_very_signal_that_its_agent_gets(start, number):
    traps = "; ".join(f"trap 'echo {n.name}; exit 0' {n.name[3:]}" for n in (SLURMS, *OTHERS))
    script = f"{traps}; echo ready; while :; do sleep 0.05; done"
    handled = ("--signals-to-handle=SIGUSR1,SIGTERM,SIGINT,SIGHUP", "--shutdown-timeout=600")
    process = start("--standalone", *handled, "--no-python", "sh", "-c", script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + number, f"{number.name}\n")


def test_the_signal_that_slurm_sends_to_all_nodes_reaches_the_workers_of_all(cluster):
    script = """trap 'echo "USR1 on $ZERO_NODE"; sleep 1; exit 0' USR1; echo "ready on $ZERO_NODE"
        while :; do sleep 0.05; done"""
    flags = ("--nnodes=2", "--signals-to-handle=SIGUSR1", COLD)
    job = cluster(flags=flags, script=("--no-python", "sh", "-c", script))
    job.start("a", "b")
    wait_for(lambda: all(f"ready on {n}" in job.output for n in "ab"), 150, "both workers")
    for node in "ab":  # one after the other, as Slurm's daemons do
        job.agents[node].process.send_signal(signal.SIGUSR1)
        wait_for(lambda node=node: f"USR1 on {node}" in job.output, 150, "the signal")
    codes = [job.agents[node].wait() for node in "ab"]
    assert codes == [128 + signal.SIGUSR1] * 2, job.output


@pytest.mark.full
def test_another_signal_is_no_impatience_the_same_one_is(start):
    traps = "trap 'echo USR1' USR1; trap 'echo TERM' TERM"
    script = f"{traps}; echo ready; while :; do sleep 0.05; done"
    handled = ("--signals-to-handle=SIGUSR1,SIGTERM", "--shutdown-timeout=600")
    process = start("--standalone", *handled, "--no-python", "sh", "-c", script)
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name[3:]}\n"
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert "SIGTERM again: the workers are killed" in said


def test_a_script_that_does_not_listen_is_killed_after_the_shutdown_timeout(start):
    script = "trap '' TERM; echo ready $$; while :; do sleep 0.05; done"
    process = start("--standalone", "--shutdown-timeout=0.5", "--no-python", "sh", "-c", script)
    worker = int(process.stdout.readline().split()[1])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    wait_for(lambda: not is_alive(worker), 150, "the end of the worker")


MAKES_ITS_ENGINE_WHEN_SIGNALLED = """
import signal, threading
came = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: came.set())
print("ready", flush=True)
came.wait()
import torch, zero_deepspeed
engine, *_ = zero_deepspeed.initialize(
    model=torch.nn.Linear(2, 2),
    config={"train_batch_size": 2, "optimizer": {"type": "AdamW"}},
)
while True:
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
"""


def test_a_worker_that_was_told_to_stop_before_its_engine_was_there_leaves_with_its_first_step(
    tmp_path, start
):
    """Else it would train on to the shutdown timeout: an engine leaves SIGTERM to its agent."""
    (script := tmp_path / "train.py").write_text(MAKES_ITS_ENGINE_WHEN_SIGNALLED)
    process = start("--standalone", "--shutdown-timeout=600", script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert re.search("the workers of .* left$", said, re.MULTILINE), said


FAILS = """
import os, pathlib
print({0})
error = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"])
error.write_text('{{"message": "KeyError: {0}"}}')
raise SystemExit(1)
"""
"""It leaves a record of its error, as torchelastic's `@record` does."""


@pytest.mark.full
def test_a_run_of_the_same_name_keeps_the_output_and_the_errors_of_the_one_before(tmp_path):
    script, logs = tmp_path / "fails.py", tmp_path / "logs"
    flags = ("--standalone", "--rdzv-id=j", f"--log-dir={tmp_path}/logs", "-r3", COLD, script)
    for number in (1, 2):
        script.write_text(FAILS.format(number))
        assert f"KeyError: {number}" in agent(*flags).stderr
    script.write_text("raise SystemExit(3)")
    assert "KeyError" not in agent(*flags).stderr
    for pattern, texts in {
        "j_*/attempt_0/0/stdout.log": ["", "1\n", "2\n"],
        "j_*/attempt_0/0/error.json": [f'{{"message": "KeyError: {n}"}}' for n in (1, 2)],
    }.items():
        assert sorted(path.read_text() for path in logs.glob(pattern)) == texts


def test_every_agent_ends_with_the_job_and_its_cause_spares_too(cluster, etcd_store, tmp_path):
    go = tmp_path / "go"
    wait = ("--no-python", "sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done; exit 3")
    job = cluster(flags=("--nnodes=1",), script=wait)
    job.start(*"abcde")

    def spares() -> int:
        jobs = [now for now in status.read_all(etcd_store) if now.job == job.job]
        return sum(len(now.spares) for now in jobs if now.state == "ACTIVE")

    wait_for(lambda: spares() == 4, 150, "a worker and four spares")
    go.touch()
    assert [job.agents[node].wait() for node in "abcde"] == [AgentExit.JOB_FAILED] * 5
    for one in job.agents.values():
        assert "rank 0: exit code 3 on node" in one.output


def test_a_spare_outlives_the_host_of_everything(cluster, etcd_store):
    ready = ("--no-python", "sh", "-c", 'echo "ready on $ZERO_NODE"; exec sleep 600')
    job = cluster(flags=("--nnodes=1", "--max-restarts=1"), script=ready)
    job.start("a")
    wait_for(lambda: "ready on a" in job.output, 150, "the first host")
    job.start("b")
    wait_for(lambda: etcd_store.get(Keys(job.job).node("b")), 150, "the spare")
    job.agents.pop("a").kill_node()
    wait_for(lambda: "ready on b" in job.output, 150, "the spare takes over")


def test_a_supervisor_is_told_how_the_agent_is(start):
    process = start("--standalone", "--health-port=0", "--rdzv-id=watched", *WAIT)
    line = next(line for line in process.stderr if "health: " in line)
    address = re.search(r"http://(127\.0\.0\.1:\d+)/healthz", line)[1]

    def ask(path: str) -> tuple[int, dict[str, object]]:
        connection = http.client.HTTPConnection(address, timeout=120)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    assert ask("/healthz")[0] == 200
    assert process.stdout.readline() == "ready\n"
    _, record = wait_for(lambda: (r := ask("/readyz"))[0] == 200 and r, 150, "readiness")
    assert (record["job"], record["state"], record["workers"]) == ("watched", "ACTIVE", "running")
    assert record["reason"] == "round 1 runs on 1 node"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM


TIMED = """
import os, time
from torch.distributed.elastic import timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 0.5):
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.1)
print("in time")
"""


@pytest.mark.parametrize("file", [None, "timers"])
@pytest.mark.full
def test_torchs_file_timers_end_a_worker_whose_time_is_up(tmp_path, file):
    script = tmp_path / "script.py"
    script.write_text(TIMED)
    named = {"TORCHELASTIC_TIMER_FILE": str(tmp_path / file)} if file else {}
    timers = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", **named}
    done = agent("--standalone", "--max-restarts=1", script, **timers)
    assert printed(done) == ["in time"]
    assert "rank 0: killed by SIGKILL" in done.stderr


def test_without_a_wish_for_timers_there_is_no_file_for_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print('TORCHELASTIC_TIMER_FILE' in os.environ)")
    assert printed(agent("--standalone", COLD, script)) == ["False"]
