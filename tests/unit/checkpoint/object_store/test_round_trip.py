"""An object store: what was saved is loaded at any world size, or named as damaged."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys

import pytest

from tests.unit.checkpoint.support import (
    SmallObjects,
    adam_state,
    blank,
    load_all,
    on_ranks,
    same_bits,
    saved,
    share,
)
from zero_checkpoint import find
from zero_checkpoint.errors import DamagedCheckpoint
from zero_checkpoint.files import objects
from zero_checkpoint.files.place import open_source, place
from zero_checkpoint.loading.candidates import Why
from zero_checkpoint.saving.commit import save
from zero_checkpoint.saving.housekeeping import Keep, tidy
from zero_checkpoint.tools.cli import main

OLD, NEW = adam_state(seed=1, width=3000), adam_state(seed=2, width=3000)


def key(path):
    return str(path).partition("bucket/")[2]


# ---- saving and loading ----


@pytest.mark.corners(world=[3])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_what_is_saved_is_loaded_at_any_world_size_and_each_byte_is_read_once(root, world):
    large = adam_state(width=20_000)
    path = saved(root, large, 2, step=1)
    target = blank(large)
    results = load_all(root, target, world)
    assert same_bits(target, large)
    assert {result.path for result in results} == {path}
    blocks = sum(len(file.digests) for file in results[0].manifest.files)
    data = sum(file.size_bytes for file in results[0].manifest.files)
    shared = (world + 1) * 3 * SmallObjects.block_bytes  # a block at each end of a run is shared
    assert blocks > 40
    assert data - 2 * 4096 <= sum(result.bytes_read for result in results) <= data + shared


def test_however_much_is_expected_of_an_object_little_of_it_is_held_at_once(root, monkeypatch):
    monkeypatch.setattr(objects, "_AHEAD_BYTES", 2500)
    content = random.Random(1).randbytes(20_000)
    path = root / "object"
    objects.file_system(root.url).pipe_file(str(path), content)
    spans = [(begin, 1000) for begin in range(0, 20_000, 1500)]
    buffer = bytearray(1000)
    with open_source(path) as source:
        source.expect(spans)
        for begin, length in spans:
            assert source.read_into([memoryview(buffer)], begin) == max(begin + length - 20_000, 0)
            assert buffer.startswith(content[begin : begin + length])
            assert sum(map(len, source.fetched.values())) <= 1000


def test_the_newest_is_loaded_and_latest_names_it(root):
    saved(root, OLD, 2, step=1)
    path = saved(root, NEW, 3, step=2)
    assert (root / "latest").read_text().strip() == path.name
    target = blank(NEW)
    assert load_all(root, target, 2)[0].path == path


def test_an_empty_prefix_holds_nothing(root):
    assert load_all(root, blank(NEW), 2) == [None, None]


def test_a_damaged_object_is_named_and_quarantined_and_the_one_before_is_loaded(s3, s3_root):
    saved(s3_root, OLD, 2, step=1)
    bad = saved(s3_root, NEW, 2, step=2)
    where = {"Bucket": s3.bucket, "Key": key(bad / "r00001.safetensors")}
    data = bytearray(s3.client().get_object(**where)["Body"].read())
    data[len(data) // 2] ^= 1
    s3.client().put_object(**where, Body=bytes(data))

    target = blank(OLD)
    assert {r.manifest.step for r in load_all(s3_root, target, 3)} == {1}
    assert same_bits(target, OLD)
    assert find(s3_root).rejected == ()  # nobody has saved there
    tidy(s3_root, saved(s3_root, OLD, 2, step=3), Keep())
    (rejected,) = find(s3_root).rejected
    assert rejected.why is Why.QUARANTINED
    assert re.search(r"r00001.safetensors: block \d+ .*XXH3-64 differs", rejected.reason)


@pytest.mark.parametrize("cut", ["shorter", "gone"])
def test_an_object_that_is_cut_or_gone_is_damage(s3, s3_root, cut):
    bad = saved(s3_root, NEW, 2, step=2)
    where = {"Bucket": s3.bucket, "Key": key(bad / "r00001.safetensors")}
    data = s3.client().get_object(**where)["Body"].read()
    s3.client().delete_object(**where)
    if cut == "shorter":
        s3.client().put_object(**where, Body=data[:70_000])
    for error in load_all(s3_root, blank(NEW), 3):
        assert isinstance(error, DamagedCheckpoint)
        assert f"{bad}/r00001.safetensors" in str(error)


# ---- tools, and an engine ----


def test_zero_ckpt_works_on_urls(root, capsys, tmp_path):
    old, new = saved(root, OLD, 2, step=1, tag="a"), saved(root, NEW, 3, step=2, tag="b")

    def run(*arguments, code=0):
        assert main([*map(str, arguments), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    assert [row["name"] for row in run("ls", root)] == [new.name, old.name]
    assert run("show", f"{root}@a")["path"] == str(old)
    assert [result["damage"] for result in run("verify", root, "--all")] == [[], []]
    assert run("diff", f"{root}@a", new, code=1)["counts"]["different"] > 0
    out = tmp_path / "model.pt"
    assert run("export", root, out, "--to", "torch")["files"] == [str(out)]
    assert run("import", out, root, "--from", "torch")["path"].startswith(str(root))
    assert [a["path"] for a in run("prune", root, "--keep-last", 2)["actions"]] == [str(old)]
    assert run("repair", root)["actions"] == []
    assert not old.exists()


SCRIPT = """
import sys, torch, zero_deepspeed
config = {"train_micro_batch_size_per_gpu": 2,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
for number in range(2):
    engine, *_ = zero_deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)
    path, client = engine.load_checkpoint(sys.argv[1])
    print(path, client.get("seen"))
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1], client_state={"seen": number}, blocking=number == 0)
"""


@pytest.mark.full
def test_an_engine_saves_to_a_url_and_goes_on_from_it(s3, s3_root):
    """The script ends while its last save is in flight."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(s3_root)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=150)
    newest, first = find(s3_root).candidates
    assert done.stdout.splitlines() == ["None None", f"{first.path} 0"]
    assert (newest.manifest.step, newest.manifest.meta["client"]) == (2, {"seen": 1})


def test_ranks_that_see_another_store_are_told_so(root):
    def work(consensus):
        where = root if consensus.rank == 0 else place(f"{root}-other")
        state = share(NEW, consensus.rank, consensus.world)
        return save(where, state, consensus, step=1, tag="t", round=0, fence=None)

    for error in on_ranks(2, work):
        assert "rank 0 sees None" in str(error)
        assert "storage that all nodes share" in str(error)
