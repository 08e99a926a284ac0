"""The plan of a load: every wanted byte, once, and about nothing else."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from zero_engine.checkpoint.fragments import check_cover, from_lists
from zero_engine.checkpoint.plan import Part, Want, plan

BLOCK = 64


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
    wants = []
    for tensor, count in enumerate(numels):
        for _ in range(draw(st.integers(0, 2))):
            start = draw(st.integers(0, count))
            wants.append(Want(tensor, start, draw(st.integers(0, count - start)), widths[tensor]))
    return fragments, wants, len(numels)


@settings(max_examples=300, deadline=None)
@given(stored_and_wanted())
def test_every_wanted_element_comes_from_exactly_one_fragment(case):
    fragments, wants, n_tensors = case
    where = {}  # (tensor, byte) -> (file, byte in the file), by brute force
    for tensor, file, start, length, offset in zip(
        *(getattr(fragments, name).tolist() for name in fragments.to_lists()), strict=True
    ):
        for want in (w for w in wants if w.tensor == tensor):
            for byte in range(length * want.itemsize):
                where[tensor, start * want.itemsize + byte] = (file, offset + byte)

    got: dict[tuple[int, int], tuple[int, int]] = {}
    for read in plan(wants, fragments, n_tensors, BLOCK):
        at = read.block * BLOCK
        for part in read.parts:
            assert at <= part.offset
            at = part.offset + part.length
            for byte in range(part.length):
                key = (part.want, part.at + byte)
                assert key not in got, "read twice"
                got[key] = (read.file, part.offset + byte)
        assert at <= (read.block + 1) * BLOCK

    assert got == {
        (number, byte): where[want.tensor, want.start * want.itemsize + byte]
        for number, want in enumerate(wants)
        for byte in range(want.length * want.itemsize)
    }


def test_adjacent_runs_share_the_read_of_their_block():
    fragments = from_lists(
        {"tensor": [0, 1], "file": [0, 0], "start": [0, 0], "length": [4, 4], "offset": [128, 144]}
    )
    reads = plan([Want(0, 0, 4, 4), Want(1, 0, 4, 4)], fragments, 2, BLOCK)
    assert [(r.file, r.block) for r in reads] == [(0, 2)]
    assert reads[0].parts == (Part(128, 16, 0, 0), Part(144, 16, 1, 0))


def test_a_thousand_ranks_by_a_thousand_tensors_are_planned_within_a_second():
    world, tensors, length = 1024, 1000, 1_000_000
    rows = [
        (t, (t * 7 + f) % world, f * length // 100, length // 100, 4096 + t * length)
        for t in range(tensors)
        for f in range(100)
    ]
    names = ("tensor", "file", "start", "length", "offset")
    fragments = from_lists(dict(zip(names, zip(*rows, strict=True), strict=True)))
    begin = time.process_time()
    reads = plan([Want(t, 5, length - 9, 4) for t in range(3)], fragments, tensors, 4 << 20)
    assert time.process_time() - begin < 1
    assert sum(part.length for read in reads for part in read.parts) == 3 * (length - 9) * 4


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
