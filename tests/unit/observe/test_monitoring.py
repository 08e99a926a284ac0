"""The alert rules and the dashboard in deploy/monitoring name metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from zero_agent.loop.observed.metrics import NODE_METRICS
from zero_orchestrator.observe.metrics import ETCD_UP, JOB_METRICS, Type

MONITORING = Path(__file__).resolve().parents[3] / "deploy" / "monitoring"
ENDS = {
    Type.GAUGE: ("",),
    Type.COUNTER: ("_total",),
    Type.HISTOGRAM: ("_bucket", "_count", "_sum"),
}
SAMPLES = {
    row.name + end for row in (*JOB_METRICS, *NODE_METRICS, ETCD_UP) for end in ENDS[row.type]
}


def expressions(file: str) -> list[str]:
    """The queries of a file."""
    found = yaml.safe_load((MONITORING / file).read_text())
    if file == "alerts.yaml":
        return [rule["expr"] for group in found["groups"] for rule in group["rules"]]
    return [target["expr"] for panel in found["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("file", ["alerts.yaml", "dashboard.json"])
def test_every_query_is_of_metrics_that_exist(file):
    named = {
        name
        for expression in expressions(file)
        for name in re.findall(r"\bzero_\w+", re.sub(r"\{[^}]*\}|\([a-z_, ]*\)", "", expression))
    }
    assert named
    assert named - SAMPLES == set()


def test_every_alert_says_what_is_wrong_and_what_follows():
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "description"}
            assert rule["labels"]["severity"] in {"warning", "critical"}


def test_an_alert_about_a_job_ends_with_the_job_or_says_when():
    of_jobs = [one for one in expressions("alerts.yaml") if "zero_job_" in one]
    ends = r'state=~?"(ACTIVE|FORMING|ACTIVE\|FORMING)"|_seen_timestamp_seconds < \d|increase\('
    assert [one for one in of_jobs if not re.search(ends, one) and "unless" not in one] == []


def test_a_panel_is_red_only_where_something_is_wrong():
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    colours = {
        panel["title"]: [
            step["color"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        ]
        for panel in panels
    }
    assert {title for title, found in colours.items() if "red" in found} == {
        "Goodput since the start", "Age of the newest checkpoint", "Silence of etcd",
    }  # fmt: skip


def test_no_panel_of_the_dashboard_covers_another():
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len({*places}) == len(places)


@pytest.fixture
def promtool():
    """Runs `promtool`."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not here: it is in Debian's package prometheus")

    def run(*words):
        done = subprocess.run(
            [program, *map(str, words)], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.mark.full
def test_prometheus_accepts_the_rules(promtool):
    promtool("check", "rules", MONITORING / "alerts.yaml")


def _state(name, values="1x2000"):
    return f'zero_job_state{{state="{name}",zero_job="j"}}', values


ACTIVE, THEN_DONE = _state("ACTIVE"), _state("ACTIVE", "1x299 0x2000")
SEEN = ('zero_job_seen_timestamp_seconds{zero_job="j"}', "0x2000")
JOB, NODE, OF = 'zero_job="j"', 'node="a",zero_job="j"', '{zero_job="j"}'
LINK, STUCK = 'kind="slow link",zero_job="j"', 'kind="stuck",zero_job="j"'
SAVES = 'outcome="failed",rank="0",tier="disk",zero_job="j"'
# For each alert: its samples, one a minute; minutes at which it fires, and does not; its labels.
ALERTS = {
    "ZeroJobFailed": ([_state("FAILED"), SEEN], (1, 59), (60,), f'state="FAILED",{JOB}'),
    "ZeroJobLost": ([_state("LOST"), SEEN], (5, 1439), (4, 1440), f'state="LOST",{JOB}'),
    "ZeroJobWaitsForNodes": (
        [_state("FORMING"), (f"zero_job_min_nodes{OF}", "2x2000"),
         (f"zero_job_live_nodes{OF}", "1x19 2x2000")],
        (10, 19), (9, 20), f'state="FORMING",{JOB}'),
    "ZeroJobMakesNoStep": (
        [THEN_DONE, (f"zero_job_step{{{NODE}}}", "900x29 1+1x29 31x2000")],  # it has resumed from 1
        (96, 299), (50, 94, 300), JOB),
    "ZeroJobStuck": (
        [THEN_DONE, (f"zero_job_verdicts{{{STUCK}}}", "0x9 1x2000")], (10, 299), (9, 300), STUCK),
    "ZeroJobRestartsOften": (
        [(f"zero_job_restarts_total{OF}", "0x9 1+1x4 5x2000")], (14, 20), (10, 40), JOB),
    "ZeroJobRestartBudgetLow": (
        [THEN_DONE, (f"zero_job_restart_budget{OF}", "5x2000"),
         (f"zero_job_restart_budget_spent{OF}", "3x9 4x2000")],
        (10, 299), (9, 300), JOB),
    "ZeroJobGoodputLow": (
        [THEN_DONE, (f"zero_job_goodput_ratio{OF}", "0.5x2000"),
         ('zero_job_node_time_seconds{use="useful",zero_job="j"}', "0+60x2000")],
        (91, 299), (90, 300), JOB),
    "ZeroJobStraggler": (
        [THEN_DONE, (f'zero_job_straggler_ratio{{rank="3",{JOB}}}', "1.9x2000")],
        (10, 299), (9, 300), f'rank="3",{JOB}'),
    "ZeroJobSlowNetworkOrStorage": (
        [THEN_DONE, (f"zero_job_verdicts{{{LINK}}}", "1x2000")], (5, 299), (4, 300), LINK),
    "ZeroJobSavesFail": (
        [(f"zero_node_saves_total{{{SAVES}}}", "0x9 1+1x4 5x2000")], (14, 30), (9, 60), SAVES),
    "ZeroJobCheckpointOld": (
        [THEN_DONE, (f'zero_job_checkpoint_timestamp_seconds{{tier="disk",{JOB}}}', "0x2000")],
        (241, 299), (240, 300), f'tier="disk",{JOB}'),
    "ZeroAgentStalled": (
        [(f"zero_agent_healthy{{{NODE}}}", "1x9 0x9 1x2000")], (11, 19), (10, 20), NODE),
    "ZeroEtcdSilent": (
        [(f"zero_agent_etcd_silence_seconds{{{NODE}}}", "0x9 31x9 0x2000")],
        (10, 19), (9, 20), NODE),
    "ZeroAgentsNotScraped": (
        [ACTIVE, (f"zero_agent_healthy{{{NODE}}}", "_x20 1x2000")],
        (10, 19), (9, 20), f'state="ACTIVE",{JOB}'),
    "ZeroJobMetricsAbsent": (
        [_state("ACTIVE", "_x20 1x2000"), (f"zero_agent_healthy{{{NODE}}}", "1x2000")],
        (10, 19), (9, 20), JOB),
    "ZeroMetricsBlind": ([("zero_etcd_up", "0x19 1x2000")], (5, 19), (4, 20), ""),
}  # fmt: skip


@pytest.mark.full
def test_every_alert_fires_for_what_it_is_about_and_ends_with_it(promtool, tmp_path):
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [*ALERTS]
    tests = []
    for rule, (samples, on, off, labels) in zip(rules, ALERTS.values(), strict=True):
        is_it = f'alertname="{rule["alert"]}",alertstate="firing"'
        every = ",".join(filter(None, [is_it, f'severity="{rule["labels"]["severity"]}"', labels]))
        asked = [
            {
                "expr": f"ALERTS{{{is_it}}}",
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f"ALERTS{{{every}}}", "value": 1}] * (minute in on),
            }
            for minute in sorted((*on, *off))
        ]
        series = [{"series": one, "values": values} for one, values in samples]
        tests.append({"interval": "1m", "input_series": series, "promql_expr_test": asked})
    file = {"rule_files": [str(MONITORING / "alerts.yaml")], "evaluation_interval": "1m"}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({**file, "tests": tests}))
    promtool("test", "rules", tmp_path / "test.yaml")
