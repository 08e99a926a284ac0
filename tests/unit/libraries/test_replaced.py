"""What a plug-in replaces in a library is there, or its version is refused."""

from __future__ import annotations

import importlib
import pkgutil
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from zero_contract.errors import ConfigError
from zero_libraries.versions import TRIED

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, when they are imported


@pytest.mark.parametrize(
    ("library", "base"),
    [
        ("transformers", "transformers:Trainer"),
        ("lightning", "lightning.pytorch.strategies:Strategy"),
        ("torchtitan", "torchtitan.trainer:Trainer"),
    ],
)
def test_a_plug_in_checks_all_that_it_replaces(library: str, base: str) -> None:
    pytest.importorskip(library)
    if library == "torchtitan":
        import tests.support.torchtitan_cpu  # noqa: F401 - the CPU comes first
    plug_in: Any = importlib.import_module(f"zero_libraries.{library}")
    theirs = pkgutil.resolve_name(base)
    its = {
        name
        for name, value in vars(plug_in._Protected).items()
        if isinstance(value, FunctionType | property) and not name.startswith("__")
    }
    assert {name for name in its if hasattr(theirs, name)} == {*plug_in._REPLACED}


def test_an_accelerator_without_a_method_that_a_run_replaces_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerate = pytest.importorskip("accelerate")
    from zero_libraries.accelerate import protect

    monkeypatch.delattr(accelerate.Accelerator, "_do_sync")
    model = nn.Linear(2, 1)
    given = model, torch.optim.SGD(model.parameters()), DataLoader(range(8), 2)
    with pytest.raises(ConfigError, match=r"has no Accelerator\._do_sync, .*: install that one"):
        protect(accelerate.Accelerator(cpu=True), *given, microbatches=2)


def test_a_trainer_without_a_method_that_a_run_replaces_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    from zero_libraries.transformers import protect

    monkeypatch.delattr(transformers.Trainer, "floating_point_ops")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=rf"has no .*, .* {TRIED['transformers']} is the newest"):
        protect(transformers.Trainer(nn.Linear(2, 1), arguments), microbatches=2)
