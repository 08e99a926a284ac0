"""What `zero-ctl status` makes of a job's keys."""

import json
import time
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.written_job import SPEC, Job, conditions, node, read
from zero_orchestrator.ctl import cli, events_command, views
from zero_orchestrator.membership.failures import Charge, Exclusion
from zero_orchestrator.membership.job_state import Failure
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe import history as histories
from zero_orchestrator.observe import status
from zero_orchestrator.observe.events import (
    Event,
    events_prefix,
    goodput_prefix,
    history_key,
    progress_prefix,
    seen_key,
    verdicts_key,
)
from zero_orchestrator.observe.history import History, Saved
from zero_orchestrator.observe.pace import Pace, Quantiles, Speed, bucket, to_record
from zero_orchestrator.observe.status import (
    Condition,
    NoSuchJob,
    UnreadableJob,
    choose_job,
)
from zero_orchestrator.observe.verdicts import Kind, Verdict, to_value


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(ManualClock())


def shown(now: status.JobStatus) -> str:
    console = Console(width=200)
    with console.capture() as text:
        console.print(views.status_page(now))
    return text.get()


def listed(jobs) -> str:
    console = Console(width=200)
    with console.capture() as text:
        console.print(views._jobs_table(jobs))
    return text.get()


def test_a_running_job_with_its_ranks_spare_budget_checkpoint_and_progress(memory):
    job = Job(memory)
    job.live("abc")
    job.round(2, "ACTIVE", "ab")
    memory.put(job.keys.charged(1), Charge(n=1, cause="lost node d").to_json())
    memory.put(job.keys.latest, '{"step": 40, "tag": "t", "digest": "d", "samples": 320}')
    memory.put(
        progress_prefix("gpt") + "b",
        '{"step": 44, "samples": 352, "loss": 1.5, "pids": {"2": 4711, "3": 4712}}',
    )
    now = read(job)
    assert (now.state, now.round, now.world_size, now.ended) == ("ACTIVE", 2, 4, False)
    assert (now.restarts, now.max_restarts, now.min_nodes, now.max_nodes) == (1, 2, 1, 3)
    assert now.checkpoint == {"step": 40, "tag": "t", "digest": "d", "samples": 320}
    assert [(r.node, r.first_rank, r.slots, r.address) for r in now.members] == [
        ("a", 0, 2, "host-a"),
        ("b", 2, 2, "host-b"),
    ]
    assert [(r.step, r.loss) for r in now.members] == [(None, None), (44, 1.5)]
    assert [r.pids for r in now.members] == [{}, {"2": 4711, "3": 4712}]
    assert "  4711, 4712  host-b  " in shown(now)
    assert [(r.node, r.first_rank, r.condition) for r in now.spares] == [
        ("c", None, Condition.SPARE)
    ]
    assert now.live_nodes == ("a", "b", "c")


def test_a_run_whose_sums_are_the_backends_is_shown_as_such(memory):
    job = Job(memory)
    job.live("ab")
    job.round(1, "ACTIVE", "ab")
    assert "reduction" not in shown(read(job))
    memory.put(progress_prefix("gpt") + "b", '{"step": 44, "reduction": "native"}')
    assert "native: the number of ranks changes the result" in shown(read(job))


def test_a_checkpoint_in_memory_is_shown_as_long_as_the_job_runs(memory):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    assert read(job).in_memory is None
    memory.put(job.keys.in_memory, '{"step": 43, "tag": "t43", "digest": "d", "samples": 344}')
    assert read(job).in_memory == {"step": 43, "tag": "t43", "digest": "d", "samples": 344}
    assert "step 43, 344 samples (t43)" in shown(read(job))
    job.round(1, "DONE", "a")
    assert "t43" not in shown(read(job))


def test_what_checkpoints_in_memory_take_of_each_node_is_shown_with_its_cap(memory):
    job = Job(memory)
    job.live("ab")
    job.round(1, "ACTIVE", "ab")
    assert "memory" not in shown(read(job))
    use = '{"used_bytes": 114294784, "budget_bytes": 536870912}'
    memory.put(progress_prefix("gpt") + "b", f'{{"step": 44, "ram": {use}}}')
    now = read(job)
    assert [(r.ram_used_bytes, r.ram_budget_bytes) for r in now.members] == [
        (None, None),
        (114294784, 536870912),
    ]
    assert [line.split()[-4:] for line in shown(now).splitlines()[-2:]] == [
        ["-", "-", "-", "-"],
        ["109.0", "of", "512", "MiB"],
    ]


