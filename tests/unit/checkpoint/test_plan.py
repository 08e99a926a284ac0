"""The plan of a load: every wanted byte, once, and about nothing else."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint.support import share, table
from zero_checkpoint.format.fragments import COLUMNS, check_cover, first_break, from_lists
from zero_checkpoint.format.layout import block_bytes_for
from zero_checkpoint.format.pieces import PARAM, State, TensorId, TensorInfo
from zero_checkpoint.format.plan import PlannedPart, plan
from zero_checkpoint.format.table import Extents
from zero_checkpoint.saving.commit import own_layout

BLOCK = 64


class Want(NamedTuple):
    """A row of `Extents`."""

    tensor: int
    start: int
    length: int
    itemsize: int
    memory: int
    address: int


def planned(wants, *rest):
    rows = np.array(wants, dtype=np.int64).reshape(-1, len(Extents._fields))
    return plan(Extents(*rows.T), *rest)


@st.composite
def stored_and_wanted(draw):
    """Tensors cut at random, the cuts spread over files in random order, and random wants."""
    numels = draw(st.lists(st.integers(0, 200), min_size=1, max_size=4))
    widths = [draw(st.sampled_from([1, 2, 4, 8])) for _ in numels]
    runs = []
    for tensor, count in enumerate(numels):
        cuts = draw(st.lists(st.integers(0, count), max_size=5))
        edges = sorted({0, count, *cuts})
        runs += [(tensor, a, b - a) for a, b in pairwise(edges)]
    runs = draw(st.permutations(runs))
    ends, rows = [128, 192, 256], []
    for tensor, start, length in runs:
        file = draw(st.integers(0, 2))
        rows.append((tensor, file, start, length, ends[file]))
        ends[file] += length * widths[tensor]
    columns = zip(*rows, strict=True) if rows else [[]] * 5
    names = ("tensor", "file", "start", "length", "offset")
    fragments = from_lists(dict(zip(names, columns, strict=True)))
    wants, memory, end = [], 0, 0
    for tensor, count in enumerate(numels):
        for _ in range(draw(st.integers(0, 2))):
            start = draw(st.integers(0, count))
            length = draw(st.integers(0, count - start))
            if draw(st.booleans()):  # else it adjoins the one before
                memory, end = memory + 1, draw(st.integers(0, 8))
            wants.append(Want(tensor, start, length, widths[tensor], memory, end))
            end += length * widths[tensor]
    return fragments, wants, len(numels)


@settings(max_examples=300, deadline=None)
@given(stored_and_wanted(), st.integers(1, 4))
def test_every_wanted_element_comes_from_exactly_one_fragment(case, most_blocks):
    fragments, wants, n_tensors = case
    widths = {want.tensor: want.itemsize for want in wants}
    stored = {  # (tensor, byte) -> (file, byte in the file), by brute force
        (tensor, start * widths[tensor] + byte): (file, offset + byte)
        for tensor, file, start, length, offset in zip(
            *(getattr(fragments, name).tolist() for name in COLUMNS), strict=True
        )
        if tensor in widths
        for byte in range(length * widths[tensor])
    }

    got: dict[tuple[int, int], tuple[int, int]] = {}  # (memory, address) -> the same
    for read in planned(wants, fragments, n_tensors, BLOCK, most_blocks * BLOCK):
        assert 1 <= len(read.blocks) <= most_blocks
        at = read.blocks[0] * BLOCK
        for part in read.parts:
            assert at <= part.offset
            at = part.offset + part.length
            target = wants[part.want]
            for byte in range(part.length):
                key = (target.memory, target.address + part.at + byte)
                assert key not in got, "read twice"
                got[key] = (read.file, part.offset + byte)
        assert at <= read.blocks.stop * BLOCK

    assert got == {
        (want.memory, want.address + byte): stored[want.tensor, want.start * want.itemsize + byte]
        for want in wants
        for byte in range(want.length * want.itemsize)
    }


def test_adjacent_runs_share_the_read_of_their_block():
    fragments = from_lists(
        {"tensor": [0, 1], "file": [0, 0], "start": [0, 0], "length": [4, 4], "offset": [128, 144]}
    )
    (read,) = planned([Want(0, 0, 4, 4, 0, 0), Want(1, 0, 4, 4, 1, 16)], fragments, 2, BLOCK)
    assert (read.file, read.blocks) == (0, range(2, 3))
    assert read.parts == (PlannedPart(128, 16, 0, 0), PlannedPart(144, 16, 1, 0))

    (read,) = planned([Want(0, 0, 4, 4, 0, 0), Want(1, 0, 4, 4, 0, 16)], fragments, 2, BLOCK)
    assert read.parts == (PlannedPart(128, 32, 0, 0),), "they adjoin in memory, too"


def test_blocks_that_follow_each_other_are_read_at_once_and_others_by_themselves():
    columns = {"tensor": [0], "file": [0], "start": [0], "length": [128], "offset": [128]}
    fragments = from_lists(columns)
    wants = [Want(0, 0, 40, 4, 0, 0), Want(0, 90, 38, 4, 1, 0)]  # bytes 128:288 and 488:640
    reads = planned(wants, fragments, 1, BLOCK)
    assert [r.blocks for r in reads] == [range(2, 5), range(7, 10)]
    assert [r.parts for r in reads] == [
        (PlannedPart(128, 160, 0, 0),),
        (PlannedPart(488, 152, 1, 0),),
    ]


# ---- whole jobs, without their memory ----


def gpt2_shapes():
    """124,439,808 parameters in 148 tensors."""
    width, shapes = 768, {"wte": (50257, 768), "wpe": (1024, 768)}
    for layer in range(12):
        for name, shape in {
            "ln_1": (width,), "qkv": (width, 3 * width), "proj": (width, width),
            "ln_2": (width,), "fc": (width, 4 * width), "out": (4 * width, width),
        }.items():  # fmt: skip
            shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[-1:]}
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def shadow(shapes):
    """Tensors of these shapes, with moments, that take no memory."""
    return {
        TensorId(kind, name): torch.empty(shape, device="meta")
        for kind in (PARAM, "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


def saved_by(full, world):
    """The fragments and file sizes of a save by so many ranks."""
    layouts = [own_layout(share_of_units(full, rank, world), rank) for rank in range(world)]
    columns = [layout.columns for layout in layouts]
    joined = {name: [n for one in columns for n in one[name]] for name in columns[0]}
    joined["file"] = [rank for rank, one in enumerate(columns) for _ in one["tensor"]]
    return from_lists(joined), [layout.size_bytes for layout in layouts]


def share_of_units(full, rank, world):
    """As the engine divides it: every layer by itself."""
    units = {}
    for tensor, data in full.items():
        units.setdefault(".".join(tensor.fqn.split(".")[:2]), {})[tensor] = data
    shares = [share(unit, rank, world).pieces for unit in units.values()]
    return State(table(full), tuple(itertools.chain(*shares)))


def many_shapes():
    """10,000 tensors of 16 KiB, a hundred to a layer."""
    return {f"h.{n // 100}.{n % 100}": (4096,) for n in range(10_000)}


@pytest.mark.corners(shapes=[gpt2_shapes])
@pytest.mark.parametrize(
    ("shapes", "saved_by_ranks", "loaded_by"),
    [
        *itertools.product([gpt2_shapes], [1, 2, 4], [1, 2, 3, 4, 8]),
        *itertools.product([many_shapes], [2], [3, 4]),
    ],
)
def test_all_ranks_together_read_hardly_more_than_the_checkpoint(shapes, saved_by_ranks, loaded_by):
    full = shadow(shapes())
    fragments, sizes = saved_by(full, saved_by_ranks)
    block_bytes = block_bytes_for(table(full))
    index = {tensor: position for position, tensor in enumerate(full)}
    read = 0
    for rank in range(loaded_by):
        pieces = share_of_units(full, rank, loaded_by).pieces
        wants = [Want(index[p.id], p.start, p.data.numel(), 4, n, 0) for n, p in enumerate(pieces)]
        for one in planned(wants, fragments, len(index), block_bytes):
            begin, end = one.blocks[0] * block_bytes, one.blocks.stop * block_bytes
            read += min(end, sizes[one.file]) - begin
    whole = sum(4 * data.numel() for data in full.values())
    assert whole <= read < 1.01 * sum(sizes)


@pytest.mark.parametrize(
    ("tensors", "gigabytes", "kib"),
    [
        *((100, 1.5, 32), (100, 84, 128), (100, 1_000, 1024), (100, 60_000, 4096)),
        *((100, 0.1, 8), (10_000, 1.5, 4), (10_000, 12, 16), (10_000, 84, 128), (1, 1e-6, 4)),
    ],
)
def test_blocks_are_short_as_long_as_the_manifest_stays_small(tensors, gigabytes, kib):
    info = TensorInfo((int(gigabytes * 1e9 / tensors),), torch.uint8)
    names = [TensorId(PARAM, str(number)) for number in range(tensors)]
    assert block_bytes_for(dict.fromkeys(names, info)) == kib << 10


def cut_evenly(numels, world):
    """Rows (tensor, rank, start, length) of three kinds of tensors, each kind cut by itself."""
    ends = np.cumsum(numels)
    starts, total = ends - numels, int(ends[-1])
    edges = np.unique([*starts, *(total * np.arange(world) // world)])
    tensor = np.searchsorted(ends, edges, side="right")
    rank = np.searchsorted(total * np.arange(1, world) // world, edges, side="right")
    length = np.diff([*edges, total])
    kinds = [tensor + kind * len(numels) for kind in range(3)]
    own = [np.stack([each, rank, edges - starts[tensor], length]) for each in kinds]
    return np.concatenate(own, axis=1)


def test_a_thousand_ranks_read_every_byte_exactly_once_and_ask_nobody_for_their_plan():
    """There is no process group here: a collective would raise."""
    assert not dist.is_initialized()
    numels = [4099 * 129 + 7 * n for n in range(1000)]
    tensor, file, start, length = cut_evenly(np.array(numels), 1024)
    order = np.lexsort((start, tensor, file))
    tensor, file, start, length = tensor[order], file[order], start[order], length[order]
    offset = 4096 + 4 * (np.cumsum(length) - length)
    heads = np.array([offset[file == rank][0] - 4096 for rank in range(1024)])
    offset -= heads[file]
    fragments = from_lists(
        {"tensor": tensor, "file": file, "start": start, "length": length, "offset": offset}
    )
    assert check_cover(fragments, numels * 3, str) is None

    wants = [[] for _ in range(1000)]
    for tensor, rank, start, length in cut_evenly(np.array(numels), 1000).T.tolist():
        wants[rank].append(Want(tensor, start, length, 4, len(wants[rank]), 0))
    parts = np.array(
        [
            (read.file, part.offset, part.length)
            for own in wants
            for read in planned(own, fragments, 3000, 1 << 19)
            for part in read.parts
        ]
    )
    file, begin, length = parts[np.lexsort((parts[:, 1], parts[:, 0]))].T
    last = fragments.offset + 4 * fragments.length
    ends = np.array([last[fragments.file == rank].max() for rank in range(1024)])
    low = np.full(1024, 4096)
    assert first_break(file, begin, begin + length, low, ends) is None


def test_a_gap_and_an_overlap_are_found_and_named():
    def problem(*runs, numel=10):
        names = ("tensor", "file", "start", "length", "offset")
        columns = zip(*((0, file, start, length, 0) for file, start, length in runs), strict=True)
        fragments = from_lists(dict(zip(names, columns, strict=True)))
        return check_cover(fragments, [numel], lambda _: "param/w")

    assert problem((0, 0, 4), (1, 4, 6)) is None
    assert problem((0, 1, 9)) == "param/w[0:1] is in no file"
    assert problem((0, 0, 4), (1, 6, 4)) == "param/w[4:6] is in no file"
    assert problem((0, 0, 9)) == "param/w[9:10] is in no file"
    assert problem((0, 0, 6), (3, 4, 6)) == "param/w[4:6] is in more than one place: files [0, 3]"
    assert problem((0, 0, 11)) == "param/w[10:11] is beyond the end of the tensor"
