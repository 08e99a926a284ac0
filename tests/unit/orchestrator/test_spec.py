"""Bounds, names and specifications, and what a user reads when they are wrong."""

import pytest

from zero_orchestrator.errors import SpecError
from zero_orchestrator.membership.spec import JobSpec, check_job_name, parse_nnodes


@pytest.mark.parametrize(
    ("text", "bounds"), [("4", (4, 4)), ("1:4", (1, 4)), (" 2:2 ", (2, 2)), ("1:1000", (1, 1000))]
)
def test_nnodes_is_a_number_or_a_range(text, bounds):
    assert parse_nnodes(text) == bounds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4:2", "--nnodes=4:2: minimum 4 exceeds maximum 2; write 2:4"),
        ("0:2", "--nnodes=0:2: a job needs at least 1 node; write 1:2"),
        ("two", "--nnodes=two: not a number of nodes; write 4, or 1:4 for 1 to 4 nodes"),
        ("1:2:3", "--nnodes=1:2:3: not a number of nodes; write 4, or 1:4 for 1 to 4 nodes"),
        ("-1", "--nnodes=-1: not a number of nodes; write 4, or 1:4 for 1 to 4 nodes"),
    ],
)
def test_wrong_bounds_are_refused_with_the_remedy(text, message):
    with pytest.raises(SpecError) as refused:
        parse_nnodes(text)
    assert str(refused.value) == message


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-x", "a b", "x" * 129])
def test_a_job_name_that_cannot_be_part_of_a_key_is_refused(name):
    with pytest.raises(SpecError, match="use letters, digits"):
        check_job_name(name)


def test_a_specification_survives_its_key():
    spec = JobSpec(min_nodes=1, max_nodes=4, max_restarts=3, command=("train.py", "--lr", "1"))
    assert JobSpec.from_json(spec.to_json()) == spec


def test_an_agent_with_another_specification_reads_every_difference():
    running = JobSpec(min_nodes=1, max_nodes=4, max_restarts=3, command=("train.py", "--lr", "1"))
    mine = JobSpec(min_nodes=1, max_nodes=2, max_restarts=3, command=("train.py",))
    with pytest.raises(SpecError) as refused:
        mine.check_same(running, "gpt")
    assert str(refused.value) == (
        "job gpt runs with another specification: max_nodes is 4 there and 2 here; "
        "command is train.py --lr 1 there and train.py here. "
        "Start this agent with the same values, or choose another --rdzv-id"
    )


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"node_unit": 0}, "--node-unit=0: write how many nodes belong together, from 1"),
        (
            {"node_unit": 3},
            "--node-unit=3 with --nnodes=1:2: no multiple of 3 lies between; write --nnodes=3:3",
        ),
        ({"refill_after_steps": -1}, "--refill-after-steps=-1: must not be negative; write 0"),
        ({"exclude_after": -2}, "--exclude-after=-2: must not be negative; write 0"),
        ({"exclude_for_s": 0}, "--exclude-for=0: write 1 to 9000000000 seconds"),
        ({"exclude_for_s": 10**20}, f"--exclude-for={10**20}: write 1 to 9000000000 seconds"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_the_remedy(facts, message):
    with pytest.raises(SpecError) as refused:
        JobSpec(**{"min_nodes": 1, "max_nodes": 2, **facts})
    assert str(refused.value) == message


def test_the_smallest_round_is_a_whole_number_of_units():
    spec = JobSpec(min_nodes=3, max_nodes=9, node_unit=4)
    assert (spec.fewest, spec.usable(3), spec.usable(7), spec.usable(100)) == (4, 0, 4, 8)
