"""The forkserver: workers are forked, stopped and reaped, and none outlives its agent."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.cluster import COLD, agent, descendants, environment, is_alive, kill_all
from tests.support.manual_clock import ManualClock
from tests.support.waiting import wait_for
from zero_agent.workers.exits import read_error_file
from zero_agent.workers.forkserver import KILL_TIMEOUT_S, PACKET_BYTES
from zero_agent.workers.forkserver_client import ANSWER_S, ForkserverClient, _Outbox
from zero_agent.workers.output.tap import FILES, Tap, Terminal
from zero_agent.workers.worker_main import Program
from zero_contract.hub import Hub

pytestmark = pytest.mark.processes

LISTENING = "0A"
"""In /proc/net/tcp."""


@pytest.fixture
def forking(tmp_path):
    """A forkserver that has imported nothing, and the news it sends."""
    hub, news = Hub(), queue.SimpleQueue()
    forkserver = ForkserverClient(hub, environment(), [], lambda _, said: news.put(said))
    yield lambda code, **more: _start(forkserver, hub, tmp_path, code, **more), forkserver, news
    forkserver.close()
    hub.close()
    close_files()


_TAPS: list[Tap] = []


def close_files() -> None:
    """A hub that is closed may leave the end of a worker's output, and so its files, unseen."""
    while _TAPS:
        for sink in _TAPS.pop()._raw:
            sink.close()
    assert FILES.flush()


def _start(forkserver: ForkserverClient, hub: Hub, tmp_path: Path, code: str, **more: str) -> int:
    script = tmp_path / "script.py"
    script.write_text(code)
    taps = [Tap(hub, Terminal(2), tmp_path / name) for name in ("out", "err")]
    _TAPS.extend(taps)
    program = Program(target=str(script), is_module=False, arguments=["one", "two words"])
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "RANK": "7", **more}
    return forkserver.start(program, env, *taps)


def status_of(worker: int, news: queue.SimpleQueue) -> int:
    while True:
        said = news.get(timeout=120)
        if said.get("id") == worker and "status" in said:
            return said["status"]


def ends_of(workers: int, news: queue.SimpleQueue) -> dict[int, int]:
    """The status of each of so many workers, in whichever order they end."""
    ended: dict[int, int] = {}
    while len(ended) < workers:
        said = news.get(timeout=120)
        ended |= {said["id"]: said["status"]} if "status" in said else {}
    return ended


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit('in words')", 1),
        ("raise ValueError('no')", 1),
        ("import sys; sys.stdout = sys.stderr = None", 0),
        ("import sys; sys.stdout = object()", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import sys, os; assert sys.argv[1:] == ['one', 'two words']", 0),
        ("import os; assert os.environ['RANK'] == '7'", 0),
        ("import sys; assert sys.modules['__main__'].__file__ == sys.argv[0]", 0),
        ("import threading, os; threading.Timer(0.1, lambda: os._exit(9)).start()", 9),
    ],
)
def test_a_worker_ends_as_its_script_would(forking, code, status):
    start, _, news = forking
    assert status_of(start(code), news) == status


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(3)", "raise ValueError('no')"])
@pytest.mark.parametrize(
    "late",
    [
        "atexit.register(use)",
        "threading.Thread(target=lambda: (threading.main_thread().join(), use())).start()",
    ],
)
def test_what_goes_on_behind_the_last_line_finds_the_script_in_main(forking, late, end):
    """By name, as pickle and the processes that it starts do; also with values of that moment."""
    start, _, news = forking
    code = (
        "import atexit, os, pickle, runpy, sys, threading\n"
        "class Foo: pass\n"
        "def use():\n"
        "    global value\n"
        "    value = pickle.dumps(Foo())\n"
        "    os._exit(9 if vars(sys.modules['__main__'])['value'] == value else 1)\n"
        "assert runpy.run_path(os.devnull, run_name='__main__')['__name__'] == '__main__'\n"
        f"{late}\n{end}"
    )
    assert status_of(start(code), news) == 9


