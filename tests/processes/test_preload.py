"""`--preload`, and what becomes of an agent whose imports fail, end, are killed or never end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import (
    COLD,
    agent,
    descendants,
    environment,
    is_alive,
    kill_all,
    light_imports,
)
from tests.support.waiting import wait_for
from zero_agent.workers.forkserver_client import CLOSE_TIMEOUT_S
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.observe import status
from zero_orchestrator.store import private_etcd
from zero_orchestrator.store.etcd.client import EtcdStore

pytestmark = pytest.mark.processes


def test_status_finds_the_job_of_one_node_and_says_what_is_imported_until_the_script_runs(tmp_path):
    waits = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    imported, ended, script = (tmp_path / name for name in ("imported", "ended", "script.py"))
    (tmp_path / "slow.py").write_text(waits.format(str(imported)))
    script.write_text(waits.format(str(ended)))
    command = (sys.executable, "-m", "zero_agent", "--standalone", "--preload=slow", str(script))
    job = subprocess.Popen(command, env=light_imports(tmp_path) | {"TMPDIR": str(tmp_path)})
    try:
        wait_for(lambda: private_etcd.running([tmp_path]), 150, "the etcd of the job")
        with contextlib.closing(EtcdStore(private_etcd.choose("", [tmp_path]))) as store:

            def prepares() -> list[str]:
                jobs = [status.find(store, each.job) for each in status.read_all(store)]
                return [row.preparing for job in jobs for row in job.members]

            wait_for(lambda: "slow" in "".join(prepares()), 150, "what is imported")
            imported.touch()
            wait_for(lambda: prepares() == [""], 150, "a script that prepares nothing")
        ended.touch()
        assert job.wait(timeout=150) == AgentExit.OK
    finally:
        job.kill()
        job.wait()


def test_imports_may_take_longer_than_nodes_are_waited_for(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    )
    (tmp_path / "script.py").write_text("import slow")
    flags = ("--standalone", "--rdzv-conf=timeout=1", "--preload=slow")
    done = agent(*flags, str(tmp_path / "script.py"), env=light_imports(tmp_path))
    assert done.returncode == AgentExit.OK, done.stderr


def test_what_is_preloaded_is_imported_once_for_all_workers_of_all_rounds(tmp_path):
    (tmp_path / "heavy.py").write_text("print('imported', flush=True)")
    script = tmp_path / "script.py"
    script.write_text(
        "import heavy, os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] < '1')"
    )
    env = light_imports(tmp_path)
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--preload=heavy,json.none")
    done = agent(*flags, str(script), env=env)
    assert (done.returncode, done.stdout.count("imported")) == (0, 1), done.stderr
    assert "there is no module json.none to preload" in done.stderr


def test_what_cannot_be_preloaded_is_named_with_the_remedy(tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('no luck')")
    script = tmp_path / "script.py"
    script.touch()
    env = light_imports(tmp_path)
    for flags, told in (
        (("--preload=torch,nowhere.at.all",), "there is no module nowhere.at.all; install it"),
        (("--preload=json", "--cold-start"), "leave out --preload, or --cold-start"),
        (("--preload=broken",), "importing broken has failed: ValueError: no luck; python -c"),
    ):
        done = agent("--standalone", *flags, str(script), env=env)
        assert (done.returncode != 0, done.stdout) == (True, "")
        assert told in done.stderr
        assert "Traceback" not in done.stderr


NAMED_THREAD = """
import ctypes, threading
named = threading.Event()
def wait():
    ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
    named.set()
    threading.Event().wait()
