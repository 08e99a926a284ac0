"""The metrics of a job and of a node, as Prometheus reads them."""

from dataclasses import replace

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.written_job import Job
from zero_agent.loop.observed.metrics import NODE_METRICS, Readings, of_node
from zero_agent.node.health_endpoint import STARTING
from zero_agent.node.state import Workers
from zero_agent.workers.step_times import Spent, StepTimes
from zero_contract.worker import Progress, Restored, Saved
from zero_orchestrator.ctl import cli
from zero_orchestrator.ctl.views import TableView
from zero_orchestrator.errors import SpecError
from zero_orchestrator.observe.events import MemoryUse
from zero_orchestrator.observe.goodput import Use
from zero_orchestrator.observe.history import Saved as Checkpoint
from zero_orchestrator.observe.metrics import JOB as JOB_LABEL
from zero_orchestrator.observe.metrics import JOB_METRICS, exposition, of_jobs
from zero_orchestrator.observe.pace import Histogram, Quantiles, Speed
from zero_orchestrator.observe.status import Condition, JobStatus, NodeRow
from zero_orchestrator.observe.verdicts import Kind, Verdict

NODE = NodeRow(
    node="a", condition=Condition.RUNNING, alive=True, first_rank=0, slots=2, address="host", step=7
)
JOB = JobStatus(
    job="gpt",
    state="ACTIVE",
    now="",
    round=3,
    world_size=2,
    members=(NODE,),
    restarts=1,
    max_restarts=3,
    checkpoint={"step": 5, "samples": 40, "tag": "t", "time": 1.5},
    goodput=0.75,
    time_ns={"useful_steps": 3 * 10**9, "idle": 10**9},
)


SAVED = Saved(
    step=2,
    committed=True,
    size_bytes=8,
    stall_s=0.375,
    write_s=0.25,
    publish_s=0.125,
    total_s=0.5,
)


def read(text: bytes) -> dict[str, float]:
    """`name job label ...` -> value."""
    found = {}
    for metric in text_string_to_metric_families(text.decode()):
        for sample in metric.samples:
            labels = [value for name, value in sample.labels.items() if name != JOB_LABEL]
            found[" ".join([sample.name, sample.labels[JOB_LABEL], *labels])] = sample.value
    return found


def test_the_metrics_of_a_job_are_what_its_status_shows():
    found = read(exposition(lambda: of_jobs([JOB])))
    assert found["zero_job_state gpt ACTIVE"] == 1
    assert found["zero_job_state gpt FORMING"] == 0
    assert found["zero_job_rounds_total gpt"] == 3
    assert found["zero_job_restarts_total gpt"] == 1
    assert found["zero_job_restart_budget gpt"] == 3
    assert found["zero_job_step gpt a"] == 7
    assert found["zero_job_checkpoint_timestamp_seconds gpt disk"] == 1.5
    assert found["zero_job_goodput_ratio gpt"] == 0.75
    times = {use: found[f"zero_job_node_time_seconds gpt {use}"] for use in Use}
    assert (sum(times.values()), times[Use.USEFUL], times[Use.SAVING]) == (4, 3, 0)


def test_the_metrics_of_a_job_have_its_tokens_and_how_long_its_steps_take():
    each = Quantiles(count=9, p50_s=0.5, p90_s=0.6, p99_s=0.7)
    job = replace(
        JOB,
        members=(replace(NODE, ranks={"3": each}),),
        step_times=each,
        tokens=900,
        speed=Speed(steps=2.0, tokens=600.0),
        kept=7,
    )
    found = read(exposition(lambda: of_jobs([job])))
    assert found["zero_job_tokens gpt"] == 900
    assert found["zero_job_tokens_per_second gpt"] == 600
    assert found["zero_job_step_duration_seconds gpt 0.9"] == 0.6
    assert found["zero_job_rank_step_duration_seconds gpt a 0.99 3"] == 0.7
    assert found["zero_job_published_checkpoints_total gpt memory"] == 7
    assert "zero_job_samples_per_second gpt" not in found


