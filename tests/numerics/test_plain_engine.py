"""`zero_engine` alone, without DeepSpeed's names: an engine that trains, saves and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zero_engine
from tests.support.cluster import environment
from tests.support.models import Tokens, make_model, param_groups
from tests.support.training import DATASET_SIZE, config, fingerprint, make_engine, train
from tests.support.world import WorldPool, one_result
from zero_deepspeed import DeepSpeedEngine

SCRIPT = """
import json, sys
import zero_engine
from tests.support.models import Tokens, make_model, param_groups

settings, directory = json.loads(sys.argv[1]), sys.argv[2]

def make():
    model = make_model(7)
    return zero_engine.initialize(
        model, model_parameters=param_groups(model), training_data=Tokens(23), config=settings
    )

def train(engine, steps):
    while engine.global_steps < steps:
        for batch in engine.training_dataloader:
            engine.backward(engine(batch))
            engine.step()
            if engine.global_steps == steps:
                return

first = make()
train(first, 2)
first.save_checkpoint(directory, client_state={"seen": 20}, blocking=True)
second = make()
_, client = second.load_checkpoint(directory)
train(second, 4)
print(json.dumps({
    "types": [type(first).__name__, type(second).__name__],
    "hash": second.weight_hash(),
    "client": client,
    "with_deepspeeds_names": [name for name in sys.modules if name.startswith("zero_deepspeed")],
}))
"""


def test_a_script_trains_and_goes_on_without_anything_of_deepspeed(
    worlds: WorldPool, tmp_path: Path
) -> None:
    settings = config(3)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(settings), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "types": ["Engine", "Engine"],
        "hash": one_result(worlds, train_under_deepspeeds_names, settings)[0],
        "client": {"seen": 20},
        "with_deepspeeds_names": [],
    }


def train_under_deepspeeds_names(settings: dict[str, Any]) -> tuple[Any, ...]:
    engine = make_engine(settings)
    assert type(engine) is DeepSpeedEngine
    train(engine, 4)
    return fingerprint(engine)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_gives_the_bits_of_deepspeeds_names(worlds: WorldPool, stage: int, world: int) -> None:
    by_name = one_result(worlds, train_under_deepspeeds_names, config(stage))
    assert worlds.run(world, train_plainly, config(stage)) == [by_name] * world


def train_plainly(settings: dict[str, Any]) -> tuple[Any, ...]:
    model = make_model(7)
    engine = zero_engine.initialize(
        model,
        model_parameters=param_groups(model),
        training_data=Tokens(DATASET_SIZE),
        config=settings,
    )
    assert type(engine) is zero_engine.Engine
    train(engine, 4)
    return fingerprint(engine)
