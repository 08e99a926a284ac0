"""What the dashboard and the report show of a job, made of its records."""

import asyncio
import contextlib
import dataclasses
import json
import math

import pytest
from msgspec import structs

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.pictured import T0, disturbed, loss_at
from zero_contract.exit_codes import CtlExit
from zero_orchestrator.ctl import cli, report_command
from zero_orchestrator.ctl.page import document
from zero_orchestrator.ctl.page.picture import RANKS, Json, Records, picture
from zero_orchestrator.ctl.views import TableView
from zero_orchestrator.errors import SpecError
from zero_orchestrator.membership.job_state import State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.spec import JobSpec
from zero_orchestrator.observe import history as histories
from zero_orchestrator.observe import timeline as timelines
from zero_orchestrator.observe.events import Event, events_prefix, goodput_prefix, history_key
from zero_orchestrator.observe.goodput import to_record
from zero_orchestrator.observe.history import History
from zero_orchestrator.observe.status import Condition, JobStatus, NodeRow


def shown(records: Records, **changes) -> dict:
    return picture(
        dataclasses.replace(records, **changes), now_s=records.status.members[0].step_time_s
    )


def test_the_picture_of_a_job_that_lost_a_node_and_has_it_back():
    found = shown(disturbed())
    assert found["range"][0] == T0
    assert (found["curve"]["step"][0], found["curve"]["step"][-1]) == (1, 76)
    assert found["curve"]["loss"][-1] == pytest.approx(loss_at(76))
    assert (found["curve"]["rate"][9], found["curve"]["unit"]) == (128, "samples per second")
    assert {4, 3} == set(found["curve"]["workers"])
    values = {tile["label"]: tile["value"] for tile in found["tiles"]}
    assert (values["Step"], values["Nodes"], values["Restarts"]) == ("76", "4", "1 of 3")
    assert values["Checkpoint"] == "70"
    on_disk = [row for row in found["checkpoints"]["rows"] if not row[7]]
    assert [row[0] for row in on_disk] == [10, 20, 30, 40, 50, 60, 70]
    read = {row[0]: row[5] for row in on_disk}
    assert (read[30][0], read[20], read[40]) == (2, None, None)
    (problem,) = found["problems"]
    assert (problem["kind"], problem["nodes"]) == ("straggler", ["node-c"])
    assert (problem["to_s"], problem["steps"]) == (None, True)
    assert problem["text"] == "rank 2 on node-c computes 1.4 x slower since step 67"
    assert sum(use["part"] for use in found["uses"]) == pytest.approx(1)


def test_the_timelines_cover_the_run_without_gaps_and_show_who_was_gone():
    found = shown(disturbed())
    for timeline in found["timelines"]:
        spans = timeline["spans"]
        assert spans[0][0] == T0
        assert spans[-1][1] is None  # until now
        assert [span[1] for span in spans[:-1]] == [span[0] for span in spans[1:]]
    phases = {
        timeline["node"]: [span[2] for span in timeline["spans"]] for timeline in found["timelines"]
    }
    assert "gone" in phases["node-b"]
    assert {"recovering", "repeating"} <= set(phases["node-a"])
    assert "gone" not in phases["node-a"]


def test_a_recovery_lasts_from_the_first_sign_to_the_first_step_of_the_next_round():
    failure, join = shown(disturbed())["recoveries"]
    assert (failure["failures"], failure["cause"]) == (1, "lost node node-b; restart 1 of 3")
    assert failure["to_s"] - failure["from_s"] == pytest.approx(1.85, abs=0.02)
    assert (join["failures"], join["over"], join["rounds"]) == (0, True, [2])
    assert [event[2] for event in failure["events"]][:3] == ["exit", "dead", "interrupt"]


def test_a_timeline_that_was_written_long_ago_is_continued_by_what_the_job_has_told_since():
    records = disturbed()
    restart = next(e for e in records.events if e.record["event"] == "interrupt")
    began = next(e for e in records.events if e.record["round"] == 2)
    old_s = restart.record["time"] - 1
    node = records.timelines["node-a"]
    spans = tuple(span for span in node.spans if span.from_s < old_s)
    old = dataclasses.replace(node, spans=spans, until_s=old_s)
    found = shown(records, timelines={**records.timelines, "node-a": old})
    timeline = next(timeline for timeline in found["timelines"] if timeline["node"] == "node-a")
    since = [(span[0], span[2]) for span in timeline["spans"] if span[0] > old_s]
    first_s = next(p.time_s for p in records.history.points if p.time_s > began.record["time"])
    assert since[:2] == [(restart.record["time"], "recovering"), (first_s, "training")]
    assert [phase for _, phase in since[2:]] == ["recovering", "training"]


