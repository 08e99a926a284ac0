"""Which failure is the root cause, which exit code follows, and what is kept of earlier ones."""

from __future__ import annotations

import json
import logging
import signal
from dataclasses import replace

import pytest

from zero_agent.loop import leaving
from zero_agent.node.state import Workers
from zero_agent.workers import exits
from zero_agent.workers.environment import StartOrder
from zero_agent.workers.exits import Exit, fresh_error_file
from zero_agent.workers.group import WorkerGroup
from zero_agent.workers.output.recent import RecentOutput
from zero_contract.exit_codes import AgentExit
from zero_contract.hub import Hub
from zero_contract.journal import Journal
from zero_contract.worker import ExitCode
from zero_orchestrator.membership.job_state import Failure, Node, Snapshot, State
from zero_orchestrator.membership.spec import JobSpec

SPEC = JobSpec(min_nodes=1, max_nodes=4)


class Silent:
    """Takes orders as a forkserver does; nothing runs."""

    def signal(self, worker: int, number: int) -> None: ...


def group(tmp_path, ends: list[tuple[int, int]], printed: str = "") -> WorkerGroup:
    """Workers that have ended in this order: rank, status; and what the first has printed."""
    recent = RecentOutput()
    recent.add(
        {"local_rank": ends[0][0], "rank": ends[0][0], "round": 1, "stream": "stderr"},
        printed.encode(),
    )
    workers = WorkerGroup(Silent(), Hub(), 1, fence=1, recent=recent)
    for rank, _ in ends:
        file = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / f"{rank}.json")}
        workers._running[rank] = StartOrder(rank=rank, local_rank=rank, env=file)
    for rank, end in ends:
        workers.ended(rank, end)
    return workers


def test_the_first_worker_to_end_is_the_cause_whatever_the_clock_in_its_error_file_says(tmp_path):
    for rank, clock in ((0, "1"), (1, "999999999999")):
        facts = {"py_callstack": "", "timestamp": clock}
        record = {"message": {"message": f"broke {rank}", "extraInfo": facts}}
        (tmp_path / f"{rank}.json").write_text(json.dumps(record))
    assert group(tmp_path, [(1, 1), (0, 1)]).first_failure.rank == 1


def test_a_message_of_any_length_is_a_failure_that_etcd_takes_and_its_place_is_told(tmp_path):
    """As load_state_dict raises that names each of a model's parameters: etcd takes 1.5 MiB."""
    message = f"RuntimeError: Missing key(s): {'layer.weight, ' * 200_000}"
    raised = f'  File "train.py", line 7, in <module>\n{message}\n'
    facts = {"py_callstack": raised, "timestamp": "1"}
    for record in ({"message": message, "extraInfo": facts}, message):
        (tmp_path / "0.json").write_text(json.dumps({"message": record}))
        end = group(tmp_path, [(0, 1)]).first_failure
        failure = cause("a", 1)
        failure = replace(failure, summary=end.summary, traceback=end.traceback)
        assert len(failure.to_json()) < 20_000
        assert end.summary.startswith("rank 0: RuntimeError: Missing key(s): layer.weight, layer")
        left_out = len(message) - exits.MESSAGE_LIMIT
        assert f"... ({left_out:,} more characters, which --log-dir keeps)" in end.summary
        assert record is message or end.traceback.startswith('  File "train.py", line 7')


def test_a_worker_ends_all_the_same_where_its_files_cannot_be_looked_at(tmp_path):
    """As on a file system that has gone away: here a name that none takes."""
    lost = tmp_path / ("x" * 300)
    assert group(lost, [(0, 1)]).first_failure.summary == "rank 0: exit code 1"
    stuck = exits.read_stacks({0: lost / "stacks.txt"})
    assert stuck == "rank 0:\n(no answer: the process is stopped)"


def test_a_worker_that_lost_its_peers_first_is_not_the_cause(tmp_path):
    found = group(tmp_path, [(0, ExitCode.PEER_LOST), (1, 1)])
    # What ends after the first was stopped by the agent, and is no cause either.
    assert found.first_failure.rank == 0
    assert found.state.value == "peer lost"


def test_a_worker_that_lost_its_peers_names_those_that_had_ended(tmp_path):
    found = group(tmp_path, [(1, 0), (2, 0), (0, ExitCode.PEER_LOST)])
    told = "rank 0: a peer is gone; ended with exit code 0: rank 1, 2 (lost its peers)"
    assert found.first_failure.summary == told


@pytest.mark.parametrize(("gpus", "state"), [(True, Workers.PEER_LOST), (False, Workers.FAILED)])
def test_a_worker_that_torchs_watchdog_ends_blames_no_host_that_has_gpus(
    tmp_path, monkeypatch, gpus: bool, state: Workers
) -> None:
    monkeypatch.setattr(exits, "GPU_DEVICE", tmp_path if gpus else tmp_path / "none")
    assert group(tmp_path, [(0, -signal.SIGABRT)]).state is state
    assert group(tmp_path, [(0, -signal.SIGSEGV)]).state is Workers.FAILED
    (tmp_path / "1.json").write_text(json.dumps({"message": "an assertion of the program"}))
    assert group(tmp_path, [(1, -signal.SIGABRT)]).state is Workers.FAILED


