"""Weights are read first, and each rank is told once for every checkpoint that is tried."""

from __future__ import annotations

import pytest
import torch

from tests.unit.checkpoint.support import adam_state, blank, flip, on_ranks, saved, share
from zero_checkpoint import find
from zero_checkpoint.errors import CheckpointError, ModelMismatch
from zero_checkpoint.format.dtypes import byte_view
from zero_checkpoint.format.pieces import PARAM
from zero_checkpoint.loading.restore import load

WORLD = 3
LONGER_THAN_A_READ = 150_000
"""Rows of 44 bytes, of the weights as of each moment: 6.6 MB."""


def load_and_note(roots, target, note):
    """Load on a rank from each of the roots; what came of it, and what each rank noted."""

    def work(consensus):
        state, notes = share(target, consensus.rank, len(roots)), []
        try:
            result = load(
                roots[consensus.rank],
                consensus,
                lambda _: state,
                exchange=lambda filled: notes.append(note(state, filled)),
            )
        except CheckpointError as error:
            result = error
        return result, notes

    return on_ranks(len(roots), work)


def told(_, filled):
    return filled


def test_the_weights_are_there_when_they_are_exchanged_and_nothing_else_was_waited_for(tmp_path):
    full = adam_state(width=LONGER_THAN_A_READ)
    saved(tmp_path, full, 2)
    expected = [share(full, rank, WORLD).pieces for rank in range(WORLD)]

    def what_is_there(state, filled):
        rank = next(r for r in range(WORLD) if starts(expected[r]) == starts(state.pieces))
        return filled, {
            kind: all(
                torch.equal(byte_view(here.data), byte_view(there.data))
                for here, there in zip(state.pieces, expected[rank], strict=True)
                if here.id.kind == kind and here.data.numel()
            )
            for kind in (PARAM, "exp_avg_sq")
        }

    for _, notes in load_and_note([tmp_path] * WORLD, blank(full), what_is_there):
        assert notes == [(True, {PARAM: True, "exp_avg_sq": False})]


def starts(pieces):
    return [(piece.id, piece.start) for piece in pieces]


@pytest.mark.parametrize(
    ("kind", "first"), [(PARAM, {True, False}), ("exp_avg_sq", {True})], ids=["weights", "a moment"]
)
def test_a_rank_whose_weights_are_damaged_takes_part_and_again_after_falling_back(
    tmp_path, kind, first
):
    full = adam_state(width=LONGER_THAN_A_READ)
    saved(tmp_path, full, WORLD, step=1)
    saved(tmp_path, full, WORLD, step=2)
    newest = find(tmp_path).candidates[0]
    rows, ids = newest.manifest.fragments, list(newest.manifest.tensors)
    row = max(
        (n for n, t in enumerate(rows.tensor) if ids[t].kind == kind), key=lambda n: rows.length[n]
    )
    middle = int(rows.offset[row] + 2 * rows.length[row])
    flip(newest.path / newest.manifest.files[rows.file[row]].name, middle)

    results = load_and_note([tmp_path] * WORLD, blank(full), told)

    assert [result.manifest.step for result, _ in results] == [1] * WORLD
    assert [len(notes) for _, notes in results] == [2] * WORLD
    assert {notes[0] for _, notes in results} == first
    assert {notes[1] for _, notes in results} == {True}


def test_ranks_that_read_nothing_take_part_too(tmp_path, tmp_path_factory):
    full = adam_state()
    saved(tmp_path, full)
    elsewhere = tmp_path_factory.mktemp("other-node")
    seen, unseen = load_and_note([tmp_path, elsewhere], blank(full), told)
    assert (seen[1], unseen[1]) == ([True], [False])

    other_model = adam_state(width=38)
    for error, notes in load_and_note([tmp_path] * 2, other_model, told):
        assert type(error) is ModelMismatch
        assert notes == [False]