def test_what_workers_do_before_their_first_step_is_shown_until_they_take_it(memory):
    job = Job(memory)
    job.live("ab")
    job.round(1, "ACTIVE", "ab")
    assert "prepares" not in shown(read(job))
    told = {"preparing": "loading step-000000040.g1.3fa9: 40%", "time": 1.0}
    memory.put(progress_prefix("gpt") + "b", json.dumps(told))
    now = read(job)
    assert [(row.preparing, row.step, row.step_time_s) for row in now.members] == [
        ("", None, None),
        ("loading step-000000040.g1.3fa9: 40%", None, None),
    ]
    assert shown(now).splitlines()[-1].split()[-3:] == ["loading", "step-000000040.g1.3fa9:", "40%"]
    memory.put(progress_prefix("gpt") + "b", json.dumps({"step": 41, "preparing": ""}))
    assert "prepares" not in shown(read(job))


def test_speed_tokens_and_the_step_times_of_the_slowest_ranks_are_shown(memory):
    job = Job(memory)
    job.live("ab")
    job.round(1, "ACTIVE", "ab")
    for name, ranks, took_s in (("a", "01", 0.25), ("b", "23", 0.5)):
        each = Quantiles(count=10, p50_s=took_s, p90_s=took_s, p99_s=2 * took_s)
        pace = Pace(
            speed=Speed(steps=2.0, samples=16.0, tokens=4096.0),
            counts={bucket(took_s): 20},
            ranks=dict.fromkeys(ranks, each),
        )
        told = {"step": 44, "samples": 352, "tokens": 90112, "pace": to_record(pace)}
        memory.put(progress_prefix("gpt") + name, json.dumps(told))
    now = read(job)
    assert (now.samples, now.tokens) == (352, 90112)
    assert now.speed == Speed(steps=2.0, samples=16.0, tokens=4096.0)
    assert now.step_times == Quantiles(count=40, p50_s=0.25, p90_s=0.5, p99_s=0.5)
    page = shown(now)
    assert "352 samples, 90,112 tokens" in page
    assert "2.00 steps/s, 16 samples/s, 4,096 tokens/s" in page
    assert "p50 0.25 s, p90 0.5 s, p99 0.5 s, in this round" in page
    rows = [line.split() for line in page.splitlines()[-4:]]
    assert [row[:2] for row in rows] == [["2", "b"], ["3", "b"], ["0", "a"], ["1", "a"]]
    assert rows[0][2:] == ["10", "0.5", "s", "0.5", "s", "1", "s"]


def test_hosts_that_are_excluded_and_nodes_that_are_unfit_are_shown_with_the_reason(memory):
    job = Job(memory)
    job.live("ab")
    job.round(1, "ACTIVE", "a")
    memory.put(job.keys.node("c"), replace(node("c"), unhealthy="no disk").to_json())
    excluded = Exclusion(host="b", why="its workers failed 2 times in a row", for_s=60)
    memory.put(job.keys.excluded("b"), excluded.to_json())
    assert conditions(job) == {
        "a": Condition.RUNNING,
        "b": Condition.EXCLUDED,
        "c": Condition.UNHEALTHY,
    }
    assert read(job).exclusions == (excluded,)


def test_restarts_that_count_and_those_without_progress_are_told_apart(memory):
    job = Job(memory)
    job.live("a")
    job.round(3, "ACTIVE", "a")
    for n in (1, 2):
        charge = Charge(n=n, cause="broke", reached=7, workers=True)
        memory.put(job.keys.charged(n), charge.to_json())
    now = read(job)
    assert (now.restarts, now.restarts_spent, now.restarts_without_progress) == (2, 2, 2)
    assert "2 of 2 spent; the last 2 without a new step" in shown(now)
    memory.put(job.keys.charged(3), Charge(n=3, cause="broke", reached=7, workers=True).to_json())
    assert "2 of 2 spent, and one more failure has ended the job" in shown(read(job))


