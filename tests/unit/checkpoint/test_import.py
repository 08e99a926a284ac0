"""What others wrote becomes a checkpoint of ours, bit by bit, without running their code."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from zero_checkpoint.dcp.layout import find_layout
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.format.pieces import BUFFER, PARAM, TensorId
from zero_checkpoint.state.client_state import unpack
from zero_checkpoint.tools import locate
from zero_checkpoint.tools.conversion import adopt
from zero_checkpoint.tools.conversion.adopt import Dtypes
from zero_checkpoint.tools.conversion.dcp import read_dcp
from zero_checkpoint.tools.conversion.deepspeed import read_deepspeed
from zero_checkpoint.tools.conversion.foreign import Foreign, read_hf, read_torch
from zero_checkpoint.tools.tensors import read_tensors

DEEPSPEED = Path(__file__).parents[2] / "data" / "deepspeed"


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def adopted(root, foreign, **options):
    """The checkpoint and all its tensors, read back with every byte verified."""
    settings = {"source": "s", "tag": "t", "step": None, "dtypes": Dtypes(), **options}
    adopt.adopt(root, foreign, **settings)
    checkpoint = locate.one(str(root))
    return checkpoint, dict(read_tensors(checkpoint, checkpoint.manifest.tensors))


def from_torch(path, **options):
    return read_torch(path, **{"allow_pickle": False, "key": "", "buffers": [], **options})


# ---- torch ----


def test_a_state_dict_keeps_its_ties_and_its_running_statistics_are_buffers(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "m.pt")

    foreign = from_torch(tmp_path / "m.pt", key="model")
    assert foreign.left_out == ["epoch"]
    checkpoint, tensors = adopted(tmp_path / "ck", foreign)

    assert checkpoint.manifest.aliases == {"2.weight": "0.weight"}
    kinds = {t.fqn: t.kind for t in tensors}
    assert {name for name, kind in kinds.items() if kind == BUFFER} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert torch.equal(tensors[TensorId(PARAM, "0.weight")], model[0].weight.detach())


@pytest.mark.parametrize("kind", ["sparse_coo", "meta"])
def test_a_tensor_without_all_its_elements_is_refused_by_name(tmp_path, kind):
    made = {
        "sparse_coo": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.empty(3, device="meta"),
    }
    torch.save({"w": torch.ones(3), "odd": made[kind]()}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=rf"^odd is a tensor of another kind \({kind}\)"):
        from_torch(tmp_path / "m.pt")


def test_a_state_dict_of_a_torch_before_1_6_is_read_as_well(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"w": weight}, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    _, tensors = adopted(tmp_path / "ck", from_torch(tmp_path / "m.bin"))
    assert torch.equal(tensors[TensorId(PARAM, "w")], weight)


def test_what_is_no_state_dict_is_named_with_the_remedy(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"'model' is not a tensor; .*--key"):
        from_torch(tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="no key 'net'; keys are: model, step"):
        from_torch(tmp_path / "m.pt", key="net")
    with pytest.raises(CheckpointError, match="no such file"):
        from_torch(tmp_path / "nowhere.pt")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"not a zip", "Unsupported operand 110"),
        (b".", "pop from empty list"),
        (b"", "EOFError"),
    ],
)
def test_what_is_no_file_of_torch_is_asked_about_and_nobody_is_told_to_trust_it(
    tmp_path, content, found
):
    path = tmp_path / "m.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        from_torch(path)
    assert str(refused.value) == (
        f"{path}: torch cannot read it: {found}; is it a file of torch.save?"
    )


def test_a_pickle_runs_only_for_those_who_trust_it(tmp_path):
    fuse = tmp_path / "ran"
    torch.save({"w": torch.ones(2), "bomb": Bomb(fuse)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="add --allow-pickle if you trust the author"):
        from_torch(tmp_path / "m.pt")
    assert not fuse.exists()
    with pytest.raises(CheckpointError, match="'bomb' is not a tensor"):
        from_torch(tmp_path / "m.pt", allow_pickle=True)
    assert fuse.exists()


# ---- Hugging Face ----


def test_bf16_weights_become_the_fp32_masters_that_the_engine_trains(tmp_path):
    weight = torch.randn(4, 2).bfloat16()
    save_file({"w": weight}, tmp_path / "model.safetensors")
    _, tensors = adopted(tmp_path / "ck", read_hf(tmp_path, buffers=[]))
    assert torch.equal(tensors[TensorId(PARAM, "w")], weight.float())


def test_an_index_may_not_name_files_elsewhere_nor_ones_that_are_missing(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside of its directory"):
        read_hf(tmp_path, buffers=[])
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="the index names it, and it is missing"):
        read_hf(tmp_path, buffers=[])
    for text in (
        "{",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"w": 3}}',
        '{"weight_map": {"w": []}}',
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="no index of safetensors"):
            read_hf(tmp_path, buffers=[])


# ---- DeepSpeed ----


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_masters_and_moments_are_what_its_own_converter_finds(tmp_path, stage):
    source = DEEPSPEED / f"stage{stage}"
    checkpoint, tensors = adopted(tmp_path, read_deepspeed(source, allow_pickle=False))

    truth = load_file(source / "truth.safetensors")
    compared = 0
    for name, data in truth.items():
        kind, _, fqn = name.partition("/")
        if fqn not in ("frozen", "head.weight", "offset"):
            assert torch.equal(tensors[TensorId(kind, fqn)].reshape(-1), data.reshape(-1)), name
            compared += 1
    assert compared == 9
    assert checkpoint.manifest.aliases == {"head.weight": "embed.weight"}
    assert {t.fqn for t in tensors if t.kind == PARAM} == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "frozen",
    }
    assert [t.fqn for t in tensors if t.kind == BUFFER] == ["offset"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_groups_counters_and_batch_come_along(tmp_path, stage):
    foreign = read_deepspeed(DEEPSPEED / f"stage{stage}", allow_pickle=False)
    assert [group["params"] for group in foreign.groups] == [
        ["embed.weight"],
        ["norm.weight", "norm.bias"],
    ]
    options = [group["hyperparameters"] for group in foreign.groups]
    assert [(o["lr"], o["weight_decay"]) for o in options] == [(1e-2, 0.1), (5e-3, 0.0)]
    three = {"tensor": 3.0, "dtype": "torch.float32", "shape": []}
    assert [group["state"] for group in foreign.groups] == [{"step": three}] * 2
    assert foreign.frozen == {"frozen"}
    run = foreign.run
    assert (run["step"], run["samples"], run["world"], run["stage"]) == (3, 12, 2, stage)
    assert (run["microbatches"], run["micro_batch"]) == (2, 2)


def test_a_deepspeed_scripts_own_state_and_schedule_come_along(tmp_path):
    source = shutil.copytree(DEEPSPEED / "stage2", tmp_path / "ds")
    path = source / "t" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content |= {"lr_scheduler": {"last_batch_iteration": 2}, "epoch": 4, "best": torch.tensor(0.5)}
    torch.save(content | {"samples": torch.zeros(300_000)}, path)

    foreign = read_deepspeed(source, allow_pickle=False)

    assert list(foreign.left_out) == ["samples"]
    checkpoint, _ = adopted(tmp_path / "ck", foreign)
    meta = checkpoint.manifest.meta
    assert unpack(meta["client"]) == {"epoch": 4, "best": torch.tensor(0.5)}
    assert meta["engine"]["scheduler"] == {"last_batch_iteration": 2}


def test_a_deepspeed_checkpoint_with_a_rank_missing_is_refused(tmp_path):
    source = shutil.copytree(DEEPSPEED / "stage2", tmp_path / "ds")
    next((source / "t").glob("*rank_1*optim*")).unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 .*_optim_states.pt are there"):
        read_deepspeed(source, allow_pickle=False)


def test_deepspeed_files_run_no_code(tmp_path):
    source = shutil.copytree(DEEPSPEED / "stage2", tmp_path / "ds")
    fuse = tmp_path / "ran"
    torch.save({"module": {}, "bomb": Bomb(fuse)}, source / "t" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        read_deepspeed(source, allow_pickle=False)
    assert not fuse.exists()


def test_a_layout_of_another_release_is_one_sentence(tmp_path):
    source = shutil.copytree(DEEPSPEED / "stage2", tmp_path / "ds")
    torch.save({"module": {}}, source / "t" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"not laid out as DeepSpeed 0\.19 does it"):
        read_deepspeed(source, allow_pickle=False)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_value_of_a_deepspeed_model_file_is_a_traceback(tmp_path, stage):
    source = shutil.copytree(DEEPSPEED / f"stage{stage}", tmp_path / "ds")
    path = next((source / "t").glob("*mp_rank_00_model_states.pt"))
    content = torch.load(path, weights_only=False)
    raised = []
    for key in content:
        for value in (None, "x", -1, [], {}, ["x"], {"x": "x"}, torch.zeros(())):
            torch.save(content | {key: value}, path)
            try:
                read_deepspeed(source, allow_pickle=False)
            except CheckpointError:
                pass
            except Exception as error:
                raised.append(f"{key} = {value!r}: {error!r}")
    assert raised == []


def test_a_directory_that_is_no_deepspeed_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*_model_states.pt in it"):
        read_deepspeed(tmp_path, allow_pickle=False)
    (tmp_path / "zero").mkdir()
    with pytest.raises(CheckpointError, match="import the checkpoint that it was"):
        read_deepspeed(tmp_path, allow_pickle=False)


# ---- DCP ----


def trained():
    """A model with a parameter that is never used, and its optimizer after two steps."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    model.register_parameter("unused", nn.Parameter(torch.randn(2)))
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, *model[1].parameters(), model.unused], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture(params=[False, True], ids=["nested", "flattened"])
def dcp_directory(request, tmp_path):
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=request.param)
    state, optimizer_state = get_state_dict(model, optimizer, options=options)
    content = {"model": state, "optimizer": optimizer_state, "step": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def from_dcp(path, **options):
    usual = {"model_key": None, "optimizer_key": None, "buffers": (), "allow_pickle": False}
    return read_dcp(path, **{**usual, **options})


def test_dcp_brings_weights_moments_and_groups_in_both_its_forms(dcp_directory, tmp_path):
    model, optimizer = trained()
    foreign = from_dcp(dcp_directory)
    checkpoint, tensors = adopted(tmp_path / "ck", foreign)

    for name, param in model.named_parameters():
        assert torch.equal(tensors[TensorId(PARAM, name)], param.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            # torch has no state for what was never used; the engine has zeros.
            want = optimizer.state[param].get(key, torch.zeros_like(param))
            assert torch.equal(tensors[TensorId(key, name)], want)
    groups = checkpoint.manifest.meta["engine"]["groups"]
    assert [sorted(group["params"]) for group in groups] == [
        ["0.weight"],
        ["0.bias", "1.bias", "1.weight", "unused"],
    ]
    assert [group["hyperparameters"]["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group["state"]["step"]["tensor"] for group in groups] == [2.0, 2.0]
    assert checkpoint.manifest.step == 2


class AppState(Stateful):
    """As in PyTorch's tutorial."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}


def shapes_of_users(model, optimizer):
    """What people save, whether the optimizer comes along, the step, and what is left out."""
    state, optimizer_state = get_state_dict(model, optimizer)
    by_number = optimizer.state_dict()
    return {
        "app": ({"app": AppState(model, optimizer)}, True, None, []),
        "opt": (
            {"net": state, "opt": optimizer_state, "train": {"global_step": 7}, "sched": {"at": 7}},
            *(True, 7, ["sched"]),
        ),
        "flat": ({**state, "optim": optimizer_state, "step": torch.tensor(3)}, True, 3, []),
        "ema": ({"model": state, "ema": state, "optim": optimizer_state}, True, None, ["ema"]),
        "numbered": ({"model": state, "optim": by_number}, False, None, ["optim"]),
    }


@pytest.mark.parametrize("shape", ["app", "opt", "flat", "ema", "numbered"])
def test_dcp_finds_model_optimizer_and_step_and_names_what_it_leaves_out(tmp_path, shape):
    model, optimizer = trained()
    content, has_optimizer, step, left_out = shapes_of_users(model, optimizer)[shape]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)

    foreign = from_dcp(tmp_path / "dcp")

    assert {n: t.tolist() for n, t in foreign.params.items()} == {
        name: param.tolist() for name, param in model.named_parameters()
    }
    assert foreign.buffers == {}
    assert sorted(foreign.moments) == (["exp_avg", "exp_avg_sq"] if has_optimizer else [])
    assert len(foreign.groups) == (2 if has_optimizer else 0)
    assert foreign.run.get("step") == step
    assert list(foreign.left_out) == left_out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a.model.w", "b.model.w"], "under each of a.model, b.model; choose with --model-key"),
        (["model.embed.weight", "lm_head.weight"], "there are other tensors, such as lm_head"),
        (["state.w.step", "param_groups.w.lr"], "no model in it; name its key with --model-key"),
        (["net.w", "d.state.w.step", "g.state.w.step"], "each of d, g; choose with --optimizer-k"),
    ],
)
def test_where_dcp_can_mean_two_things_the_user_is_asked(keys, message):
    weights = [key for key in keys if not key.endswith(("step", "lr"))]
    with pytest.raises(CheckpointError, match=message):
        find_layout(keys, weights, weights, model_key=None, optimizer_key=None)


def test_dcp_metadata_run_no_code(dcp_directory, tmp_path):
    fuse = tmp_path / "ran"
    (dcp_directory / ".metadata").write_bytes(pickle.dumps(Bomb(fuse)))
    with pytest.raises(CheckpointError, match="damaged or hostile"):
        from_dcp(dcp_directory)
    assert not fuse.exists()


def test_damaged_dcp_directories_are_named(dcp_directory, tmp_path):
    with pytest.raises(CheckpointError, match="--model-key net: there is no such key; there are"):
        from_dcp(dcp_directory, model_key="net")
    next(dcp_directory.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="missing; it holds"):
        from_dcp(dcp_directory)
    with pytest.raises(CheckpointError, match=r"no \.metadata in it"):
        from_dcp(tmp_path)


# ---- all ----


def test_unknown_things_stay_unknown_and_a_tie_must_be_one(tmp_path):
    foreign = Foreign(params={"a": torch.ones(2), "b": torch.ones(2)}, buffers={})
    tied = adopt.tie(foreign, {"b": "a"})
    assert (list(tied.params), tied.aliases) == (["a"], {"b": "a"})
    checkpoint, _ = adopted(tmp_path, tied)
    engine = checkpoint.manifest.meta["engine"]
    assert (engine["groups"], engine["microbatches"], engine["seed"]) == ([], None, None)
    other = Foreign(params={"a": torch.ones(2), "b": torch.zeros(2)}, buffers={})
    with pytest.raises(CheckpointError, match="the two differ, so they are not tied"):
        adopt.tie(other, {"b": "a"})


def test_a_tie_to_what_is_tied_itself_is_one_to_the_parameter_that_stays(tmp_path):
    params = {"a": torch.ones(2), "b": torch.ones(2), "other": torch.zeros(2)}
    foreign = Foreign(params=params, buffers={}, aliases={"c": "b"})
    tied = adopt.tie(foreign, {"b": "a"})
    assert (list(tied.params), tied.aliases) == (["a", "other"], {"b": "a", "c": "a"})
    checkpoint, _ = adopted(tmp_path, tied)
    assert checkpoint.manifest.aliases == tied.aliases
    with pytest.raises(CheckpointError, match="the two differ, so they are not tied"):
        adopt.tie(foreign, {"c": "other"})


def test_frozen_parameters_leave_their_groups_and_take_the_dtype_that_is_computed_in(tmp_path):
    group = {"params": ["a", "b"], "hyperparameters": {}, "state": {}}
    foreign = Foreign(
        params={"a": torch.ones(2), "b": torch.ones(2)},
        buffers={"c": torch.ones(2)},
        groups=[group],
    )
    frozen = adopt.freeze(foreign, ["b*"])
    checkpoint, tensors = adopted(tmp_path, frozen, dtypes=Dtypes(computed=torch.bfloat16))
    assert checkpoint.manifest.meta["engine"]["groups"][0]["params"] == ["a"]
    dtypes = {t.fqn: data.dtype for t, data in tensors.items()}
    assert dtypes == {"a": torch.float32, "b": torch.bfloat16, "c": torch.bfloat16}
    with pytest.raises(CheckpointError, match="--frozen z: matches no parameter"):
        adopt.freeze(foreign, ["z"])
