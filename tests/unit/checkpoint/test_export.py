"""What goes out can be read by those it is for: torch, safetensors, transformers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open

from tests.unit.checkpoint.support import adam_state, saved
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint
from zero_checkpoint.format.pieces import BUFFER, PARAM, TensorId
from zero_checkpoint.tools import cli, locate
from zero_checkpoint.tools.conversion import export
from zero_checkpoint.tools.conversion.adopt import Dtypes, adopt
from zero_checkpoint.tools.conversion.export import workplace
from zero_checkpoint.tools.conversion.foreign import read_hf, read_torch

WEIGHT, BIAS = TensorId(PARAM, "net.embed.weight"), TensorId(PARAM, "net.bias")
COUNT = TensorId(BUFFER, "net.count")
WRITERS = {
    "torch": export.export_torch,
    "hf": functools.partial(export.export_hf, shard_bytes=1 << 20),
}


@pytest.fixture
def checkpoint(tmp_path):
    full = {
        WEIGHT: torch.randn(6, 4),
        BIAS: torch.randn(4),
        TensorId("exp_avg", "net.bias"): torch.randn(4),
        COUNT: torch.tensor(7),
    }
    saved(tmp_path / "in", full, aliases={"net.head.weight": "net.embed.weight"})
    return locate.one(str(tmp_path / "in")), full


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """As on a disk that becomes full, with another number of the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_does_not_fit_on_the_disk_is_an_error_and_leaves_nothing(checkpoint, tmp_path, write):
    source, _ = checkpoint
    directory = tmp_path / "out"
    directory.mkdir()
    with files_of_at_most(64), pytest.raises((CheckpointError, OSError), match="File too large"):
        write(source, export.select(source), directory / "model")
    assert list(directory.iterdir()) == []


def test_a_torch_file_is_a_plain_state_dict_with_its_ties(checkpoint, tmp_path):
    source, full = checkpoint
    out = tmp_path / "out" / "model.pt"
    export.export_torch(source, export.select(source), out)

    state = torch.load(out, weights_only=True)

    assert set(state) == {"net.embed.weight", "net.head.weight", "net.bias", "net.count"}
    assert torch.equal(state["net.embed.weight"], full[WEIGHT])
    assert state["net.head.weight"].data_ptr() == state["net.embed.weight"].data_ptr()
    assert state["net.count"] == 7


def test_a_dtype_is_for_reals_and_a_prefix_comes_off_all_names(checkpoint, tmp_path):
    source, full = checkpoint
    selection = export.select(source, dtype=torch.bfloat16, strip_prefix="net.")
    export.export_torch(source, selection, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(state["embed.weight"], full[WEIGHT].bfloat16())
    assert state["count"].dtype == torch.int64


def test_shards_are_listed_in_an_index_and_hold_every_name_once(checkpoint, tmp_path):
    source, full = checkpoint
    out = tmp_path / "out"
    files = export.export_hf(source, export.select(source), out, shard_bytes=100)

    index = json.loads((out / export.INDEX).read_text())
    read = {}
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(out / name, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            for key in shard.keys():  # noqa: SIM118
                assert index["weight_map"][key] == name
                assert key not in read
                read[key] = shard.get_tensor(key)

    assert {path.name for path in files} == {export.INDEX, *index["weight_map"].values()}
    assert len(files) == 4
    assert index["metadata"]["total_size"] == 2 * 96 + 16 + 8
    assert torch.equal(read["net.head.weight"], full[WEIGHT])
    assert set(read) == {"net.embed.weight", "net.head.weight", "net.bias", "net.count"}


def test_one_shard_needs_no_index_and_holds_a_tied_weight_under_both_names(checkpoint, tmp_path):
    source, full = checkpoint
    files = export.export_hf(source, export.select(source), tmp_path / "o", shard_bytes=10**9)
    assert [path.name for path in files] == ["model.safetensors"]
    foreign = read_hf(tmp_path / "o", buffers=[])
    assert torch.equal(foreign.params["net.head.weight"], full[WEIGHT])
    assert torch.equal(foreign.params["net.embed.weight"], full[WEIGHT])


def test_nothing_is_ever_overwritten_and_damage_leaves_nothing(checkpoint, tmp_path):
    source, _ = checkpoint
    selection, out = export.select(source), tmp_path / "model"
    out.write_text("mine")
    for write in (
        lambda: export.export_torch(source, selection, out),
        lambda: export.export_hf(source, selection, out, shard_bytes=10**9),
    ):
        with pytest.raises(CheckpointError, match="is there already"):
            write()
    assert out.read_text() == "mine"
    out.unlink()
    file = source.path / "r00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for write in (
        lambda: export.export_torch(source, selection, out),
        lambda: export.export_hf(source, selection, out, shard_bytes=10**9),
    ):
        with pytest.raises(DamagedCheckpoint):
            write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_of_two_exports_to_one_place_the_first_is_not_disturbed(checkpoint, tmp_path, write):
    source, _ = checkpoint
    selection, out = export.select(source), tmp_path / "model"
    refused = []

    def begin_another(_: int) -> None:
        with pytest.raises(CheckpointError, match="another export is writing here; wait for it"):
            write(source, selection, out)
        refused.append(True)

    write(source, selection, out, progress=begin_another)
    assert refused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "model"]