threading.Thread(target=wait, daemon=True).start()
named.wait()
"""


def test_a_module_whose_threads_would_be_lost_is_left_to_the_workers_with_a_warning(tmp_path):
    """The thread of jemalloc, which `import pyarrow` starts, is known not to be needed."""
    (tmp_path / "arrow.py").write_text(NAMED_THREAD.format(name=b"jemalloc_bg_thd"))
    (tmp_path / "threads.py").write_text(NAMED_THREAD.format(name=b"poller"))
    (tmp_path / "script.py").write_text(
        "import json, sys\nprint([name in sys.modules for name in ('arrow', 'threads', 'later')])"
    )
    (tmp_path / "later.py").touch()
    flags = ("--standalone", "--preload=arrow,threads,later", str(tmp_path / "script.py"))
    done = agent(*flags, env=light_imports(tmp_path))
    assert (done.returncode, done.stdout) == (0, "[True, False, True]\n"), done.stderr
    assert "starting: importing torch, arrow, threads, later\n" in done.stderr
    assert (
        "importing threads starts a thread (poller), which forked workers would lack: each worker "
        "imports threads itself, at every start" in done.stderr
    )


@pytest.fixture
def importing(tmp_path):
    """An agent whose forkserver imports without end, and the process that does."""
    (tmp_path / "endless.py").write_text(
        "import os, pathlib, signal, subprocess\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(__file__).with_name('imports').write_text(f'{os.getpid()}\\n')\n"
        "signal.pause()\n"
    )
    (tmp_path / "script.py").touch()
    flags = ["--standalone", "--max-restarts=1", "--preload=endless"]
    command = [sys.executable, "-m", "zero_agent", *flags, "script.py"]
    env = light_imports(tmp_path)
    mark, started = tmp_path / "imports", []
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as run:
        try:
            wait_for(lambda: mark.exists() and mark.read_text().endswith("\n"), 150, "the imports")
            started = descendants(run.pid)
            yield run, int(mark.read_text())
        finally:
            kill_all([run.pid, *started])


@pytest.mark.full
def test_an_agent_starts_no_process_of_a_version_that_was_installed_under_it(tmp_path):
    """Its own packages are a copy, of which a file is written while it runs."""
    here = Path(__file__).resolve().parents[2]
    packages = [here / "agent" / "zero_agent", here / "orchestrator" / "zero_orchestrator"]
    for package in packages:
        shutil.copytree(package, tmp_path / package.name)
    env = environment() | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "zero_agent", "--standalone", "--max-restarts=3", COLD]
    with subprocess.Popen(
        [*command, "--no-python", "sleep", "60"], env=env, stderr=subprocess.PIPE, text=True
    ) as agent:
        wait_for(lambda: len(descendants(agent.pid)) >= 4, 60, "etcd, the worker, its parent")
        forkserver = next(
            pid for pid in descendants(agent.pid) if "forkserver" in command_line(pid)
        )
        (tmp_path / "zero_agent" / "workers" / "forkserver.py").write_text(
            "raise SystemExit('new')"
        )
        os.kill(forkserver, signal.SIGKILL)
        assert agent.wait(60) == AgentExit.UNHEALTHY
        said = agent.stderr.read()
    assert "forkserver.py has changed since this agent began" in said


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.corners(number=[signal.SIGTERM])
def test_an_agent_that_is_stopped_while_it_imports_ends_at_once(importing, number):
    agent, _ = importing
    started = descendants(agent.pid)
    agent.send_signal(number)
    assert agent.wait(CLOSE_TIMEOUT_S) == 128 + number  # it was not waited for in vain
    assert "Traceback" not in agent.stderr.read()
    wait_for(lambda: not any(map(is_alive, started)), 150, "what it had started to be gone")


def test_imports_that_somebody_kills_are_begun_again_once(importing, tmp_path):
    agent, first = importing
    os.kill(first, signal.SIGKILL)
    mark = tmp_path / "imports"
    old = f"{first}\n"
    new = wait_for(
        lambda: (told := mark.read_text()).endswith("\n") and told != old and told,
        60,
        "the imports, again",
    )
    os.kill(int(new), signal.SIGKILL)
    assert agent.wait(150) == AgentExit.UNHEALTHY
    said = agent.stderr.read()
    assert said.count("the forkserver is gone: killed by SIGKILL") == 1
    assert said.endswith(", endless: killed by SIGKILL\n")


def test_a_job_survives_a_kill_of_its_imports(tmp_path):
    (tmp_path / "killed_once.py").write_text(
        "import os, pathlib, signal\n"
        "mark = pathlib.Path(__file__).with_name('imported')\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import os; print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])")
    env = light_imports(tmp_path)
    flags = ("--standalone", "--max-restarts=1", "--preload=killed_once")
    done = agent(*flags, str(script), env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("attempt 0\n", "attempt 1\n")  # whether the round had begun by then


def test_imports_end_with_an_agent_that_is_killed(importing):
    agent, forkserver = importing
    agent.kill()
    wait_for(lambda: not is_alive(forkserver), 150, "the forkserver to be gone")
