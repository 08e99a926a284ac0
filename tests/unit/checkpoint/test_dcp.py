"""torch.distributed.checkpoint writes and reads universal checkpoints: one process, no group."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import zero_checkpoint
from zero_checkpoint.dcp import Reader, Writer
from zero_checkpoint.format.manifest import file_name
from zero_checkpoint.format.pieces import PARAM, TensorId, cut
from zero_checkpoint.tools.cli import main


def save(state: Any, directory: Path, **options: Any) -> Any:
    writer = Writer(directory, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is no process group
        dcp.save(state, storage_writer=writer, no_dist=True)
    return writer.path


def load(state: Any, directory: Path, **options: Any) -> Any:
    reader = Reader(directory, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return reader.path


@st.composite
def boxes(draw: Any) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - low)) for size, low in zip(shape, offsets, strict=True)]
    return shape, offsets, sizes


@given(boxes())
def test_a_box_is_runs_of_its_elements_as_long_as_they_can_be_alike(box: Any) -> None:
    shape, offsets, sizes = box
    whole = torch.arange(math.prod(shape)).view(shape)
    part = whole[tuple(slice(low, low + n) for low, n in zip(offsets, sizes, strict=True))]
    pieces = list(cut(TensorId(PARAM, "w"), shape, offsets, part.contiguous()))
    found = [range(each.start, each.start + each.data.numel()) for each in pieces]
    assert [i for run in found for i in run] == part.flatten().tolist()
    if sizes == shape or sizes[1:] == shape[1:]:
        assert len(found) == 1
    assert len({len(run) for run in found}) == 1


class Net(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)).sum() * self.scale


def made(seed: int = 0, steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    for step in range(steps):
        model(torch.arange(8.0).view(2, 4) + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_dcp_gets_back_what_it_has_saved(tmp_path: Path) -> None:
    extra = {
        "step": 7,
        "seen": torch.tensor(12),
        "loader": {"rank_0": b"\x00\xff", "shape": (2, 3), "name": "c4"},
        "noise": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    }
    path = save({**state_of(*made()), "train": extra}, tmp_path)
    assert path.name.startswith("step-000000007.")
    blank = {"step": 0, "seen": torch.tensor(0), "loader": {"rank_0": 0, "shape": 0, "name": 0}}
    state = {**state_of(*made(1, 1)), "train": {**blank, "noise": torch.zeros(2, 3)}}
    state["train"]["noise"] = state["train"]["noise"].bfloat16()
    load(state, tmp_path)
    assert same(state, {**state_of(*made()), "train": extra})


def test_a_checkpoint_of_dcp_has_the_names_and_kinds_of_the_engine(tmp_path: Path) -> None:
    save(state_of(*made()), tmp_path, step=2)
    (found,) = zero_checkpoint.find(tmp_path).candidates
    kinds = {(tensor.kind, tensor.fqn) for tensor in found.manifest.tensors}
    params = {"body.weight", "body.bias", "norm.weight", "norm.bias", "scale"}
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert {fqn for kind, fqn in kinds if kind == "param"} == params
    assert {fqn for kind, fqn in kinds if kind == "buffer"} == buffers
    assert {fqn for kind, fqn in kinds if kind == "exp_avg_sq"} == params
    (group,) = found.manifest.meta["engine"]["groups"]
    assert set(group["params"]) == params
    assert group["hyperparameters"]["betas"] == [0.8, 0.9]
    assert group["state"]["step"] == {"tensor": 2.0, "dtype": "torch.float32", "shape": []}


def nested(directory: Path, keys: set[str] | None = None) -> dict[str, Any]:
    """What DCP's converters make of a checkpoint: they have no state to fill."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = _EmptyStateDictLoadPlanner(keys=keys)
        _load_state_dict(state, Reader(directory), planner=planner, no_dist=True)
    return state


EXTRA = {"step": 7, "seen": [torch.tensor(12), {"a.b": torch.ones(2)}], "c.d": (1, "two")}
PREFIXES = [("model", "optimizer"), ("app.net", "app.opt")]


@pytest.mark.parametrize("names", PREFIXES)
def test_converters_of_dcp_nest_a_state_as_it_was_saved(tmp_path: Path, names: Any) -> None:
    model, optimizer = state_of(*made()).values()
    state = {
        names[0]: model,
        "app": {names[1]: optimizer, "of ranks": {"0": 1, "1": 2}},
        "train": EXTRA,
    }
    save(state, tmp_path / "saved", step=1)
    assert same(nested(tmp_path / "saved"), state)
    assert same(nested(tmp_path / "saved", {"train"}), {"train": EXTRA})


