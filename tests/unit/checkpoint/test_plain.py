"""`zero_checkpoint.save` and `load`: plain structures, with no engine and without one installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_checkpoint
from tests.unit.checkpoint.support import on_ranks
from zero_checkpoint import Part, StoreConsensus, weight_hash
from zero_checkpoint.dcp import Writer
from zero_checkpoint.errors import CheckpointError, ModelMismatch
from zero_checkpoint.plain import agree

TREE = Path(__file__).parents[3]
SCRIPT = TREE / "tests/data/scripts/plain_checkpoint.py"


@pytest.mark.full
def test_the_library_alone_saves_on_two_processes_and_loads_on_one_bit_for_bit(
    tmp_path: Path,
) -> None:
    """In a directory with three packages and nothing of this tree beside them."""
    for package in ("orchestrator/zero_contract", "engine/zero_comm", "engine/zero_checkpoint"):
        shutil.copytree(TREE / package, tmp_path / "alone" / Path(package).name)
    (tmp_path / "work").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / "work")
    installed = [path for path in sys.path if Path(path).name == "site-packages"]
    paths = [str(tmp_path / "alone"), *installed]

    # -S reads no .pth file, by which this tree is importable otherwise.
    done = subprocess.run(
        [sys.executable, "-S", "-P", script, str(tmp_path / "work")],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"v2:[0-9a-f]{64}\n", done.stdout)


def state() -> dict[str, Any]:
    return {
        "w": torch.arange(12.0).reshape(3, 4).T,
        "nested": [torch.tensor(2.5), {"b": torch.tensor([1, 2], dtype=torch.int8)}, "text"],
        "groups": ({"lr": 0.1, "betas": (0.9, 0.999)}, {7: None}),
    }


def test_a_process_alone_gets_back_what_it_saved(tmp_path: Path) -> None:
    zero_checkpoint.save(tmp_path, state(), step=5, tag="best")

    found = zero_checkpoint.load(tmp_path)

    assert found is not None
    assert (found.step, found.tag, found.path.parent) == (5, "best", tmp_path)
    assert torch.equal(found.state["w"], state()["w"])
    assert found.state["nested"][0].item() == 2.5
    assert found.state["nested"][1]["b"].dtype == torch.int8
    assert (found.state["nested"][2], found.state["groups"]) == ("text", state()["groups"])


@pytest.mark.parametrize("keep_last", [-1, 0, 1])
def test_a_policy_that_keeps_fewer_than_two_is_refused_before_anything_is_saved(
    tmp_path: Path, keep_last: int
) -> None:
    with pytest.raises(CheckpointError, match="keep at least 2"):
        zero_checkpoint.save(tmp_path, state(), step=5, keep_last=keep_last)
    with pytest.raises(CheckpointError, match="keep at least 2"):
        Writer(tmp_path, keep_last=keep_last)
    assert zero_checkpoint.load(tmp_path) is None


def test_a_view_that_is_conjugated_when_it_is_read_is_saved_and_filled_as_it_reads(
    tmp_path: Path,
) -> None:
    made = torch.tensor([1 + 2j, 3 - 4j])
    zero_checkpoint.save(tmp_path, {"lazy": made.conj(), "sign": made.conj().imag}, step=5)
    into = {"lazy": torch.zeros_like(made).conj(), "sign": torch.zeros_like(made).conj().imag}
    zero_checkpoint.load(tmp_path, into)
    assert into["lazy"].tolist() == [1 - 2j, 3 + 4j]
    assert into["sign"].tolist() == [-2, 4]


def test_tensors_are_filled_in_place_whatever_their_strides(tmp_path: Path) -> None:
    zero_checkpoint.save(tmp_path, state(), step=5)
    mine = {"w": torch.zeros(3, 4).T, "nested": [torch.zeros((), requires_grad=True)]}

    found = zero_checkpoint.load(tmp_path, mine)

    assert found is not None
    assert found.state["w"] is mine["w"]
    assert weight_hash({"w": mine["w"]}.items()) == weight_hash({"w": state()["w"]}.items())
    assert mine["nested"][0].item() == 2.5
    assert found.state["nested"][1]["b"] is None  # not asked for


def test_where_nothing_was_saved_nothing_is_loaded(tmp_path: Path) -> None:
    assert zero_checkpoint.load(tmp_path) is None


def test_where_another_library_has_saved_a_load_names_the_import(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `zero_torch` and the reader of DCP say, too: without a word the training begins anew."""
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / ".metadata").touch()
    told = (
        f"; step-5 looks like a checkpoint of torch.distributed.checkpoint: "
        f"zero-ckpt import {tmp_path}/step-5 DIR --from dcp"
    )
    assert zero_checkpoint.load(tmp_path) is None
    assert caplog.messages == [f"{tmp_path}: there are no checkpoints here{told}"]
    with pytest.raises(CheckpointError, match=re.escape(f"tags there are: none{told}")):
        zero_checkpoint.load(tmp_path, tag="step-5")
    assert zero_checkpoint.find(str(tmp_path)).candidates == ()


