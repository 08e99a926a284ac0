"""`zero-ctl dashboard` beside a job: who may read it, who may act, and what a reader sees live."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request

import jsonschema
import pytest

from tests.support.browser import CHROMIUM, browser
from tests.support.cluster import COLD, environment
from tests.support.waiting import wait_for
from tests.unit.observe.test_json_output import SCHEMAS, closed
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import status

pytest.importorskip("uvicorn", reason="the extra dashboard is not installed: make dev")
pytestmark = [pytest.mark.processes, pytest.mark.etcd]

COUNTS = """
import time
import zero_agent
step = 0
while not zero_agent.should_leave():
    time.sleep(0.2)
    step += 1
    zero_agent.heartbeat(step)
zero_agent.leave()
"""


class Dashboard:
    """A dashboard that runs."""

    def __init__(self, url: str, token: str, process: subprocess.Popen[str]) -> None:
        self.url, self.token, self.process = url, token, process
        self.address = urllib.parse.urlsplit(url).netloc

    def ask(self, method: str, path: str, body: str = "", **headers: str):
        """The answer to one request, and its text."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer, answer.read().decode()

    def act(self, path: str, token: str, **asked: str) -> tuple[int, str]:
        """The status and the sentence with which a request to act is answered."""
        headers = {"Authorization": f"Bearer {token}"}
        answer, text = self.ask("POST", path, json.dumps(asked), **headers)
        return answer.status, json.loads(text)["said"]


@contextlib.contextmanager
def dashboard(endpoint: str, job: str, *flags: str):
    command = [sys.executable, "-m", "zero_orchestrator", "dashboard", job, "--port=0", *flags]
    env = {**environment(), "PET_RDZV_ENDPOINT": endpoint}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        token = process.stdout.readline().split()[-1]
        yield Dashboard(url, token, process)
    finally:
        process.kill()
        process.communicate()


def test_it_waits_for_its_job_and_with_json_the_address_and_the_token_are_a_record(
    etcd, etcd_store
):
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=7, command=("t.py",))
    command = [sys.executable, "-m", "zero_orchestrator", "dashboard", "told", "--port=0", "--json"]
    env = {**environment(), "PET_RDZV_ENDPOINT": etcd.endpoint}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=env, text=True, **pipes)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline().endswith("; waiting for it, until Ctrl-C\n")
        etcd_store.put(Keys("told").spec, spec.to_json())
        told = json.loads(process.stdout.readline())
        jsonschema.validate(told, closed(SCHEMAS["dashboard"]))
        assert (told["job"], len(told["token"])) == ("told", 32)
        with urllib.request.urlopen(told["url"], timeout=60) as answer:
            assert answer.status == http.client.OK
    finally:
        process.kill()
        process.communicate()


def test_anyone_here_may_read_and_only_the_holder_of_the_token_may_act(etcd, etcd_store):
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=7, command=("t.py", "--key=hunter2"))
    keys = Keys("shown")
    etcd_store.put(keys.spec, spec.to_json())
    with dashboard(etcd.endpoint, "shown") as board:
        assert board.url.startswith("http://127.0.0.1:")
        answer, page = board.ask("GET", "/")
        assert answer.status == 200
        assert '"name":"shown"' in page
        assert "hunter2" not in page
        assert board.token not in page
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-frame-options"] == "DENY"

        assert board.act("/stop", "x" * len(board.token))[0] == 403
        assert board.ask("POST", "/stop", "{}")[0].status == 403
        assert board.ask("GET", "/stop")[0].status == 405
        assert board.ask("GET", "/", Host="evil.example")[0].status == 400
        assert etcd_store.get(keys.stop) is None
        code, said = board.act("/drain", board.token, node="n7")
        assert (code, said) == (409, "Not done: there is no live node n7; there are: shown: none")
        headers = {"Authorization": f"Bearer {board.token}"}
        assert board.ask("POST", "/drain", "[]", **headers)[0].status == 400
        assert (
            board.ask("POST", "/drain", '{"node":"' + "n" * 5000 + '"}', **headers)[0].status == 400
        )

        code, said = board.act("/stop", board.token)
        assert (code, said.partition(";")[0]) == (200, "Job shown is asked to stop")
        assert json.loads(etcd_store.get(keys.stop).value).endswith("(on the dashboard)")
        board.process.send_signal(signal.SIGINT)
        assert board.process.wait(60) == 128 + signal.SIGINT


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_on_all_addresses_it_is_reached_by_any_of_them_and_by_the_names_of_the_machine(
    etcd, etcd_store, host
):
    spec = JobSpec(min_nodes=1, max_nodes=1, max_restarts=7, command=("t.py",))
    etcd_store.put(Keys("shown").spec, spec.to_json())
    with dashboard(etcd.endpoint, "shown", f"--host={host}") as board:
        here = {"::": "[::1]"}.get(host, "127.0.0.1")
        board.address = f"{here}:{urllib.parse.urlsplit(board.url).port}"
        names = ("192.0.2.7", "[2001:db8::7]", "localhost", socket.gethostname(), socket.getfqdn())
        for name in (*names, *(f"{name.upper()}:8780" for name in names)):
            assert board.ask("GET", "/", Host=name)[0].status == 200, name
        for name in ("evil.example", "192.0.2.7.evil.example", "[", ""):
            answer, text = board.ask("GET", "/", Host=name)
            assert (answer.status, text) == (
                400,
                f"zero-ctl dashboard: {name!r} is no name of this machine: use its address, or "
                "start the dashboard with --host=NAME\n",
            )


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH")
def test_a_reader_sees_the_steps_come_in_and_drains_a_node(cluster, etcd_store, tmp_path):
    script = tmp_path / "counts.py"
    script.write_text(COUNTS)
    job = cluster(flags=("--nnodes=1", COLD), script=[str(script)])
    job.start("a")
    wait_for(lambda: etcd_store.get(Keys(job.job).spec), 150, "the job")
    with dashboard(job.endpoint, job.job) as board, browser(tmp_path / "browser") as page:
        page.look(1280, 900)
        page.open(board.url)

        def step() -> int:
            text = page.run("document.querySelector('#tiles .value').textContent")
            return int(text) if text.isdecimal() else 0

        wait_for(lambda: step() > 0, 60, "a step on the page")
        first = step()
        wait_for(lambda: step() > first, 60, "another step, without a reload")
        wait_for(lambda: page.run("picture.lanes[0].spans.length") >= 2, 60, "the lane")
        assert page.run("picture.lanes[0].spans.at(-1)[2]") == "training"

        page.run("document.getElementById('drain').click()")
        assert page.run("document.getElementById('answer').textContent") == "Enter the token first."
        page.run(f"document.getElementById('token').value = {json.dumps(board.token)}")
        page.run("document.getElementById('drain').click()")
        page.run("document.getElementById('sure-yes').click()")
        assert job.agents.pop("a").wait() == 6
        answer = "document.getElementById('answer').textContent"
        assert page.run(answer) == f"Node a will leave job {job.job} at its next step boundary."
        wait_for(lambda: page.run("picture.job.state") == "LOST", 60, "the page says it")
        assert page.errors == []
        page.shoot(tmp_path / "dashboard.png")
    assert status.read(etcd_store, job.job).live_nodes == ()