WATCHDOG = (
    "[rank0]:[E1124 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process "
    "group watchdog thread terminated with exception: {}\nterminate called after throwing an "
    "instance of 'c10::DistBackendError'\n"
)


@pytest.mark.parametrize(
    ("said", "state", "message"),
    [
        (
            "CUDA error: unspecified launch failure",
            Workers.FAILED,
            "CUDA error: unspecified launch failure",
        ),
        (
            "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\n"
            "Cuda failure 719 'unspecified launch failure'",
            Workers.FAILED,
            "Cuda failure 719 'unspecified launch failure'",
        ),
        ("Watchdog caught collective operation timeout", Workers.PEER_LOST, ""),
        ("NCCL error: remote process exited or there was a network error", Workers.PEER_LOST, ""),
    ],
)
def test_an_error_of_its_own_gpu_that_the_watchdog_prints_blames_the_host(
    tmp_path, monkeypatch, said: str, state: Workers, message: str
) -> None:
    monkeypatch.setattr(exits, "GPU_DEVICE", tmp_path)
    found = group(tmp_path, [(0, -signal.SIGABRT)], WATCHDOG.format(said))
    assert (found.state, found.first_failure.message) == (state, message)


def cause(node: str, revision: int, *, symptom: bool = False) -> Failure:
    return Failure(node=node, symptom=symptom, summary=f"{node} broke", revision=revision)


@pytest.mark.parametrize(
    ("failures", "root"),
    [
        ((cause("a", 9), cause("b", 7)), "b"),
        ((cause("a", 3, symptom=True), cause("b", 7)), "b"),
        ((cause("a", 3, symptom=True), cause("b", 2, symptom=True)), "b"),
    ],
)
def test_the_root_cause_of_a_job_is_by_the_order_of_the_store(failures, root):
    found = leaving.root_cause(Snapshot(SPEC, failures=failures))
    assert found is not None
    assert found.node == root


class Seen:
    """A rendezvous that has read this."""

    node = Node(id="a", incarnation="1", address="a", slots=1)

    def __init__(self, job: Snapshot) -> None:
        self.snapshot = job


@pytest.mark.parametrize(
    ("state", "by", "code"),
    [
        (State.DONE, "finish", AgentExit.OK),
        (State.FAILED, "fail", AgentExit.JOB_FAILED),
        (State.FAILED, "give up", AgentExit.NO_PROGRESS),
        (State.STOPPED, "halt", AgentExit.STOPPED),
        (State.ACTIVE, "activate", AgentExit.DRAINED),
    ],
)
def test_the_exit_code_says_how_it_ended(state, by, code, caplog):
    job = Snapshot(SPEC, state=state, by=by, cause="because", failures=(cause("a", 1),))
    job = replace(job, failures=(replace(job.failures[0], traceback="KeyError: 1"),))
    with caplog.at_level(logging.INFO, "zero"):
        codes = {"left": AgentExit.DRAINED, "stopped": AgentExit.STOPPED}
        assert leaving.log_end("j", Seen(job), Journal("a"), **codes, named=True) == code
    assert ("KeyError: 1" in caplog.text) == (state is State.FAILED)


def test_the_root_cause_is_one_block_with_torchruns_words():
    facts = {"host": "h", "rank": 3, "local_rank": 1, "pid": 77, "status": -9, "error_file": "/e"}
    killed = replace(cause("a", 1), **facts)
    job = Snapshot(SPEC, cause="why", failures=(killed,))
    assert leaving.root_cause_block(job).splitlines()[1:-1] == [
        "Root Cause (first observed failure):",
        "  host      : h",
        "  node      : a",
        "  rank      : 3 (local_rank: 1)",
        "  exitcode  : -9 (pid: 77) (SIGKILL)",
        "  error_file: /e",
        "  traceback : none; a broke",
    ]
    lost = Snapshot(SPEC, cause="node a is lost")
    assert "\n  cause     : node a is lost\n" in leaving.root_cause_block(lost)


@pytest.mark.parametrize(
    ("named", "remedy"), [(True, "give another --rdzv-id"), (False, "type the command again")]
)
def test_who_stopped_a_job_reads_how_to_run_it_again(named, remedy, caplog):
    job = Snapshot(SPEC, state=State.STOPPED, by="halt", cause="enough")
    with caplog.at_level(logging.INFO, "zero"):
        code = leaving.log_end("j", Seen(job), Journal("a"), left=6, stopped=0, named=named)
    assert code == 0, "as --stop-exit-code says"
    assert caplog.messages == [f"job j has been stopped: enough; to run it again, {remedy}"]


def test_an_error_of_an_earlier_run_is_kept_and_not_taken_for_a_new_one(tmp_path):
    for text in ("first", "second"):
        fresh_error_file(tmp_path).write_text(text)
    path = fresh_error_file(tmp_path)
    assert not path.exists()
    assert exits.read_error_file(path) == ("", "", False)
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert kept == {"error.1.json": "first", "error.2.json": "second"}


def test_a_worker_is_told_apart_by_how_it_ended():
    def end(status: int) -> str:
        return Exit(rank=0, status=status, wanted=False, message="", traceback="").summary

    assert end(3) == "rank 0: exit code 3"
    assert end(-9) == "rank 0: killed by SIGKILL"
    assert end(ExitCode.PEER_LOST) == "rank 0: lost its peers"