def test_a_damaged_checkpoint_makes_the_load_fall_back_to_the_one_before(tmp_path: Path) -> None:
    zero_checkpoint.save(tmp_path, {"w": torch.zeros(4)}, step=1)
    newest = zero_checkpoint.save(tmp_path, {"w": torch.ones(4)}, step=2)
    (file,) = Path(str(newest)).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")

    found = zero_checkpoint.load(tmp_path)

    assert found is not None
    assert (found.step, found.state["w"].tolist()) == (1, [0.0] * 4)


def test_every_byte_of_a_checkpoint_can_be_verified_without_a_load(tmp_path: Path) -> None:
    zero_checkpoint.save(tmp_path, {"w": torch.arange(9.0)}, step=1)
    (whole,) = zero_checkpoint.find(tmp_path).candidates
    assert zero_checkpoint.verify(whole) == []
    file = tmp_path / whole.path.name / "r00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    (damage,) = zero_checkpoint.verify(whole)
    assert (damage.file, damage.tensors) == ("r00000.safetensors", ("param/w[0:9]",))


def test_another_shape_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    zero_checkpoint.save(tmp_path, {"w": torch.ones(4)}, step=1)
    mine = {"w": torch.zeros(5)}

    with pytest.raises(ModelMismatch, match=r"param/w is float32 \[4\] in the checkpoint"):
        zero_checkpoint.load(tmp_path, mine)

    assert mine["w"].tolist() == [0.0] * 5


def test_three_ranks_save_what_each_has_and_two_load_what_each_wants(tmp_path: Path) -> None:
    whole = torch.arange(10.0)

    def save(consensus: StoreConsensus) -> int:
        start, stop = ((0, 4), (4, 4), (4, 10))[consensus.rank]
        own = {f"own{consensus.rank}": torch.tensor([consensus.rank])}
        mine = {"w": Part(whole[start:stop], start, (10,)), **own}
        zero_checkpoint.save(tmp_path, mine, step=1, consensus=consensus)
        return consensus.rank

    def load(consensus: StoreConsensus) -> list[float]:
        part = torch.zeros(5)
        mine = {"w": Part(part, 5 * consensus.rank, (10,))}
        found = zero_checkpoint.load(tmp_path, mine, consensus=consensus)
        assert found is not None
        assert sorted(found.state) == ["own0", "own1", "own2", "w"]
        return part.tolist()

    assert on_ranks(3, save) == [0, 1, 2]
    assert on_ranks(2, load) == [whole[:5].tolist(), whole[5:].tolist()]


@pytest.mark.parametrize(
    ("mine", "problem"),
    [
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, "two tensors are called a.b"),
        ({"f": open}, "state.f is a builtin_function_or_method, which no checkpoint can hold"),
        ({"w": Part(torch.zeros(2), 0, (3,))}, "w"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name_and_nothing_is_published(
    tmp_path: Path, mine: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        zero_checkpoint.save(tmp_path, mine, step=1)
    assert zero_checkpoint.load(tmp_path) is None


def test_a_step_below_0_is_refused_as_no_load_would_find_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step -1 is less than 0"):
        zero_checkpoint.save(tmp_path, {"w": torch.zeros(1)}, step=-1)
    zero_checkpoint.save(tmp_path, {"w": torch.zeros(1)}, step=0)
    found = zero_checkpoint.load(tmp_path)
    assert found is not None
    assert found.step == 0


def test_what_one_rank_cannot_fill_is_an_error_by_name_on_all_ranks_at_once(tmp_path: Path) -> None:
    zero_checkpoint.save(tmp_path, {"a": torch.zeros(1)}, step=1)

    def load(consensus: StoreConsensus) -> str:
        twice = {"b": {"c": torch.zeros(1)}, "b.c": torch.zeros(1)}
        into = twice if consensus.rank else {"a": torch.ones(1)}
        with pytest.raises(CheckpointError) as raised:
            zero_checkpoint.load(tmp_path, into, consensus=consensus)
        return str(raised.value)

    for error in on_ranks(2, load):
        assert "rank 1 could not load" in error
        assert "two tensors are called b.c; rename one" in error
    with pytest.raises(CheckpointError, match="two tensors are called b"):
        zero_checkpoint.load(
            tmp_path / "empty", {"b": {"c": torch.zeros(1)}, "b.c": torch.zeros(1)}
        )


def test_what_several_ranks_have_is_divided_among_them_by_bytes() -> None:
    def vote(**tensors: list[Any]) -> dict[str, Any]:
        return {"state": {}, "tensors": tensors}

    a, b, c = ["F32", [8], 0, 8], ["F32", [4], 0, 4], ["F32", [4], 0, 4]

    agreed = agree([vote(a=a, b=b, c=c), vote(a=a, b=b, c=c)])
    assert agreed["writes"] == [["a"], ["b", "c"]]

    agreed = agree([vote(a=a), vote(a=["F32", [4, 2], 0, 8])])
    assert agreed == {"problem": "a is F32 [4, 2] on rank 1 and F32 [8] on one before it"}

    agreed = agree([vote(a=a), {"problem": "rank 1: it has failed"}])
    assert agreed == {"problem": "rank 1: it has failed"}