def test_tokens_and_what_saves_took_are_shown_where_they_are_known():
    records = disturbed()
    assert "Tokens per second" not in {tile["label"] for tile in shown(records)["tiles"]}
    unknown = dataclasses.replace(records.history.checkpoints[-1], size_bytes=0)
    bare = dataclasses.replace(records.history, checkpoints=(unknown,), in_memory=None)
    assert shown(records, history=bare)["checkpoints"]["rows"][0][6] is None
    points = [structs.replace(p, tokens=1000 * p.step) for p in records.history.points]
    history = dataclasses.replace(records.history, points=tuple(points), kept=70)
    times = {"size_bytes": 1 << 20, "stall_s": 0.1, "write_s": 0.4, "publish_s": 0.2}
    found = shown(records, history=history.with_times(70, **times))
    (tile,) = [one for one in found["tiles"] if one["label"] == "Tokens per second"]
    assert (tile["value"], tile["note"]) == ("4,000", "76,000 in all")
    assert found["checkpoints"]["kept"] == 70
    on_disk, in_memory = found["checkpoints"]["rows"][-2:]
    assert on_disk[6:] == [[1 << 20, 0.1, 0.4, 0.2], False]
    assert in_memory[:1] + in_memory[3:4] == [70, "global_step70"]
    assert in_memory[6:] == [[1_498_112_000, 0.025, 0.9, 0.012], True]


def test_a_checkpoint_in_memory_is_verified_by_a_load_from_memory_alone():
    records = disturbed()
    loaded = {"event": "restore", "tag": "global_step70", "round": 4, "load_s": 0.5}
    told = [Event(98, {**loaded, "time": T0, "in_memory": True})]
    found = shown(records, events=told)["checkpoints"]["rows"]
    assert [row[5] for row in found if row[7]] == [[4, T0, 0.5, None]]
    told = [Event(98, {**loaded, "time": T0, "in_memory": False})]
    found = shown(records, events=told)["checkpoints"]["rows"]
    assert [row[5] for row in found if row[7]] == [None]


def test_how_long_steps_take_is_shown_of_the_slowest_ranks_and_after_the_end_of_the_run():
    records = disturbed()
    found = shown(records)
    (tile,) = [one for one in found["tiles"] if one["label"] == "Step time"]
    assert (tile["value"], tile["note"]) == ("0.25 s", "median; p99 0.375 s")
    paces = found["paces"]
    assert [row[0] for row in paces["rows"]] == [
        *("all ranks, this round", "one rank, all rounds", "rank 2 on node-c"),
        *("rank 0 on node-a", "rank 1 on node-b", "rank 3 on node-d"),
    ]
    assert [paces["rows"][1][1], paces["rows"][2][2]] == [76, 0.35]
    of_many = shown(disturbed(nodes=200))["paces"]
    assert (len(of_many["rows"]), of_many["left_out"]) == (2 + RANKS, 200 - RANKS)
    ended = dataclasses.replace(records.status, state=State.DONE, members=(), step_times=None)
    found = picture(dataclasses.replace(records, status=ended), now_s=T0)
    assert [row[0] for row in found["paces"]["rows"]] == ["one rank, all rounds"]
    (tile,) = [one for one in found["tiles"] if one["label"] == "Step time"]
    assert tile["value"] == "0.25 s"


def test_the_timeline_of_a_node_that_is_lost_ends_where_its_round_did():
    records = disturbed()
    gone = dataclasses.replace(
        records.timelines["node-b"], spans=records.timelines["node-b"].spans[:3]
    )
    gone = dataclasses.replace(gone, until_s=gone.spans[-1].from_s)
    rows = tuple(row for row in records.status.members if row.node != "node-b")
    status = dataclasses.replace(records.status, members=rows)
    found = shown(records, status=status, timelines={**records.timelines, "node-b": gone})
    timeline = next(timeline for timeline in found["timelines"] if timeline["node"] == "node-b")
    lost_s = next(e.record["time"] for e in records.events if e.record["event"] == "interrupt")
    assert timeline["spans"][-1] == [lost_s, found["range"][1], "gone"]
    assert timeline["condition"] == "gone"


def test_a_job_that_has_ended_ends_where_its_records_do():
    records = disturbed()
    status = dataclasses.replace(records.status, state=State.DONE)
    found = picture(dataclasses.replace(records, status=status), now_s=T0 + 9e6)
    assert found["range"][1] < T0 + 100
    assert all(timeline["spans"][-1][2] == "training" for timeline in found["timelines"])
    assert found["job"]["ended"] is True


