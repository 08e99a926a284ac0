"""`zero-agent` as it is typed: wrong input is named with its remedy, any script runs."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.support.cluster import (
    COLD,
    LONG_S,
    TRAIN,
    Cluster,
    agent,
    descendants,
    environment,
    final_hash,
    is_alive,
    light_imports,
    paced,
    training,
)
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit

pytestmark = pytest.mark.processes

STANDALONE = [sys.executable, "-m", "zero_agent", "--standalone"]
DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    optimizer.step()
total = torch.cat([p.flatten() for p in model.parameters()]).sum()
everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
dist.all_gather(everyone, total.detach())
assert len(set(map(float, everyone))) == 1
local = os.environ["LOCAL_RANK"]
print("rank", dist.get_rank(), "of", dist.get_world_size(), "local", local, flush=True)
dist.destroy_process_group()
"""


# Of the flags alone: test_bad_input has every one of them, within one process.
MISTYPED = [
    (["--nnodes=4:2", str(TRAIN)], "--nnodes=4:2: minimum 4 exceeds maximum 2; write 2:4", 2),
    (["--nproc-per-node=some", str(TRAIN)], "write a number from 1, or auto, cpu, gpu", 2),
    (["--max-restarts=-1", str(TRAIN)], "--max-restarts=-1: must not be negative", 2),
    (["--rdzv-id=a/b", str(TRAIN)], "--rdzv-id=a/b: use letters, digits", 2),
    (["--rdzv-endpoint=a:b", str(TRAIN)], "write HOST:PORT with a port", 2),
]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["nowhere.py"], "nowhere.py: there is no such script", 2),
        (["-m", "no.such.module"], "-m no.such.module: there is no such module", 2),
        (["--nproc-per-node=gpu", str(TRAIN)], "torch sees no GPU here; use cpu or a number", 8),
        (["--standalone", "--nnodes=1:4", str(TRAIN)], "a standalone job has one node", 2),
        (["--rdzv-endpoint=127.0.0.1:1", "--etcd-wait=0", str(TRAIN)], "127.0.0.1:1", 3),
        *(pytest.param(*case, marks=pytest.mark.full) for case in MISTYPED),
    ],
)
def test_wrong_input_is_one_message_with_the_remedy(arguments, message, code):
    done = agent(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.full
def test_a_misspelt_key_of_the_config_is_named_with_the_right_one(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 8, "gradient_cliping": 1.0}))
    done = agent("--standalone", str(TRAIN), f"--config={config}", "--samples=64")
    assert done.returncode == AgentExit.JOB_FAILED
    assert "gradient_cliping" in done.stderr
    assert "gradient_clipping" in done.stderr