def test_a_list_of_jobs_has_owner_age_nodes_of_the_round_and_step(memory):
    job = Job(memory)
    memory.put(job.keys.spec, replace(SPEC, max_nodes=2, owner="ada@login").to_json())
    job.live("abc")
    record = {"n": 2, "state": "ACTIVE", "cause": "because", "at": time.time() - 31 * 60}
    job.round(2, "ACTIVE", "ab")
    memory.put(job.keys.round, json.dumps(record))
    memory.put(progress_prefix("gpt") + "b", '{"step": 44, "samples": 352}')
    (row,) = listed(status.read_each(memory)).splitlines()[1:]
    head = ("gpt", "ACTIVE", "31 minutes ago", "ada@login", "2", "2 + 1 (1:2)", "44")
    assert tuple(filter(None, (cell.strip() for cell in row.split("  "))))[:7] == head


def test_the_accelerators_of_a_node_are_shown_where_its_agent_has_found_some(memory):
    job = Job(memory)
    job.live("ab")
    job.round(1, "ACTIVE", "ab")
    assert "devices" not in shown(read(job))
    memory.put(progress_prefix("gpt") + "b", '{"devices": "8 x NVIDIA H100 80GB HBM3"}')
    assert [row.devices for row in read(job).members] == ["", "8 x NVIDIA H100 80GB HBM3"]
    assert shown(read(job)).splitlines()[-1].endswith("8 x NVIDIA H100 80GB HBM3")


def test_a_job_that_takes_no_step_has_no_speed_and_no_time_that_is_left(memory):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    paced = to_record(Pace(speed=Speed(steps=2.0)))
    told = {"step": 44, "pace": paced, "total_steps": 400}
    memory.put(progress_prefix("gpt") + "a", json.dumps(told))
    assert (read(job).speed.steps, read(job).left_s, read(job).stuck) == (2.0, 178.0, False)
    memory.put(verdicts_key("gpt"), to_value([Verdict(kind=Kind.STUCK, text="no step")]))
    assert (read(job).speed, read(job).left_s, read(job).stuck) == (None, None, True)
    assert "left 356 of 400 steps" in " ".join(shown(read(job)).split())


def test_what_a_job_waits_for_is_what_its_agents_say(memory):
    job = Job(memory)
    job.live("ab")
    job.round(1, "FORMING", "ab")
    assert read(job).now == "waiting for the workers of a, b to stop"


def test_a_job_that_all_agents_have_left_is_lost_and_says_since_when_and_what_brings_it_back(
    memory,
):
    job = Job(memory)
    job.round(1, "ACTIVE", "ab")
    memory.put(seen_key("gpt"), json.dumps({"time": time.time() - 31 * 60}))
    assert (read(job).state, read(job).live_nodes) == ("LOST", ())
    assert conditions(job) == {"a": Condition.LOST, "b": Condition.LOST}
    sentence = (
        "no agent is alive; the job goes on when one is started; one was alive 31 minutes ago"
    )
    assert sentence in shown(read(job))
    assert sentence in listed(status.read_all(memory))


def test_steps_checkpoints_and_states_have_an_age(memory):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    head = json.loads(memory.get(job.keys.round).value)
    memory.put(job.keys.round, json.dumps({**head, "at": time.time() - 3 * 3600}))
    saved = {"step": 40, "tag": "t", "digest": "d", "samples": 320, "time": time.time() - 600}
    memory.put(job.keys.latest, json.dumps(saved))
    told = {"step": 44, "loss": 1.5, "time": time.time() - 40}
    memory.put(progress_prefix("gpt") + "a", json.dumps(told))
    page = shown(read(job))
    assert "3 hours ago: because" in page
    assert "step 40, 320 samples (t), 10 minutes ago" in page
    assert page.splitlines()[-1].split()[-5:] == ["44", "40", "s", "ago", "1.5000"]


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"total_steps": 400}, "left 356 of 400 steps, 3 minutes at this speed"),
        ({"total_steps": 40}, "left 0 of 40 steps, 0 s at this speed"),  # it was said too low
        ({"total_steps": 0}, None),
        ({}, None),
    ],
)
def test_the_time_that_is_left_is_shown_where_the_number_of_all_steps_is_known(memory, said, line):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    paced = to_record(Pace(speed=Speed(steps=2.0)))
    memory.put(progress_prefix("gpt") + "a", json.dumps({"step": 44, "pace": paced, **said}))
    lines = [" ".join(one.split()) for one in shown(read(job)).splitlines()]
    assert [one for one in lines if one.startswith("left")] == ([line] if line else [])
    job.round(1, "DONE", "a")
    assert "left" not in shown(read(job))