def test_ps_and_top_tell_each_rank_from_the_forkserver(forking):
    start, forkserver, news = forking
    code = (
        "title, name = (open(f'/proc/self/{file}').read() for file in ('cmdline', 'comm'))\n"
        "assert (title.rstrip(chr(0)), name) == ('zero-worker rank 7', 'zero-rank 7' + chr(10))"
    )
    assert status_of(start(code), news) == 0
    ps = ("ps", "-o", "args=,comm=", "-p", str(forkserver.pid))
    assert subprocess.check_output(ps, text=True).split() == ["zero-forkserver"] * 2


def test_a_script_gets_arguments_of_any_length(forking, tmp_path):
    """As a shell makes them of `data/*.parquet`: the kernel takes 2 MiB in all."""
    _, forkserver, news = forking
    script = tmp_path / "files.py"
    script.write_text("import sys; assert sys.argv[1:] == [f'data/{n:020}' for n in range(10_000)]")
    files = [f"data/{number:020}" for number in range(10_000)]
    program = Program(target=str(script), is_module=False, arguments=files)
    held = len(os.listdir("/proc/self/fd"))
    taps = [Tap(forkserver._hub, Terminal(2), None) for _ in range(2)]
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    assert status_of(forkserver.start(program, env, *taps), news) == 0
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= held, 150, "all files to be closed")


@pytest.mark.parametrize(
    ("code", "message", "permanent"),
    [
        ("raise ValueError('no')", "ValueError: no", False),
        ("raise SystemExit('in words')", "in words", False),
        ("raise SystemExit(2)", "", False),
        ("from zero_contract.errors import UsageExit\nraise UsageExit('no')", "no", True),
        (
            "import argparse; argparse.ArgumentParser().parse_args()",
            "script.py refused its arguments",
            True,
        ),
        ("exec('a b')", "SyntaxError: invalid syntax", True),
        (
            "class Mute(Exception):\n    def __str__(self): return self.no\nraise Mute",
            "Mute: <exception str() failed>",
            False,
        ),
        (
            "from zero_contract.errors import ConfigError\nraise ConfigError('x: unknown')",
            "ConfigError: x: unknown",
            True,
        ),
    ],
)
def test_its_error_file_says_whether_a_restart_would_meet_the_error_again(
    forking, tmp_path, code, message, permanent
):
    start, _, news = forking
    assert status_of(start(code), news) != 0
    left = read_error_file(tmp_path / "error.json")
    assert (message in left.message, bool(left.message), left.permanent) == (
        True,
        bool(message),
        permanent,
    )


@pytest.fixture
def importing(tmp_path):
    """A forkserver that imports until `go` exists, and the news it sends."""
    go = tmp_path / "go"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
    (tmp_path / "slow.py").write_text(waits)
    hub, news = Hub(), queue.SimpleQueue()
    env = environment() | {"PYTHONPATH": str(tmp_path)}
    forkserver = ForkserverClient(hub, env, ["slow"], lambda _, said: news.put(said))
    yield lambda code, **more: _start(forkserver, hub, tmp_path, code, **more), forkserver, news, go
    forkserver.close()
    hub.close()
    close_files()


def test_orders_of_any_number_are_taken_while_the_forkserver_still_imports(importing):
    """More than its socket holds: the agent has leases to keep alive meanwhile."""
    start, forkserver, news, go = importing
    held = len(os.listdir("/proc/self/fd"))
    workers = [start("pass", PAD="x" * 20_000) for _ in range(30)]
    assert not forkserver.ready
    go.touch()
    assert ends_of(len(workers), news) == dict.fromkeys(workers, 0)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= held, 150, "all pipes to be closed")


def test_a_worker_that_waits_for_the_imports_is_stopped_without_them(importing, tmp_path):
    """A round that is left in this moment need not wait for this node."""
    start, forkserver, news, go = importing
    held = len(os.listdir("/proc/self/fd"))
    leaves_a_file = f"open({str(tmp_path / 'ran')!r}, 'a').close()"
    stopped, wanted = start(leaves_a_file), start("pass")
    forkserver.signal(stopped, signal.SIGTERM)
    assert status_of(stopped, news) == -signal.SIGTERM
    assert not forkserver.ready
    go.touch()
    assert status_of(wanted, news) == 0
    assert not (tmp_path / "ran").exists()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= held, 150, "all pipes to be closed")