def test_a_job_that_has_only_begun_has_a_picture():
    status = JobStatus(job="new", state="", now="waiting")
    found = picture(Records(status=status, events=(), history=History(), timelines={}), now_s=T0)
    assert (found["range"], found["timelines"], found["recoveries"]) == ([T0, T0], [], [])
    assert found["words"]["loss"] == "Loss: not reported."
    document.page(found, live=False)


def test_a_loss_that_is_not_finite_is_named_and_spoils_nothing():
    row = NodeRow(
        node="a",
        condition=Condition.RUNNING,
        alive=True,
        first_rank=0,
        slots=8,
        address="x",
        step=7,
        loss=math.nan,
    )
    status = JobStatus(job="gpt", state="ACTIVE", now="", members=(row,))
    event = Event(1, {"time": math.inf, "event": None, "text": None})
    records = Records(status=status, events=(event,), history=History(), timelines={})
    found = picture(records, now_s=T0)
    assert next(t for t in found["tiles"] if t["label"] == "Loss")["value"] == "not finite"
    assert found["timelines"][0]["ranks"] == "0-7"
    json.dumps(found, allow_nan=False)


def test_the_page_has_neither_the_command_line_nor_markup_of_the_job():
    records = disturbed()
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    event = Event(99, {"time": T0, "node": evil, "round": 1, "event": "dead", "text": evil})
    status = dataclasses.replace(records.status, job=evil, now=evil)
    text = document.page(shown(records, status=status, events=(*records.events, event)), live=False)
    assert "hunter2" not in text
    assert "<img" not in text
    assert text.count("<script") == text.count("</script") == 2
    assert "alert(1)" in text  # as data
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_10_000_steps_of_200_nodes_fit_in_a_page():
    found = shown(disturbed(nodes=200, steps=10_000, every=500, fails_at=4000))
    assert len(found["curve"]["step"]) <= histories.POINTS
    assert len(document.page(found, live=False)) < 1_000_000


# ---- zero-ctl report ----


def stored(records: Records) -> MemoryStore:
    """A store with these records of a job."""
    store, job = MemoryStore(ManualClock()), "demo"
    spec = JobSpec(min_nodes=1, max_nodes=4, max_restarts=3, command=("train.py",))
    store.put(Keys(job).spec, spec.to_json())
    for event in records.events:
        store.put(f"{events_prefix(job)}a.1.{event.revision:06d}", json.dumps(event.record))
    for node, timeline in records.timelines.items():
        ledger = {
            "ns": to_record({}),
            "timeline": timelines.to_record(timeline),
            "time": timeline.until_s,
        }
        store.put(goodput_prefix(job) + node, json.dumps(ledger))
    store.put(history_key(job), json.dumps(histories.to_record(records.history)))
    return store


def report(store, *flags: str) -> int:
    args = cli.make_parser().parse_args(["report", *flags])
    return report_command.run(args, store, TableView())


def test_a_report_is_one_page_with_the_records_of_the_job_and_one_file_of_its_recoveries(
    tmp_path, capsys
):
    path = tmp_path / "report.html"
    assert report(stored(disturbed()), "demo", "-o", str(path)) == CtlExit.OK
    assert f"the report of job demo is {path}" in capsys.readouterr().out
    text = path.read_text()
    data = text.partition('id="picture">')[2].partition("</script>")[0]
    found = json.loads(data)
    assert found["curve"]["step"][-1] == 76
    assert [timeline["node"] for timeline in found["timelines"]] == [
        "node-a",
        "node-b",
        "node-c",
        "node-d",
    ]
    assert len(found["recoveries"]) == 2
    assert {one.name for one in tmp_path.iterdir()} == {"report.html", "report.trace.json"}


def test_a_report_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(SpecError, match=r"--output=.*cannot be written \(No such file"):
        report(stored(disturbed()), "demo", "-o", str(tmp_path / "missing" / "report.html"))


def test_unreadable_records_leave_out_only_what_they_hold(tmp_path):
    store = stored(disturbed())
    store.put(history_key("demo"), "[1]")
    store.put(goodput_prefix("demo") + "node-a", '{"ns": {}, "timeline": {"spans": 7}}')
    report(store, "demo", "-o", str(tmp_path / "r.html"))
    text = (tmp_path / "r.html").read_text()
    assert '"node":"node-b"' in text
    assert '"node":"node-a"' not in text


# ---- zero-ctl report, from files alone ----


