"""The goodput ledger of a job with a failure, and the metrics that Prometheus reads of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import COLD, ROOT, TOGETHER, agent, environment
from tests.support.etcd_server import EtcdServer
from tests.support.otlp import collector
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import status
from zero_orchestrator.observe.events import goodput_prefix, history_key, read_goodput, read_history
from zero_orchestrator.observe.goodput import Use, from_record, total_ns
from zero_orchestrator.store.kv import KeyValueStore

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

SCRIPT = """
import os, pathlib, sys, time, urllib.request
import zero_agent
fails = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(1, 5 if fails else 7):
    time.sleep(0.3)
    zero_agent.heartbeat(step, loss=1 / step, tokens=100 * step)
time.sleep(0.3)
if not fails:
    with urllib.request.urlopen(sys.argv[1], timeout=60) as answer:
        pathlib.Path(sys.argv[2]).write_bytes(answer.read())
os._exit(3 if fails else 0)
"""


def test_the_time_of_a_job_with_a_failure_is_accounted_for(etcd, etcd_store, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    logs, endpoint = tmp_path / "logs", f"--rdzv-endpoint={etcd.endpoint}"
    name = ("--rdzv-id=goodput", "--node-id=a", f"--log-dir={logs}")
    began_s = time.monotonic()
    port, scraped = free_port(), tmp_path / "metrics"
    flags = ("--nnodes=1", "--max-restarts=1", COLD, f"--health-port={port}")
    url = f"http://127.0.0.1:{port}/metrics"
    with collector() as received:
        env = {**environment(), "OTEL_EXPORTER_OTLP_ENDPOINT": received.url}
        done = agent(endpoint, *name, *flags, str(script), url, str(scraped), env=env)
    wall_s = time.monotonic() - began_s
    assert done.returncode == 0, done.stderr
    parts = received.tree()
    assert list(parts) == ["recovery"]
    assert [name for name, _, _ in parts["recovery"]] == [
        "",
        "detection",
        "meeting",
        "starting",
        "first step",
    ]
    assert 0.3 < parts["recovery"][0][2] < wall_s, "with the first step, which takes 0.3 s"

    now = status.read(etcd_store, "goodput")
    used_ns = from_record(now.time_ns)
    assert {Use.STARTING, Use.USEFUL, Use.REPEATED, Use.REFORMING} <= used_ns.keys()
    assert Use.UNREPORTED not in used_ns
    assert now.tokens == 600
    points = read_history(etcd_store.get(history_key("goodput"))).points
    assert points[-1].step == 6
    assert all(point.loss == pytest.approx(1 / point.step, rel=1e-5) for point in points)
    sleeps_s = (5 + 7) * 0.3
    assert sleeps_s < total_ns(used_ns) / 1e9 < wall_s
    lines = (logs / "goodput" / "events-a.jsonl").read_text().splitlines()
    (told,) = [event for event in map(json.loads, lines) if event["event"] == "time"]
    assert told["ns"].keys() <= now.time_ns.keys()
    assert told["ns"]["repeated_steps"] == now.time_ns["repeated_steps"]
    assert told["text"] in done.stderr + done.stdout

    metrics = scraped.read_text()
    labels = 'node="a",zero_job="goodput"'
    assert f"zero_agent_ready{{{labels}}} 1.0" in metrics
    assert f"zero_node_step{{{labels}}} 6.0" in metrics
    assert 'zero_node_step_duration_seconds_count{node="a",rank="0",' in metrics

    command = [sys.executable, "-m", "zero_orchestrator", "metrics", "goodput"]
    env = {**environment(), "PET_RDZV_ENDPOINT": etcd.endpoint}
    shown = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert f'zero_job_goodput_ratio{{zero_job="goodput"}} {now.goodput}' in shown.stdout
    assert 'zero_job_restarts_total{zero_job="goodput"} 1.0' in shown.stdout


@contextlib.contextmanager
def _served(endpoint: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`zero-ctl metrics --port`, and the URL at which it serves."""
    command = [sys.executable, "-m", "zero_orchestrator", "metrics", "--port=0"]
    env = {**environment(), "PET_RDZV_ENDPOINT": endpoint}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            told = process.stdout.readline()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics is served until Ctrl-C\n", told)
            yield process, told.split()[0]
        finally:
            process.kill()