@pytest.fixture
def standing_still(forking):
    """A forkserver that reads nothing until it gets SIGCONT."""
    start, forkserver, news = forking
    wait_for(lambda: forkserver.ready, 150, "the forkserver to be ready")
    os.kill(forkserver.pid, signal.SIGSTOP)
    yield start, forkserver, news
    os.kill(forkserver.pid, signal.SIGCONT)


def test_orders_of_any_number_are_taken_while_the_forkserver_stands_still(standing_still):
    """The agent that gives them has leases to keep alive meanwhile."""
    start, forkserver, news = standing_still
    held = len(os.listdir("/proc/self/fd"))
    workers: list[int] = []

    def give():
        workers.extend(start("pass", PAD="x" * 20_000) for _ in range(30))

    giving = threading.Thread(target=give, daemon=True)  # a call that waits must not hang the test
    giving.start()
    giving.join(60)
    assert (len(workers), giving.is_alive()) == (30, False)
    os.kill(forkserver.pid, signal.SIGCONT)
    assert ends_of(len(workers), news) == dict.fromkeys(workers, 0)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= held, 150, "all pipes to be closed")


def test_of_the_orders_that_the_forkserver_has_no_room_for_only_a_start_is_withdrawn():
    """A signal has the id of its process: what has been sent would never hear of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        outbox, large = _Outbox(ours), {"op": "start", "pad": "x" * 50_000}
        outbox.open()
        for number in range(20):
            outbox.give(number, large, [])
        outbox.give(0, {"op": "signal", "signal": 15}, [])
        outbox.give(19, {"op": "signal", "signal": 15}, [])
        assert [outbox.withdraw(number) for number in (0, 18)] == [False, True]
        assert outbox.given == 21
        read = []
        while outbox.given > len(read):
            read.append(json.loads(theirs.recv(PACKET_BYTES)))
            outbox.open()
        starts = [order["id"] for order in read if order["op"] == "start"]
        assert (starts, [order["id"] for order in read[-2:]]) == ([*range(18), 19], [0, 19])
        outbox.close()


def test_an_order_to_a_forkserver_that_is_gone_is_nothing_to_worry_about(importing, caplog):
    """One of several workers is gone with it, so the others are to end: they have."""
    start, forkserver, news, go = importing
    go.touch()
    worker = start("import signal; signal.pause()")
    while "pid" not in news.get(timeout=120):
        pass
    forkserver.close()
    forkserver.signal(worker, signal.SIGKILL)
    assert caplog.messages == []


def test_what_a_script_registers_with_atexit_runs_and_its_output_is_kept(forking, tmp_path):
    start, _, news = forking
    code = "import atexit; atexit.register(print, 'goodbye'); print('hello', end=' ')"
    assert status_of(start(code), news) == 0
    wait_for(lambda: (tmp_path / "out").read_text() == "hello goodbye\n", 150, "the output")


@pytest.mark.parametrize("error", ["ValueError", "CancelledError"])
def test_a_traceback_is_left_in_the_error_file_without_our_frames(forking, tmp_path, error):
    start, _, news = forking
    code = f"from asyncio import *\ndef f(): raise {error}('no')\nf()"
    assert status_of(start(code), news) == 1
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"].endswith(f"{error}: no")
    lines = message["extraInfo"]["py_callstack"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{tmp_path}/script.py", line 3, in <module>'
    assert (tmp_path / "err").read_text() == ""


def test_an_error_that_no_file_can_take_is_printed_and_a_script_that_has_none_is_done(
    forking, tmp_path
):
    start, _, news = forking
    nowhere = {"TORCHELASTIC_ERROR_FILE": "/proc/none/error.json"}
    assert status_of(start("pass", **nowhere), news) == 0
    assert status_of(start("raise ValueError('no')", **nowhere), news) == 1
    wait_for((tmp_path / "err").read_text, 150, "the error")
    first, *_, last = (tmp_path / "err").read_text().splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: no")


def test_a_rounds_store_listens_on_the_nodes_own_address_alone(forking):
    _, forkserver, news = forking
    forkserver.host_store("127.0.0.2")
    told = {}
    while "port" not in told:
        told |= news.get(timeout=120)
    sockets = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    where = [fields[1] for fields in sockets if fields[3] == LISTENING]
    assert [one for one in where if one.endswith(f":{told['port']:04X}")] == [
        f"0200007F:{told['port']:04X}"
    ]


@pytest.mark.full
def test_a_rounds_store_listens_at_once_and_imports_torch_for_the_first_who_asks(forking):
    _, forkserver, news = forking
    store, told = forkserver.host_store("127.0.0.1"), {}
    while not {"pid", "port"} <= told.keys():
        told |= news.get(timeout=120)
    assert told["id"] == store
    maps = Path(f"/proc/{told['pid']}/maps")
    assert "libtorch" not in maps.read_text()
    where = f"'127.0.0.1', {told['port']}"
    asks = f"TCPStore({where}, wait_for_workers=False).set('key', 'value')"
    asked = [
        subprocess.Popen([sys.executable, "-c", f"from torch.distributed import *; {asks}"])
        for _ in range(2)
    ]
    assert [one.wait(120) for one in asked] == [0, 0]
    assert "libtorch" in maps.read_text()


def test_what_workers_leave_ends_with_them_although_the_store_of_the_round_serves_on(
    forking, tmp_path
):
    start, forkserver, news = forking
    forkserver.host_store("127.0.0.1")
    told = {}
    while not {"pid", "port"} <= told.keys():
        told |= news.get(timeout=120)
    code = (
        "import subprocess\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'left')!r}, 'w').write(str(left.pid))"
    )
    assert status_of(start(code), news) == 0
    left = int((tmp_path / "left").read_text())
    wait_for(lambda: not is_alive(left), 150, "the process that had left the worker's group")
    assert is_alive(told["pid"])


def test_a_worker_killed_in_the_moment_of_its_start_is_gone(forking):
    """The signal must not get lost between the fork and the worker's own process group."""
    start, forkserver, news = forking
    for _ in range(30):
        worker = start("import time; time.sleep(600)")
        forkserver.signal(worker, signal.SIGKILL)
        assert status_of(worker, news) == -signal.SIGKILL


