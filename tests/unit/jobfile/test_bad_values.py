"""Whatever a job file has in whatever key: it is refused with its line, or made into files."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.unit.jobfile.support import LEAST, job
from zero_orchestrator.ctl import cli
from zero_orchestrator.jobfile.reading import schema
from zero_orchestrator.jobfile.reading.checks import check
from zero_orchestrator.jobfile.reading.reader import JobFileError
from zero_orchestrator.jobfile.render import slurm, systemd
from zero_orchestrator.jobfile.render.patches import merges, operations
from zero_orchestrator.jobfile.start.facts import why_no_etcd, why_no_registry

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
