"""Nodes come, go and are killed; the weights and the samples do not show it.

Every test ends in the same claim: the final hash is that of a run to which nothing happened,
and the ledger is exactly one pass over the data.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.cluster import (
    LONG_S,
    ROOT,
    SAMPLES,
    STEPS,
    TOGETHER,
    TRAIN,
    descendants,
    final_hash,
    light_imports,
    paced,
    run_alone,
    training,
)
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from zero_agent.node.process_control import children
from zero_contract.exit_codes import AgentExit
from zero_data.ledger import read_ledger, verify
from zero_orchestrator.observe.events import history_key, read_history

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

STUCK_SAVE = ROOT / "tests" / "support" / "stuck_save.py"


def assert_as_if_nothing_had_happened(job, undisturbed_hash):
    job.wait_for_end()
    report = job.report()
    assert report.problems == ()
    assert (report.steps, report.samples) == (STEPS, SAMPLES)
    assert final_hash(job.output) == undisturbed_hash
    assert job.events("world size") == []


@pytest.mark.full
def test_a_killed_worker_costs_one_restart_and_nothing_else(cluster, undisturbed_hash, etcd_store):
    job = cluster(flags=("--nnodes=2", "--max-restarts=1"))
    job.start("a", "b")
    job.wait_for_step(25, world=2)
    os.kill(job.worker_of("b"), signal.SIGKILL)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert [event["text"] for event in job.events("interrupt")] == [
        f"rank {rank}: killed by SIGKILL on node b; restart 1 of 1"
        for rank in (1 if job.events("activate")[0]["nodes"] == ["a", "b"] else 0,)
    ]
    history = read_history(etcd_store.get(history_key(job.job)))
    assert [point.step for point in history.points] == list(range(1, STEPS + 1))
    assert all(point.losses == 1 for point in history.points)
    (restored,) = job.events("restore")
    assert (restored["round"], restored["in_memory"]) == (2, False)
    assert (restored["step"], restored["tag"]) in [(c.step, c.tag) for c in history.checkpoints]


@pytest.mark.full
def test_every_node_is_killed_in_turn_and_comes_back(cluster, undisturbed_hash):
    job = cluster(flags=("--nnodes=1:3", "--max-restarts=5"))
    job.start("a", "b", "c")
    job.wait_for_step(20, world=3)
    job.pace(6 * LONG_S)  # the steps that are left outlast the imports of three nodes
    first, *others = job.events("activate")[-1]["nodes"]
    for victim in (first, *others):
        job.agents[victim].kill_node()
        step = max(step for step, _ in job.last_steps().values())
        job.wait_for_step(step + 1, world=2)
        job.start(victim)
        job.wait_for_step(step + 2, world=3)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert len(job.events("interrupt")) == 3


@pytest.mark.full
def test_a_late_node_joins_at_a_step_boundary_and_no_step_is_repeated(cluster, undisturbed_hash):
    job = cluster(flags=("--nnodes=1:2",))
    job.start("a")
    job.wait_for_step(10, world=1)
    job.pace(LONG_S)
    job.start("b")
    job.wait_for_step(11, world=2)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert job.report().repeated_steps == 0
    assert job.events("interrupt") == []


IMPORTS_WAIT = """
import os, pathlib, sys, time
if "zero_agent.workers.forkserver" in sys.orig_argv:
    go = pathlib.Path(os.environ["GO"])
    go.with_name("waiting").touch()
    while not go.exists():
        time.sleep(0.01)
