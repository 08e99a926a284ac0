"""Nodes join and leave, workers are lost, and those of the others stay in their processes.

Every test ends in the same claim as those of `test_elastic`: the hash is that of a run to which
nothing happened, and the ledger is exactly one pass over the data.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    LONG_S,
    ROOT,
    SAMPLES,
    STEPS,
    TOGETHER,
    Cluster,
    descendants,
    final_hash,
    kill_all,
    paced,
    training,
)
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from zero_contract.exit_codes import AgentExit

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.full]


THEN = """
import runpy, sys
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def staying(cluster: Callable[..., Cluster], tmp_path: Path) -> Callable[..., Cluster]:
    """A job whose workers stay where they can."""

    def made(*flags: str, first: str = "", **more: Any) -> Cluster:
        """`first` is what a worker does before its script."""
        settings = json.loads((ROOT / "examples" / "gpt.json").read_text())
        settings.setdefault("elastic", {})["in_place"] = True
        (tmp_path / "config.json").write_text(json.dumps(settings | more))
        script = paced(training(tmp_path, f"--config={tmp_path}/config.json"), tmp_path)
        if first:
            (tmp_path / "first.py").write_text(first + THEN)
            script = [f"{tmp_path}/first.py", *script]
        return cluster(flags=flags, script=script)

    return made


def assert_as_if_nothing_had_happened(
    job: Cluster, undisturbed_hash: str, interrupts: int = 0
) -> None:
    job.wait_for_end()
    report = job.report()
    assert report.problems == ()
    assert (report.steps, report.samples) == (STEPS, SAMPLES)
    assert report.repeated_steps == 0
    assert final_hash(job.output) == undisturbed_hash
    assert len(job.events("interrupt")) == interrupts


def stays(job: Cluster) -> list[tuple[int, str, int]]:
    """Of each start: its round, the node, and how many workers stay in their processes."""
    return sorted((e["round"], e["node"], e["stay"]) for e in job.events("start"))


def test_a_node_joins_and_leaves_and_the_other_keeps_its_process(staying, undisturbed_hash):
    job = staying("--nnodes=1:2")
    job.start("a")
    job.wait_for_step(10, world=1)
    pid = job.worker_of("a")
    job.pace(LONG_S)
    job.start("b")
    job.wait_for_step(11, world=2)
    job.agents["b"].process.send_signal(signal.SIGTERM)
    assert job.agents.pop("b").wait() == 128 + signal.SIGTERM
    job.wait_for_step(12, world=1)
    assert job.worker_of("a") == pid
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job) == [(1, "a", 0), (2, "a", 1), (2, "b", 0), (3, "a", 1)]


def test_a_worker_whose_rank_changes_keeps_its_process(staying, undisturbed_hash):
    job = staying("--nnodes=1:2")
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    first, other = job.events("activate")[-1]["nodes"]
    pid = job.worker_of(other)
    job.pace(LONG_S)
    job.agents[first].process.send_signal(signal.SIGTERM)
    assert job.agents.pop(first).wait() == 128 + signal.SIGTERM
    job.wait_for_step(11, world=1)
    assert job.worker_of(other) == pid
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job)[-1][1:] == (other, 1)


WAITS = """
import os, signal
from pathlib import Path
import torch.distributed as dist
held = Path(os.environ.get("HELD", "nowhere"))
begin = dist.init_process_group


def pauses(*args, **options):
    if held.exists():  # the first worker alone, when it has its round
        held.unlink()
        signal.pause()
    return begin(*args, **options)


dist.init_process_group = pauses
"""


