"""What `zero-ctl` asks a job for, and which job and node it takes a command to be about."""

from dataclasses import replace

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.written_job import Job, conditions, node, read
from zero_orchestrator.ctl import cli, views
from zero_orchestrator.ctl.requests import (
    TooFewNodes,
    ask_to_drain,
    ask_to_stop,
    exclude,
    include,
)
from zero_orchestrator.membership.failures import FOR_EVER_S, Exclusion
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe import status
from zero_orchestrator.observe.status import (
    Condition,
    NoSuchJob,
    NoSuchNode,
    choose_job,
    choose_node,
    newest_job,
)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(ManualClock())


def test_a_wish_to_drain_is_of_one_agent_process_and_goes_when_it_goes(memory):
    job = Job(memory)
    job.live("ab")
    job.round(1, "ACTIVE", "ab")
    ask_to_drain(memory, "gpt", "b", "me")
    assert conditions(job) == {"a": Condition.RUNNING, "b": Condition.DRAINING}
    memory.revoke(memory.get(job.keys.node("b")).lease)
    assert memory.range(job.keys.drain("")).items == ()
    with pytest.raises(NoSuchNode, match="node b of job gpt has just gone"):
        ask_to_drain(memory, "gpt", "b", "me")


def test_a_host_is_excluded_by_its_name_or_a_nodes_until_it_is_included_again(memory):
    job = Job(memory)
    job.live("ab")
    spare = replace(node("c"), host="h1")
    memory.put(job.keys.node("c"), spare.to_json(), lease=memory.grant(3))
    job.round(1, "ACTIVE", "ab")
    assert exclude(memory, "gpt", "c", "me", 600).host == "h1"
    assert memory.get(job.keys.excluded("h1")).lease != 0
    exclude(memory, "gpt", "b", "me", 0)
    assert memory.get(job.keys.excluded("b")).lease == 0
    assert conditions(job)["c"] is Condition.EXCLUDED
    with pytest.raises(NoSuchNode, match="a is not excluded in job gpt; b, h1 is"):
        include(memory, "gpt", "a")
    assert [include(memory, "gpt", name) for name in ("h1", "b")] == ["h1", "b"]
    assert read(job).exclusions == ()


def test_an_exclusion_of_one_of_several_nodes_of_a_host_names_both_commands(memory):
    job = Job(memory)
    job.live("a")
    for name in "bc":
        on_one = replace(node(name), host="h1")
        memory.put(job.keys.node(name), on_one.to_json(), lease=memory.grant(3))
    job.round(1, "ACTIVE", "a")
    with pytest.raises(NoSuchNode, match=r"b is a node of host h1, .* b, c, .*`zero-ctl drain b`"):
        exclude(memory, "gpt", "b", "me", 600)
    assert exclude(memory, "gpt", "h1", "me", 600).host == "h1"


def test_an_exclusion_that_a_user_asks_for_leaves_enough_nodes_or_is_refused(memory):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    with pytest.raises(TooFewNodes, match=r"gpt needs 1 .* host a \(a\) it has 0: .*drain"):
        exclude(memory, "gpt", "a", "me", 60)
    with pytest.raises(NoSuchNode, match="there is no node or host z; there are: a"):
        exclude(memory, "gpt", "z", "me", 60)
    assert read(job).exclusions == ()


def test_the_first_wish_to_stop_is_kept_and_shown(memory):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    assert ask_to_stop(memory, "gpt", "me", "maintenance")
    assert not ask_to_stop(memory, "gpt", "you", "")
    assert read(job).stop == "stop asked by me (maintenance)"


def test_the_newest_job_is_the_one_that_runs_or_else_the_one_that_began_last(memory):
    for name in ("z", "a", "m"):
        Job(memory, name).round(1, "DONE", "x")
    assert newest_job(status.read_all(memory)).job == "m"
    Job(memory, "a").live("x")
    memory.put(Keys("a").round, '{"n": 1, "state": "ACTIVE", "cause": "because"}')
    assert newest_job(status.read_all(memory)).job == "a"


def test_a_command_without_a_job_is_about_the_only_one_that_runs(memory):
    Job(memory, "old").round(1, "DONE", "a")
    running = Job(memory, "new")
    running.live("a")
    running.round(1, "ACTIVE", "a")
    jobs = status.read_all(memory)
    assert [job.job for job in jobs] == ["new", "old"]
    assert choose_job(jobs, None).job == "new"
    assert choose_job(jobs, "old").job == "old"


def test_a_job_that_is_not_there_is_answered_with_those_that_are(memory):
    with pytest.raises(NoSuchJob, match="no job has been started with this etcd"):
        choose_job([], None)
    for name in ("a", "b"):
        Job(memory, name).live("x")
    jobs = status.read_all(memory)
    with pytest.raises(NoSuchJob, match="there is no job c; there are: a, b"):
        choose_job(jobs, "c")
    with pytest.raises(NoSuchJob, match="several jobs run; name one of: a, b"):
        choose_job(jobs, None)
    for name in ("a", "b"):  # whose agents have not left yet
        Job(memory, name).round(1, "DONE", "x")
    with pytest.raises(NoSuchJob, match="no job runs; name one of: a, b"):
        choose_job(status.read_all(memory), None)


def test_an_exclusion_for_less_than_a_second_is_not_for_ever(memory):
    Job(memory).live("ab")
    args = cli.make_parser().parse_args(["exclude", "a", "gpt", "--for=0.4"])
    assert cli._COMMANDS["exclude"](args, memory, views.TableView()) == 0
    (barred,) = memory.range(Keys("gpt").excluded("")).items
    assert (barred.lease != 0, Exclusion.from_json(barred.value).for_s) == (True, 1)


@pytest.mark.parametrize("for_s", ["99999999999", "99999999999999999999", f"1{'0' * 200}d"])
def test_an_exclusion_for_any_length_of_time_is_a_record_that_agents_read(memory, for_s):
    Job(memory).live("ab")
    args = cli.make_parser().parse_args(["exclude", "a", "gpt", f"--for={for_s}"])
    assert cli._COMMANDS["exclude"](args, memory, views.TableView()) == 0
    (barred,) = memory.range(Keys("gpt").excluded("")).items
    assert Exclusion.from_json(barred.value).for_s == memory.time_left(barred.lease) == FOR_EVER_S


def test_a_node_is_looked_for_in_all_jobs_and_its_absence_names_those_there_are(memory):
    Job(memory, "a").live("xy")
    Job(memory, "b").live("xz")
    jobs = status.read_all(memory)
    assert choose_node(jobs, "z", None).job == "b"
    assert choose_node(jobs, "x", "a").job == "a"
    with pytest.raises(NoSuchNode, match=r"node x is in several jobs \(a, b\)"):
        choose_node(jobs, "x", None)
    with pytest.raises(NoSuchNode, match="no live node q; there are: a: x, y; b: x, z"):
        choose_node(jobs, "q", None)
