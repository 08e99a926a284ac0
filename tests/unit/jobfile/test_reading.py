"""Wrong job files: every message names the line, the key and the remedy."""

from __future__ import annotations

import json
import re

import pytest

from tests.unit.jobfile.support import LEAST, job
from zero_contract.values import Size
from zero_orchestrator.jobfile.reading import schema
from zero_orchestrator.jobfile.reading.reader import JobFileError
from zero_orchestrator.jobfile.reading.schema import at_least


def test_the_least_job_file_has_the_defaults_of_deploy(tmp_path):
    file = job(tmp_path).file
    assert (file.nnodes, file.start, file.max_restarts) == ("2:8", 2, 20)
    assert (file.grace, file.drain_s) == (120, 100)
    assert (file.resources.cpu, str(file.resources.memory)) == ("4", "16Gi")
    assert (file.etcd.members, file.checkpoint.access) == (3, "ReadWriteMany")


def test_a_job_file_says_all_there_is_to_say(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"train_batch_size": 8}))
    file = job(
        tmp_path,
        """\
args: [--a, "b c"]
config: c.json
parameters: 1.3B
processes_per_node: gpu
resources: {cpu: 64, memory: 512Gi, gpu: 8, shm: 64Gi}
checkpoint: {claim: shared, save_s: 30}
etcd:
  endpoints: [etcd-0:2379, "[::1]:2379"]
  user: zero
  password_file: /etc/zero/password
environment: {NCCL_DEBUG: INFO, ANSWER: 42, TRUE: yes}
spot: true
kubernetes: {namespace: team, queue: training}
slurm: {partition: gpu, options: {exclusive: ""}}
""",
    ).file
    assert file.args == ("--a", "b c")
    assert file.parameters == 1_300_000_000
    assert (file.processes, file.threads_per_worker) == (8, 8)
    assert file.etcd.endpoints == ("etcd-0:2379", "[::1]:2379")
    assert file.environment == {"NCCL_DEBUG": "INFO", "ANSWER": "42", "TRUE": "yes"}
    assert (file.grace, file.drain_s) == (15, 11)
    assert file.slurm.options == {"exclusive": ""}


@pytest.mark.parametrize(("written", "bounds"), [("2:16", (2, 16)), ("4", (4, 4)), ("1:4", (1, 4))])
def test_bounds_are_read_as_written_though_yaml_would_make_a_number_in_base_60_of_them(
    tmp_path, written, bounds
):
    file = job(tmp_path, text=f"name: gpt\nscript: t.py\nnodes: {written}\n").file
    assert (file.nodes.min, file.nodes.max) == bounds


WRONG = {
    "resource: {cpu: 4}": "4: resource: unknown key; did you mean 'resources'?",
    "resources: {cpus: 4}": "4: resources.cpus: unknown key; did you mean 'cpu'?",
    "resources:\n  memory: 16GB": (
        "5: resources.memory: '16GB' is not a size; write 512Mi, 16Gi or 2Ti"
    ),
    "resources: {cpu: 0}": (
        "4: resources.cpu: '0' is not a number of cores; write 4, or 500m for half of one"
    ),
    "resources: [4, 16Gi]": "4: resources: a list is not an object",
    "resources: 4": "4: resources: '4' is not an object",
    "name: b": "4: name: is given twice, first in line 1; keep one",
    "spot: maybe": "4: spot: 'maybe' is not true or false",
    "max_restarts: many": "4: max_restarts: 'many' is not an integer",
    "max_restarts: {a: 1}": "4: max_restarts: a mapping is not an integer",
    "grace_s: 2m": "4: grace_s: '2m' is not a length of time; write seconds, such as 120",
    "grace_s: .inf": "4: grace_s: '.inf' is not a length of time; write seconds, such as 120",
    "exclude_after: -1": "4: exclude_after: '-1' is less than 0",
    "exclude_for: 0s": (
        "4: exclude_for: '0s' is not more than 0 seconds; write seconds, such as 30, or 10m"
    ),
    "node_unit: 0": "4: node_unit: '0' is less than 1",
    "join_timeout: soon": (
        "4: join_timeout: 'soon' is not a length of time; write seconds, such as 30, or 10m, "
        "or 2h, or 7d"
    ),
    "hang_timeout: never": (
        "4: hang_timeout: 'never' is not a limit; write seconds, such as 600, or 10m, or "
        "auto, or off"
    ),
    "hang-timeout: off": "4: hang-timeout: unknown key; did you mean 'hang_timeout'?",
    "numa_binding: cpu": (
        '4: numa_binding: \'cpu\' is not "node", "socket", "exclusive" or "core-complex"'
    ),
    "checkpoint: {ram_budget: 16GB}": (
        "4: checkpoint.ram_budget: '16GB' is not a size; write 512Mi, 16Gi or 2Ti"
    ),
    "threads: 0": "4: threads: '0' is less than 1",
    "parameters: huge": "4: parameters: 'huge' is not a number of parameters; write 125M or 7B",
    "processes_per_node: all": (
        "4: processes_per_node: 'all' is not a number of workers; write a number from 1, or "
        "auto, cpu or gpu"
    ),
    "etcd:\n  endpoints:\n  - etcd": (
        "6: etcd.endpoints[0]: 'etcd' is not an address of etcd; write HOST:PORT, such as "
        "etcd-0:2379"
    ),
    "checkpoint: {url: /mnt}": (
        "4: checkpoint.url: '/mnt' is not a URL in an object store; write s3://BUCKET/PREFIX "
        "or gs://..."
    ),
    "checkpoint: {access: RWX}": (
        '4: checkpoint.access: \'RWX\' is not "ReadWriteMany" or "ReadWriteOnce"'
    ),
    "environment: {A: [1]}": "4: environment.A: a list is not a string",
    "kubernetes: {namespace: My_Team}": (
        "4: kubernetes.namespace: 'My_Team' is not a name that every kind of cluster "
        "accepts; use at most 40 of a-z, 0-9 and '-', a letter first"
    ),
    "config: missing.json": "4: config: missing.json cannot be read: No such file or directory",
    "args: [a": "4: is not YAML: expected ',' or ']', but got '<stream end>'",
    "spot: !!python/object/apply:os.system [x]": "4: spot: a list is not true or false",
}