@pytest.mark.parametrize("killed", ["worker", "node"])
def test_a_newcomer_that_dies_while_it_joins_costs_a_restart_and_nothing_else(
    staying, undisturbed_hash, tmp_path, killed
):
    job = staying("--nnodes=1:2", "--max-restarts=1", first=WAITS)
    job.start("a")
    job.wait_for_step(10, world=1)
    pid = job.worker_of("a")
    job.pace(LONG_S)
    held = tmp_path / "held"
    held.touch()
    job.start("b", HELD=str(held))
    wait_for(lambda: not held.exists(), 60, "a newcomer has begun")
    wait_for(lambda: len(stays(job)) == 3, 60, "the other node is in its round")
    if killed == "worker":
        os.kill(job.worker_of("b"), signal.SIGKILL)
    else:
        job.agents.pop("b").kill_node()
    wait_for(lambda: job.worker_of("a") != pid, 60, "the survivor is started anew")
    assert_as_if_nothing_had_happened(job, undisturbed_hash, interrupts=1)
    assert stays(job)[:3] == [(1, "a", 0), (2, "a", 1), (2, "b", 0)]
    assert {stay for _, _, stay in stays(job)[3:]} == {0}


# ---- newcomers warm up while the others train ----

START_UP_S = 6.0
STARTS_UP = """
import os, signal, time
from pathlib import Path
time.sleep(float(os.environ.get("START_UP_S", "0")))
told = Path(os.environ.get("TOLD", "nowhere"))
if told.exists():
    fate = told.read_text()
    told.unlink()
    if fate == "waits": signal.pause()
    if fate == "is killed": os.kill(os.getpid(), signal.SIGKILL)
    if fate == "makes a group":
        import torch.distributed as dist
        dist.init_process_group("gloo")
"""


def assert_nobody_stood_still(job: Cluster, n: int, newcomer: str) -> None:
    """Round n begins with a newcomer: the others were asked to leave when it had warmed up."""
    began, ended = [e["time"] for e in job.events("warm up") if e["node"] == newcomer][-2:]
    asked = next(e["time"] for e in job.events("yield") if e["round"] == n - 1)
    begins = next(e["time"] for e in job.events("activate") if e["round"] == n)
    assert began + START_UP_S <= ended < asked
    assert begins - asked < START_UP_S / 2


def test_a_node_with_a_long_start_up_joins_and_the_others_train_meanwhile(
    staying, undisturbed_hash
):
    job = staying("--nnodes=1:2", first=STARTS_UP)
    job.start("a")
    job.wait_for_step(10, world=1)
    pid = job.worker_of("a")
    job.pace(LONG_S)
    job.start("b", START_UP_S=str(START_UP_S))
    job.wait_for_step(11, world=2)
    assert job.worker_of("a") == pid
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job) == [(1, "a", 0), (2, "a", 1), (2, "b", 0)]
    assert_nobody_stood_still(job, 2, "b")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_warms_up_again_and_the_others_train_meanwhile(
    staying, undisturbed_hash, victim
):
    flags = ("--nnodes=1:2", "--max-restarts=1", TOGETHER)
    job = staying(*flags, first=STARTS_UP, checkpoint={"ram": {}})
    job.start("a", "b", START_UP_S=str(START_UP_S))
    job.wait_for_step(10, world=2)
    nodes = job.events("activate")[-1]["nodes"]
    killed, other = nodes[victim], nodes[1 - victim]
    pid = job.worker_of(other)
    job.pace(LONG_S)
    os.kill(job.worker_of(killed), signal.SIGKILL)
    job.wait_for_step(12, world=1)
    job.wait_for_step(14, world=2)
    assert job.worker_of(other) == pid
    assert_the_result_is(job, undisturbed_hash)
    assert [stay for _, node, stay in stays(job) if node == other] == [0, 1, 1]
    assert len(job.events("interrupt")) == 1
    assert_nobody_stood_still(job, 3, killed)


EXCHANGES_BETWEEN_STEPS = """
import torch
import torch.distributed as dist
from zero_engine.core.engine import Engine

step = Engine.step


def step_and_count(engine, *args):
    step(engine, *args)
    dist.all_reduce(torch.ones(1))


Engine.step = step_and_count
"""