def test_the_metrics_of_a_job_count_the_verdicts_of_each_kind():
    slow = Verdict(kind=Kind.SLOW_LINK, text="the link from a to b is slow")
    found = read(exposition(lambda: of_jobs([replace(JOB, verdicts=(slow, slow))])))
    assert found["zero_job_verdicts gpt slow link"] == 2
    counts = {kind: found[f"zero_job_verdicts gpt {kind}"] for kind in Kind}
    assert counts == {**dict.fromkeys(Kind, 0), Kind.SLOW_LINK: 2}


def test_the_metrics_of_a_job_have_what_its_last_saves_took_on_disk_and_in_memory():
    ended = Checkpoint(
        step=5, tag="t", time_s=1.5, samples=40, digest="d", size_bytes=64, stall_s=0.5, write_s=2
    )
    job = replace(JOB, last_save=ended, last_save_in_memory=replace(ended, stall_s=0.125))
    found = read(exposition(lambda: of_jobs([job])))
    assert found["zero_job_last_save_stall_seconds gpt disk"] == 0.5
    assert found["zero_job_last_save_stall_seconds gpt memory"] == 0.125
    assert found["zero_job_last_save_size_bytes gpt memory"] == 64
    assert found["zero_job_last_save_write_seconds gpt memory"] == 2
    assert found["zero_job_last_save_publish_seconds gpt memory"] == 0


def test_a_metric_that_is_not_known_is_left_out():
    bare = replace(JOB, checkpoint=None, goodput=None, time_ns={}, members=())
    names = {name.split()[0] for name in read(exposition(lambda: of_jobs([bare])))}
    assert names.isdisjoint(
        {"zero_job_checkpoint_step", "zero_job_goodput_ratio", "zero_job_step", "zero_job_loss"}
        | {"zero_job_tokens", "zero_job_tokens_per_second", "zero_job_step_duration_seconds"}
        | {"zero_job_last_save_stall_seconds"}
    )
    assert "zero_job_state" in names


def test_several_jobs_share_each_metric():
    text = exposition(lambda: of_jobs([JOB, replace(JOB, job="bert", round=9)]))
    assert text.count(b"# HELP zero_job_rounds_total ") == 1
    found = read(text)
    assert (found["zero_job_rounds_total gpt"], found["zero_job_rounds_total bert"]) == (3, 9)


def test_the_names_follow_the_conventions_of_prometheus():
    units = ("_seconds", "_bytes", "_ratio")
    for row in (*JOB_METRICS, *NODE_METRICS):
        assert row.name.startswith("zero_")
        assert not row.name.endswith("_total")  # the library adds it to a counter
        assert row.help.endswith(".")
        named = [unit for unit in units if unit in row.name]
        assert all(row.name.endswith(unit) for unit in named)


def readings(**facts) -> Readings:
    status = replace(STARTING, job="gpt", node="a", round=3, workers=Workers.RUNNING)
    status = replace(status, workers_round=3)
    unknown = {"used_ns": {}, "progress": None, "step_times": {}, "memory": None}
    unknown |= {"spent": {}, "etcd": Histogram(), "speed": None, "published": {}}
    return Readings(**{"status": status, **unknown, **facts})


