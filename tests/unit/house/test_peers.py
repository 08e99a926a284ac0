"""The harness for the suites of peers: what a case comes to, and what makes a run fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.cases import Case, Outcome, judge, read, write
from tests.peers.report import lost, table
from tests.peers.run import collect, run, sample
from tests.peers.suites import Suite

TRACEBACK = """
>       engine.step()
E       zero_contract.errors.ZeroError: step() without backward(); call engine.backward(loss) first
"""


@pytest.mark.parametrize(
    ("outcome", "text", "found"),
    [
        ("passed", "", Outcome.PASSED),
        ("skipped", "Skipped: no device", Outcome.SKIPPED),
        ("failed", TRACEBACK, Outcome.PUBLIC),
        ("began", "", Outcome.PUBLIC),
        ("failed", "NotImplementedError: not here: deepspeed.moe.layer.x", Outcome.NOT_OFFERED),
        ("failed", "NotImplementedError: not here: deepspeed.runtime.fp16.x", Outcome.INTERNALS),
        ("failed", "ModuleNotFoundError: No module named 'mup'", Outcome.HARNESS),
    ],
)
def test_a_case_has_an_outcome(outcome: str, text: str, found: Outcome) -> None:
    assert judge("unit/test_x.py::test", outcome, text).outcome is found


def test_a_failure_is_told_by_its_last_error() -> None:
    reason = judge("a", "failed", TRACEBACK).reason
    assert reason.endswith("ZeroError: step() without backward(); call engine.backward(loss) first")
    assert judge("a", "began", "").reason == "did not end"
    assert judge("a", "failed", "ValueError: no /home/me/x-1/file").reason == "ValueError: no file"


def test_only_a_case_that_passed_before_makes_a_run_fail(tmp_path: Path) -> None:
    before = {
        "kept": Case("kept", Outcome.PASSED),
        "lost": Case("lost", Outcome.PASSED),
        "failed": Case("failed", Outcome.INTERNALS, "AttributeError: x"),
    }
    write(tmp_path / "cases.tsv", before)
    assert read(tmp_path / "cases.tsv") == before
    found = before | {"lost": Case("lost", Outcome.PUBLIC, "ValueError: y")}
    assert lost(before, found) == [found["lost"]]
    assert lost(found, before) == []
    assert table("peer", found).splitlines()[1:] == ["    lost: ValueError: y"]


CASES = """
import os
import pytest

@pytest.mark.parametrize("number", range(5))
def test_many(number):
    assert number < 4

def test_that_ends_its_process():
    os._exit(3)

def test_after_it():
    pass

def test_leaves_a_fixture():
    os.environ["LEFT"] = "1"
    raise ValueError

def test_takes_the_fixture():
    assert "LEFT" not in os.environ, "assert not self._finalizers"
"""


def test_every_case_of_a_suite_has_an_outcome_although_one_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "test_cases.py").write_text(CASES)
    suite = Suite(name="peer", source="", folder="peer", files=("test_cases.py",), per_test=2)
    names = sample(collect(suite, tmp_path), suite.per_test)
    gone = "test_cases.py::test_of_another_version"
    found = run(suite, tmp_path, [gone, *sorted(names)], None, minutes=5)
    assert {name.partition("::")[2]: case.outcome for name, case in found.items()} == {
        "test_after_it": Outcome.PASSED,
        "test_leaves_a_fixture": Outcome.PUBLIC,
        "test_many[0]": Outcome.PASSED,
        "test_many[2]": Outcome.PASSED,
        "test_takes_the_fixture": Outcome.PASSED,
        "test_that_ends_its_process": Outcome.PUBLIC,
    }