def test_a_script_that_cannot_stay_restarts_once_and_with_the_killed_worker(
    staying, undisturbed_hash
):
    """The others would gain nothing by going on before it has warmed up, and restart twice."""
    flags = ("--nnodes=1:2", "--max-restarts=1", TOGETHER)
    job = staying(*flags, first=EXCHANGES_BETWEEN_STEPS, checkpoint={"ram": {}})
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    os.kill(job.worker_of("b"), signal.SIGKILL)
    assert_the_result_is(job, undisturbed_hash)
    assert stays(job) == [(1, "a", 0), (1, "b", 0), (2, "a", 0), (2, "b", 0)]


@pytest.mark.parametrize("fate", ["is killed", "makes a group"])
def test_a_newcomer_that_dies_while_it_warms_up_costs_nobody_anything(
    staying, undisturbed_hash, tmp_path, fate
):
    """One that is killed warms up again; a script that cannot warm up joins as without this."""
    told = tmp_path / "told"
    told.write_text(fate)
    job = staying("--nnodes=1:2", "--max-restarts=0", first=STARTS_UP)
    job.start("a")
    job.wait_for_step(10, world=1)
    pid = job.worker_of("a")
    job.pace(LONG_S)
    job.start("b", TOLD=str(told))
    job.wait_for_step(11, world=2)
    assert job.worker_of("a") == pid
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job) == [(1, "a", 0), (2, "a", 1), (2, "b", 0)]
    warm_ups = [event["text"] for event in job.events("warm up")]
    why = "killed by SIGKILL" if fate == "is killed" else "MASTER_ADDR"
    assert why in warm_ups[1]
    assert len(warm_ups) == (4 if fate == "is killed" else 2)


def test_a_newcomer_that_never_comes_to_its_engine_is_named_and_leaves(
    staying, undisturbed_hash, tmp_path
):
    told = tmp_path / "told"
    told.write_text("waits")
    job = staying("--nnodes=1:2", "--join-timeout=20", first=STARTS_UP)
    job.start("a")
    job.wait_for_step(10, world=1)
    job.pace(2 * LONG_S)
    job.start("b", TOLD=str(told))
    newcomer = job.agents.pop("b")
    assert newcomer.wait() == AgentExit.UNHEALTHY
    assert "workers of node b have not come to their engine within 20 s" in newcomer.output
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job) == [(1, "a", 0)]


def test_a_spare_whose_script_cannot_warm_up_stays_a_spare(staying, undisturbed_hash, tmp_path):
    told = tmp_path / "told"
    told.write_text("makes a group")
    job = staying("--nnodes=1:1", "--join-timeout=5", first=STARTS_UP)
    job.start("a")
    job.wait_for_step(10, world=1)
    job.pace(2 * LONG_S)
    job.start("b", TOLD=str(told))
    wait_for(lambda: "spare: b" in job.agents["b"].output, 60, "a spare that has not warmed up")
    ((step, _),) = job.last_steps().values()
    job.wait_for_step(step + 8, world=1)  # longer than --join-timeout
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job) == [(1, "a", 0)]


HAS_A_GROUP = """
import os
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook


def make_group(*_):
    hook.remove()
    dist.new_group([dist.get_rank()], use_local_synchronization=True)


if os.environ["LOCAL_RANK"] == "{}" and os.environ["ZERO_ROUND"] == "1":
    hook = register_module_forward_hook(make_group)
"""


