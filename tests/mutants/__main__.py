"""Does a test notice each small change of the code on which equal bits and commits depend?

    python -m tests.mutants              all modules of SUBJECTS; `make mutants` calls it
    python -m tests.mutants zero_step.gradients.norm

Each mutant runs the tests of its module in a fork of this process, which has imported torch. It
fails if a mutant survives that EQUIVALENT does not name, or if one that is named there dies.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType

import pytest
import torch  # noqa: F401 - each fork would import it again

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.mutate import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / part) for part in ("orchestrator", "agent", "engine")]
SUBJECTS = {
    "zero_step.gradients.norm": [
        "tests/unit/step/test_norm.py",
        "tests/unit/step/test_division.py",
    ],
    "zero_comm.sums.ordered_sum": ["tests/numerics/test_reduction.py"],
    "zero_checkpoint.saving.commit": [
        "tests/unit/checkpoint/test_candidates.py",
        "tests/unit/checkpoint/test_commit.py",
    ],
    "zero_checkpoint.loading.restore": [
        "tests/unit/checkpoint/test_candidates.py",
        "tests/unit/checkpoint/test_damage.py",
        "tests/unit/checkpoint/test_round_trip.py",
        "tests/unit/checkpoint/test_weights_first.py",
        "tests/unit/checkpoint/memory/test_damage.py",
        "tests/unit/checkpoint/test_plain.py",
        "tests/unit/checkpoint/test_commit.py",
    ],
}
"""Module -> the tests that have to notice each change of it."""
_LIMIT_S = 600
"""A mutant may loop for ever: then it is noticed, too."""


class _Mutated(Loader, MetaPathFinder):
    """Loads one module from a changed tree."""

    def __init__(self, name: str, code: CodeType) -> None:
        self._name, self._code = name, code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        origin = PathFinder.find_spec(fullname, path)
        assert origin is not None
        return importlib.util.spec_from_loader(fullname, self, origin=origin.origin)

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, vars(module))


def survives(module: str, path: Path, mutant: Mutant, tests: Sequence[str]) -> bool:
    """Run the tests on a mutant; whether all of them pass."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        sys.meta_path.insert(0, _Mutated(module, compile(mutant.tree, path, "exec")))
        os._exit(bool(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))
    deadline_s = time.monotonic() + _LIMIT_S
    try:
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline_s:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
    except KeyboardInterrupt:
        os.killpg(child, signal.SIGKILL)
        raise SystemExit(128 + signal.SIGINT) from None
    return done[1] == 0


def source_of(module: str) -> Path:
    """The file of a module, which is not imported."""
    for root in PATHS:
        path = Path(root, *module.split(".")).with_suffix(".py")
        if path.exists():
            return path
    raise FileNotFoundError(f"{module}: in none of {PATHS}")


def main(modules: Sequence[str]) -> int:
    """Try all mutants of these modules; print those that survive. 0: as EQUIVALENT says."""
    if unknown := [module for module in modules if module not in SUBJECTS]:
        raise SystemExit(f"{', '.join(unknown)}: not known; there are {', '.join(SUBJECTS)}")
    sys.path[:0] = PATHS
    wrong = 0
    for module in modules:
        path, named = source_of(module), EQUIVALENT.get(module, {})
        unchanged = Mutant(0, "unchanged", ast.parse(path.read_text()))
        if not survives(module, path, unchanged, SUBJECTS[module]):
            raise SystemExit(f"{module}: its tests fail, or take {_LIMIT_S} s, without any change")
        found, count = Counter[str](), 0
        for mutant in mutants(path.read_text()):
            count += 1
            if survives(module, path, mutant, SUBJECTS[module]):
                found[mutant.what] += 1
                if mutant.what not in named:
                    print(
                        f"{path.relative_to(ROOT)}:{mutant.line}: survives: {mutant.what}",
                        flush=True,
                    )
        noticed = [what for what in named if what not in found]
        for what in noticed:
            print(f"{module}: is noticed, so it is not equivalent: {what}")
        unexpected = sum(found[what] for what in found if what not in named)
        wrong += unexpected + len(noticed)
        print(
            f"{module}: {count} mutants, {unexpected} survive, {len(named)} named equivalent",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(SUBJECTS)))