@pytest.fixture
def files(tmp_path):
    """The event files of three nodes; the last line of one was cut when its power was lost."""
    told = [
        (1.0, "a", "open", 0, "the job begins", {"nodes": ["a", "b", "c"], "revision": 4}),
        (2.0, "b", "activate", 1, "round 1 begins", {"nodes": ["a", "b", "c"], "revision": 5}),
        (2.5, "a", "start", 1, "this node runs", {"world_size": 3}),
        (9.0, "a", "interrupt", 1, "lost node c; restart 1 of 3", {"nodes": ["a", "b"]}),
        (9.5, "a", "activate", 2, "round 2 begins", {"nodes": ["a", "b"]}),
        (9.6, "b", "start", 2, "this node runs", {"world_size": 2}),
        (20.0, "a", "straggler", 2, "rank 1 is slow", {"rank": 1, "host": "b", "slow": True}),
        (30.0, "b", "finish", 2, "all workers have ended", {"nodes": ["a", "b"]}),
        (
            31.0,
            "a",
            "job time",
            2,
            "x",
            {"ns": {"useful_steps": 6, "starting_and_ending": 2}, "missing": []},
        ),
    ]
    directory = tmp_path / "logs" / "demo"
    directory.mkdir(parents=True)
    for time_s, node, event, n, text, facts in told:
        record = {"time": T0 + time_s, "node": node, "round": n, "event": event, "text": text}
        with (directory / f"events-{node}.jsonl").open("a") as file:
            file.write(json.dumps({**record, **facts}) + "\n")
    (directory / "events-c.jsonl").write_text('{"time": 12, "no')
    return directory.parent


def test_a_report_from_files_alone_shows_the_story_and_says_what_is_absent(files, capsys):
    path = files / "report.html"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", f"--log-dir={files}", "-o", str(path), "--json"])
    assert ended.value.code == CtlExit.OK
    assert json.loads(capsys.readouterr().out)["target"] == str(path)
    found = json.loads(path.read_text().partition('id="picture">')[2].partition("</script>")[0])
    assert (found["job"]["state"], found["job"]["round"]) == ("DONE", 2)
    assert found["job"]["note"] == (
        f"Made from the event files in {files}/demo alone, without etcd. Loss, throughput, "
        "timelines and the list of checkpoints are absent, because only etcd keeps them. Lines "
        "that are no events: 1"
    )
    assert [event[3] for event in found["events"]][:3] == ["open", "activate", "start"]
    assert [one["cause"] for one in found["recoveries"]] == ["lost node c; restart 1 of 3"]
    assert [one["text"] for one in found["problems"]] == ["rank 1 is slow"]
    values = {tile["label"]: tile["value"] for tile in found["tiles"]}
    assert (values["Nodes"], values["Restarts"], values["Goodput"]) == ("2", "1", "75.0 %")
    assert (values["Step"], values["Loss"]) == ("-", "-")


def test_files_of_no_job_or_of_several_are_refused_with_their_names(files, capsys):
    (files / "other").mkdir()
    (files / "other" / "events-a.jsonl").touch()
    for words in ([], ["third"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["report", *words, f"--log-dir={files}"])
        assert ended.value.code == CtlExit.USAGE
        assert "there are those of demo, other; name the directory" in capsys.readouterr().err


# ---- what the dashboard sends ----


def test_only_what_has_changed_is_sent_and_of_lists_only_their_changed_items():
    server = pytest.importorskip("zero_orchestrator.ctl.page.server")
    before = {"tiles": [1, 2, 3], "job": {"now": "x"}, "events": [1], "same": [7]}
    after = {"tiles": [1, 9, 3], "job": {"now": "y"}, "events": [1, 2], "same": [7]}
    assert server.changes({}, before) == before
    assert server.changes(before, before) == {}
    assert server.changes(before, after) == {
        "job": {"now": "y"},
        "events": [1, 2],
        "patches": {"tiles": [[1, 9]]},
    }


def test_a_page_that_is_opened_later_never_shows_the_job_as_it_was_before():
    server = pytest.importorskip("zero_orchestrator.ctl.page.server")
    rounds = iter(range(1, 1000))
    feed = server.Feed(lambda: {"round": next(rounds)})

    async def first() -> Json | None:
        async with contextlib.aclosing(feed.news()) as news:
            return await anext(news)

    async def twice() -> list[Json | None]:
        return [await first(), await first()]

    assert [told["round"] for told in asyncio.run(twice())] == [1, 2]


def test_a_page_whose_job_cannot_be_read_says_that_it_shows_the_past():
    """Whatever the reason: a dashboard that stands still in silence looks as if all were well."""
    server = pytest.importorskip("zero_orchestrator.ctl.page.server")

    def look() -> Json:
        raise KeyError("step")

    async def first() -> Json | None:
        async with contextlib.aclosing(server.Feed(look).news()) as news:
            return await anext(news)

    said = asyncio.run(first())["trouble"]
    assert said == "The page shows the job as it was: internal error, KeyError('step')"