def test_what_the_last_saves_took_is_shown_on_disk_and_in_memory_and_how_long_steps_took(memory):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    newest = {"step": 44, "tag": "t", "digest": "d", "samples": 352}
    for key in (job.keys.latest, job.keys.in_memory):
        memory.put(key, json.dumps(newest))
    ended = Saved(
        step=40, tag="t", time_s=1.0, samples=1, digest="d", size_bytes=3_000_000, stall_s=0.5
    )
    history = replace(
        History().with_checkpoint(ended).with_checkpoint(replace(ended, step=44, size_bytes=0)),
        in_memory=replace(ended, stall_s=0.0123),
        kept=7,
    )
    for took_s in (0.25, 0.25, 0.5):
        history = history.with_duration(took_s)
    memory.put(history_key("gpt"), json.dumps(histories.to_record(history)))
    now = read(job)
    assert (now.last_save, now.last_save_in_memory) == (ended, replace(ended, stall_s=0.0123))
    page = shown(now)
    assert "step 44, 352 samples (t); 3.0 MB, training waited 0.5 s; 2 in all" in page
    assert "step 44, 352 samples (t); 3.0 MB, training waited 0.0123 s; 7 in all" in page
    assert "p50 0.25 s, p90 0.5 s, p99 0.5 s, of one rank in all rounds" in page


def test_saves_that_fail_are_shown_until_one_succeeds(memory):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    history = History()
    for step in (10, 20, 20, 30):  # a save that is repeated counts once
        history = history.with_failure(step, "no space left", time.time())
    waits = history.with_wait(30, "room", 3420.0, time.time())
    for now, says in (
        (history, "the last 3 failed: no space left"),
        (waits, "the last 3 failed: no space left; waiting for room, 57 min left"),
    ):
        memory.put(history_key("gpt"), json.dumps(histories.to_record(now)))
        [line] = [line for line in shown(read(job)).splitlines() if "no space left" in line]
        assert line.strip().split(maxsplit=1) == ["saves", says]
    saved = Saved(step=30, tag="t", time_s=1.0, samples=1, digest="d")
    for ended in (waits.with_checkpoint(saved), History().with_checkpoint(saved).after(waits)):
        memory.put(history_key("gpt"), json.dumps(histories.to_record(ended)))
        assert read(job).failing_saves is None
    assert History().after(waits).failing == waits.failing


def test_the_condition_of_every_member_is_its_own(memory):
    job = Job(memory)
    job.live("abcde")
    job.round(1, "ACTIVE", "abcdefg")
    memory.put(job.keys.report(1, "quiet", "a"), "")
    memory.put(job.keys.report(1, "quiet", "g"), "")
    memory.put(job.keys.report(1, "done", "b"), "")
    failure = Failure(node="c", symptom=False, summary="broke")
    memory.put(job.keys.report(1, "fail", "c"), failure.to_json())
    draining = replace(node("d"), draining=True)
    memory.put(job.keys.node("d"), draining.to_json(), lease=memory.grant(3))
    assert conditions(job) == {
        "a": Condition.LEFT,
        "b": Condition.DONE,
        "c": Condition.FAILED,
        "d": Condition.DRAINING,
        "e": Condition.RUNNING,
        "f": Condition.LOST,
        "g": Condition.GONE,
    }


def test_nobody_is_lost_in_a_job_that_has_ended(memory):
    job = Job(memory)
    job.round(1, "STOPPED", "ab", cause="enough")
    assert conditions(job) == {"a": Condition.GONE, "b": Condition.GONE}
    assert read(job).live_nodes == ()
    assert read(job).now == "the job is STOPPED: enough"


def test_a_job_that_cannot_be_understood_is_named_with_what_to_do_and_hides_no_other(memory):
    Job(memory).live("a")
    memory.put(Keys("future").spec, '{"moon": "full"}')
    with pytest.raises(UnreadableJob, match=r"job future cannot be understood .*same version"):
        status.read(memory, "future")
    future, gpt = status.read_all(memory)
    assert (future.job, future.state, gpt.job) == ("future", "UNREADABLE", "gpt")
    assert "use the zero-ctl of the same version" in future.now
    assert choose_job((future, gpt), None).job == "gpt"


def test_the_time_of_an_event_is_local_and_says_its_zone(monkeypatch):
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", "Asia/Kolkata")
            time.tzset()
            line = views.event_line(Event(1, {"time": 0.25})).plain
    finally:
        time.tzset()
    assert line.startswith("01-01 05:30:00.250+0530  round")