def _scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def _a_job(store: KeyValueStore) -> None:
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=7, command=("train.py",))
    store.put(Keys("served").spec, spec.to_json())


def test_the_metrics_of_all_jobs_are_served_on_a_free_port_until_ctrl_c(etcd, etcd_store):
    _a_job(etcd_store)
    with _served(etcd.endpoint) as (process, url):
        text = _scrape(url)
        assert 'zero_job_restart_budget{zero_job="served"} 7.0' in text
        assert "zero_etcd_up 1.0" in text
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


def test_without_etcd_a_scrape_says_so_and_the_metrics_come_back_with_it(tmp_path):
    server = EtcdServer(tmp_path).start()
    try:
        with _served(server.endpoint) as (process, url):
            server.stop()
            text = _scrape(url)
            assert ("zero_etcd_up 0.0" in text, "zero_job_" in text) == (True, False)
            server.start()
            wait_for(lambda: "zero_etcd_up 1.0" in _scrape(url), 60, "etcd in the metrics")
            process.kill()
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
        server.stop()
        command = [sys.executable, "-m", "zero_orchestrator", "metrics", "--port=0"]
        env = {**environment(), "PET_RDZV_ENDPOINT": server.endpoint}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    finally:
        server.stop()


PROMETHEUS = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs: [{{job_name: zero, static_configs: [{{targets: ["{target}"]}}]}}]
"""


@pytest.mark.full
def test_a_real_prometheus_scrapes_the_jobs_and_evaluates_every_rule(etcd, etcd_store, tmp_path):
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("prometheus is not here: it is in Debian's package of that name")
    _a_job(etcd_store)
    rules, port = ROOT / "deploy" / "monitoring" / "alerts.yaml", free_port()
    with _served(etcd.endpoint) as (_, url):
        target = url.removeprefix("http://").removesuffix("/metrics")
        (tmp_path / "prometheus.yml").write_text(PROMETHEUS.format(rules=rules, target=target))
        command = [
            program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        with subprocess.Popen(command) as prometheus:
            try:

                def ask(path: str) -> Any:
                    with contextlib.suppress(OSError):
                        return json.loads(_scrape(f"http://127.0.0.1:{port}/api/v1/{path}"))["data"]
                    return {}

                query = "query?query=zero_job_restart_budget"
                found = wait_for(lambda: ask(query).get("result"), 60, "a scrape")
                assert [(one["metric"]["zero_job"], one["value"][1]) for one in found] == [
                    ("served", "7")
                ]

                def evaluated() -> list[dict[str, Any]]:
                    groups = ask("rules").get("groups", [])
                    listed = [rule for group in groups for rule in group["rules"]]
                    return listed if all(one["health"] != "unknown" for one in listed) else []

                health = {one["name"]: one["health"] for one in wait_for(evaluated, 60, "rules")}
                assert set(health.values()) == {"ok"}, health
            finally:
                prometheus.kill()


COUNTS = """
import os, pathlib, time
import zero_agent
here = pathlib.Path("{directory}")
step = 0
while not (here / "enough").exists():
    time.sleep(0.2)
    step += 1
    zero_agent.heartbeat(step)
    (here / ("step-" + os.environ["TORCHELASTIC_RESTART_COUNT"])).write_text(str(step))