def test_a_plain_ddp_script_runs_unchanged(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    done = agent("--standalone", "--nproc_per_node=2", str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 2 local 0",
        "rank 1 of 2 local 1",
    ]


def test_what_a_script_wrote_to_files_that_it_left_open_is_there(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import gzip\ntext, packed = open('text', 'w'), gzip.open('packed', 'wt')\n"
        "def save(file): file.write('last words')\n"
        "save(text); save(packed)"
    )
    done = agent("--standalone", str(script), cwd=tmp_path, env=light_imports(tmp_path))
    assert (done.returncode, (tmp_path / "text").read_text()) == (0, "last words"), done.stderr
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"last words"


def test_how_a_standalone_job_ended_can_be_asked_after_its_store_has_gone_with_it(tmp_path):
    home = {**environment(), "XDG_STATE_HOME": str(tmp_path)}
    done = agent("--standalone", "--rdzv-id=alone", "--no-python", "true", env=home)
    assert done.returncode == 0, done.stderr
    asked = subprocess.run(
        [
            *(sys.executable, "-m", "zero_orchestrator", "status", "--json", "alone"),
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        ],
        env=home,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(asked.stdout)["state"] == "DONE"


def test_a_module_runs_with_its_arguments(tmp_path):
    (tmp_path / "tool.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = agent(
        "--standalone", "-m", "tool", "--flag", "x y", cwd=tmp_path, env=light_imports(tmp_path)
    )
    assert (done.returncode, done.stdout) == (0, "__main__ ['--flag', 'x y']\n"), done.stderr


def test_a_fresh_interpreter_for_each_worker_on_request(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, os; print('torch' in sys.modules, os.environ['RANK'])")
    for flags, torch_is_imported in [((COLD,), False), ((), True)]:
        done = agent("--standalone", *flags, str(script), env=light_imports(tmp_path))
        assert (done.returncode, done.stdout) == (0, f"{torch_is_imported} 0\n"), done.stderr


def test_a_signal_that_comes_when_all_is_done_does_not_change_the_exit_code():
    late = (
        "import atexit, os, signal, sys\n"
        "from zero_agent.command.cli import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", late, "--standalone", "--no-python", "true"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_flags_come_from_torchruns_environment_and_the_command_line_wins(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['WORLD_SIZE'])")
    env = {**environment(), "PET_NPROC_PER_NODE": "3", "PET_STANDALONE": "1"}
    assert agent(COLD, str(script), env=env).stdout == "3\n" * 3
    assert agent("--nproc-per-node=2", COLD, str(script), env=env).stdout == "2\n" * 2


@pytest.mark.etcd
@pytest.mark.parametrize(
    ("flag", "signature"),
    [
        ("--nnodes=1", ""),
        ("--node-id=a", " a"),
        ("--nnodes=1:2", f" {re.escape(socket.gethostname())}-[0-9a-f]{{4}}"),
    ],
)
@pytest.mark.corners(flag=["--nnodes=1", "--nnodes=1:2"])
def test_the_lines_of_one_of_several_nodes_name_it(etcd, flag, signature):
    done = agent(f"--rdzv-endpoint={etcd.endpoint}", flag, "--no-python", "true")
    assert done.returncode == 0, done.stderr
    for line in done.stderr.splitlines():
        assert re.match(rf"\[zero \d\d:\d\d:\d\d{signature}\] ", line), line


def test_the_tracebacks_of_a_failed_job_are_one_and_it_comes_last(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os\nprint('working')\nraise KeyError(os.environ['RANK'])")
    flags = ("--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path}/logs")
    done = agent(*flags, str(script), env=light_imports(tmp_path))
    assert done.returncode == AgentExit.JOB_FAILED
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-2].startswith("    KeyError: ")
    assert done.stderr.count("(exit code 1) on node ") == 1
    assert done.stderr.count("; no restarts are allowed (--max-restarts)") == 1


def test_a_wrong_argument_of_the_script_ends_the_job_with_restarts_left(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    flags = ("--standalone", "--max-restarts=3")
    done = agent(*flags, str(script), "--epohcs=2", env=light_imports(tmp_path))
    assert done.returncode == AgentExit.JOB_FAILED
    assert "unrecognized arguments: --epohcs=2" in done.stderr
    assert done.stderr.count("round 1 runs on 1 node") == done.stderr.count(" runs on 1 node") == 1
    assert "train.py refused its arguments (exit code 2) on node " in done.stderr
    assert "; a restart would meet the same error" in done.stderr


def test_the_output_of_every_round_is_kept_in_the_log_directory(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)"
        "\nsys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))"
    )
    logs = tmp_path / "logs"
    done = agent(
        *("--standalone", "--max-restarts=1", f"--log-dir={logs}", "--rdzv-id=j", COLD),
        str(script),
    )
    assert done.returncode == 0
    (own,) = logs.glob("j_*")
    kept = {str(p.relative_to(own)): p.read_text() for p in logs.rglob("*.log")}
    assert kept == {
        f"attempt_{n}/0/{name}.log": text
        for n in (0, 1)
        for name, text in (("stdout", "out 0\n"), ("stderr", "err\n"))
    }


@pytest.mark.parametrize("receivers", ["its agent", "every process"])
@pytest.mark.full
def test_an_interrupted_standalone_job_saves_leaves_nothing_and_goes_on_later(tmp_path, receivers):
    """Slurm and systemd signal every process of a job, its etcd too."""
    job = Cluster(tmp_path, endpoint="", pause_s=LONG_S)
    command = [*STANDALONE, *paced(training(tmp_path), tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    job.wait_for_step(3, world=1)
    below = descendants(first.pid)
    if receivers == "every process":
        for pid in below:
            os.kill(pid, signal.SIGTERM)
    first.send_signal(signal.SIGTERM)
    assert first.wait(150) == 128 + signal.SIGTERM
    wait_for(lambda: not any(map(is_alive, below)), 150, "workers and etcd to be gone")
    ((steps, _),) = job.last_steps().values()
    done = agent("--standalone", *training(tmp_path)[:-1])
    assert done.returncode == 0, done.stderr
    assert f"step {steps}: training on 1 workers" in done.stdout
    assert final_hash(done.stdout)


def test_a_killed_agent_leaves_neither_workers_nor_its_etcd(tmp_path):
    job = Cluster(tmp_path, endpoint="", pause_s=LONG_S)
    command = [*STANDALONE, *paced(training(tmp_path), tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    job.wait_for_step(1, world=1)
    below = descendants(process.pid)
    assert len(below) >= 4, "etcd, forkserver, worker, the round's store"
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, below)), 150, "everything to be gone")


def test_an_endpoint_where_nothing_listens_is_named():
    port = free_port()
    where = (f"--rdzv-endpoint=127.0.0.1:{port}", "--etcd-wait=0")
    done = agent(*where, "--nnodes=1:2", str(TRAIN))
    assert done.returncode == 3
    assert f"127.0.0.1:{port}" in done.stderr


FULL = """
import threading
def start(thread): raise RuntimeError("can't start new thread")
threading.Thread.start = start
from zero_orchestrator.start import agent
agent()
"""


@pytest.mark.etcd
def test_an_agent_that_can_start_no_thread_crashes_and_does_not_say_that_the_job_failed(etcd):
    flags = (f"--rdzv-endpoint={etcd.endpoint}", "--nnodes=1", COLD, "--no-python", "true")
    done = subprocess.run(
        [sys.executable, "-c", FULL, *flags],
        capture_output=True, text=True, timeout=60, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == AgentExit.CRASHED, done.stderr
    assert "can't start new thread" in done.stderr
    assert "this agent ends, its job does not" in done.stderr


LOSES_ITS_LOGS = """
import os, pathlib, sys
logs = pathlib.Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    logs.rename(logs.with_name("former"))
    logs.touch()  # from now on nothing can be made there
    raise ValueError("the first")
raise ValueError("the second")
"""


def test_a_log_directory_that_is_lost_in_a_job_costs_neither_the_job_nor_its_errors(tmp_path):
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(LOSES_ITS_LOGS)
    flags = ("--standalone", "--max-restarts=1", f"--log-dir={logs}")
    done = agent(*flags, str(script), str(logs), env=light_imports(tmp_path))
    assert done.returncode == AgentExit.JOB_FAILED, done.stderr
    first, _, second = done.stderr.partition("round 2")
    assert "ValueError: the first" in first
    assert "worker_main" not in first
    assert second.splitlines()[-2] == "    ValueError: the second"


@pytest.mark.full
def test_a_job_whose_output_nobody_reads_is_done_all_the_same(tmp_path):
    prints = "head -c 9000000 /dev/zero | tr '\\0' x; touch done"
    command = [sys.executable, "-m", "zero_agent", "--standalone", COLD, "--no-python"]
    with (tmp_path / "err").open("wb") as err:
        job = subprocess.Popen(
            [*command, "sh", "-c", prints], stdout=subprocess.PIPE, stderr=err, cwd=tmp_path,
            env=environment(),
        )  # fmt: skip
    with job:
        try:
            assert job.wait(150) == 0, (tmp_path / "err").read_text()
        finally:
            job.kill()
    assert (tmp_path / "done").exists()
    assert "has not answered" not in (tmp_path / "err").read_text()
