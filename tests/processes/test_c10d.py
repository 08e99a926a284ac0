"""torchrun's elastic command, `--rdzv-backend=c10d --rdzv-endpoint=HOST[:PORT]`, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.cluster import COLD, AgentProcess, agent, environment, printed_by_all
from tests.support.partition import network
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.store.join_token import ENV_JOIN_TOKEN

pytestmark = pytest.mark.processes

SAYS = """
import os, pathlib, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print("rank", rank, "of", world, flush=True)
for wanted in sys.argv[1:]:
    while not pathlib.Path(wanted).exists():
        time.sleep(0.05)
"""
C10D = ("--rdzv-backend=c10d", "--logs-specs=default", "--rdzv-id=c10d", COLD)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "says.py"
    path.write_text(SAYS)
    return str(path)


@pytest.fixture
def at_home(tmp_path: Path) -> dict[str, str]:
    """An environment whose state directory is the test's, as another user's is."""
    return {**environment(), "XDG_STATE_HOME": str(tmp_path / "state")}


def begin(
    environ: Mapping[str, str], *command: str, before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "zero_agent", *command],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_two_agents_of_a_machine_meet_at_the_endpoint_again_and_again(script, at_home):
    """As under torchrun, the same --rdzv-id may be used again once its job has ended.

    And how it has ended can be asked after its store has gone with it.
    """
    where = f"--rdzv-endpoint=localhost:{free_port()}"
    flags = ("--nnodes=2", where, *C10D, script)
    for _ in range(2):
        lines = printed_by_all([begin(at_home, *flags) for _ in range(2)])
        assert sorted(lines) == [["rank 0 of 2"], ["rank 1 of 2"]]
    assert list(Path(at_home["XDG_STATE_HOME"]).glob("*/store-*/data")) == []
    asked = subprocess.run(
        [sys.executable, "-m", "zero_orchestrator", "status", "--json", "c10d", where],
        env=at_home,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(asked.stdout)["state"] == "DONE"
    assert "etcd does not answer" in asked.stderr


@pytest.mark.parametrize("where", ["localhost:0", "127.0.0.1:0"])
@pytest.mark.corners(where=["localhost:0"])
def test_port_0_is_a_free_port_for_a_job_of_one_node(script, at_home, where):
    done = agent(
        "--nnodes=1", "--nproc-per-node=2", f"--rdzv-endpoint={where}", *C10D, script, env=at_home
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"]


@pytest.mark.full
def test_an_elastic_job_begins_with_one_node_and_takes_the_next(script, at_home, tmp_path):
    flags = ("--nnodes=1:2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", *C10D)
    first = started(at_home, tmp_path, "a", *flags, script, str(tmp_path / "end"))
    wait_for(lambda: "rank 0 of 1" in first.output, 60, "the first round")
    second = started(at_home, tmp_path, "b", *flags, script, str(tmp_path / "end"))
    wait_for(lambda: "rank 1 of 2" in second.output, 60, "the second round")
    (tmp_path / "end").touch()
    assert (first.wait(), second.wait()) == (0, 0)


@pytest.mark.full
def test_an_agent_of_the_endpoints_host_that_is_killed_and_started_again_serves_the_same_job(
    script, at_home, tmp_path
):
    flags = ("--nnodes=1:2", "--max-restarts=3", f"--rdzv-endpoint=127.0.0.1:{free_port()}", *C10D)
    flags = (*flags, "--rdzv-conf=last_call_timeout=60", script, str(tmp_path / "end"))
    first = started(at_home, tmp_path, "a", *flags)
    second = started(at_home, tmp_path, "b", *flags)
    wait_for(lambda: "of 2" in first.output and "of 2" in second.output, 60, "the first round")
    serves = next(one for one in (first, second) if "the job's etcd" in one.output)
    other = second if serves is first else first
    serves.kill_node()
    again = started(at_home, tmp_path, "c", *flags)
    wait_for(lambda: "of 2" in again.output, 90, "a round with both")
    (tmp_path / "end").touch()
    assert (again.wait(), other.wait()) == (0, 0)
    assert "round 2" in other.output, "the same job goes on"


@pytest.mark.full
def test_an_endpoint_that_nobody_serves_is_named_with_what_to_do(at_home):
    where = "--rdzv-endpoint=192.0.2.1:29400"
    done = agent("--nnodes=2", "--join-timeout=1", where, *C10D, "--no-python", "true", env=at_home)
    assert done.returncode == AgentExit.NO_STORE
    assert "no zero-agent serves the job's etcd there; start one on that host" in done.stderr


def test_another_program_at_the_endpoint_is_an_error(at_home):
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "--bind=127.0.0.1", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as taken:
        port = taken.stdout.readline().split(" port ")[1].split()[0]
        where = f"--rdzv-endpoint=127.0.0.1:{port}"
        done = agent("--nnodes=2", where, *C10D, "--no-python", "true", env=at_home)
        taken.kill()
    assert done.returncode == AgentExit.USAGE
    assert "a program listens there that does not answer as etcd does" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("late", ["a", "b"])
@pytest.mark.parametrize("host", ["10.77.0.1", "head"])
def test_two_hosts_meet_at_the_first_whichever_comes_first(script, at_home, tmp_path, host, late):
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n10.77.0.1 head\n")
    see = f'mount --bind {names} /etc/hosts && exec "$@"'
    in_view = ("unshare", "--mount", "sh", "-c", see, "-")
    flags = ("--nnodes=2", f"--rdzv-endpoint={host}", *C10D, script)
    with network("a", "b") as machines:
        agents = []
        for name in sorted("ab", key=lambda each: each == late):
            with machines.inside(name):
                environ = {**at_home, ENV_JOIN_TOKEN: "0123456789abcdef0123456789abcdef"}
                environ["XDG_STATE_HOME"] += name
                agents.append(begin(environ, *flags, before=in_view))
        assert sorted(printed_by_all(agents)) == [["rank 0 of 2"], ["rank 1 of 2"]]


@pytest.mark.full
def test_the_first_host_is_lost_then_another_leaves_and_the_job_ends_well(
    script, at_home, tmp_path
):
    """Agents with workers: the store outlives the host that it began on, and ends with the job."""
    flags = ("--nnodes=1:4", "--max-restarts=3", "--rdzv-endpoint=10.77.0.1", *C10D)
    flags = (*flags, "--rdzv-conf=last_call_timeout=60", script, str(tmp_path / "end"))
    with network(*"abcd") as machines:
        agents = {}
        for name in "abcd":
            state = {"XDG_STATE_HOME": f"{at_home['XDG_STATE_HOME']}-{name}"}
            with machines.inside(name):
                environ = {**at_home, **state, ENV_JOIN_TOKEN: "0123456789abcdef" * 2}
                agents[name] = started(environ, tmp_path, name, *flags)
        said = lambda text: sum(agents[name].output.count(text) for name in agents)  # noqa: E731
        # What workers print: the agents log the same words, with more before them.
        ranks = lambda world: sum(said(f"\nrank {n} of {world}\n") for n in range(world))  # noqa: E731
        try:
            wait_for(lambda: ranks(4) == 4, 150, "the first round")
            wait_for(lambda: said(":29400, ") >= 2, 90, "three members")
            agents.pop("a").kill_node()
            wait_for(lambda: ranks(3) == 3, 90, "a round without the first host")
            wait_for(lambda: said("node a is lost") == 1, 90, "the first host has no member")
            wait_for(lambda: said("has caught up") >= 2, 90, "another node has its member")
            leaves = agents.pop("b")
            leaves.process.terminate()
            assert leaves.wait() == 128 + 15, leaves.output
            wait_for(lambda: ranks(2) == 2, 90, "a round of two nodes")
            (tmp_path / "end").touch()
            assert [each.wait() for each in agents.values()] == [0, 0], said
        finally:
            for each in agents.values():
                each.kill_node()
    assert not list(tmp_path.glob("state-[cd]/*/store-*/data"))


def started(environ: Mapping[str, str], directory: Path, name: str, *words: str) -> AgentProcess:
    log = directory / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "zero_agent", f"--node-id={name}", *words],
            stdout=file,
            stderr=file,
            env=environ,
            start_new_session=True,
        )
    return AgentProcess(process, log)