def test_a_ctrl_c_of_the_terminal_never_reaches_the_forkserver(importing):
    _, forkserver, _, _ = importing
    assert os.getsid(forkserver.pid) == forkserver.pid


AGENT = """
import sys, time
from pathlib import Path
from zero_contract.hub import Hub
from zero_agent.workers.output.tap import Tap, Terminal
from zero_agent.workers.worker_main import Program
from zero_agent.workers.forkserver_client import ANSWER_S, ForkserverClient
import os
hub = Hub()
forkserver = ForkserverClient(hub, os.environ, [], lambda *news: None)
taps = [Tap(hub, Terminal(2), None) for _ in range(2)]
forkserver.start(Program(target=sys.argv[1], is_module=False, arguments=[]), {}, *taps)
time.sleep(600)
"""
FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])                             # in the worker's group
subprocess.Popen(["sleep", "600"], start_new_session=True)     # escaped from it
if (parent := os.fork()) == 0:                                 # a daemon: its parent is gone
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.waitpid(parent, 0)
open("whole", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["agent", "forkserver"])
def test_no_process_of_a_worker_outlives_its_agent(tmp_path, victim):
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    command = [sys.executable, "-c", AGENT, str(script)]
    pids: list[int] = []
    agent = subprocess.Popen(command, env=environment(), cwd=tmp_path)
    try:
        wait_for((tmp_path / "whole").exists, 150, "the family")
        pids = descendants(agent.pid)
        assert len(pids) == 5  # forkserver, worker, two sleeps, and the daemon
        os.kill(agent.pid if victim == "agent" else pids[0], signal.SIGKILL)
        workers = pids if victim == "agent" else pids[:2]
        wait_for(lambda: not any(map(is_alive, workers)), 150, "every process to be gone")
    finally:
        kill_all(filter(is_alive, [agent.pid, *descendants(agent.pid), *pids]))
        agent.wait()


