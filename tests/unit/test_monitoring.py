"""The alert rules and the dashboard in deploy/monitoring name metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from zero_agent.loop.metrics import NODE_METRICS, STEPS
from zero_orchestrator.ctl.metrics import ETCD_UP, JOB_METRICS

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
DEFINED = [definition for definition, _ in (*JOB_METRICS, *NODE_METRICS)]
SAMPLES = {one.name + ("_total" if one.counts else "") for one in DEFINED}
SAMPLES |= {ETCD_UP.name, *(f"{STEPS.name}_{part}" for part in ("bucket", "count", "sum"))}


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


@pytest.mark.full
def test_prometheus_accepts_the_rules():
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not here: it is in Debian's package prometheus")
    command = [promtool, "check", "rules", str(MONITORING / "alerts.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
