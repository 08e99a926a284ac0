"""A name that a script knows from DeepSpeed, and that is not here, is an error with the remedy."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

import zero_deepspeed
from tests.support.cluster import environment
from zero_deepspeed.absent_names import ABSENT_NAMES


@pytest.mark.parametrize("name", ABSENT_NAMES)
def test_who_uses_or_imports_it_reads_what_to_do_instead(name: str) -> None:
    message = f"{name} does not exist here: {ABSENT_NAMES[name]}"
    package, _, last = name.rpartition(".")
    with pytest.raises(ModuleNotFoundError) as imported:
        importlib.import_module(name)
    with pytest.raises(ImportError) as taken:
        exec(f"from {package} import {last}", {})
    with pytest.raises(AttributeError) as looked_up:
        getattr(importlib.import_module(package), last)
    assert [str(error.value) for error in (imported, taken, looked_up)] == [message] * 3


@pytest.mark.parametrize("name", ABSENT_NAMES)
def test_who_only_asks_is_told_that_it_is_not_there(name: str) -> None:
    package, _, last = name.rpartition(".")
    module = importlib.import_module(package)
    asked = hasattr(module, last), getattr(module, last, None), importlib.util.find_spec(name)
    assert asked == (False, None, None)


def test_what_never_was_there_is_an_error_like_any_other() -> None:
    with pytest.raises(AttributeError, match="module 'zero_deepspeed' has no attribute 'nonsense'"):
        zero_deepspeed.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nonsense' from 'zero_deepspeed'"):
        exec("from zero_deepspeed import nonsense", {})
    assert not hasattr(zero_deepspeed, "nonsense")


SCRIPT = """
import zero_deepspeed.as_deepspeed
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
"""


@pytest.mark.full
def test_under_deepspeeds_own_name_as_well() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    name = "deepspeed.runtime.zero.stage3"
    wanted = f"ModuleNotFoundError: {name} does not exist here: "
    assert done.stderr.splitlines()[-1] == wanted + ABSENT_NAMES[f"zero_{name}"]
