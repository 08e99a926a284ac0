"""Every library is required, or comes with an extra that an error message names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment
from zero_contract.extras import _EXTRAS, remedy

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    extra: {re.match(r"[\w-]+", one)[0] for one in wanted}
    for extra, wanted in PROJECT["optional-dependencies"].items()
}
REQUIRED = {re.match(r"[\w-]+", one)[0] for one in PROJECT["dependencies"]}
TRAINING = {"zero_checkpoint", "zero_comm", "zero_data", "zero_engine", "zero_step", "zero_torch"}
TRAINING |= {"zero_deepspeed", "zero_torchrun"}


def imported(package: Path) -> set[str]:
    """The top-level modules that the files of a package import, wherever."""
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("package", ["zero_contract", "zero_orchestrator", "zero_agent"])
def test_what_the_agent_imports_is_required_or_has_an_extra_with_a_remedy(package):
    [place] = [
        ROOT / side / package
        for side in ("orchestrator", "agent")
        if (ROOT / side / package).exists()
    ]
    distributions = packages_distributions()
    unknown = {
        name
        for name in imported(place)
        if not name.startswith("zero_")
        and not {each.lower() for each in distributions.get(name, [name])} & REQUIRED
        and name not in _EXTRAS
    }
    assert unknown <= {"google"}, "protobuf's"


def test_each_extra_that_is_named_has_the_library():
    for library, extra in _EXTRAS.items():
        wanted = {name.replace("-", "_") for name in OPTIONAL[extra]}
        assert any(name.startswith(library) for name in wanted), (library, extra)
        assert remedy(f"{library}.part").endswith(f"pip install 'zero-elastic[{extra}]'")
    assert remedy("grpc") == "grpc is not installed: pip install zero-elastic"


@pytest.mark.parametrize("package", sorted(TRAINING - {"zero_comm", "zero_torchrun"}))
def test_a_library_without_torch_says_what_to_type(package):
    blocked = (
        "import sys; sys.modules['torch'] = None; import importlib.util as u; find = u.find_spec\n"
    )
    blocked += "u.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}import {package}"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.endswith("torch is not installed: pip install 'zero-elastic[torch]'\n")
