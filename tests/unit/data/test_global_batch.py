from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_contract.errors import ConfigError
from zero_data.global_batch import (
    BatchShape,
    Cursor,
    MicroBatch,
    StepPlan,
    contiguous,
    micro_steps_left,
    mix,
    node_turns,
    permute,
    plan_epoch,
    plan_rest,
    plan_step,
    resolve_batch,
    sample_ids,
    strided,
)

BATCH = BatchShape(microbatches=5, micro_batch=2)


def ids_of_epoch(epoch: int, world: int, dataset_size: int, batch: BatchShape) -> list[int]:
    """What all ranks consume in one epoch, in step and micro-batch order, without padding."""
    consumed = []
    for plan in plan_epoch(epoch * dataset_size, batch, dataset_size):
        for micro in range(plan.micro_steps(world)):
            for rank in range(world):
                microbatch = plan.microbatch(micro, rank, world)
                if not microbatch.padding:
                    consumed += sample_ids(plan, microbatch, dataset_size, dataset_size, 42)
    return consumed


@given(
    dataset_size=st.integers(1, 60),
    microbatches=st.integers(1, 7),
    micro_batch=st.integers(1, 4),
    world=st.integers(1, 9),
)
def test_an_epoch_is_every_sample_once_in_the_same_order_at_every_world_size(
    dataset_size: int, microbatches: int, micro_batch: int, world: int
) -> None:
    batch = BatchShape(microbatches=microbatches, micro_batch=micro_batch)
    epoch = ids_of_epoch(1, world, dataset_size, batch)
    assert sorted(epoch) == list(range(dataset_size))
    assert epoch == ids_of_epoch(1, 1, dataset_size, batch)


def test_the_last_step_of_an_epoch_is_shorter_and_straddles_nothing() -> None:
    plans = list(plan_epoch(20, BATCH, 23))
    assert plans == [StepPlan(20, 3, 2)]
    assert [plans[0].microbatch(0, rank, 2) for rank in range(2)] == [
        MicroBatch(0, 0, 2, padding=False),
        MicroBatch(1, 2, 1, padding=False),
    ]
    assert plan_step(23, BATCH, 23) == StepPlan(23, 10, 2)


def test_a_rank_past_the_last_leaf_runs_it_again_as_a_ghost() -> None:
    plan = StepPlan(0, 10, 2)
    assert plan.micro_steps(3) == 2
    assert plan.live(1, 3) == 2
    assert plan.microbatch(1, 2, 3) == MicroBatch(4, 8, 2, padding=True)


@given(position=st.integers(0, 99), world=st.integers(1, 9))
def test_the_micro_steps_left_are_those_of_the_plans_left(position: int, world: int) -> None:
    plans = plan_epoch(position, BATCH, 23)
    assert micro_steps_left(position, BATCH, 23, world) == sum(p.micro_steps(world) for p in plans)


@given(samples=st.integers(1, 40), micro_batch=st.integers(1, 9))
def test_the_weights_of_the_leaves_add_up_to_one(samples: int, micro_batch: int) -> None:
    plan = StepPlan(0, samples, micro_batch)
    weights = [plan.weight(plan.microbatch(i, 0, 1)) for i in range(plan.microbatches)]
    assert sum(weights) == pytest.approx(1, abs=1e-12)


# ---- assignments ----


@given(
    micro_batches=st.integers(1, 70),
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    block=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_every_assignment_runs_every_micro_batch_once_in_the_fewest_micro_steps(
    micro_batches: int, nodes: list[int], block: int
) -> None:
    world = sum(nodes)
    for assignment in (
        strided(world),
        node_turns(nodes, block),
        contiguous(world),
    ):
        rows = assignment.rows(micro_batches)
        run = [number for row in rows for number in row if number is not None]
        assert sorted(run) == list(range(micro_batches))
        assert [len(row) for row in rows] == [world] * -(-micro_batches // world)


def test_the_default_assignment_goes_from_rank_to_rank_in_each_micro_step() -> None:
    assert strided(3).rows(5) == [[0, 1, 2], [3, 4, None]]


def test_each_rank_runs_what_the_rows_say_and_no_further_rank_does() -> None:
    turns = node_turns((1, 2), 4)
    assert [turns.number(1, rank, 6) for rank in range(3)] == [1, 4, 5]
    assert strided(3).number(1, 2, 5) == 5, "past the last one: a padding micro-batch"
    assert turns.places(6) == [0, 3, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="no rank has a number from 3 on"):
        turns.number(0, 3, 6)


def test_the_first_micro_batch_with_samples_is_found_wherever_it_runs() -> None:
    late = plan_step(0, BATCH, sizes=(0, 0, 2, 1, 2))
    places = [late.first_place(each) for each in (strided(1), strided(2), node_turns((1, 2), 4))]
    assert places == [(2, 0), (1, 0), (0, 1)]
    assert plan_step(0, BATCH).first_place(strided(2)) == (0, 0)


def test_a_cursor_that_goes_elsewhere_begins_a_step_and_says_so() -> None:
    cursor = Cursor(step=7, samples=70, micro=2)
    cursor.move(step=3, samples=30)
    assert (cursor.step, cursor.samples, cursor.micro, cursor.moves) == (3, 30, 0, 1)


def test_a_script_that_ends_its_steps_itself_gets_the_rest_of_an_epoch_in_parts() -> None:
    rest = plan_rest(4, BATCH, epoch_size=30)
    assert (rest.samples, rest.first(2, world=3).samples) == (26, 12)
    assert rest.first(9, world=3).samples == 26
    assert plan_rest(4, BATCH).samples > 10**9
    assert plan_step(4, BATCH).samples == BATCH.samples


def test_nodes_take_blocks_in_turn_and_share_what_is_left() -> None:
    rows = node_turns((2, 2), 4).rows(13)
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, None], [10, 11, None, None]]
    assert node_turns((1, 2), 4).rows(6) == [[0, 2, 3], [1, 4, 5]]


