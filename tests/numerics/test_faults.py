"""What may go wrong with a checkpoint, and where it is tested that it goes as stated.

`FAULTS` is the list; every test in it exists (that is tested, too). Here are the tests of whole
engines that no other file has: a rank killed in the middle of a background save, and disks that
fail.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path
from typing import BinaryIO

import pytest
import torch.distributed as dist

from tests.support.inside import persistence_of
from tests.support.saving import ASYNC, Deadly, heard, undisturbed, use
from tests.support.training import DATASET_SIZE, config, make_engine, train
from tests.support.waiting import wait_for
from tests.support.world import WorldError, WorldPool
from zero_checkpoint import find
from zero_checkpoint.files.storage import Disk
from zero_contract import worker as contract
from zero_data.ledger import read_ledger, verify

TESTS = Path(__file__).resolve().parents[1]
FAULTS = {
    "a rank is killed when 10, 50 or 99 % of its bytes are written: the one before is loaded": [
        "test_a_rank_killed_while_it_writes_costs_nothing_but_the_attempt",
        "test_a_rank_killed_while_it_writes_in_the_background_leaves_the_checkpoint_before",
        "test_a_rank_killed_in_mid_upload_costs_nothing_but_the_attempt",
        "test_what_a_save_leaves_that_died_as_a_whole_is_swept",
    ],
    "the coordinator is killed before the commit: the one before; after it: the new one": [
        "test_a_coordinator_killed_at_any_stage_leaves_the_old_or_the_new_whole",
        "test_a_coordinator_killed_before_the_commit_leaves_the_old_and_after_it_the_new",
    ],
    "the machine loses what was not synced, in any order: the old or the new, never mixed": [
        "test_a_power_cut_at_any_point_leaves_the_old_checkpoint_or_the_new",
    ],
    "the storage is not mounted, or is emptied, in a later round of a job: an error": [
        "test_where_the_checkpoints_of_the_job_are_gone_there_is_no_fresh_start",
        "test_a_job_whose_checkpoints_are_not_mounted_in_a_later_round_does_not_begin_anew",
    ],
    "a bit flips, a file is cut, deleted or swapped: named, quarantined, the one before": [
        "test_all_ranks_fall_back_together_and_the_damage_is_named_and_marked",
        "test_the_named_range_holds_the_damaged_element",
        "test_a_damaged_object_is_named_and_quarantined_and_the_one_before_is_loaded",
        "test_an_object_that_is_cut_or_gone_is_damage",
    ],
    "a manifest is cut, flipped or newer: no candidate, and said": [
        "test_no_bit_of_a_manifest_can_flip_unseen",
        "test_no_prefix_of_a_manifest_is_a_manifest",
        "test_a_newer_format_is_refused_with_the_advice_to_upgrade",
    ],
    "a manifest is hostile: refused before anything is allocated or opened": [
        "test_a_hostile_manifest_with_a_right_digest_is_refused",
        "test_a_key_that_is_there_twice_is_refused",
    ],
    "the disk is full, or fails: the save is given up, said at the next step, tried next time": [
        "test_a_full_disk_is_named_and_leaves_the_previous_checkpoint",
        "test_a_failed_operation_fails_every_rank_and_leaves_nothing",
        "test_a_write_error_of_the_system_is_told_to_every_rank",
        "test_a_full_disk_is_a_warning_of_the_next_step_and_an_error_where_no_later_save_was_made",
        "test_a_save_that_finds_no_room_costs_a_warning_and_the_script_goes_on_and_saves_later",
        "test_the_last_save_of_a_script_waits_for_room_and_without_it_the_script_fails",
        "test_a_disk_that_fails_for_a_while_costs_the_saves_of_that_while",
        "test_a_failed_operation_fails_every_rank_and_leaves_nothing",
    ],
    "a rank dies, stalls or is interrupted in a load: known in time, nothing is made of it": [
        "test_a_rank_lost_between_its_weights_and_its_vote_is_missed_and_the_load_begins_anew",
        "test_a_rank_that_waits_for_the_search_leaves_when_its_agent_asks",
        "test_a_load_that_is_interrupted_leaves_nothing_to_go_on_with_but_itself",
    ],
    "the only checkpoint is damaged: an error, and no step with what it has left": [
        "test_nothing_is_made_of_what_a_damaged_checkpoint_has_left_until_another_is_loaded",
    ],
    "a checkpoint of another model is tried: everything is as it was": [
        "test_after_a_refused_load_training_goes_on_as_if_it_had_not_been_tried",
    ],
    "a disk fails while a checkpoint is read: damage, like any other": [
        "test_blocks_that_the_disk_cannot_read_any_more_are_damage",
    ],
    "the disk is slow while training goes on: what is saved is the state of its own step": [
        "test_a_background_save_writes_the_bytes_that_a_blocking_one_would_have_written",
    ],
    "Ctrl-C in mid-save, and training goes on: saved is what was there when the save began": [
        "test_who_interrupts_a_save_and_trains_on_finds_in_it_what_was_there_when_it_began",
    ],
    "a rank is stopped in mid-save: nobody waits for it for long, its late vote is refused": [
        "test_a_stopped_rank_does_not_hold_up_the_others_and_its_late_vote_is_refused",
        "test_a_refused_commit_publishes_nothing_and_training_goes_on",
    ],
    "1 of 4 is killed in mid-save, 3 go on, then 4 again: each sample once, the same bits": [
        "test_a_rank_lost_in_mid_save_costs_no_sample_and_no_bit_at_three_ranks_and_at_four",
    ],
    "a node is lost with its memory, or two neighbours are": [
        "test_a_lost_node_and_then_a_killed_worker_cost_a_restart_each_and_no_committed_step",
        "test_two_neighbours_lost_at_once_mean_the_checkpoint_on_disk",
    ],
    "the cluster and the stage are others than those of the save: 320 combinations": [
        "test_all_sixteen_load_to_the_same_bits_and_only_the_blocks_that_hold_them_are_read",
    ],
    "a deletion dies, or the newest is damaged: never half of one, never the last whole one": [
        "test_dying_anywhere_in_a_deletion_leaves_all_of_it_or_what_a_sweep_removes",
        "test_prune_never_deletes_the_last_one_that_is_whole",
        "test_a_deletion_that_dies_leaves_no_checkpoint_and_is_finished_later",
    ],
    "two savers, or a saver and a sweep, want the same name: one of them": [
        "test_of_many_writers_of_one_manifest_exactly_one_wins",
        "test_a_save_whose_directory_was_swept_meanwhile_cannot_commit",
        "test_a_save_that_was_swept_cannot_publish",
    ],
    "the credentials expire: an error, and no fresh start": [
        "test_credentials_that_are_refused_are_no_empty_store",
    ],
}
"""What goes wrong, what comes of it -> the tests that show it."""


def test_every_fault_of_the_list_has_its_tests() -> None:
    texts = (path.read_text() for path in TESTS.rglob("test_*.py"))
    there = {name for text in texts for name in re.findall(r"(?m)^def (test_\w+)\(", text)}
    named = {test for tests in FAULTS.values() for test in tests}
    assert named <= there, sorted(named - there)


# ---- a rank is lost in mid-save ----


def run_round(root: str, number: int, until: int, dies: bool) -> tuple[str, int]:
    """One round of a job: saves each step in the background; rank 1 may die in a save."""
    os.environ[contract.ENV_ROUND] = str(number)
    try:
        settings = ASYNC | {"elastic": {"sample_ledger": f"{root}/ledger"}}
        engine = make_engine(config(number % 4, **settings), seed=number)
        engine.load_checkpoint(f"{root}/checkpoints")
        begun_at = engine.global_steps
        for step in range(begun_at + 1, until + 1):
            train(engine, step)
            if dies and step == until and dist.get_rank() == 1:
                use(engine, Deadly())
            engine.save_checkpoint(f"{root}/checkpoints")
        engine.wait_for_checkpoint()
        engine.destroy()
        return engine.weight_hash(), begun_at
    finally:
        del os.environ[contract.ENV_ROUND]


def first_weights(until: int) -> str:
    engine = make_engine(config(0), seed=1)
    train(engine, until)
    return engine.weight_hash()


def test_a_rank_lost_in_mid_save_costs_no_sample_and_no_bit_at_three_ranks_and_at_four(
    worlds: WorldPool, tmp_path: Path
) -> None:
    """Five micro-batches a step divide among neither; the epoch ends in step 3."""
    root = str(tmp_path)
    with pytest.raises(WorldError, match="rank 1 died, exit -9"):
        # The others wait for its vote: without an agent nobody tells them that none will come.
        worlds.run(4, run_round, root, 1, 2, True, deadline_s=150, grace_s=0)
    assert [c.manifest.step for c in find(tmp_path / "checkpoints").candidates] == [1]

    assert {begun for _, begun in worlds.run(3, run_round, root, 2, 4, False)} == {1}
    ends = worlds.run(4, run_round, root, 3, 6, False)

    assert ends == [(worlds.run(1, first_weights, 6)[0], 4)] * 4
    report = verify(read_ledger(tmp_path / "ledger"), DATASET_SIZE)
    assert report.exact, report.problems
    assert report.world_by_step == {1: 4, 2: 3, 3: 3, 4: 3, 5: 4, 6: 4}
    assert report.repeated_steps == 1
    assert report.samples == 2 * DATASET_SIZE


# ---- a disk that fails for a while ----


class Failing(Disk):
    """A disk of which a part cannot be written, while `fails`."""

    fails = True

    def sync(self, file: BinaryIO) -> None:
        if self.fails and "r00001" in file.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(file)


def save_through_a_failure(root: str) -> tuple[list[str], str]:
    engine = make_engine(config(2, **ASYNC))
    disk = use(engine, Failing())
    assert isinstance(disk, Failing)
    with heard(logging.WARNING) as lines:
        for step in range(1, 5):
            disk.fails = step in (2, 3)
            train(engine, step)
            assert engine.save_checkpoint(root)
            wait_for(lambda: not persistence_of(engine).saver.busy, 60, "the end of the save")
        train(engine, 5)
    engine.destroy()
    return lines, engine.weight_hash()


def test_a_disk_that_fails_for_a_while_costs_the_saves_of_that_while(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (lines, end), (_, other_end) = worlds.run(2, save_through_a_failure, str(tmp_path))
    assert end == other_end == worlds.run(1, undisturbed)[0]
    failed = [line for line in lines if "was not saved; training continues" in line]
    assert [line.split(" was not saved")[0] for line in failed] == [
        "the checkpoint of step 2",
        "the checkpoint of step 3",
    ]
    assert all(line.endswith("Input/output error (errno 5)") for line in failed)
    assert [c.manifest.step for c in find(tmp_path).candidates] == [4, 1]
    assert len(list(tmp_path.glob("step-*"))) == 2
