"""Whatever a job file has in whatever key: it is refused with its line, or made into files."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from dataclasses import replace

import pytest

from tests.unit.jobfile.support import LEAST, job
from zero_contract.values import parse_seconds
from zero_orchestrator.ctl import cli
from zero_orchestrator.jobfile.reading import schema
from zero_orchestrator.jobfile.reading.checks import check
from zero_orchestrator.jobfile.reading.reader import JobFileError
from zero_orchestrator.jobfile.reading.settings import settings
from zero_orchestrator.jobfile.render import slurm, systemd
from zero_orchestrator.jobfile.render.patches import merges, operations
from zero_orchestrator.jobfile.start.facts import Kubectl, why_no_etcd, why_no_registry

DIGITS = (19, 400, 5000)
ODD = (
    *("9" * count for count in DIGITS),
    *("0" * count + "1" for count in DIGITS),
    *(f"{'9' * count}.{'9' * count}{unit}" for count in DIGITS for unit in ("T", "Gi", "m", "d")),
    *("", "1e308", "-1", "a b", "a\n", "1\n", "CONFIG", "a\nb", "'", '"', "é", "a" * 99 + ":1"),
    *("[1]", "{a: b}", "{a: }", "[{a: }]", "{a: " * 60 + "1" + "}" * 60),
)


def given_as(key: str, value: str) -> str:
    """The least job file with a value at a path."""
    written = value if value[:1] in ("[", "{") else json.dumps(value)
    first, *inner = key.split(".")
    least = "".join(line for line in LEAST.splitlines(True) if not line.startswith(f"{first}:"))
    text = "".join(f"{{{name}: " for name in inner) + written + "}" * len(inner)
    return f"{least}{first}: {text}\n"


@pytest.mark.parametrize("key", sorted(schema.keys()))
def test_no_value_of_any_key_is_a_failure_of_this_program(tmp_path, key):
    for value in ODD:
        try:
            made = job(tmp_path, text=given_as(key, value))
            if not any(one.is_fatal for one in check(made)):
                merges(made.file)
                operations(made.file)
                slurm.render(made)
                systemd.files(made)
        except JobFileError as error:
            found = str(error)
            assert found.startswith(f"{tmp_path}/job.yaml:")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "abc"), ("kubernetes.namespace", "abc"), ("grow_every", "10m"),
        ("exclude_for", "10m"), ("hang_timeout", "auto"), ("resources.cpu", "500m"),
        ("processes_per_node", "auto"), ("etcd.endpoints", "a:1"), ("checkpoint.url", "s3://a"),
    ],
)  # fmt: skip
def test_a_value_with_a_newline_at_its_end_is_refused(tmp_path, key, value):
    assert job(tmp_path, text=given_as(key, value))
    with pytest.raises(JobFileError, match=rf"{key}.*'{value}\\n' is not "):
        job(tmp_path, text=given_as(key, f"{value}\n"))


@pytest.mark.parametrize("depth", [400, 3000, 100_000])
def test_a_config_that_is_nested_too_deeply_is_named(tmp_path, depth):
    for text in ('{"a": ' * depth, '{"a": ' * depth + "1" + "}" * depth):
        (tmp_path / "c.json").write_text(text)
        named = pytest.raises(JobFileError, match=r"4: config: c.json is not a config: ")
        with named if depth > 900 or not text.endswith("}") else contextlib.nullcontext():
            check(job(tmp_path, "config: c.json"))


@pytest.mark.parametrize("depth", [50, 100, 200, 400])
def test_a_pod_that_is_nested_deeply_is_rendered_or_named(tmp_path, depth, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    path = tmp_path / "job.yaml"
    pod = "{spec: " + "{a: " * depth + "1" + "}" * depth + "}"
    path.write_text(f"{LEAST}image: a:1\nkubernetes: {{pod: {pod}}}\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["render", str(path), "--to=kubernetes"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("zero-ctl: ")


@pytest.mark.parametrize("host", ["a" * 70 + ".b", "a..b", "é" * 70])
def test_an_etcd_at_no_name_of_a_host_is_a_reason(host):
    assert why_no_etcd([f"{host}:1"]) == f"{host}:1: is no name of a host"


@pytest.mark.parametrize("registry", ["reg:50x", "a" * 70 + ".b:1", "a..b:1", "[", "a b:1", "é:1"])
def test_a_registry_at_no_address_is_a_reason(registry):
    assert why_no_registry(registry)


@pytest.mark.parametrize("value", ["a b", "a#b", "'", '"', "a\\b", "$(x)", "x[a|b]&c", "24:00:00"])
@pytest.mark.parametrize("key", ["partition", "account", "time", "options.comment"])
def test_a_value_is_one_word_of_its_line_in_a_batch_script(tmp_path, key, value):
    made = job(tmp_path, text=given_as(f"slurm.{key}", value))
    name = key.rpartition(".")[2]
    (line,) = (line for line in slurm.render(made).splitlines() if f" --{name}=" in line)
    # sbatch takes a backslash also within single quotes, where a shell does not.
    words = shlex.split(line.removeprefix("#SBATCH "), comments=True)
    assert [word.replace("\\\\", "\\") for word in words] == [f"--{name}={value}"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('partition: "a\\nreboot"', "partition"),
        ('account: "a\\rb"', "account"),
        ('options: {comment: "a\\nb"}', "options.comment"),
        ('options: {"a\\nb": c}', "options.a\nb"),
        ('options: {"a b": c}', "options.a b"),
    ],
)
def test_what_a_line_of_a_batch_script_cannot_hold_is_refused(tmp_path, text, key):
    made = job(tmp_path, f"slurm: {{{text}}}")
    with pytest.raises(JobFileError, match=rf":4: slurm.{key}: .*write it on one line"):
        slurm.render(made)


@pytest.mark.parametrize(
    "config", ['{"a":\nCONFIG\n}', '{\nCONFIG: 1\n"CONFIG":\nCONFIG\nCONFIG_\n}']
)
def test_a_batch_script_writes_the_config_as_it_is(tmp_path, config):
    made = replace(job(tmp_path, text=LEAST), config=config)
    _, _, rest = slurm.render(made).partition("cat >")
    script = "cat >" + rest.partition("set -- ")[0]
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "gpt.config.json").read_text() == f"{config}\n"


@pytest.mark.parametrize("grace_s", ["2000000", "1e9", "1e300", "7.5", "30", "123456.789"])
def test_an_agent_reads_the_grace_period_that_a_job_file_has(tmp_path, grace_s):
    file = job(tmp_path, f"grace_s: {grace_s}").file
    assert parse_seconds(settings(file)["PET_SHUTDOWN_TIMEOUT"]) == pytest.approx(file.drain_s)


def test_a_cluster_that_does_not_say_why_it_does_not_answer_is_named(tmp_path, monkeypatch):
    (tmp_path / "kubectl").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert Kubectl(None).why_unreachable() == "kubectl ended with exit code 3"