def test_a_rank_that_sums_on_its_own_runs_consecutive_micro_batches() -> None:
    assert contiguous(2).rows(5) == [[0, 3], [1, 4], [2, None]]


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_a_shuffle_is_a_permutation_whatever_part_of_it_is_asked_for(size: int, seed: int) -> None:
    whole = permute(np.arange(size), size, seed, 0)
    assert sorted(whole.tolist()) == list(range(size))
    part = np.arange(size // 3, size // 2)
    assert permute(part, size, seed, 0).tolist() == whole[part].tolist()


def test_shuffles_and_seeds_stay_what_they_are_forever() -> None:
    """Checkpoints taken with one release go on with the next."""
    assert permute(np.arange(8), 8, 42, 0).tolist() == [4, 1, 3, 2, 7, 6, 0, 5]
    assert mix(42, 3, 1) == 6717522985872898827


def test_every_epoch_has_an_order_of_its_own() -> None:
    orders = {tuple(permute(np.arange(50), 50, 42, epoch).tolist()) for epoch in range(20)}
    assert len(orders) == 20


def test_a_shuffle_puts_samples_everywhere() -> None:
    """Each of 10 samples meets each of 10 places, about evenly, over 2000 keys."""
    counts = np.zeros((10, 10))
    for seed in range(2000):
        counts[np.arange(10), permute(np.arange(10), 10, seed, 0)] += 1
    assert abs(counts - 200).max() < 75  # 5.6 standard deviations of one count


@pytest.mark.parametrize(
    ("numbers", "world", "expected"),
    [
        ((12, 3, None), 8, (BatchShape(microbatches=4, micro_batch=3), False)),
        ((12, 3, 7), 8, (BatchShape(microbatches=4, micro_batch=3), False)),
        ((None, 3, 2), 4, (BatchShape(microbatches=8, micro_batch=3), True)),
        ((None, 3, None), 4, (BatchShape(microbatches=4, micro_batch=3), True)),
        ((12, None, 2), 3, (BatchShape(microbatches=6, micro_batch=2), True)),
        ((12, None, None), 3, (BatchShape(microbatches=3, micro_batch=4), True)),
    ],
)
def test_any_two_of_deepspeeds_batch_numbers_describe_the_batch(
    numbers: tuple[int | None, int | None, int | None], world: int, expected: object
) -> None:
    assert resolve_batch(*numbers, world, first_round=False) == expected


def test_three_numbers_must_agree_when_a_job_begins_and_may_not_after_a_resize() -> None:
    message = (
        r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size: "
        r"7 != 2 \* 3 \* 1; leave out gradient_accumulation_steps"
    )
    with pytest.raises(ConfigError, match=message):
        resolve_batch(7, 2, 3, 1, first_round=True)
    fixed = (BatchShape(microbatches=6, micro_batch=2), False)
    assert resolve_batch(12, 2, 3, 2, first_round=True) == fixed
    assert resolve_batch(12, 2, 3, 5, first_round=False) == fixed


def test_a_batch_that_does_not_divide_names_the_nearest_that_does() -> None:
    with pytest.raises(ConfigError, match=r"7 is not a multiple of .* 2; the nearest that is: 8"):
        resolve_batch(7, 2, None, 1, first_round=True)


def test_a_config_without_a_batch_size_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match="set train_batch_size"):
        resolve_batch(None, None, 4, 2, first_round=True)