def test_events_without_a_job_are_of_the_newest_also_after_its_end_and_say_how_old_they_are(
    memory, capsys
):
    for name in ("old", "new"):
        Job(memory, name).round(1, "DONE", "a")
        told = {"event": "done", "text": f"{name} is done", "time": time.time() - 300}
        memory.put(f"{events_prefix(name)}a.1.000001", json.dumps(told))
    ask = cli.make_parser().parse_args
    assert events_command.run(ask(["events"]), memory, views.TableView()) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "the newest event was 5 minutes ago"
    assert ("new is done" in told.out, told.err) == (True, "zero-ctl: events of job new\n")
    memory.put(f"{events_prefix('old')}a.1.000000", "not JSON")
    memory.put(f"{progress_prefix('new')}a", "[]")
    assert status.read(memory, "new").members[0].step is None
    memory.delete(Keys("old").spec)
    assert events_command.run(ask(["events", "old"]), memory, views.TableView()) == 0
    told = capsys.readouterr().out
    assert ("old is done" in told, "not JSON" in told) == (True, True)
    with pytest.raises(NoSuchJob, match="there is no job older; there are: new"):
        events_command.run(ask(["events", "older"]), memory, views.TableView())


def test_a_job_that_is_unreadable_does_not_hide_the_progress_of_the_others(memory):
    Job(memory)
    memory.put(Keys("old").spec, "of another version")
    memory.put(goodput_prefix("gpt") + "a", '{"ns": {"idle": 1}}')
    found = {job.job: (job.state, job.time_ns) for job in status.read_each(memory)}
    assert found == {"gpt": ("LOST", {"idle": 1}), "old": ("UNREADABLE", {})}


@pytest.mark.parametrize("value", [None, "x", -1.5, [1], {"a": "b"}, 10**30])
def test_progress_that_is_damaged_hides_that_node_alone(memory, value):
    job = Job(memory)
    job.live("ab")
    job.round(1, "ACTIVE", "ab")
    memory.put(progress_prefix("gpt") + "b", '{"step": 44, "pids": {"2": 4711}}')
    for name in ("step", "time", "samples", "tokens", "total_steps", "ram", "pids", "pace"):
        damaged = {"step": 40, "devices": "one", name: value}
        memory.put(progress_prefix("gpt") + "a", json.dumps(damaged))
        memory.put(seen_key("gpt"), json.dumps({name: value}))
        now = read(job)
        assert ([row.node for row in now.members], now.members[1].step) == (["a", "b"], 44), name
        assert "4711" in shown(now)


def test_the_goodput_is_that_of_all_nodes_together(memory):
    job = Job(memory)
    assert "goodput" not in shown(read(job))
    for name, useful_s in (("a", 60), ("b", 30)):
        ns = {"useful_steps": useful_s * 10**9, "re_forming": 5 * 10**9}
        memory.put(goodput_prefix("gpt") + name, json.dumps({"ns": ns, "time": 1.0}))
    memory.put(goodput_prefix("gpt") + "c", "of another version")
    now = read(job)
    assert (now.goodput, now.time_ns["re_forming"]) == (0.9, 10**10)
    assert "90.0 % useful steps, 10.0 % re-forming; of 100 s of all nodes" in shown(now)


def test_of_thousands_of_arguments_a_person_is_shown_the_first_and_a_tool_all():
    command = ("train.py", *(f"data/{number:04}.parquet" for number in range(5000)))
    now = status.JobStatus(job="gpt", state="ACTIVE", now="runs", command=command)
    page = " ".join(shown(now).split())
    assert "train.py data/0000.parquet" in page
    assert f"... ({len(' '.join(command)) - 1000:,} more characters)" in page
    assert json.loads(now.to_json())["command"] == list(command)


@pytest.mark.parametrize(
    "value", ["{}", '{"tag": "t"}', '{"step": "x"}', '{"step": 1, "time": -1}', "[]", "x"]
)
def test_a_damaged_record_of_the_checkpoint_in_memory_hides_nothing_else(memory, value):
    job = Job(memory)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    memory.put(job.keys.in_memory, value)
    assert "in memory" not in shown(read(job))
    memory.put(job.keys.in_memory, '{"step": 5}')
    assert "step 5, 0 samples" in shown(read(job))
