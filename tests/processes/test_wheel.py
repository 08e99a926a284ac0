"""The wheel alone is enough: installed into a new environment, with no checkout in reach."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment

pytestmark = [pytest.mark.full, pytest.mark.processes]

ROOMS = ("orchestrator", "agent", "engine")
PACKAGES = {path.parent.name for room in ROOMS for path in (ROOT / room).glob("*/__init__.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as `make dist` does, out of a copy: a build writes into its sources."""
    pytest.importorskip("build.__main__", reason="the package `build` is not installed: make dev")
    source = tmp_path_factory.mktemp("source")
    for name in (*ROOMS, "deploy"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    out = source / "dist"
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    done = subprocess.run(line, cwd=out.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(out.glob("*.tar.gz"))) == 1
    [made] = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that has the wheel, and of this one what it depends on."""
    directory = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    [packages] = directory.glob("lib/python*/site-packages")
    # A directory named in a .pth is on the path, and the .pth files in it are not read: so the
    # editable installation of the checkout, which lies beside torch, is out of reach.
    (packages / "dependencies.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    return directory / "bin"


def run(directory: Path, *line: object) -> str:
    """What a program prints, in a directory that is no checkout."""
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, line)], cwd=directory, env=kept, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_types_the_licence_and_what_job_files_are_rendered_from(
    wheel: Path,
) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"{package}/py.typed" for package in PACKAGES} <= {*names}
    assert sum(name.endswith("licenses/LICENSE") for name in names) == 1
    rendered = {f"zero_orchestrator/jobfile/deploy/{name}" for name in rendered_from()}
    assert rendered <= {*names}
    assert [name for name in names if name.startswith(("tests", "docs", "examples"))] == []


def rendered_from() -> list[str]:
    deploy = ROOT / "deploy"
    found: list[Path] = []
    for room in ("kubernetes/base", "kubernetes/components", "slurm", "systemd"):
        found += [path for path in (deploy / room).rglob("*") if path.is_file()]
    return [str(path.relative_to(deploy)) for path in found]


def test_every_package_is_that_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    names = sorted(PACKAGES)
    text = f"import {', '.join(names)}\nfor it in ({', '.join(names)}): print(it.__file__)"
    places = run(tmp_path, installed / "python", "-c", text).splitlines()
    assert len(places) == len(PACKAGES)
    assert [place for place in places if not place.startswith(str(installed.parent))] == []


def test_an_example_trains_under_the_agent_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "minimal.py", tmp_path)
    agent = (installed / "zero-agent", "--standalone", "--nproc-per-node=2")
    assert run(tmp_path, *agent, "minimal.py").startswith("step 48, weights ")
    assert len(run(tmp_path, installed / "zero-ckpt", "ls", "checkpoints").splitlines()) > 2


def test_a_job_file_is_rendered_by_the_wheel(installed: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "job.yaml", tmp_path)
    job = (tmp_path / "job.yaml").read_text().replace("{size: 1Gi}", "{path: /mnt/checkpoints}")
    (tmp_path / "job.yaml").write_text(job)
    render = (installed / "zero-ctl", "render", "job.yaml", "--to", "slurm")
    assert "#SBATCH --job-name=minimal\n" in run(tmp_path, *render)
