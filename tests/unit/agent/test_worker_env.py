"""The environment of a worker, as scripts written for torchrun expect it."""

from __future__ import annotations

import dataclasses

import pytest

from zero_agent.workers.environment import forkserver_env, own_device, places, worker_env
from zero_orchestrator.errors import SpecError
from zero_orchestrator.membership.job_state import Members, Node, Snapshot, State
from zero_orchestrator.membership.spec import JobSpec

NODES = tuple(
    Node(id=name, incarnation="1", address=name, slots=slots, role=role)
    for name, slots, role in [("a", 1, "ps"), ("b", 2, "trainer"), ("c", 3, "ps"), ("d", 1, "ps")]
)
JOB = Snapshot(
    spec=JobSpec(min_nodes=1, max_nodes=4, max_restarts=5),
    n=7,
    state=State.ACTIVE,
    fence=42,
    nodes=NODES,
    members=Members(NODES, restarts=2),
    master="10.0.0.1:4711",
)


FILES = {"socket_path": "/s", "error_file": "/e", "heartbeat_file": "/h", "leave_file": "/l"}
SECRET = "of the job"


def environments(index: int) -> list[dict[str, str]]:
    node = NODES[index]
    return [
        worker_env(JOB, node, place, name="job", secret=SECRET, **FILES)
        for place in places(JOB, node)
    ]


def test_ranks_are_contiguous_on_a_node_and_role_ranks_within_a_role():
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    found = [tuple(env[name] for name in names) for i in range(4) for env in environments(i)]
    assert found == [
        ("0", "0", "0", "ps", "0", "5"),
        ("1", "0", "1", "trainer", "0", "2"),
        ("2", "1", "1", "trainer", "1", "2"),
        ("3", "0", "2", "ps", "1", "5"),
        ("4", "1", "2", "ps", "2", "5"),
        ("5", "2", "2", "ps", "3", "5"),
        ("6", "0", "3", "ps", "4", "5"),
    ]


def test_every_worker_of_a_round_reads_the_same_restart_count():
    counts = {env["TORCHELASTIC_RESTART_COUNT"] for i in range(4) for env in environments(i)}
    assert counts == {"2"}


def test_a_worker_finds_every_variable_of_torchrun():
    found = environments(2)[1]
    assert len(found.pop("ZERO_VOTE_KEY")) == 64
    assert len(found.pop("ZERO_RUN")) == 16
    assert found == {
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_NAME": "ps",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "5",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/e",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "ZERO_JOB": "job",
        "ZERO_NODE": "c",
        "ZERO_ROUND": "7",
        "ZERO_FENCE": "42",
        "ZERO_STORE": "",
        "ZERO_COMMITTED_STEP": "0",
        "ZERO_COMMITTED_ROOT": "",
        "ZERO_AGENT_SOCKET": "/s",
        "ZERO_HEARTBEAT_FILE": "/h",
        "ZERO_LEAVE_FILE": "/l",
    }


def test_a_worker_that_warms_up_has_the_ranks_of_a_last_node_and_cannot_make_a_group():
    newcomer = dataclasses.replace(NODES[0], id="new", slots=2)
    warm = dataclasses.replace(JOB, master=None).warming_up(newcomer)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ZERO_ROUND", "MASTER_ADDR", "MASTER_PORT")
    found = [
        worker_env(warm, newcomer, place, name="job", secret=SECRET, **FILES)
        for place in places(warm, newcomer)
    ]
    assert [tuple(env[name] for name in names) for env in found] == [
        ("7", "0", "9", "0", "", ""),
        ("8", "1", "9", "0", "", ""),
    ]


def test_the_ranks_of_a_round_and_no_others_have_its_key():
    keys = {env["ZERO_VOTE_KEY"] for i in range(4) for env in environments(i)}
    next_round = dataclasses.replace(JOB, n=8)
    (later,) = places(next_round, NODES[0])
    other = worker_env(next_round, NODES[0], later, name="job", secret=SECRET, **FILES)
    assert len(keys) == 1
    assert not keys & {other["ZERO_VOTE_KEY"], SECRET}


def test_a_job_is_one_run_in_all_of_its_rounds():
    next_round = dataclasses.replace(JOB, n=8)
    (later,) = places(next_round, NODES[0])
    other = worker_env(next_round, NODES[0], later, name="job", secret=SECRET, **FILES)
    assert {env["ZERO_RUN"] for i in range(4) for env in environments(i)} == {other["ZERO_RUN"]}


def test_several_workers_get_one_thread_each_unless_told_otherwise():
    assert forkserver_env({}, 2, None)["OMP_NUM_THREADS"] == "1"
    assert forkserver_env({"OMP_NUM_THREADS": "4"}, 2, None)["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in forkserver_env({}, 1, None)


def test_a_set_has_one_order_on_all_ranks_and_a_lost_peer_no_cpp_stack_unless_told_otherwise():
    assert forkserver_env({}, 1, None) == {"PYTHONHASHSEED": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    wanted = {"PYTHONHASHSEED": "random", "TORCH_CPP_LOG_LEVEL": "INFO"}
    assert forkserver_env(wanted, 1, None) == wanted


def test_a_worker_with_a_virtual_local_rank_sees_its_own_device_alone():
    assert own_device({}, 2) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "2"}
    shown = {"CUDA_VISIBLE_DEVICES": "5,GPU-7"}
    assert own_device(shown, 1)["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    with pytest.raises(SpecError, match="CUDA_VISIBLE_DEVICES=5,GPU-7 has no device for local"):
        own_device(shown, 2)