"""


@pytest.mark.full
def test_training_does_not_stand_still_while_a_late_node_imports(
    cluster, undisturbed_hash, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(IMPORTS_WAIT)
    job = cluster(flags=("--nnodes=1:2",))
    job.start("a")
    job.wait_for_step(10, world=1)
    job.pace(LONG_S)
    job.start("b", PYTHONPATH=str(tmp_path), GO=str(tmp_path / "go"))
    wait_for((tmp_path / "waiting").exists, 60.0, "imports of the second node")
    job.pace(0.1)
    step = max(step for step, _ in job.last_steps().values())
    job.wait_for_step(step + 20, world=1)
    job.pace(LONG_S)
    (tmp_path / "go").touch()
    job.wait_for_step(step + 21, world=2)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert [event["round"] for event in job.events("activate")] == [1, 2]


@pytest.mark.parametrize("receivers", ["its agent", "every process"])
@pytest.mark.full
def test_a_drained_node_leaves_at_a_step_boundary_for_free(cluster, undisturbed_hash, receivers):
    """Slurm and others signal every process of a job: only the agents act on it."""
    job = cluster(flags=("--nnodes=1:2",))
    job.start("a", "b")
    job.wait_for_step(10, world=2)
    agent = job.agents["a"].process
    if receivers == "every process":
        for pid in descendants(agent.pid):
            os.kill(pid, signal.SIGTERM)
    agent.send_signal(signal.SIGTERM)
    assert job.agents.pop("a").wait() == 128 + signal.SIGTERM
    job.wait_for_step(11, world=1)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert job.report().repeated_steps == 0
    assert job.events("interrupt") == []


MEETING = """
import os, pathlib, signal, sys
import torch.distributed as dist
import zero_deepspeed
from zero_comm.worker.agent_link import AgentLink, exit_on_peer_loss
from zero_comm.waiting import transport_failures
if os.environ["ZERO_ROUND"] == "2": sys.exit()
zero_deepspeed.init_distributed()
if dist.get_rank() == 1: signal.pause()
link = AgentLink(rank=0)
pathlib.Path(sys.argv[1], "waits").touch()
with exit_on_peer_loss(link), transport_failures("meeting"): dist.barrier()
"""
"""In round 1 rank 0 can leave at a boundary, and waits for rank 1, which cannot."""


@pytest.mark.full
def test_a_node_is_drained_for_free_also_while_some_workers_cannot_leave_yet(cluster, tmp_path):
    """Those are stopped, and the others lose their peers to that."""
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    flags = ("--nnodes=1:2", "--max-restarts=0", TOGETHER)
    job = cluster(flags=flags, script=[str(script), str(tmp_path)])
    job.start("a", "b")
    wait_for((tmp_path / "waits").exists, 150, "a worker that waits for its peer")
    (began,) = job.events("activate")
    first, second = began["nodes"]
    job.agents[first].process.send_signal(signal.SIGTERM)
    assert job.agents.pop(first).wait() == 128 + signal.SIGTERM
    assert job.agents[second].wait() == 0
    assert "lost its peers" in job.output
    assert job.events("interrupt") == job.events("fail") == []


@pytest.mark.full
def test_a_node_killed_within_an_async_save_and_a_lost_epoch_boundary_show_nowhere(
    cluster, tmp_path
):
    """Four nodes, three over the boundary, four again: 8 micro-batches are no multiple of 3."""
    config = json.loads(TRAIN.with_name("gpt.json").read_text()) | {"checkpoint": {"async": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = (f"--config={tmp_path}/config.json", "--samples=2010", "--epochs=2")
    expected = run_alone(tmp_path / "alone", *more)
    job = cluster(flags=("--nnodes=1:4", "--max-restarts=1"), pause_s=0.1)
    job.script = [str(STUCK_SAVE), *paced(training(tmp_path, *more), tmp_path)]
    job.start("a", "b", "c")
    job.start("d", STUCK_FROM_STEP="20", STUCK_MARKER=str(tmp_path / "stuck"))
    job.wait_for_step(1, world=4)
    wait_for((tmp_path / "stuck").exists, 60.0, "a save that has begun")
    job.agents["d"].kill_node()
    job.wait_for_step(64, world=3)
    job.pace(LONG_S)
    job.start("d")
    job.wait_for_step(65, world=4)
    job.wait_for_end()
    report = verify(read_ledger(tmp_path / "ledger"), 2010)
    assert (report.problems, report.steps, report.samples) == ((), 2 * 63, 2 * 2010)
    assert report.repeated_steps > 0  # that save counts for nothing
    assert final_hash(job.output) == expected


@pytest.mark.full
def test_the_stage_may_differ_from_round_to_round(cluster, undisturbed_hash):
    """Stage 3 first, stage 1 after everything was killed: the same job goes on."""
    job = cluster(flags=("--nnodes=2", "--max-restarts=2"))
    job.script = paced(training(job.directory, "--stage=3"), job.directory)
    job.start("a", "b")
    job.wait_for_step(25, world=2)
    for node in ("a", "b"):
        job.agents[node].kill_node()
    again = cluster(flags=("--nnodes=1",))
    again.script = training(job.directory, "--stage=1")
    again.start("a")
    again.wait_for_end()
    assert final_hash(again.output) == undisturbed_hash


@pytest.mark.full
def test_the_next_round_does_not_wait_for_a_node_that_still_imports(
    cluster, undisturbed_hash, tmp_path
):
    (tmp_path / "gate.py").write_text(
        "import os, pathlib, time\n"
        "while not pathlib.Path(os.environ.get('GATE', '/')).exists(): time.sleep(0.05)\n"
    )
    job = cluster(flags=("--nnodes=2:3", "--max-restarts=1", "--preload=gate"), pause_s=0.2)
    job.start("a", "b", PYTHONPATH=str(tmp_path))
    job.wait_for_step(10, world=2)
    job.agents["b"].kill_node()
    wait_for(lambda: job.events("interrupt"), 150, "the end of the round")
    gate = tmp_path / "open"
    job.start("c", PYTHONPATH=str(tmp_path), GATE=str(gate))
    wait_for(lambda: descendants(job.agents["c"].process.pid), 150, "its imports have begun")
    job.start("b", PYTHONPATH=str(tmp_path))
    wait_for(lambda: len(job.events("activate")) == 2, 150, "the next round")
    job.wait_for_step(25, world=2)
    job.pace(6 * LONG_S)  # the steps that are left outlast the imports of the third node
    gate.touch()
    wait_for(lambda: len(job.events("activate")) == 3, 150, "a round with all three")
    job.pace(0)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    rounds = [sorted(event["nodes"]) for event in job.events("activate")]
    assert rounds == [["a", "b"], ["a", "b"], ["a", "b", "c"]]


@pytest.mark.full
def test_a_node_with_several_workers_trains_to_the_same_bits(cluster, undisturbed_hash):
    job = cluster(flags=("--nnodes=1", "--nproc-per-node=2"))
    job.start("a")
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert set(job.report().world_by_step.values()) == {2}


@pytest.mark.full
def test_nodes_that_add_before_they_send_come_and_go_with_the_same_bits(
    cluster, undisturbed_hash, tmp_path
):
    """With elastic.accumulate "node": two nodes of two workers, then one, then two again."""
    job = cluster(flags=("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=2"))
    config = json.loads((ROOT / "examples" / "gpt.json").read_text())
    config["elastic"] = {"accumulate": "node", "sample_ledger": str(job.directory / "ledger")}
    (tmp_path / "node.json").write_text(json.dumps(config))
    arguments = training(job.directory, f"--config={tmp_path}/node.json")
    without_ledger = [each for each in arguments if not each.startswith("--ledger")]
    job.script = paced(without_ledger, job.directory)
    job.start("a", "b")
    job.wait_for_step(15, world=4)
    job.agents["b"].kill_node()
    step = max(step for step, _ in job.last_steps().values())
    job.wait_for_step(step + 1, world=2)
    job.pace(LONG_S)  # the job is not at its end before the newcomer is there
    job.start("b")
    job.wait_for_step(step + 2, world=4)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert set(job.report().world_by_step.values()) >= {2, 4}


def test_a_job_that_keeps_failing_ends_with_its_budget_on_every_node(cluster, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os\nif os.environ['RANK'] == '0': raise ValueError('no luck')\n"
        "import time; time.sleep(600)\n"
    )
    job = cluster(flags=("--nnodes=2", "--max-restarts=2"), script=[str(script)])
    job.start("a", "b", PYTHONPATH=light_imports(tmp_path)["PYTHONPATH"])
    assert [job.agents[node].wait() for node in "ab"] == [AgentExit.JOB_FAILED] * 2
    assert len(job.events("interrupt")) == 2
    failing, *_ = job.events("activate")[0]["nodes"]
    for node in "ab":
        shown = job.agents[node].output.count("ValueError: no luck\n")
        assert shown == (3 if node == failing else 1), "each where it happened, the last everywhere"
        for cost in ("restart 1 of 2", "restart 2 of 2", "all 2 restarts are spent (--max"):
            assert job.agents[node].output.count(f"; {cost}") == 1, "each failure is said once"


@pytest.mark.full
def test_the_end_of_the_process_with_the_rounds_store_is_a_failure_with_a_name(
    cluster, undisturbed_hash
):
    """Training would go on without it, up to a save that cannot end."""
    job = cluster(flags=("--nnodes=2", "--max-restarts=1"))
    job.start("a", "b")
    job.wait_for_step(5, world=2)
    host = job.events("activate")[0]["nodes"][0]
    (forkserver,) = children(job.agents[host].process.pid)
    (store,) = set(children(forkserver)) - {job.worker_of(host)}
    os.kill(store, signal.SIGKILL)
    assert_as_if_nothing_had_happened(job, undisturbed_hash)
    assert [event["text"] for event in job.events("interrupt")] == [
        "rank 0: the process with the round's TCPStore ended (killed by SIGKILL) "
        f"on node {host}; restart 1 of 1"
    ]


@pytest.mark.full
def test_a_job_whose_checkpoints_are_not_mounted_in_a_later_round_does_not_begin_anew(
    cluster, tmp_path
):
    job = cluster(flags=("--nnodes=1", "--max-restarts=1"), pause_s=LONG_S)
    job.start("a")
    job.wait_for_step(22, world=1)
    storage = tmp_path / "checkpoints"
    storage.rename(tmp_path / "away")
    os.kill(job.worker_of("a"), signal.SIGKILL)
    assert job.agents["a"].wait() == AgentExit.JOB_FAILED
    assert f"{storage} has no checkpoint any more, and this job has published one" in job.output
    assert (storage.exists(), job.last_steps().keys()) == (False, {(1, 0)})


@pytest.mark.full
def test_a_parent_of_workers_that_stands_still_is_replaced(cluster, tmp_path):
    """It cannot kill its workers, and all other nodes wait for that."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, pathlib, sys, time\nhere = pathlib.Path(sys.argv[1])\n"
        '(here / f\'began.{os.environ["ZERO_ROUND"]}.{os.environ["RANK"]}\').touch()\n'
        "while not (here / 'began.2.1').exists(): time.sleep(0.01)\n"
    )
    job = cluster(flags=("--nnodes=2", "--max-restarts=1"), script=[str(script), str(tmp_path)])
    job.start("a", "b")
    wait_for(lambda: len(list(tmp_path.glob("began.1.*"))) == 2, 150, "the workers of round 1")
    (forkserver,) = children(job.agents["a"].process.pid)
    suspend(forkserver)
    os.kill(job.worker_of("b"), signal.SIGKILL)
    job.wait_for_end()
    killed, gone = job.events("forkserver")
    assert killed["node"] == gone["node"] == "a"
    assert "has not answered for 10 s" in killed["text"]
    assert len(job.events("interrupt")) == 1