def test_what_stock_pytorch_has_saved_dcp_nests_in_the_form_that_optimizers_take(
    tmp_path: Path,
) -> None:
    model, optimizer = made()
    zero_checkpoint.save(tmp_path / "plain", state_of(model, optimizer), step=1)
    assert same(nested(tmp_path / "plain"), state_of(model, optimizer))


def test_an_exported_checkpoint_becomes_a_file_of_torch_as_dcp_converts_its_own(
    tmp_path: Path,
) -> None:
    state = {**state_of(*made()), "train": EXTRA}
    save(state, tmp_path / "saved", step=1)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "dcp"]) == 0
    dcp_to_torch_save(tmp_path / "out", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=False)
    assert same(found, state)
    model, optimizer = made(1, 0)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    assert same(state_of(model, optimizer), state_of(*made()))


def test_the_directory_may_be_named_by_checkpoint_id(tmp_path: Path) -> None:
    for step in (10, 20):
        state = {"w": torch.full((3,), float(step))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                state,
                checkpoint_id=tmp_path / f"step-{step}",
                storage_writer=Writer(),
                no_dist=True,
            )
    state = {"w": torch.zeros(3)}
    load(state, tmp_path)
    assert state["w"].tolist() == [20.0] * 3
    load(state, tmp_path, tag="step-10")
    assert state["w"].tolist() == [10.0] * 3


def test_a_writer_and_a_reader_go_where_the_checkpoint_id_of_each_call_says(tmp_path: Path) -> None:
    writer, reader = Writer(), Reader()
    for run in (1, 2):
        name = tmp_path / f"run-{run}" / "step-10"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                {"w": torch.full((3,), float(run))},
                checkpoint_id=name,
                storage_writer=writer,
                no_dist=True,
            )
        assert writer.path is not None
        assert writer.path.parent == name.parent
    for run in (1, 2):
        name, state = tmp_path / f"run-{run}" / "step-10", {"w": torch.zeros(3)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=name, storage_reader=reader, no_dist=True)
        assert state["w"].tolist() == [float(run)] * 3


def test_a_damaged_checkpoint_makes_dcp_load_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2):
        path = save({"w": torch.full((3,), float(step))}, tmp_path, step=step)
    file = path / file_name(0)
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    state = {"w": torch.zeros(3)}
    assert load(state, tmp_path) != path
    assert state["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("state", "options", "problem"),
    [
        ({"w": torch.zeros(2)}, {}, "how many steps were done is not known"),
        ({"w": torch.zeros(2), "bad": {1, 2}}, {"step": 1}, "bad is a set, which no checkpoint"),
    ],
)
def test_what_cannot_be_saved_is_an_error_that_says_why(
    tmp_path: Path, state: Any, options: Any, problem: str
) -> None:
    with pytest.raises(CheckpointException, match=problem):
        save(state, tmp_path, **options)
    assert not zero_checkpoint.find(tmp_path).candidates


def test_zero_ckpt_exports_a_plain_dcp_directory(tmp_path: Path) -> None:
    save({**state_of(*made()), "epoch": 3}, tmp_path / "ours", step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(["export", str(tmp_path / "ours"), str(tmp_path / "plain"), "--to", "dcp"])
        state = {**state_of(*made(1, 1)), "epoch": 0}
        dcp.load(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert same(state, {**state_of(*made()), "epoch": 3})


def step_of_torchtitan(folder: Path) -> int:
    """Which checkpoint torchtitan 0.3 looks for at its start: -1, if it finds none."""
    found = [
        int(match[1])
        for path in folder.iterdir()
        if (match := re.search(r"step-(\d+)", path.name)) and (path / ".metadata").is_file()
    ]
    return max(found, default=-1)


def test_torchtitan_finds_what_a_writer_has_saved_and_a_reader_loads_it(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (50, 100, 150):
            state = {"w": torch.full((3,), float(step)), "train_state": {"step": step}}
            name = tmp_path / f"step-{step}"
            dcp.save(state, storage_writer=Writer(keep_last=2), checkpoint_id=name, no_dist=True)
        step = step_of_torchtitan(tmp_path)
        assert step == 150
        assert (tmp_path / "step-150").is_dir()
        state = {"w": torch.zeros(3), "train_state": {"step": 0}}
        name = tmp_path / f"step-{step}"
        dcp.load(state, storage_reader=Reader(), checkpoint_id=name, no_dist=True)
    assert (state["w"].tolist(), state["train_state"]) == ([150.0] * 3, {"step": 150})
    # What was deleted is not found any more, either.
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == [
        "step-100",
        "step-150",
    ]
