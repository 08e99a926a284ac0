"""Stacks of workers: read from two formats, grouped, and taken without harm to any process."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.suspended import suspend
from zero_agent.workers import stacks as taking
from zero_agent.workers.worker_main import STACKS_SIGNAL
from zero_orchestrator.observe.stacks import (
    Frame,
    RankStack,
    Thread,
    from_answer,
    from_faulthandler,
    from_spy,
    groups,
    whose,
)

NEWEST = """\
Thread 0x00007f8d2bfff6c0 [saver] (most recent call first):
  File "/lib/threading.py", line 331 in wait
  File "/lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007f8d2c4a1740 [MainThread] (most recent call first):
  File "/app/data.py", line 88 in read
  File "/app/train.py", line 7 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 286 in run_path
  File "/site/zero_agent/workers/worker_main.py", line 83 in run
  File "/site/zero_agent/workers/forkserver.py", line 276 in main
"""
OLDEST = NEWEST.replace(" [saver]", "").replace(" [MainThread]", "")


def stack(rank: int, *lines: int, node: str = "a", host: str = "") -> RankStack:
    frames = tuple(Frame(function="f", file="x.py", line=line) for line in lines)
    main = Thread(name="m", main=True, frames=frames)
    return RankStack(rank=rank, node=node, host=host, threads=(main,))


def test_the_main_thread_comes_first_without_the_frames_that_started_the_program():
    main, saver = from_faulthandler(NEWEST)
    assert (main.name, main.main, saver.name, saver.main) == ("MainThread", True, "saver", False)
    assert [str(frame) for frame in main.frames] == [
        "read (/app/data.py:88)",
        "<module> (/app/train.py:7)",
    ]
    older = from_faulthandler(OLDEST)
    assert [thread.frames for thread in older] == [main.frames, saver.frames]
    assert older[1].name == "0x00007f8d2bfff6c0"


def test_native_frames_have_no_line():
    frames = [
        {"name": "poll", "filename": "/lib/libc.so.6", "line": 0},
        {"name": "step", "filename": "/app/train.py", "line": 7},
    ]
    one = {"pid": 5, "thread_id": 77, "frames": frames, "os_thread_id": 6, "thread_name": None}
    found = from_spy(json.dumps([one, {**one, "os_thread_id": 5, "thread_name": "MainThread"}]))
    assert [(thread.name, thread.main) for thread in found] == [("MainThread", True), ("77", False)]
    assert [str(f) for f in found[0].frames] == ["poll (/lib/libc.so.6)", "step (/app/train.py:7)"]


def test_equal_stacks_are_one_group_and_the_odd_one_out_comes_first():
    found = groups([stack(0, 3), stack(1, 3), stack(2, 9, node="b", host="gpu-2"), stack(3, 3)])
    assert [whose(group.members) for group in found] == [
        "rank 2 on node b (host gpu-2)",
        "rank 0-1, 3 on node a",
    ]
    assert found[0].threads[0].frames[0].line == 9


def test_an_unreadable_stack_is_a_problem_of_its_rank_alone():
    record = {"host": "h", "ranks": [{"rank": 0, "spy": "nonsense"}, {"rank": 1, "text": OLDEST}]}
    bad, good = from_answer("a", record)
    assert bad.problem.startswith("its stacks cannot be read: JSONDecodeError")
    assert (good.problem, len(good.threads)) == ("", 2)


@contextlib.contextmanager
def process(tmp_path: Path, code: str, file: Path):
    """A child that runs `code`, once it has said that it is ready."""
    child = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    try:
        yield taking.Process(rank=3, pid=child.pid, parent=os.getpid(), file=file)
        assert child.poll() is None, "it is undisturbed"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_worker_writes_its_stacks_again_and_again_and_goes_on(tmp_path):
    code = (
        "import faulthandler, signal, sys, time\n"
        f"faulthandler.register({int(STACKS_SIGNAL)}, file=open(sys.argv[1], 'a'))\n"
        "def asleep():\n print('ready', flush=True)\n time.sleep(60)\nasleep()\n"
    )
    with process(tmp_path, code, tmp_path / "stacks.txt") as worker:
        for _ in range(2):
            (found,) = taking.take([worker], native=False, within_s=30.0)
            (thread,) = from_faulthandler(found["text"])
            assert (found["rank"], found["pid"]) == (3, worker.pid)
            assert thread.frames[0].function == "asleep"
        suspend(worker.pid)
        (found,) = taking.take([worker], native=False, within_s=0.2)
        assert "in state T (stopped)" in found["problem"]
        os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.full
def test_py_spy_shows_native_frames_below_those_of_python(tmp_path):
    if not (shutil.which("py-spy") or Path(sys.executable).with_name("py-spy").exists()):
        pytest.skip("needs py-spy: pip install 'zero-elastic[stacks]'")
    code = "import time\ndef asleep():\n print('ready', flush=True)\n time.sleep(60)\nasleep()\n"
    with process(tmp_path, code, tmp_path / "stacks.txt") as worker:
        (found,) = taking.take([worker], native=True, within_s=60.0)
        if "ermission" in found.get("problem", ""):
            pytest.skip(found["problem"])
        (main,) = from_spy(found["spy"])
    names = [frame.function for frame in main.frames]
    place = names.index("asleep")
    assert place > 0
    assert names[place + 1] == "<module>"
    assert main.frames[0].line is None, "the most recent call is native"


def test_a_program_that_does_not_handle_the_signal_does_not_get_it(tmp_path, monkeypatch):
    code = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"
    with process(tmp_path, code, tmp_path / "stacks.txt") as worker:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # as without py-spy
        monkeypatch.setenv("PATH", str(tmp_path))
        (found,) = taking.take([worker], native=False, within_s=5.0)
        assert found["problem"] == (
            f"process {worker.pid}: it does not write its stacks itself, so this needs py-spy on "
            "its node: pip install 'zero-elastic[stacks]' in the environment of the agent"
        )
        (found,) = taking.take([worker], native=True, within_s=5.0)
        assert found["problem"].startswith(f"process {worker.pid}: native frames need py-spy")