@pytest.mark.parametrize("written", WRONG)
def test_what_is_wrong_is_named_with_its_line_and_the_remedy(tmp_path, written):
    with pytest.raises(JobFileError) as caught:
        job(tmp_path, written)
    message = str(caught.value).removeprefix(f"{tmp_path}/job.yaml:")
    assert message == WRONG[written]


def test_a_key_unlike_any_other_is_told_which_there_are(tmp_path):
    with pytest.raises(JobFileError, match=r"4: zzz: unknown key; known: args, "):
        job(tmp_path, "zzz: 1")


def test_every_mistake_is_told_at_once_in_the_order_of_the_lines(tmp_path):
    with pytest.raises(JobFileError) as caught:
        job(tmp_path, text="nodes: 4:2\nspot: 1\nscript: [a]\n")
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(f"{tmp_path}/job.yaml:") for line in lines] == [
        "1: nodes: 4:2: minimum 4 exceeds maximum 2; write 2:4",
        "1: name: is missing; write a name that every kind of cluster accepts; use at most 40 of "
        "a-z, 0-9 and '-', a letter first",
        "2: spot: '1' is not true or false",
        "3: script: a list is not a script that zero-agent runs, such as train.py",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty; deploy/job.yaml is an example"),
        (b"\xff\xfe\x00", r"is not UTF-8 text"),
        (b"- a\n", r":1: a list: keys with values are needed here"),
        (b"a: \x01\n", r"is not YAML"),
    ],
)
def test_a_file_that_is_no_job_file_says_so(tmp_path, content, message):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(JobFileError, match=message):
        schema.load(path)


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(JobFileError, match=r"none.yaml: cannot be read: No such file"):
        schema.load(tmp_path / "none.yaml")


def test_a_value_that_is_left_empty_is_the_default(tmp_path):
    assert job(tmp_path, "spot:\ngrace_s: ~\n").file == job(tmp_path, text=LEAST).file


def test_a_config_may_have_comments_as_the_engine_and_deepspeed_read_it(tmp_path):
    (tmp_path / "c.json").write_text('{"checkpoint": {"keep_last": 4}, // four\n}')
    found = job(tmp_path, "config: c.json")
    assert found.engine == {"checkpoint": {"keep_last": 4}}
    assert found.config == (tmp_path / "c.json").read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "it is not a JSON object"),
        ('{"a": 1', "Expecting ',' delimiter: line 1 column 8"),
        ("words", "Expecting value: line 1 column 1"),
    ],
)
def test_what_is_no_config_is_named_with_its_line(tmp_path, text, problem):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(JobFileError, match=re.escape(f"c.json is not a config: {problem}")):
        job(tmp_path, "config: c.json")


def test_places_in_the_arguments_are_filled_in_and_other_variables_are_left(tmp_path):
    file = job(tmp_path, "args: [-c=$(CONFIG), $(CHECKPOINTS)/x, $(POD_NAME), $HOME]").file
    assert file.arguments(config="/c", checkpoints="/d") == [
        "-c=/c",
        "/d/x",
        "$(POD_NAME)",
        "$HOME",
    ]


def test_sizes_are_bytes_and_stay_as_they_are_written():
    assert Size("1.5Gi").size_bytes == 3 * 2**29
    assert str(Size("1.5Gi")) == "1.5Gi"
    assert Size("1024Mi") == Size("1Gi") < Size("1025Mi")
    assert [str(at_least(n)) for n in (1, 2**30, 2**30 + 1)] == ["1Mi", "1024Mi", "2Gi"]
