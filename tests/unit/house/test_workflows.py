"""What the workflows of the repository run are the project's own commands."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def runs(path: Path) -> list[str]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    found = []
    for job in jobs:
        parts = job.get("strategy", {}).get("matrix", {}).get("part", [""])
        steps = [step["run"] for step in job["steps"] if "run" in step]
        found += [re.sub(r"\$\{\{.*?\}\}", part, step) for step in steps for part in parts]
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_step_of_a_workflow_is_a_target_of_the_makefile(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    parts = re.search(r"^PARTS := (.*)$", makefile, re.MULTILINE)
    assert parts is not None
    targets = {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE), *parts[1].split()}
    assert [step for step in runs(path) if step.removeprefix("make ") not in targets] == []


def test_the_nightly_run_has_every_part_of_the_whole_suite() -> None:
    parts = re.search(r"^PARTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert parts is not None
    nightly = [*parts[1].split(), "searches"]
    assert runs(ROOT / ".github/workflows/nightly.yml") == [f"make {part}" for part in nightly]