@pytest.mark.parametrize("leaver", [0, 1])
def test_of_two_workers_of_a_node_one_stays_and_one_is_started_anew(
    staying, undisturbed_hash, leaver
):
    job = staying("--nnodes=1:2", "--nproc-per-node=2", first=HAS_A_GROUP.format(leaver))
    job.start("a")
    job.wait_for_step(10, world=2)
    job.pace(LONG_S)
    job.start("b")
    job.wait_for_step(11, world=4)
    job.agents["b"].process.send_signal(signal.SIGTERM)
    assert job.agents.pop("b").wait() == 128 + signal.SIGTERM
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert stays(job) == [(1, "a", 0), (2, "a", 1), (2, "b", 0), (3, "a", 2)]
    of_a = [event["rank"] for event in job.events("worker") if event["node"] == "a"]
    assert sorted(of_a) == sorted([0, 1, leaver])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_and_the_other_keeps_its_process(staying, undisturbed_hash, victim):
    job = staying("--nnodes=2", "--max-restarts=1", TOGETHER, checkpoint={"ram": {}})
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    nodes = job.events("activate")[-1]["nodes"]
    killed, other = nodes[victim], nodes[1 - victim]
    pid = job.worker_of(other)
    os.kill(job.worker_of(killed), signal.SIGKILL)
    job.wait_for_step(14, world=2)
    assert job.worker_of(other) == pid
    assert_the_result_is(job, undisturbed_hash)
    assert stays(job) == sorted([(1, "a", 0), (1, "b", 0), (2, killed, 0), (2, other, 1)])


HANGS = """
import os, pathlib, threading, time
from torch.nn.modules.module import register_module_forward_hook
mark = pathlib.Path("{}")


def hang(*_):
    if os.environ["ZERO_NODE"] == "b" and mark.exists():
        mark.unlink()
        time.sleep(600)


register_module_forward_hook(hang)
"""


@pytest.mark.parametrize("how", ["in its script", "suspended"])
def test_a_worker_hangs_and_the_one_that_waits_for_it_keeps_its_process(
    staying, undisturbed_hash, tmp_path, how
):
    mark = tmp_path / "hangs"
    flags = ("--nnodes=2", "--max-restarts=1", "--hang-timeout=4", TOGETHER)
    job = staying(*flags, first=HANGS.format(mark), checkpoint={"ram": {}})
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    pid, hung = job.worker_of("a"), job.worker_of("b")
    mark.touch() if how == "in its script" else suspend(hung)
    wait_for(lambda: job.worker_of("b") != hung, 60, "the worker is started anew")
    job.wait_for_step(14, world=2)
    assert job.worker_of("a") == pid
    assert_the_result_is(job, undisturbed_hash)
    (hang,) = job.events("hang")
    assert (hang["node"], hang["pid"]) == ("b", hung)
    why = "it waits for no other rank" if how == "in its script" else "it does not answer"
    assert hang["text"].endswith(why)
    assert len(job.events("interrupt")) == 1


@pytest.mark.parametrize(
    ("fate", "lost_rank"), [("killed", 0), ("killed", 1), ("suspended", 0), ("suspended", 1)]
)
def test_a_node_is_lost_and_comes_back_and_the_other_keeps_its_process(
    staying, undisturbed_hash, fate, lost_rank
):
    """One that is suspended closes no connection: the agent of the other ends its wait."""
    job = staying("--nnodes=1:2", "--max-restarts=1", TOGETHER, checkpoint={"ram": {}})
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    nodes = job.events("activate")[-1]["nodes"]
    lost, other = nodes[lost_rank], nodes[1 - lost_rank]
    pid = job.worker_of(other)
    node = job.agents.pop(lost)
    processes = [node.process.pid, *descendants(node.process.pid)]
    for each in processes if fate == "suspended" else []:
        os.kill(each, signal.SIGSTOP)
    if fate == "killed":
        node.kill_node()
    job.wait_for_step(12, world=1)
    if fate == "suspended":
        kill_all(processes)
    job.pace(LONG_S)
    job.start(lost)
    job.wait_for_step(16, world=2)
    assert job.worker_of(other) == pid
    assert_the_result_is(job, undisturbed_hash)
    assert [stay for _, node, stay in stays(job) if node == other] == [0, 1, 1]


def assert_the_result_is(job: Cluster, undisturbed_hash: str) -> None:
    job.wait_for_end()
    report = job.report()
    assert (report.problems, report.steps, report.samples) == ((), STEPS, SAMPLES)
    assert final_hash(job.output) == undisturbed_hash