def test_the_metrics_of_a_node_are_those_of_its_agent_and_workers():
    steps, clock = StepTimes(), ManualClock()
    for step, saving_s in [(1, 0.0), (2, 0.0), (2, 4.0), (3, 0.0)]:
        steps.add(5, clock.now(), Progress(step=step, saving_s=saving_s))
        clock.advance(3.0)
    progress = Progress(step=3, samples=24, loss=0.5, gradient_norm=1.5, tokens=900)
    now = readings(
        progress=progress,
        step_times=steps.by_rank,
        used_ns={Use.SAVING: 4 * 10**9},
        memory=MemoryUse(used_bytes=10, budget_bytes=20),
        spent={
            5: Spent()
            .with_progress(Progress(step=1, compute_s=2.0, wait_s=1.0))
            .with_progress(Progress(step=2, compute_s=1.0, saving_s=0.5))
            .with_save(SAVED)
            .with_save(structs.replace(SAVED, in_memory=True, stall_s=0.03125))
            .with_save(structs.replace(SAVED, in_memory=True, stall_s=0.03125))
            .with_restore(Restored(step=2, tag="t", load_s=0.75, read_bytes=16))
            .with_save(Saved(step=3, committed=False))
        },
        etcd=Histogram().add(0.002).add(0.02),
        speed=Speed(steps=2.0, samples=16.0, tokens=600.0),
        published={False: 1, True: 20},
    )
    found = read(exposition(lambda: of_node(now)))
    assert (found["zero_agent_ready gpt a"], found["zero_agent_healthy gpt a"]) == (1, 1)
    assert found["zero_agent_workers gpt a running"] == 1
    assert found["zero_node_gradient_norm gpt a"] == 1.5
    assert "zero_node_loss_scale gpt a" not in found
    assert found["zero_node_time_seconds_total gpt a save stalls"] == 4
    assert found["zero_node_peer_memory_used_bytes gpt a"] == 10
    rank_s = "zero_node_rank_time_seconds_total gpt"
    assert found[f"{rank_s} computing a 5"] == 3.0
    assert found[f"{rank_s} waiting a 5"] == 1.0
    assert found[f"{rank_s} saving a 5"] == 0.5
    assert found["zero_node_saves_total gpt a committed 5 disk"] == 1
    assert found["zero_node_saves_total gpt a failed 5 disk"] == 1
    assert found["zero_node_saved_bytes_total gpt a 5 disk"] == 8
    assert found["zero_node_save_stall_seconds_total gpt a 5 disk"] == 0.375
    assert found["zero_node_save_write_seconds_total gpt a 5 disk"] == 0.25
    assert found["zero_node_last_save_seconds gpt a 5 disk"] == 0.5
    assert found["zero_node_save_publish_seconds_total gpt a 5 disk"] == 0.125
    assert found["zero_node_saves_total gpt a committed 5 memory"] == 2
    assert found["zero_node_saves_total gpt a failed 5 memory"] == 0
    assert found["zero_node_saved_bytes_total gpt a 5 memory"] == 16
    assert found["zero_node_save_stall_seconds_total gpt a 5 memory"] == 0.0625
    assert found["zero_node_save_write_seconds_total gpt a 5 memory"] == 0.5
    assert found["zero_node_restores_total gpt a 5"] == 1
    assert found["zero_node_restore_seconds_total gpt a 5"] == 0.75
    assert found["zero_node_restored_bytes_total gpt a 5"] == 16
    assert found["zero_node_published_checkpoints_total gpt a memory"] == 20
    assert found["zero_node_tokens gpt a"] == 900
    assert found["zero_node_tokens_per_second gpt a"] == 600
    assert found["zero_agent_etcd_call_duration_seconds_bucket gpt 0.0025 a"] == 1
    assert found["zero_agent_etcd_call_duration_seconds_count gpt a"] == 2
    duration = "zero_node_step_duration_seconds"
    assert found[f"{duration}_count gpt a 5"] == 2
    assert found[f"{duration}_sum gpt a 5"] == 3.0 + (6.0 - 4.0)
    assert found[f"{duration}_bucket gpt 2.5 a 5"] == 1
    assert found[f"{duration}_bucket gpt 5.0 a 5"] == 2


def test_the_first_step_of_a_round_is_in_no_histogram():
    steps = StepTimes()
    steps.add(0, 1.0, None)
    steps.begin()
    steps.add(0, 500.0, None)
    assert steps.by_rank == {}
    steps.add(0, 501.0, None)
    assert steps.by_rank[0].sum_s == 1.0


def test_a_job_that_cannot_be_read_any_more_fails_no_scrape(monkeypatch):
    store = MemoryStore(ManualClock())
    job = Job(store)
    job.round(1, "ACTIVE", "a")
    found = []

    def serve(port, *, addr, registry):
        store.put(job.keys.round, '{"n": 1}')
        found.append(registry.collect)
        raise OSError

    monkeypatch.setattr("prometheus_client.exposition.start_http_server", serve)
    args = cli.make_parser().parse_args(["metrics", "gpt", "--port=0"])
    with pytest.raises(SpecError):
        cli._COMMANDS["metrics"](args, store, TableView())
    (up,) = found[0]()
    assert [sample.value for sample in up.samples] == [0]