def died_while_it_wrote(out, content=b"half"):
    """What a killed export leaves, by a process that is killed."""
    child = os.fork()
    if child == 0:
        with workplace(out) as directory:
            (directory / "model").mkdir()
            (directory / "model" / "shard").write_bytes(content)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_a_killed_export_left_does_not_block_the_next(checkpoint, tmp_path, write):
    source, _ = checkpoint
    out = tmp_path / "model"
    died_while_it_wrote(out)
    assert (tmp_path / "model.partial" / "model" / "shard").exists()

    files = write(source, export.select(source), out)

    assert [path.name for path in files] == ["model" if out.is_file() else "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "model"]


def test_what_may_be_somebody_elses_is_left_alone(checkpoint, tmp_path):
    source, _ = checkpoint
    selection, out = export.select(source), tmp_path / "model"
    partial = tmp_path / "model.partial"

    def refusal():
        with pytest.raises(CheckpointError) as caught:
            export.export_torch(source, selection, out)
        return str(caught.value)

    partial.write_text("theirs")
    assert (
        refusal()
        == f"{partial} is there already, and not left by an export; remove it, or write elsewhere"
    )
    partial.unlink()
    partial.mkdir()
    (partial / "notes").write_text("theirs")
    for _ in range(2):
        assert "is there already, and not left by an export" in refusal()
    assert [path.name for path in partial.iterdir()] == ["notes"]
    (partial / "notes").unlink()
    died_while_it_wrote(out)
    (partial / ".owner").write_text("another kernel")
    assert "left by an export on another machine" in refusal()
    assert (partial / "model" / "shard").exists()


def test_without_locks_an_export_works_and_takes_nothing_over(checkpoint, tmp_path, monkeypatch):
    source, _ = checkpoint
    selection = export.select(source)
    died_while_it_wrote(tmp_path / "model")
    unlocked = OSError(errno.ENOSYS, "Function not implemented")  # as on Lustre without "flock"
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=unlocked))
    with pytest.raises(CheckpointError, match="this file system has no locks; if no export is"):
        export.export_torch(source, selection, tmp_path / "model")
    assert (tmp_path / "model.partial" / "model" / "shard").exists()
    assert export.export_torch(source, selection, tmp_path / "m") == [tmp_path / "m"]
    assert not (tmp_path / "m.partial").exists()


def test_a_prefix_that_not_all_names_have_is_an_error(tmp_path):
    saved(tmp_path, adam_state())
    with pytest.raises(CheckpointError, match=r"'norm\.bias' does not begin with it"):
        export.select(locate.one(str(tmp_path)), strip_prefix="wte.")


@pytest.mark.parametrize("text", ["{", "3", "null", '["dtype"]'])
def test_a_config_that_is_no_object_is_refused_and_nothing_is_left(
    checkpoint, tmp_path, text, capsys
):
    (tmp_path / "in" / "config.json").write_text(text)
    arguments = ["export", str(tmp_path / "in"), str(tmp_path / "out"), "--to=hf"]
    assert cli.main(arguments) == 2
    assert "--hf-config: config.json" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_config_beside_the_checkpoint_goes_with_the_weights(checkpoint, tmp_path):
    (tmp_path / "in" / "config.json").write_text('{"model_type": "gpt2"}')  # as the Trainer does
    arguments = ["export", str(tmp_path / "in"), str(tmp_path / "out"), "--to=hf"]
    assert cli.main(arguments) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "gpt2"}


# ---- transformers itself ----


@pytest.fixture(scope="module")
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


def tiny(transformers, family):
    """A random model with tied (GPT-2) or separate (Llama) embeddings."""
    torch.manual_seed(3)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=50, bos_token_id=0, eos_token_id=1
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=50,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore")  # of transformers' own making
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_comes_back_through_from_pretrained(transformers, tmp_path, family, dtype):
    model = tiny(transformers, family)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.config.save_pretrained(tmp_path / "config")
    foreign = read_torch(tmp_path / "model.pt", allow_pickle=False, key="", buffers=[])
    adopt(tmp_path / "ck", foreign, source="", tag="t", step=None, dtypes=Dtypes())
    source = locate.one(str(tmp_path / "ck"))

    selection = export.select(source, dtype=dtype)
    out = tmp_path / "out"
    export.export_hf(source, selection, out, shard_bytes=5000, config=tmp_path / "config")
    again = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True)

    assert (out / export.INDEX).exists()
    assert again.dtype == (dtype or torch.float32)
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].to(again.dtype), theirs[name]) for name in ours)
