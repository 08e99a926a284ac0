"""`import zero_deepspeed.as_deepspeed`: who looks for DeepSpeed finds the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import environment
from tests.support.fresh import run_forked


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


LOOK = """
import zero_deepspeed.as_deepspeed
import importlib.metadata as metadata, importlib.util, json, sys

before = sorted(name for name in sys.modules if name.partition(".")[0] == "deepspeed")
import deepspeed, deepspeed.comm as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.ops.adam import DeepSpeedCPUAdam
print(json.dumps({
    "before": before,
    "same": [deepspeed is zero_deepspeed, dist is zero_deepspeed.comm,
             DeepSpeedCPUAdam is zero_deepspeed.ops.adam.DeepSpeedCPUAdam],
    "specs": [deepspeed.__spec__.name, dist.__spec__.name],
    "found": [importlib.util.find_spec(name) is not None
              for name in ("deepspeed", "deepspeed.runtime.engine", "deepspeed.pipe")],
    "version": [metadata.version("deepspeed"), deepspeed.__version__],
    "name": metadata.metadata("deepspeed")["Name"],
    "imported_as": metadata.packages_distributions()["deepspeed"],
}))
"""


def test_modules_and_metadata_of_deepspeed_are_those_of_the_engine() -> None:
    done = run("-c", LOOK)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    first, second = told.pop("version")
    assert first == second
    assert tuple(map(int, first.partition("+")[0].split("."))) >= (0, 19, 8)
    assert told == {
        "before": [],
        "same": [True, True, True],
        "specs": ["zero_deepspeed", "zero_deepspeed.comm"],
        "found": [True, True, False],
        "name": "deepspeed",
        "imported_as": ["deepspeed"],
    }


@pytest.mark.full
def test_who_has_looked_already_is_not_left_with_half_of_it() -> None:
    done = run("-c", "import accelerate, zero_deepspeed.as_deepspeed")
    assert "zero_deepspeed.as_deepspeed comes too late: accelerate is imported" in done.stderr


PROGRAM = "import deepspeed, sys; print(deepspeed.__name__, __name__, sys.argv, sys.path[0])"


def test_a_script_and_a_module_run_as_they_are(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "program.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    ours = "zero_deepspeed.as_deepspeed"
    by_path = run("-m", ours, "scripts/program.py", "--deepspeed", "x.json", cwd=tmp_path)
    arguments = "'--deepspeed', 'x.json'"
    where = f"zero_deepspeed __main__ ['scripts/program.py', {arguments}] {script.parent}"
    assert by_path.stdout.strip() == where
    by_name = run_forked(ours, "-m", "program", "--deepspeed", "x.json", cwd=script.parent)
    assert (
        by_name.stdout.strip()
        == f"zero_deepspeed __main__ ['{script}', {arguments}] {script.parent}"
    )


USAGE = "usage: python -m zero_deepspeed.as_deepspeed [-m MODULE | SCRIPT] ARGUMENTS\n"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), USAGE),
        (("--help",), USAGE),
        (("none.py",), "zero_deepspeed.as_deepspeed: none.py: there is no such script\n"),
        (("-m", "no.it"), "zero_deepspeed.as_deepspeed: no.it: there is no such module\n"),
    ],
)
@pytest.mark.corners(given=[("none.py",)])
def test_what_cannot_be_run_is_said_in_one_line(given: tuple[str, ...], told: str) -> None:
    done = run_forked("zero_deepspeed.as_deepspeed", *given)
    assert (done.returncode, done.stderr) == (1, told)
