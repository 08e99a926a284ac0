"""Looking into checkpoints: every statement is about bytes that were really read."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.checkpoint.support import adam_state, every_dtype, flip, same_bits, saved
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint
from zero_checkpoint.format.pieces import PARAM, TensorId
from zero_checkpoint.loading.candidates import quarantine
from zero_checkpoint.saving import retention
from zero_checkpoint.saving.retention import Best
from zero_checkpoint.tools import locate, upkeep
from zero_checkpoint.tools.cli import main
from zero_checkpoint.tools.compare import Relation, compare, distance
from zero_checkpoint.tools.describe import describe, l2_norm
from zero_checkpoint.tools.listing import ListedStatus, list_root
from zero_checkpoint.tools.tensors import read_tensor, read_tensors
from zero_checkpoint.tools.verify import verify

WEIGHT = TensorId(PARAM, "wte.weight")


@pytest.fixture
def root(tmp_path):
    """Two checkpoints of two ranks, in blocks of a page."""
    for step, tag in ((1, "a"), (2, "b")):
        saved(tmp_path, adam_state(seed=step, width=400), step=step, tag=tag)
    return tmp_path


# ---- names ----


def test_a_root_means_its_newest_a_tag_its_own_and_a_directory_itself(root):
    new, old = (candidate.path for candidate in find(root).candidates)
    assert locate.one(str(root)).path == new
    assert locate.one(f"{root}@a").path == old
    assert locate.one(str(old)).path == old.resolve()


def test_an_unknown_tag_names_those_there_are(root):
    with pytest.raises(CheckpointError, match="tagged 'c'; tags there are: b, a"):
        locate.one(f"{root}@c")


def test_what_cannot_be_meant_says_why(root, tmp_path):
    quarantine(find(root).candidates[0].path, "flipped")
    quarantine(find(root).candidates[0].path, "flipped too")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint here; .*flipped"):
        locate.one(str(root))
    with pytest.raises(CheckpointError, match="there is no such directory"):
        locate.one(str(tmp_path / "nowhere"))
    attempt = tmp_path / "step-000000009.g0.abcd"
    attempt.mkdir()
    with pytest.raises(CheckpointError, match="it was never a checkpoint"):
        locate.one(str(attempt))


def test_a_quarantined_checkpoint_can_still_be_looked_at_by_its_own_name(root):
    path = find(root).candidates[0].path
    quarantine(path, "flipped")
    assert locate.one(str(path)).path == path.resolve()


def test_a_directory_whose_name_looks_like_markup_is_named_as_it_is(tmp_path, capsys):
    for name in ("lr[x=0.1]", "a[/b]"):
        saved(tmp_path / name, adam_state(), step=1)
        assert main(["verify", str(tmp_path / name)]) == 0
        assert f"{tmp_path / name}/step-" in capsys.readouterr().out
    assert main(["ls", str(tmp_path)]) == 0
    assert "lr[x=0.1]/step-" in capsys.readouterr().out


@pytest.fixture
def output(tmp_path):
    """The output directory of a Trainer: a root for each save."""
    for step in (10, 9, 20):
        root = tmp_path / "out" / f"checkpoint-{step}"
        saved(root, adam_state(seed=step), step=step, tag=f"global_step{step}")
        (root / "model.safetensors").touch()
    (tmp_path / "out" / "runs").mkdir()
    return tmp_path / "out"


def test_the_output_directory_of_a_trainer_stands_for_all_its_checkpoints(output, capsys):
    assert main(["ls", str(output), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [20, 10, 9]
    assert [row["name"].partition("/step-")[0] for row in rows] == [
        *("checkpoint-20", "checkpoint-10", "checkpoint-9")
    ]
    assert locate.one(str(output)).manifest.step == 20
    assert locate.one(f"{output}@global_step9").manifest.step == 9
    assert main(["verify", str(output), "--all"]) == 0
    assert capsys.readouterr().out.count(": intact, ") == 3
    inner = "give one of: checkpoint-20, checkpoint-10, checkpoint-9"
    for command in (["prune", str(output), "--keep-last=2"], ["repair", str(output)]):
        assert main(command) == 2
        assert inner in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("notes", "give the directory that save_checkpoint() was given, or the one above"),
        (".metadata", "it looks like a checkpoint of torch.distributed.checkpoint: zero-ckpt"),
        ("mp_rank_00_model_states.pt", "it looks like a checkpoint of DeepSpeed: zero-ckpt import"),
        ("model.safetensors.index.json", "a Hugging Face model: zero-ckpt import {} DIR --from hf"),
        ("global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt", "import {}/global_step3 DIR"),
        ("dcp/.metadata", "zero-ckpt import {}/dcp DIR --from dcp"),
    ],
)
def test_a_directory_without_checkpoints_is_an_error_with_the_remedy(
    tmp_path, capsys, file, remedy
):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    commands = [["ls"], ["show"], ["verify", "--all"], ["repair"], ["prune", "--keep-last=2"]]
    for command in commands:
        assert main([*command, str(tmp_path)]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert remedy.format(tmp_path) in told.err


# ---- tensors ----


def test_tensors_come_out_bit_by_bit_in_whatever_batches(tmp_path):
    full = adam_state() | every_dtype()
    saved(tmp_path, full, 3)
    checkpoint = locate.one(str(tmp_path))
    for batch_bytes in (1, 500, 1 << 30):
        assert same_bits(dict(read_tensors(checkpoint, full, batch_bytes=batch_bytes)), full)


def test_a_damaged_tensor_is_not_handed_out(root):
    checkpoint = locate.one(str(root))
    flip(checkpoint.path / "r00000.safetensors", 5000)
    with pytest.raises(DamagedCheckpoint, match="XXH3-64 differs"):
        read_tensor(checkpoint, WEIGHT)


def test_a_tensor_that_is_not_there_is_named(root):
    with pytest.raises(CheckpointError, match="no tensor param/nothing in it"):
        read_tensor(locate.one(str(root)), TensorId(PARAM, "nothing"))


# ---- ls ----


def test_a_listing_says_how_far_each_can_be_trusted(root):
    new, old = (candidate.path for candidate in find(root).candidates)
    third = saved(root, adam_state(seed=3), step=3, tag="c")
    quarantine(new, "flipped")
    os.truncate(third / "r00001.safetensors", 100)
    (root / "step-000000004.g0.abcd").mkdir()
    (root / "notes").mkdir()

    rows = list_root(root, now_s=2e9)

    assert [(row.name, row.status) for row in rows] == [
        ("step-000000004.g0.abcd", ListedStatus.UNCOMMITTED),
        (third.name, ListedStatus.DAMAGED),
        (new.name, ListedStatus.QUARANTINED),
        (old.name, ListedStatus.COMMITTED),
    ]
    assert "r00001.safetensors has 100 bytes" in rows[1].reason
    assert "flipped" in rows[2].reason
    assert (rows[3].step, rows[3].tag, rows[3].world) == (1, "a", 2)


def test_verified_is_said_only_after_reading_everything(root):
    old = find(root).candidates[1]
    flip(old.path / "r00000.safetensors", 9000)
    assert [row.status for row in list_root(root, now_s=2e9)] == [ListedStatus.COMMITTED] * 2
    rows = list_root(root, now_s=2e9, check=verify)
    assert [row.status for row in rows] == [ListedStatus.VERIFIED, ListedStatus.DAMAGED]


def test_what_training_deletes_meanwhile_is_left_out_of_a_listing(root):
    """A run that goes on tidies up while somebody looks."""
    new, old = find(root).candidates

    def delete(candidate):
        retention.remove(old.path)
        if candidate.path == new.path:
            retention.remove(new.path)
        return []

    (third,) = [saved(root, adam_state(seed=3), step=3, tag="c")]
    rows = list_root(root, now_s=2e9, check=delete)
    assert [row.name for row in rows] == [third.name]


# ---- show ----


def test_norms_are_those_of_float64_and_need_no_engine(tmp_path):
    full = {WEIGHT: torch.full((300,), 1e30), TensorId("exp_avg", "wte.weight"): torch.ones(300)}
    saved(tmp_path, full, meta={"client": {"epoch": 3}})
    record = describe(locate.one(str(tmp_path)), norms=True)
    assert record.tensors[0].norm == pytest.approx(math.sqrt(300) * 1e30, rel=1e-6)
    assert record.tensors[1].norm == pytest.approx(math.sqrt(300))
    assert record.optimizer_kinds == ["exp_avg"]
    assert record.client == {"epoch": 3}


def test_norms_of_complex_and_empty_tensors_are_numbers():
    assert l2_norm(torch.tensor([3 + 4j, 0])) == pytest.approx(5.0)
    assert l2_norm(torch.empty(0)) == 0.0


# ---- diff ----


def both(tmp_path, left, right, **extra):
    """The relation of each tensor of two states, saved by different numbers of ranks."""
    saved(tmp_path / "left", left, 1, **extra)
    saved(tmp_path / "right", right, 3)
    found = compare(locate.one(str(tmp_path / "left")), locate.one(str(tmp_path / "right")))
    return {f"{item.kind}/{item.name}": item for item in found}


def test_equal_bits_are_equal_at_any_world_size_nans_included(tmp_path):
    full = adam_state() | every_dtype()
    assert {item.relation for item in both(tmp_path, full, full).values()} == {Relation.EQUAL}


def test_differences_are_measured_and_missing_extra_and_reshaped_are_told_apart(tmp_path):
    left = {
        TensorId(PARAM, "same"): torch.ones(5),
        TensorId(PARAM, "moved"): torch.tensor([1.0, 2.0, 4.0]),
        TensorId(PARAM, "lost"): torch.ones(2),
        TensorId(PARAM, "longer"): torch.ones(2),
    }
    right = {
        TensorId(PARAM, "same"): torch.ones(5),
        TensorId(PARAM, "moved"): torch.tensor([1.0, 2.5, 3.5]),
        TensorId(PARAM, "longer"): torch.ones(3),
        TensorId(PARAM, "new"): torch.ones(2),
    }
    found = both(tmp_path, left, right)
    assert {name: item.relation for name, item in found.items()} == {
        "param/same": Relation.EQUAL,
        "param/moved": Relation.DIFFERENT,
        "param/lost": Relation.MISSING,
        "param/longer": Relation.RESHAPED,
        "param/new": Relation.EXTRA,
    }
    assert (found["param/moved"].max_abs, found["param/moved"].max_rel) == (0.5, 0.2)
    assert found["param/longer"].detail == "[2] / [3]"


def test_a_tensor_is_found_under_its_tied_name(tmp_path):
    left = {TensorId(PARAM, "head"): torch.ones(4)}
    right = {TensorId(PARAM, "embed"): torch.ones(4)}
    saved(tmp_path / "left", left)
    saved(tmp_path / "right", right, aliases={"head": "embed"})
    a, b = locate.one(str(tmp_path / "left")), locate.one(str(tmp_path / "right"))
    assert [item.relation for item in compare(a, b)] == [Relation.EQUAL]


def test_two_tensors_that_are_one_in_the_other_checkpoint_are_compared_with_it(tmp_path):
    left = {
        TensorId(PARAM, name): torch.full((n,), 1.0)
        for name, n in zip("abc", (4, 4, 3), strict=True)
    }
    right = {tensor: data for tensor, data in left.items() if tensor.fqn != "b"}
    saved(tmp_path / "left", left)
    saved(tmp_path / "right", right, aliases={"b": "a"})
    a, b = locate.one(str(tmp_path / "left")), locate.one(str(tmp_path / "right"))
    assert [item.relation for item in compare(a, b)] == [Relation.EQUAL] * 3


def test_numbers_beside_nan_or_infinity_differ_infinitely_and_nan_beside_nan_does_not():
    nan, inf = math.nan, math.inf
    assert distance(torch.tensor([nan, inf, 0.0]), torch.tensor([nan, inf, -0.0])) == (0, 0)
    assert distance(torch.tensor([nan]), torch.tensor([1.0])) == (inf, inf)
    assert distance(torch.tensor([inf]), torch.tensor([1.0])) == (inf, inf)


# ---- prune and repair ----


def steps(plan):
    return [int(action.path.name[5:14]) for action in plan.actions]


def test_prune_never_deletes_the_last_one_that_is_whole(tmp_path):
    for step in (1, 2, 3, 4):
        saved(tmp_path, adam_state(seed=step), step=step)
    fourth, third, *_ = find(tmp_path).candidates
    for damaged in (fourth, third):
        flip(damaged.path / "r00000.safetensors", 5000)

    plan = upkeep.plan_prune(tmp_path, keep_last=2, keep_every=None, check=verify)

    assert steps(plan) == [1]  # 2 is the newest whole one
    assert "damaged: r00000.safetensors" in plan.notes[0]


def test_prune_deletes_nothing_when_nothing_is_whole(tmp_path):
    for step in (1, 2, 3):
        flip(saved(tmp_path, adam_state(), step=step) / "r00000.safetensors", 5000)
    with pytest.raises(CheckpointError, match="so nothing is deleted"):
        upkeep.plan_prune(tmp_path, keep_last=2, keep_every=None, check=verify)


def test_prune_does_what_it_says(tmp_path):
    for step in range(1, 7):
        saved(tmp_path, adam_state(), step=step)
    plan = upkeep.plan_prune(tmp_path, keep_last=2, keep_every=3, check=verify)
    assert steps(plan) == [1, 2, 4]
    for action in plan.actions:
        action.act()
    assert [c.manifest.step for c in find(tmp_path).candidates] == [6, 5, 3]


def test_prune_goes_on_where_training_has_deleted_before_it(tmp_path):
    for step in range(1, 6):
        saved(tmp_path, adam_state(), step=step)
    plan = upkeep.plan_prune(tmp_path, keep_last=2, keep_every=None, check=verify)
    retention.remove(plan.actions[0].path)
    for action in plan.actions:
        action.act()
    assert [c.manifest.step for c in find(tmp_path).candidates] == [5, 4]


def test_prune_keeps_the_best_and_says_why(tmp_path):
    for step in range(1, 7):
        saved(tmp_path, adam_state(), step=step, meta={"client": {"loss": abs(step - 2.9)}})
    best = Best(metric="loss", count=2)
    plan = upkeep.plan_prune(tmp_path, keep_last=2, keep_every=None, keep_best=best, check=verify)
    assert steps(plan) == [1, 4]
    assert [note.partition(": ")[2] for note in plan.notes[1:]] == [
        "stays, among the best: loss = 0.1",
        "stays, among the best: loss = 0.9",
    ]


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_url_where_only_a_local_file_will_do_is_refused(root, command, capsys):
    places = {"export": [str(root), "s3://b/x", "--to", "torch"]}
    with pytest.raises(SystemExit):
        main([command, *places.get(command, ["s3://b/x", str(root), "--from", "torch"])])
    assert "s3://b/x is in a store, where only checkpoints can be" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["loss", "loss:low", "loss:min:0", ":min", "loss:min:2:3"])
def test_a_best_that_cannot_be_read_is_refused(root, text, capsys):
    with pytest.raises(SystemExit):
        main(["prune", str(root), "--keep-last", "2", "--keep-best", text])
    assert "write METRIC:min or METRIC:max" in capsys.readouterr().err


@pytest.mark.parametrize("hint", [None, "step-000000001.g0.0000\n", "\xff"])
def test_repair_writes_the_hint_anew_and_says_so(root, hint):
    newest = find(root).candidates[0].path.name
    (root / "latest").unlink()
    if hint is not None:
        (root / "latest").write_text(hint)
    (action,) = upkeep.plan_repair(root, now_s=2e9, older_than_s=0).actions
    action.act()
    assert (root / "latest").read_text() == f"{newest}\n"
    assert upkeep.plan_repair(root, now_s=2e9, older_than_s=0).actions == []


def test_repair_leaves_the_hint_alone_where_the_newest_was_saved_aside(root):
    hint = (root / "latest").read_text()
    meta = {"engine": {"aside": True}}
    saved(root, adam_state(seed=3, width=400), step=3, tag="best", meta=meta)
    assert upkeep.plan_repair(root, now_s=2e9, older_than_s=0).actions == []
    assert (root / "latest").read_text() == hint


def test_a_metric_that_nobody_has_saved_deletes_nothing(tmp_path, capsys):
    for step in (1, 2, 3):
        saved(tmp_path, adam_state(seed=step), step=step)
    assert main(["prune", str(tmp_path), "--keep-last=2", "--keep-best=los:min"]) == 2
    assert "no checkpoint has a number 'los' in its client_state" in capsys.readouterr().err
    assert len(find(tmp_path).candidates) == 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ls ck@t", "ck@t: a tag names one checkpoint of many; give ck\n"),
        ("import ck new --from=hf", "ck holds checkpoints of this engine, which need no import: "),
        ("import hf new --from=dcp", "; it looks like a Hugging Face model: zero-ckpt import hf "),
        (
            "import hf new --from=hf --frozen=b*",
            "matches no parameter; parameters are: a\n",
        ),
        (
            "export ck hf/model.safetensors/m --to=torch",
            "directories in this path is a file",
        ),
        ("export ck m --to=torch --max-shard-size=1GB", "is for --to hf only; leave it out"),
    ],
)
def test_who_takes_one_thing_for_another_is_told_what_it_is(
    tmp_path, monkeypatch, capsys, command, message
):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "ck", adam_state())
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "hf"]
