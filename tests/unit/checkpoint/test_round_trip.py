"""What is saved at one world size is loaded at any other, bit by bit."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from tests.unit.checkpoint.support import (
    SMALL,
    adam_state,
    blank,
    every_dtype,
    interval,
    load_all,
    on_ranks,
    random_bits,
    same_bits,
    saved,
    share,
    table,
)
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError, DamagedCheckpoint, ModelMismatch
from zero_checkpoint.files.storage import DISK
from zero_checkpoint.format.dtypes import DTYPES, byte_view
from zero_checkpoint.format.layout import PAGE_BYTES
from zero_checkpoint.format.pieces import PARAM, Piece, State, TensorId
from zero_checkpoint.loading import reader
from zero_checkpoint.loading.restore import Loaded, load


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """One state, saved by 1, 2, 3 and 4 ranks."""
    roots = {}
    for world in (1, 2, 3, 4):
        roots[world] = tmp_path_factory.mktemp(f"world{world}")
        saved(roots[world], adam_state() | every_dtype(), world)
    return roots


@pytest.mark.parametrize("target", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("source", [1, 2, 3, 4])
def test_a_checkpoint_of_any_world_loads_at_any_other_bit_by_bit(roots, source, target):
    full = adam_state() | every_dtype()
    loaded_into = blank(full)

    results = load_all(roots[source], loaded_into, target)

    assert [type(result) for result in results] == [Loaded] * target
    assert {result.manifest.world for result in results} == {source}
    assert same_bits(loaded_into, full)


def test_every_stored_byte_is_read_about_once_whatever_the_world_size(tmp_path):
    full = {
        TensorId(kind, f"{layer}.w"): random_bits((40_000,), torch.float32, seed)
        for seed, (kind, layer) in enumerate(
            (kind, layer) for layer in range(10) for kind in (PARAM, "exp_avg", "exp_avg_sq")
        )
    }
    saved(tmp_path, full, 3)
    total = sum(data.numel() * 4 for data in full.values())

    for world in (1, 2, 4, 8):
        target = blank(full)
        results = load_all(tmp_path, target, world)
        assert same_bits(target, full)
        read = sum(result.bytes_read for result in results)
        assert total <= read <= 1.05 * total


def test_the_manifest_says_what_was_saved(tmp_path):
    meta = {"scheduler": {"best": float("inf"), "last": [1, 2.5, None]}, "nested": {"ü": True}}
    path = saved(tmp_path, adam_state(), 3, step=12, tag="mine", round=7, meta=meta)

    manifest = find(tmp_path).candidates[0].manifest

    assert path.name == f"step-000000012.g7.{manifest.nonce}" == manifest.directory
    assert (manifest.step, manifest.tag, manifest.round, manifest.world) == (12, "mine", 7, 3)
    assert manifest.meta == meta
    assert list(manifest.tensors) == list(adam_state())
    assert [file.size_bytes for file in manifest.files] == [
        (path / file.name).stat().st_size for file in manifest.files
    ]
    assert (tmp_path / "latest").read_text() == path.name + "\n"


def test_the_files_open_with_safetensors_and_start_on_a_page(tmp_path):
    full = adam_state() | every_dtype()
    path = saved(tmp_path, full, 3)
    manifest = find(tmp_path).candidates[0].manifest
    rebuilt = {t: torch.zeros(data.numel(), dtype=data.dtype) for t, data in full.items()}

    for file in manifest.files:
        assert file.data_offset % PAGE_BYTES == 0
        with safe_open(path / file.name, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                name, _, start = key.partition("@")
                tensor, stored = TensorId(*name.split("/", 1)), opened.get_tensor(key)
                if not start:
                    assert stored.shape == full[tensor].shape
                begin = int(start or 0)
                rebuilt[tensor][begin : begin + stored.numel()] = stored.reshape(-1)

    assert same_bits({t: data.reshape(full[t].shape) for t, data in rebuilt.items()}, full)


def test_every_dtype_of_safetensors_is_known_by_its_name():
    assert safetensors.torch._TYPES.items() <= DTYPES.items()


def test_more_tiny_tensors_than_one_system_call_takes_share_a_block(tmp_path):
    full = {TensorId(PARAM, f"scale{n}"): random_bits((), torch.float32, n) for n in range(3000)}
    saved(tmp_path, full, 2, disk=DISK)
    target = blank(full)
    results = load_all(tmp_path, target, 3)
    assert [type(result) for result in results] == [Loaded] * 3
    assert same_bits(target, full)


def test_wider_elements_come_first_so_that_every_piece_is_aligned(tmp_path):
    saved(tmp_path, every_dtype(), 2)
    manifest = find(tmp_path).candidates[0].manifest
    widths = [info.dtype.itemsize for info in manifest.tensors.values()]
    rows = manifest.fragments
    assert all(rows.offset[i] % widths[rows.tensor[i]] == 0 for i in range(len(rows)))


def test_a_rank_that_owns_nothing_still_writes_a_valid_file(tmp_path):
    full = {TensorId(PARAM, "w"): random_bits((1,), torch.float32, 0)}
    path = saved(tmp_path, full, 3)
    assert interval(0, 3, 1) == (0, 0)
    with safe_open(path / "r00000.safetensors", framework="pt") as opened:
        assert list(opened.keys()) == []
    target = blank(full)
    load_all(tmp_path, target, 8)
    assert same_bits(target, full)


def test_a_tied_tensor_is_read_under_either_of_its_names_or_both(tmp_path):
    stored, tied = TensorId(PARAM, "wte.weight"), TensorId(PARAM, "head.weight")
    data = random_bits((3000,), torch.float32, 1)
    saved(tmp_path, {stored: data}, 3, aliases={"head.weight": "wte.weight"})

    for wanted in ([stored], [tied], [stored, tied]):
        full = dict.fromkeys(wanted, data)
        target = blank(full)
        assert {type(r) for r in load_all(tmp_path, target, 2)} == {Loaded}
        assert same_bits(target, full)


def test_tensors_that_were_two_are_not_loaded_into_a_tie(tmp_path):
    two = {TensorId(PARAM, name): random_bits((9,), torch.float32, 0) for name in ("a", "b")}
    saved(tmp_path, two)
    one = {TensorId(PARAM, "a"): random_bits((9,), torch.float32, 3)}
    for error in load_all(tmp_path, one, aliases={"b": "a"}):
        assert isinstance(error, ModelMismatch)
        assert "1 extra in the checkpoint: param/b" in str(error)


@pytest.mark.parametrize("start", [-1, 400])
def test_a_wanted_piece_outside_its_tensor_is_refused_before_anything_is_read(tmp_path, start):
    full = adam_state()
    saved(tmp_path, full)
    wte = TensorId(PARAM, "wte.weight")
    data = torch.zeros(10)

    def work(consensus):
        state = State(table(full), (Piece(wte, start, data),) if consensus.rank else ())
        return load(tmp_path, consensus, lambda _: state)

    for error in on_ranks(2, work):
        assert type(error) is CheckpointError
        assert f"wte.weight[{start}:{start + 10}] leaves the 407 elements" in str(error)
    assert not data.any()
    assert len(find(tmp_path).candidates) == 1


def test_another_model_is_refused_with_the_tensors_that_differ(tmp_path):
    older, newer = adam_state(), adam_state()
    saved(tmp_path, older, step=1)
    del newer[TensorId(PARAM, "norm.bias")]
    newer[TensorId(PARAM, "wte.weight")] = torch.zeros(2, 2)
    newer[TensorId(PARAM, "scale")] = torch.zeros((), dtype=torch.bfloat16)
    for n in range(9):
        newer[TensorId(PARAM, f"new{n}")] = torch.zeros(2)
    before = {t: data.clone() for t, data in newer.items()}

    errors = load_all(tmp_path, newer, 3)

    assert {type(error) for error in errors} == {ModelMismatch}
    text = str(errors[0])
    assert "9 missing in the checkpoint: param/new0, " in text
    assert "param/new4, and 4 more" in text
    assert "1 extra in the checkpoint: param/norm.bias" in text
    assert "param/wte.weight is float32 [37, 11] in the checkpoint, float32 [2, 2]" in text
    assert "param/scale is float32 [] in the checkpoint, bfloat16 []" in text
    assert same_bits(newer, before)
    assert len(find(tmp_path).candidates) == 1  # intact: not quarantined


def test_a_model_that_one_rank_has_built_differently_is_no_reason_to_blame_the_checkpoint(tmp_path):
    full = adam_state()
    saved(tmp_path, full)

    def work(consensus):
        state = share(blank(adam_state(width=37 + consensus.rank)), consensus.rank, 2)
        return load(tmp_path, consensus, lambda _: state)

    for error in on_ranks(2, work):
        assert type(error) is CheckpointError
        assert "the ranks have built different models, build one: step-" in str(error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("block_disk", [DISK, SMALL])
def test_state_on_a_device_is_saved_and_loaded_through_host_memory(tmp_path, block_disk):
    full = {t: data.cuda() for t, data in (adam_state() | every_dtype()).items()}
    saved(tmp_path, full, 3, disk=block_disk)
    target = blank(full)
    load_all(tmp_path, target, 2)
    assert all(data.is_cuda for data in target.values())
    assert same_bits(target, full)


def test_memory_that_cannot_be_read_into_directly_is_filled_once_verified(tmp_path, monkeypatch):
    """What happens to device tensors, on machines without a device."""
    monkeypatch.setattr(reader, "_reads_into", lambda target: False)
    full = adam_state(width=600)
    saved(tmp_path, full, 3)
    target = blank(full)
    load_all(tmp_path, target, 4)
    assert same_bits(target, full)

    flip = find(tmp_path).candidates[0].path / "r00000.safetensors"
    data = bytearray(flip.read_bytes())
    data[5000] ^= 1
    flip.write_bytes(data)
    wte = TensorId(PARAM, "wte.weight")  # the first in the file; its first block is damaged
    target = blank(full)
    untouched = target[wte].reshape(-1)[:1024].clone()
    assert {type(error) for error in load_all(tmp_path, target, 1)} == {DamagedCheckpoint}
    assert torch.equal(byte_view(target[wte].reshape(-1)[:1024]), byte_view(untouched))