"""


@pytest.mark.full
def test_the_time_of_nodes_that_are_killed_spare_or_started_again_adds_up(
    cluster, etcd_store, tmp_path
):
    script = tmp_path / "counts.py"
    script.write_text(COUNTS.format(directory=tmp_path))
    job = cluster(flags=("--nnodes=1:2", "--max-restarts=3", TOGETHER, COLD), script=[str(script)])

    def run_until(restarts: int, *, above: int) -> None:
        path = tmp_path / f"step-{restarts}"
        text = f"step {above} after {restarts} restarts"
        wait_for(lambda: path.exists() and int(path.read_text() or 0) > above, 60, text)

    began_s = time.monotonic()
    job.start("a", "b")
    run_until(0, above=8)
    job.start("c")
    wait_for(lambda: status.read(etcd_store, job.job).spares, 60, "the spare")
    job.agents["b"].kill_node()
    run_until(1, above=3)  # with c in the place of b
    job.start("b")
    wait_for(lambda: status.read(etcd_store, job.job).spares, 60, "the node that is back")
    (tmp_path / "enough").touch()
    job.wait_for_end()
    wall_s = time.monotonic() - began_s

    nodes = {node: read_goodput(etcd_store.get(goodput_prefix(job.job) + node)) for node in "abc"}
    total_s = {node: total_ns(used_ns) / 1e9 for node, used_ns in nodes.items()}
    (told,) = [event for event in job.events("time") if event["node"] == "a"]
    assert total_ns(from_record(told["ns"])) / 1e9 <= total_s["a"] <= wall_s
    (of_all,) = job.events("job time")
    assert of_all["missing"] == 0
    lacks_s = sum(total_s.values()) - total_ns(from_record(of_all["ns"])) / 1e9
    assert 0 <= lacks_s < 5, "what rank 0's agent took until its own last write"
    assert of_all["text"] in job.output
    assert {Use.USEFUL, Use.REPEATED, Use.REFORMING} <= nodes["a"].keys()
    assert Use.IDLE in nodes["b"].keys() & nodes["c"].keys()
    assert max(total_s.values()) <= wall_s
    now = status.read(etcd_store, job.job)
    assert total_ns(from_record(now.time_ns)) == sum(map(total_ns, nodes.values()))


SAYS = """
import os, pathlib, socket, sys, time
from zero_contract import worker
from zero_contract.worker import Hello, Preparing, Progress

def wait_for(name):
    while not (pathlib.Path(sys.argv[1]) / name).exists():
        time.sleep(0.05)

with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
    agent.connect(os.environ[worker.ENV_SOCKET])
    agent.sendall(worker.encode(Hello(rank=0, pid=os.getpid())))
    agent.sendall(worker.encode(Preparing(what="loading x", part=0.4)))
    wait_for("loaded")
    for step in range(1, 12):
        time.sleep(0.25)
        one = Progress(step=step, samples=8 * step, tokens=1000 * step)
        agent.sendall(worker.encode(one))
    wait_for("seen")