WITH_ROOTS_CHILD = """
import os, socket, subprocess, sys, threading
from zero_agent.workers.forkserver import Forkserver
left = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)  # as sudo would be
print(left.pid, flush=True)
os.setuid(65534)
agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
forkserver = Forkserver(own)
forkserver._pids[7], forkserver._ids[left.pid] = left.pid, 7
agent.send(b'{"op": "signal", "id": 7, "signal": 15}')
threading.Thread(target=lambda: (agent.recv(99), agent.recv(99), agent.close())).start()
forkserver.serve()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_a_process_of_another_user_neither_ends_the_forkserver_nor_keeps_it():
    command = [sys.executable, "-c", WITH_ROOTS_CHILD]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, timeout=KILL_TIMEOUT_S + 60, check=False
    )
    os.kill(int(ended.stdout), signal.SIGKILL)
    assert ended.returncode == 0


WITHOUT_ROOM = """
import os, resource, socket
from zero_agent.workers.forkserver import Forkserver
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))  # it has one process, this one
agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
agent.send(b'{"op": "start", "id": 7}')
agent.shutdown(socket.SHUT_WR)
Forkserver(own).serve()
print([agent.recv(99) for _ in range(3)])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has no limit of its own")
def test_a_process_that_cannot_be_started_has_failed_and_the_forkserver_goes_on():
    command = [sys.executable, "-c", WITHOUT_ROOM]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = [b'{"ready": true}', b'{"id": 7, "status": 71}', b'{"obeyed": true}']
    assert ended.stdout == f"{told}\n", ended.stderr
    assert ended.stderr.startswith(
        "zero-agent: no further process can be started: Resource temporarily unavailable; ulimit -u"
    )


def test_a_forkserver_that_does_not_obey_is_stuck_and_one_that_imports_is_given_its_time(tmp_path):
    (tmp_path / "endless.py").write_text("import signal; signal.pause()")
    env = {**environment(), "PYTHONPATH": str(tmp_path)}
    clock, hub = ManualClock(), Hub()
    forkserver = ForkserverClient(hub, env, ["endless"], lambda *news: None, clock)
    try:
        forkserver.host_store("127.0.0.1")
        assert forkserver.stuck_s(imports_s=60) is None
        clock.advance(60)
        assert forkserver.stuck_s(imports_s=60) is None
        forkserver.ready = True  # what it says when the imports are done: from now on it may obey
        assert forkserver.stuck_s(imports_s=60) is None
        assert forkserver.stuck_s(imports_s=60) is None
        clock.advance(ANSWER_S + 1)
        assert forkserver.stuck_s(imports_s=60) == ANSWER_S + 1
        forkserver.kill()
        assert forkserver.stuck_s(imports_s=60) is None, "it is said once of each kill"
    finally:
        forkserver.kill()
        forkserver.close()
        hub.close()


ASKS = """
import os, socket
from zero_contract.worker import CommitReply, CommitRequest, Hello, decode, encode
round = int(os.environ["ZERO_ROUND"])
with socket.socket(socket.AF_UNIX) as agent:
    agent.connect(os.environ["ZERO_AGENT_SOCKET"])
    agent.sendall(encode(Hello(rank=0, pid=os.getpid(), round=round)))
    for number, n in enumerate((round + 1, round - 1, round), start=1):
        if n:
            facts = dict(step=number, tag="t", digest="d", samples=0)
            agent.sendall(encode(CommitRequest(request=number, round=n, **facts)))
    answers = [decode(next(agent.makefile("rb")))]
print([(answer.request, answer.granted) for answer in answers])
"""


def test_a_request_of_another_round_is_not_answered_by_the_fence_of_this_one(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    done = agent("--standalone", COLD, str(script))
    assert (done.returncode, done.stdout) == (0, "[(3, True)]\n"), done.stderr
