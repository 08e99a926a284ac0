"""A name that a script knows from before, or from DeepSpeed, is an error that says what to do."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

import zero_deepspeed
import zero_engine
from tests.support.cluster import environment
from zero_engine.former_names import ABSENT_NAMES, FORMER_NAMES

NAMES = FORMER_NAMES | ABSENT_NAMES
MOVED = {name: now for name, now in FORMER_NAMES.items() if " " not in now}


def said(name: str) -> str:
    if name in ABSENT_NAMES:
        return f"{name} does not exist here: {ABSENT_NAMES[name]}"
    now = FORMER_NAMES[name]
    return f"there is no {name} any more: " + (f"it is {now} now" if name in MOVED else now)


@pytest.mark.parametrize("name", NAMES)
def test_who_uses_or_imports_it_reads_where_it_went(name: str) -> None:
    package, _, last = name.rpartition(".")
    with pytest.raises(ModuleNotFoundError) as imported:
        importlib.import_module(name)
    with pytest.raises(ImportError) as taken:
        exec(f"from {package} import {last}", {})
    with pytest.raises(AttributeError) as looked_up:
        getattr(importlib.import_module(package), last)
    assert [str(error.value) for error in (imported, taken, looked_up)] == [said(name)] * 3


@pytest.mark.parametrize("name", NAMES)
def test_who_only_asks_is_told_that_it_is_not_there(name: str) -> None:
    package, _, last = name.rpartition(".")
    module = importlib.import_module(package)
    asked = hasattr(module, last), getattr(module, last, None), importlib.util.find_spec(name)
    assert asked == (False, None, None)


@pytest.mark.parametrize("name", MOVED)
def test_it_is_where_the_error_says(name: str) -> None:
    place = MOVED[name]
    package, _, last = place.rpartition(".")
    assert importlib.util.find_spec(place.partition(".")[0]) is not None
    if not package or importlib.util.find_spec(package) is None:
        importlib.import_module(place)
    else:
        importlib.import_module(package)
        found = hasattr(sys.modules[package], last)
        assert found or importlib.util.find_spec(place) is not None


def test_what_never_was_there_is_an_error_like_any_other() -> None:
    with pytest.raises(AttributeError, match="module 'zero_engine' has no attribute 'nonsense'"):
        zero_engine.nonsense  # noqa: B018
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
    wanted = f"ModuleNotFoundError: there is no {name} any more: "
    assert done.stderr.splitlines()[-1] == wanted + FORMER_NAMES[f"zero_{name}"]
