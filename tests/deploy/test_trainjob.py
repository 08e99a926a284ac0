"""Kubeflow's SDK starts a TrainJob under zero-agent, and a patch of its size resizes it."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import OVERLAYS, RENDERED, ROOT, Object, of_kind, render
from tests.deploy.test_kubelet import LEASE, images
from tests.support import crds, sandbox
from tests.support.certificates import sign
from tests.support.kube_api import KubeApi, served
from tests.support.kubelet import Cluster
from tests.support.new_environment import python_with
from tests.support.sandbox import Image
from tests.support.trainer import job_of, jobset_of, may_change
from zero_agent.loop.observed.trainjob import TrainJobStatus, trainer_status
from zero_contract.clock import SystemClock
from zero_contract.worker import Progress
from zero_orchestrator.observe.pace import Speed

USER = ROOT / "tests" / "data" / "kubernetes" / "train.py"
SDK = "kubeflow==0.5.0"
TRAINER = {
    "trainer.kubeflow.org/v1alpha1": {
        "clustertrainingruntimes": ("ClusterTrainingRuntime", False),
        "trainingruntimes": ("TrainingRuntime", True),
        "trainjobs": ("TrainJob", True),
    }
}


# ---- schemas ----


@pytest.mark.parametrize("name", RENDERED)
def test_resources_of_other_projects_fit_their_strict_schemas(name):
    objects = [one for one in render(RENDERED[name]) if crds.knows(one)]
    assert {
        one["metadata"]["name"]: crds.complaints(one) for one in objects if crds.complaints(one)
    } == {}


def test_the_strict_schema_notices_a_field_that_is_not_there():
    [runtime] = of_kind(render(OVERLAYS["trainer"]), "ClusterTrainingRuntime")
    runtime = copy.deepcopy(runtime)
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["template"]["spec"]["containers"][0]["workDir"] = "/tmp"
    assert any("workDir" in text for text in crds.complaints(runtime))


# ---- the SDK, the pods, the patches ----


@pytest.fixture(scope="module")
def trainjob(tmp_path_factory: pytest.TempPathFactory) -> Object:
    """What the SDK's `train()` sends to a cluster that has our runtime."""
    python = python_with(SDK)
    api = KubeApi(TRAINER)
    [runtime] = of_kind(render(OVERLAYS["trainer"]), "ClusterTrainingRuntime")
    api.add(runtime)
    with served(api, tmp_path_factory.mktemp("api")) as kubeconfig:
        done = subprocess.run(
            [str(python), str(USER), str(kubeconfig)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    seen, name = done.stdout.splitlines()
    assert seen == "['zero-elastic']"
    [made] = api.created
    assert made["metadata"]["name"] == name
    return made


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_sdk_needs_nothing_but_the_name_of_the_runtime(trainjob):
    assert crds.complaints(trainjob) == []
    assert trainjob["spec"]["runtimeRef"] == {
        "kind": "ClusterTrainingRuntime", "name": "zero-elastic",
    }  # fmt: skip
    [bash, option, script] = trainjob["spec"]["trainer"]["command"]
    assert (bash, option) == ("bash", "-c")
    assert script.endswith('torchrun "train.py"')


class Run:
    """A TrainJob in the local cluster, and what it has printed."""

    def __init__(self, trainjob: Object, directory: Path, stack: contextlib.ExitStack) -> None:
        objects = render(_overlay(directory / "overlay"))
        [runtime] = of_kind(objects, "ClusterTrainingRuntime")
        self.jobset = jobset_of(trainjob, runtime)
        job = job_of(self.jobset)
        objects = [one for one in objects if one["kind"] != "ClusterTrainingRuntime"]
        image = _image(directory)
        cluster = Cluster([*objects, job], image, directory)
        self.cluster = stack.enter_context(contextlib.closing(cluster))
        self.job: Any = self.cluster.controllers[job["metadata"]["name"]]
        claim = self.cluster.claim("checkpoints")
        claim.mkdir(parents=True)
        self.slow = claim / "slow"
        self.slow.touch()

    @property
    def output(self) -> str:
        return "".join(pod.output for pod in self.cluster.pods_of(self.job.name))

    def patch(self, pods: int) -> None:
        """`kubectl patch jobset`, as JobSet's gate ElasticJobSet lets it through."""
        after = copy.deepcopy(self.jobset)
        spec = after["spec"]["replicatedJobs"][0]["template"]["spec"]
        spec |= {"parallelism": pods, "completions": pods}
        assert crds.complaints(after) == []
        assert may_change(self.jobset, after) == ""
        self.jobset = after
        self.job.scale(pods)

    def until(self, text: str) -> None:
        said = len(re.findall(text, self.output))
        self.cluster.until(lambda: len(re.findall(text, self.output)) > said, 240, text)


def _overlay(directory: Path) -> Path:
    directory.mkdir()
    literals = ["PET_NNODES=1:4", "OMP_NUM_THREADS=1", f"PET_RDZV_CONF={LEASE}"]
    kustomization = {
        "resources": [os.path.relpath(OVERLAYS["trainer"], directory)],
        "generatorOptions": {"immutable": True},
        "configMapGenerator": [{"name": "agent", "behavior": "merge", "literals": literals}],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return directory


def _image(directory: Path) -> dict[str, Image]:
    """The images, of which ours has `torchrun`, as the Dockerfile puts it there."""
    agent = directory / "zero-agent"
    agent.write_text(f'#!/bin/sh\nexec {sys.executable} -m zero_agent "$@"\n')
    agent.chmod(0o755)
    found = images()
    files = {**found["zero-elastic"].files, "/opt/zero/bin/zero-agent": agent}
    files["/opt/zero/bin/torchrun"] = ROOT / "deploy" / "torchrun"
    path = "/opt/zero/bin:/usr/local/bin:/usr/bin:/bin"
    return {**found, "zero-elastic": Image(files=files, path=path)}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.etcd
@pytest.mark.netns
@pytest.mark.timeout(1200)
def test_a_patch_of_the_size_grows_and_shrinks_a_trainjob_at_a_step_boundary(trainjob, tmp_path):
    if reason := sandbox.why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        run = Run(trainjob, tmp_path, stack)
        run.until(r"step \d+ of 120")
        run.patch(2)
        run.until("round 2: this node runs rank . of 2")
        run.until(r"step \d+ of 120")
        run.patch(1)
        run.until("round 3: this node runs rank 0 of 1")
        run.until(r"step \d+ of 120")
        run.slow.unlink()
        run.cluster.until(lambda: run.job.state != "running", 240, "the end of the job")
        assert run.job.state == "complete", run.output
        # A worker that is asked to leave does so within the step's end, before the script prints.
        [stayed, *_] = run.cluster.pods_of(run.job.name)
        done = re.findall(r"step (\d+) of 120|rank 0 left at step (\d+)", stayed.output)
        steps = [int(printed or left) for printed, left in done]
        assert steps == list(range(1, 121)), "each step once, whatever the size"
        assert run.job.counted == [], "a smaller size is no failure"


def test_a_jobset_lets_its_size_be_changed_and_nothing_else():
    [runtime] = of_kind(render(OVERLAYS["trainer"]), "ClusterTrainingRuntime")
    before = jobset_of({"metadata": {"name": "a"}, "spec": {}}, runtime)
    after = copy.deepcopy(before)
    spec = after["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec["parallelism"] = 3
    assert "must be equal" in may_change(before, after)
    spec["completions"] = 3
    assert may_change(before, after) == ""
    spec["template"]["spec"]["containers"][0]["image"] = "other"
    assert may_change(before, after) == "field is immutable"


def test_a_jobset_that_is_made_again_after_its_ttl_is_the_same_job_in_etcd():
    """Its budget is spent, or it is done: `PET_RDZV_ID` has no uid of an object."""
    [runtime] = of_kind(render(OVERLAYS["trainer"]), "ClusterTrainingRuntime")
    jobset = jobset_of({"metadata": {"name": "a"}, "spec": {}}, runtime)
    job = job_of(jobset)["spec"]["template"]
    variables = {one["name"]: one for one in job["spec"]["containers"][0]["env"]}
    assert variables["PET_RDZV_ID"]["value"] == "$(TRAINJOB)"
    path = variables["TRAINJOB"]["valueFrom"]["fieldRef"]["fieldPath"]
    label = "jobset.sigs.k8s.io/jobset-name"
    assert path == f"metadata.labels['{label}']"
    assert job["metadata"]["labels"][label] == "a"
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0}, (
        "JobSet gives no budget of its own"
    )


# ---- progress ----


@pytest.mark.parametrize(
    ("progress", "speed", "done", "expected"),
    [
        (Progress(step=3, total_steps=12, loss=0.5), Speed(steps=0.5), False, (25, 18)),
        (Progress(step=3, total_steps=12), None, False, (25, None)),
        (Progress(step=3), Speed(steps=0.5), False, (None, None)),
        (Progress(step=13, total_steps=12), Speed(steps=2.0), False, (100, 0)),
        (Progress(step=3), None, True, (100, 0)),
    ],
)
def test_percent_and_rest_are_told_where_they_are_known(progress, speed, done, expected):
    status = trainer_status(progress, speed, 1e9, done=done)
    told = (status.get("progressPercentage"), status.get("estimatedRemainingSeconds"))
    assert told == expected
    assert status["lastUpdatedTime"] == "2001-09-09T01:46:40Z"
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {}}
    spec = {"runtimeRef": {"name": "zero-elastic"}}
    assert crds.complaints({**head, "spec": spec, "status": {"trainerStatus": status}}) == []


@pytest.fixture
def status_server(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[Any]]]:
    """Trainer's: TLS with a certificate of its own, a token; the variables of a pod, and posts."""
    spec = {"secretName": "tls", "commonName": "localhost", "dnsNames": ["localhost"], "isCA": True}
    sign(spec, None, tmp_path)
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    heard: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.append((self.path, self.headers["Authorization"], yaml.safe_load(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quietly."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    token = tmp_path / "token"
    token.write_text("first\n")
    prefix = "KUBEFLOW_TRAINER_SERVER_"
    url = f"https://localhost:{server.server_address[1]}/status"
    yield (
        {f"{prefix}URL": url, f"{prefix}CA_CERT": str(certificate), f"{prefix}TOKEN": str(token)},
        heard,
    )
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_end_is_posted_with_the_token_of_now(status_server, tmp_path):
    environ, heard = status_server
    status = TrainJobStatus(environ, SystemClock())
    status.look(Progress(step=1, total_steps=2, loss=0.25), None)
    status.look(Progress(step=2, total_steps=2, loss=0.25), None)  # too early
    (tmp_path / "token").write_text("second")
    status.look(Progress(step=2, total_steps=2, loss=0.125), None, done=True)
    assert [(path, token) for path, token, _ in heard][-1] == ("/status", "Bearer second")
    bodies = [body["trainerStatus"] for _, _, body in heard]
    assert [one["progressPercentage"] for one in bodies] == [50, 100]
    assert {"name": "loss", "value": "0.125"} in bodies[-1]["metrics"]


def test_a_server_that_is_not_there_is_logged_once_and_keeps_nobody(status_server, caplog):
    environ, heard = status_server
    name = "KUBEFLOW_TRAINER_SERVER_URL"
    status = TrainJobStatus({**environ, name: "https://localhost:1/status"}, SystemClock())
    for step in (1, 2):
        status.look(Progress(step=step, total_steps=2), None, done=True)
    assert heard == []
    [record] = caplog.records
    assert "shows no progress" in record.message


def test_without_a_trainjob_nothing_is_made(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread"))
    TrainJobStatus({}, SystemClock()).look(Progress(step=1), None, done=True)
