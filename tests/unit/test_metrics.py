"""The metrics of a job and of a node, as Prometheus reads them."""

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from zero_orchestrator.ctl.goodput import Use
from zero_orchestrator.ctl.metrics import JOB as JOB_LABEL
from zero_orchestrator.ctl.metrics import JOB_METRICS, exposition, of_jobs
from zero_orchestrator.ctl.status import Condition, JobStatus, NodeRow

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


def test_a_metric_that_is_not_known_is_left_out():
    bare = replace(JOB, checkpoint=None, goodput=None, time_ns={}, members=())
    names = {name.split()[0] for name in read(exposition(lambda: of_jobs([bare])))}
    assert names.isdisjoint(
        {"zero_job_checkpoint_step", "zero_job_goodput_ratio", "zero_job_step", "zero_job_loss"}
    )
    assert "zero_job_state" in names


def test_several_jobs_share_each_metric():
    text = exposition(lambda: of_jobs([JOB, replace(JOB, job="bert", round=9)]))
    assert text.count(b"# HELP zero_job_rounds_total ") == 1
    found = read(text)
    assert (found["zero_job_rounds_total gpt"], found["zero_job_rounds_total bert"]) == (3, 9)


def test_the_names_follow_the_conventions_of_prometheus():
    units = ("_seconds", "_bytes", "_ratio")
    for definition, _ in JOB_METRICS:
        assert definition.name.startswith("zero_")
        assert not definition.name.endswith("_total")  # the library adds it to a counter
        assert definition.help.endswith(".")
        named = [unit for unit in units if unit in definition.name]
        assert all(definition.name.endswith(unit) for unit in named)
