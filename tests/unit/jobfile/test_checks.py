"""Job files whose parts do not fit each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.jobfile.support import job
from zero_orchestrator.jobfile.reading.checks import check
from zero_orchestrator.jobfile.reading.reader import JobSource
from zero_orchestrator.jobfile.reading.schema import Checkpoint, Job, JobFile, Nodes


def complaints(directory, more, **engine):
    if engine:
        (directory / "c.json").write_text(json.dumps(engine))
        more += "\nconfig: c.json\n"
    return [f"{p.key}: {p.text}" for p in check(job(directory, more))]


def test_a_job_with_nothing_wrong_has_no_complaints(tmp_path):
    assert complaints(tmp_path, "checkpoint: {save_s: 60}\nparameters: 7B\n") == []


IMPOSSIBLE = {
    "processes_per_node: gpu": "processes_per_node: gpu: a node has none; write resources: "
    "{gpu: 8}, or a number of processes",
    "processes_per_node: 4\nresources: {gpu: 2}": "processes_per_node: 4 processes share 2 GPUs; "
    "write gpu",
    "resources: {memory: 8Gi, shm: 6Gi}": "resources.shm: 6Gi is more than half of memory (8Gi), "
    "of which it is a part; raise memory to 12Gi, or lower it",
    "grace_s: 30\ncheckpoint: {save_s: 40}": "grace_s: 30 s leave 25 s to drain, and one save "
    "takes 40 s; write 50, or save to something faster",
    "grace_s: 3": "grace_s: 3 s are too short for an agent to drain; write 10",
    "parameters: 70B": "checkpoint.size: 200Gi cannot hold 2 checkpoints; write 1565Gi",
    "etcd: {members: 2}": "etcd.members: 2 members survive no more failures than 1; write 3",
    "etcd: {endpoints: a:1, tls: true}": "etcd.tls: true is about an etcd made for this job; for "
    "yours name its ca, cert and key",
    "etcd: {user: zero, password_file: /p}": "etcd.user: is about an etcd of yours; name its "
    "endpoints",
    "etcd: {endpoints: a:1, user: zero}": "etcd.user: zero needs a password_file",
    "etcd: {endpoints: a:1, cert: c.pem}": "etcd: cert and key belong together; name both or "
    "neither",
    "args: [$(CONFIG)]": "args: $(CONFIG) stands for a file; name it with config: FILE",
    "image: r.example:5000/gpt": "image: r.example:5000/gpt: may be another one for the next pod; "
    "name a version or a digest: NAME:1.0.0, NAME@sha256:...",
    "image: gpt:latest": "image: gpt:latest: may be another one for the next pod; name a version "
    "or a digest: NAME:1.0.0, NAME@sha256:...",
    "environment: {OMP_NUM_THREADS: 4}": "environment.OMP_NUM_THREADS: is made from the key "
    "threads; set that",
    "environment: {a b: 4}": "environment.a b: is not a name of a variable",
    "secrets: {a b: wandb/key}": "secrets.a b: is not a name of a variable",
    "secrets: {TOKEN: hunter2}": "secrets.TOKEN: is not a reference; write SECRET/ENTRY, such as "
    "wandb/api-key, never the value",
    "environment: {T: x}\nsecrets: {T: a/b}": "secrets.T: is in environment, too; keep one",
    "secrets: {PET_NNODES: a/b}": "secrets.PET_NNODES: is made from the key nodes; set that",
    "checkpoint: {url: s3://b/x, claim: c}": "checkpoint: url and claim are two places; name one",
    "checkpoint: {secret: s}": "checkpoint.secret: s opens an object store; name its url",
    "node_unit: 16": "node_unit: no multiple of 16 lies within 2:8 nodes; write nodes: 2:16",
    "checkpoint: {ram_budget: 6Gi}": "checkpoint.ram_budget: 6Gi is more than resources.shm (4Gi), "
    "of which it is a part; raise that, or write at most 4Gi",
    "environment: {PET_EXCLUDE_AFTER: 3}": "environment.PET_EXCLUDE_AFTER: is made from the key "
    "exclude_after; set that",
    **{
        f"kubernetes: {{pod: {{spec: {{tolerations: {value}}}}}}}": "kubernetes.pod: tolerations: "
        "a list is needed here; write [{key: KEY, operator: Exists}], or leave it out"
        for value in ("", "{a: b}", "a")
    },
    "checkpoint: {access: ReadWriteOnce}": "checkpoint.access: ReadWriteOnce: agents on a second "
    "machine cannot mount it, on Kubernetes",
}


@pytest.mark.parametrize("more", IMPOSSIBLE)
def test_what_cannot_be_is_named_with_a_value_that_would_do(tmp_path, more):
    assert complaints(tmp_path, more) == [IMPOSSIBLE[more]]


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ("{min: 4, max: 2}", "nodes: minimum 4 exceeds maximum 2; write 2:4"),
        ("{min: 2, max: 4, start: 5}", "nodes.start: 5 is not within 2:4"),
    ],
)
def test_a_number_of_nodes_that_cannot_be_is_named(tmp_path, nodes, complaint):
    found = check(job(tmp_path, text=f"name: a\nscript: t.py\nnodes: {nodes}\n"))
    assert [f"{one.key}: {one.text}" for one in found] == [complaint]


@pytest.mark.parametrize(
    ("saving", "needed"),
    [
        # 7e9 parameters of 12 bytes on the least number of nodes, 2, and 64 MiB for one worker.
        ({"ram": {"replicas": 0}}, "79Gi"),
        ({"ram": {"every_steps": 1}, "async": True}, "157Gi"),
    ],
)
def test_copies_of_the_state_in_memory_need_shared_memory(tmp_path, saving, needed):
    text = "parameters: 7B\nresources: {memory: 500Gi, shm: 4Gi}"
    assert complaints(tmp_path, text, checkpoint={"async": True}) == []
    [complaint] = complaints(tmp_path, text, checkpoint=saving)
    assert complaint.startswith(f"resources.shm: 4Gi is less than the {needed} that ")
    assert complaints(tmp_path, text.replace("4Gi}", f"{needed}}}"), checkpoint=saving) == []


def test_the_volume_holds_the_checkpoints_that_are_kept_and_one_more(tmp_path):
    assert complaints(tmp_path, "parameters: 7B", checkpoint={"keep_last": 3}) == [
        "checkpoint.size: 200Gi cannot hold 4 checkpoints; write 313Gi"
    ]


@pytest.mark.parametrize(
    "saving",
    [5, None, {"keep_last": "x"}, {"ram": {"replicas": "y"}}, {"ram": 1, "keep_last": None}],
)
def test_what_is_wrong_within_the_config_is_left_for_the_engine_to_say(tmp_path, saving):
    text = "parameters: 1M"
    assert complaints(tmp_path, text, checkpoint=saving) == []


def test_on_spot_machines_a_save_longer_than_the_grace_period_is_only_a_remark(tmp_path):
    [found] = check(job(tmp_path, "spot: true\ncheckpoint: {save_s: 60}"))
    assert (found.key, found.is_fatal) == ("grace_s", False)


def saving(save_s: float, grace_s: float) -> Job:
    file = JobFile(
        name="a",
        script="t.py",
        nodes=Nodes(min=1, max=1),
        checkpoint=Checkpoint(save_s=save_s),
        grace_s=grace_s,
    )
    return Job(file=file, source=JobSource(file="f", lines={}), directory=Path(), config=None)


@given(st.integers(10, 3600))
def test_the_grace_period_that_is_proposed_is_long_enough(save_s):
    [complaint] = check(saving(save_s, grace_s=save_s))
    proposed = float(re.findall(r"write (\d+)", complaint.text)[0])
    assert check(saving(save_s, grace_s=proposed)) == []
