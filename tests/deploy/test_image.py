"""The image, built for real, and the package that it is made of.

`make test-image` builds the whole image on a Debian base, which takes minutes, root, buildah and
debootstrap, and a network or `PIP_*`; `make test` builds the package alone, without a network.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, ROOT
from tests.deploy.test_run import job_file
from tests.support.programs import works
from zero_agent.etcd.etcd_process import find_etcd

MIRROR = "http://deb.debian.org/debian"
TAG = "localhost/zero-elastic:test"


def run(*words: str | Path, timeout_s: float = 60, **more: str) -> str:
    """A command's output; its failure is the test's, with what it said."""
    done = subprocess.run(
        [*map(str, words)],
        capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ | more,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(map(str, words))}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


# ---- the package ----


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the package as a wheel, far from any checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    sources = directory / "sources"
    names = ("orchestrator", "agent", "engine", "deploy", "pyproject.toml", "README.md")
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name, **({"symlinks": True} if copy is shutil.copytree else {}))
    offline = ("--quiet", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", directory, sources, timeout_s=120)
    [wheel] = directory.glob("*.whl")
    venv.create(directory / "venv", with_pip=False)
    [packages] = (directory / "venv").glob("lib/python*/site-packages")
    run(sys.executable, "-m", "zipfile", "-e", wheel, packages)
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return directory / "venv" / "bin" / "python"


@pytest.mark.full
def test_the_installed_package_renders_what_the_checkout_does(installed, tmp_path):
    path = job_file(tmp_path, checkpoint={"path": "/c"}, etcd={"endpoints": ["e:1"]})
    targets = ["slurm", "systemd"]
    targets += ["kubernetes"] if works("kubectl") or works("kustomize") else []
    for target in targets:
        words = ("-m", "zero_orchestrator", "render", path, "--to", target)
        there = run(installed, *words, PYTHONPATH="")
        assert there == run(sys.executable, *words)
    where = run(installed, "-c", "import zero_orchestrator as z; print(z.__file__)", PYTHONPATH="")
    assert Path(where.strip()).is_relative_to(installed.parents[1])


# ---- the image ----


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """buildah with a store of its own, and the image built in it."""
    if os.geteuid() != 0:
        pytest.skip("chroot isolation needs root")
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    directory = tmp_path_factory.mktemp("buildah")
    store = ["--root", f"{directory}/store", "--runroot", f"{directory}/run"]
    tool = ["buildah", *store, "--storage-driver", "vfs"]
    base, etcd = _base(tool, directory), _etcd(tool)
    run(
        *(*tool, "build", "--isolation=chroot", "--pull=never", "--build-arg", f"BASE={base}"),
        *("--build-arg", f"ETCD_IMAGE={etcd}"),
        *(*_from_here(directory), "--file", DEPLOY / "Dockerfile", "--tag", TAG, ROOT),
        timeout_s=1800,
    )
    yield tool
    shutil.rmtree(directory)


def _base(tool: list[str], directory: Path) -> str:
    """The smallest Debian with a Python, as an image."""
    root, archive = directory / "debian", directory / "debian.tar"
    include = "--include=python3,python3-venv,ca-certificates"
    run("debootstrap", "--variant=minbase", include, "bookworm", root, MIRROR, timeout_s=900)
    run("tar", "-C", root, "-cf", archive, ".")
    container = run(*tool, "from", "scratch").strip()
    run(*tool, "add", container, archive, "/", timeout_s=300)
    run(*tool, "commit", "--quiet", container, "localhost/debian", timeout_s=300)
    shutil.rmtree(root)
    return "localhost/debian"


def _etcd(tool: list[str]) -> str:
    """An image with an etcd where that of its authors has it."""
    container = run(*tool, "from", "scratch").strip()
    run(*tool, "add", "--chmod=755", container, find_etcd(), "/usr/local/bin/etcd")
    run(*tool, "commit", "--quiet", container, "localhost/etcd")
    return "localhost/etcd"


def _from_here(directory: Path) -> list[str]:
    """Where pip of this machine finds packages, so that the build finds them there, too."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    settings = re.findall(r"^(?:global|:env:)\.([\w-]+)=('.*')$", listed, re.MULTILINE)
    values = {name: ast.literal_eval(text) for name, text in settings}
    config = directory / "pip.conf"
    lines = [f"{name} = " + value.replace("\n", "\n  ") for name, value in values.items()]
    config.write_text("\n".join(["[global]", *lines, ""]))
    words = {word.removeprefix("file://") for value in values.values() for word in value.split()}
    paths = {word.removesuffix("/simple") for word in words if word.startswith("/")}
    mounts = {config: "/etc/pip.conf"} | {path: path for path in paths if Path(path).exists()}
    volumes = [word for at, to in mounts.items() for word in ("--volume", f"{at}:{to}:ro")]
    index = os.environ.get("TORCH_INDEX")
    return volumes + (["--build-arg", f"TORCH_INDEX={index}"] if index else [])


@pytest.mark.image
@pytest.mark.timeout(3600)
def test_the_image_runs_as_a_user_without_rights_and_trains(buildah, tmp_path):
    container = run(*buildah, "from", "--pull=never", TAG, timeout_s=600).strip()
    inside = (*buildah, "run", "--isolation=chroot", container, "--")
    assert run(*inside, "id", "-u").strip() == "1000"
    assert run(*inside, "zero-agent", "--help").startswith("usage: zero-agent")
    assert "render" in run(*inside, "zero-ctl", "--help")
    config = run(*buildah, "inspect", "--type=image", "--format", "{{.OCIv1.Config}}", TAG)
    assert "zero-agent" in config
    which = "from zero_agent.etcd.etcd_process import binaries; print(*binaries())"
    assert run(*inside, "python3", "-c", which).strip() == "/usr/local/bin/etcd"
    job = ("--width=32", "--layers=2", "--length=32", "--samples=330", "--checkpoints=/tmp/c")
    agent = ("zero-agent", "--standalone", "--nproc-per-node=2", "examples/train_gpt.py")
    output = run(*inside, "env", "OMP_NUM_THREADS=1", "HOME=/tmp", *agent, *job, timeout_s=300)
    assert re.search(r"^done: 11 steps, weight hash v2:\w{64}$", output, re.MULTILINE), output