"""


def test_what_a_worker_does_before_its_first_step_and_then_its_speed_reach_zero_ctl(
    cluster, etcd_store, tmp_path
):
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    job = cluster(flags=("--nnodes=1", COLD), script=[str(script), str(tmp_path)])
    job.start("a")

    def now() -> status.JobStatus | None:
        job.check_agents()
        with contextlib.suppress(status.NoSuchJob):
            return status.read(etcd_store, job.job)
        return None

    def row() -> status.NodeRow | None:
        known = now()
        return known.members[0] if known and known.members else None

    wait_for(lambda: row() and row().preparing == "loading x: 40%", 60, "what the worker does")
    assert row().step is None
    (tmp_path / "loaded").touch()
    wait_for(lambda: now().tokens == 11_000, 60, "the tokens of all steps")
    found = now()
    assert (found.samples, found.members[0].preparing) == (88, "")
    assert found.speed.tokens == pytest.approx(1000 * found.speed.steps, rel=0.01)
    assert found.speed.steps > 0
    assert found.members[0].ranks.keys() == {"0"}
    # Times of steps are a record of their own, which may be written a little later.
    wait_for(
        lambda: (times := now().step_times) and times.count == 10, 60, "the times of all steps"
    )
    assert found.step_times.p50_s >= 0.24
    (tmp_path / "seen").touch()
    job.wait_for_end()


@pytest.mark.full
def test_the_saves_of_an_engine_are_in_the_ledger_and_in_the_metrics(cluster, etcd_store, tmp_path):
    script, port = str(Path(__file__).parents[1] / "support" / "slow_ranks.py"), free_port()
    flags = ("--nnodes=1", f"--health-port={port}")
    job = cluster(flags=flags, script=[script, str(tmp_path)])
    job.start("a")

    def scraped() -> dict[str, float]:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            return {
                line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
                for line in lines
                if not line.startswith("#")
            }
        job.check_agents()
        return {}

    labels = f'node="a",{{}}rank="0",tier="disk",zero_job="{job.job}"'
    outcome = labels.format('outcome="committed",')
    committed = f"zero_node_saves_total{{{outcome}}}"
    wait_for(lambda: scraped().get(committed, 0.0) > 0, 120, "a checkpoint in the metrics")
    found = scraped()
    assert found[f"zero_node_saved_bytes_total{{{labels.format('')}}}"] > 0
    assert found[f"zero_node_save_stall_seconds_total{{{labels.format('')}}}"] > 0
    assert found[f"zero_node_save_write_seconds_total{{{labels.format('')}}}"] > 0
    assert found[f"zero_node_save_publish_seconds_total{{{labels.format('')}}}"] > 0
    published = (
        f'zero_node_published_checkpoints_total{{node="a",tier="disk",zero_job="{job.job}"}}'
    )
    assert found[published] == found[committed]
    assert (
        found[f'zero_agent_etcd_call_duration_seconds_count{{node="a",zero_job="{job.job}"}}'] > 0
    )
    (tmp_path / "enough").touch()
    job.wait_for_end()
    now = status.read(etcd_store, job.job)
    assert from_record(now.time_ns)[Use.SAVING] > 0
    assert now.run_step_times is not None
    saved = now.last_save
    assert saved is not None
    assert saved.size_bytes > 0
    assert 0 < saved.write_s <= saved.stall_s + 5
    assert saved.publish_s > 0


@pytest.mark.full
def test_the_traces_of_an_engine_have_the_load_of_a_recovery_and_the_parts_of_a_save(
    cluster, tmp_path
):
    script = str(Path(__file__).parents[1] / "support" / "slow_ranks.py")
    job = cluster(flags=("--nnodes=1", "--max-restarts=1"), script=[script, str(tmp_path)])
    with collector() as received:
        job.start("a", OTEL_EXPORTER_OTLP_ENDPOINT=received.url)
        wait_for(lambda: "save" in received.tree() or job.check_agents(), 120, "a save")
        os.kill(job.worker_of("a"), signal.SIGKILL)
        wait_for(lambda: "recovery" in received.tree() or job.check_agents(), 120, "the recovery")
        found = received.tree()
        (tmp_path / "enough").touch()
        job.wait_for_end()
    parts = {name: (from_s, took_s) for name, from_s, took_s in found["save"]}
    assert parts.keys() == {"", "stall", "write", "publish"}
    whole_s = parts[""][1]
    assert 0 < parts["write"][0] + parts["write"][1] <= parts["publish"][0] + 0.01
    assert parts["publish"][0] + parts["publish"][1] <= whole_s + 0.01
    assert 0 < parts["stall"][1] <= whole_s + 0.01
    names = [name for name, _, _ in found["recovery"]]
    assert names == ["", "detection", "meeting", "starting", "loading", "first step"]
    loading_s = {name: took_s for name, _, took_s in found["recovery"]}["loading"]
    assert 0 < loading_s < found["recovery"][0][2]
