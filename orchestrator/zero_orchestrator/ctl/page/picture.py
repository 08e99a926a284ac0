"""The picture of a job: what the dashboard and the report draw, from the job's records.

`picture` is a pure function: records -> plain JSON of bounded size. The page draws it and decides
nothing. Times are wall clocks of nodes, in seconds since the epoch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from zero_contract.values import in_words
from zero_orchestrator.ctl.page.problems import ENDINGS, problems, withdraws
from zero_orchestrator.observe import events
from zero_orchestrator.observe import status as statuses
from zero_orchestrator.observe.events import GOODPUT, Event, number
from zero_orchestrator.observe.goodput import USES, from_record, total_ns
from zero_orchestrator.observe.history import History, Point, Saved
from zero_orchestrator.observe.stacks import in_ranges
from zero_orchestrator.observe.status import JobStatus, NodeRow, slowest_ranks
from zero_orchestrator.observe.story import ENDS, Band, bands, phases, recoveries
from zero_orchestrator.observe.timeline import Phase, Span, Timeline, intervals
from zero_orchestrator.store.kv import KeyValueStore

WINDOWS = 100
"""Throughput is a mean over so many parts of the history, so that single steps do not hide it."""
RANKS = 50
"""Most ranks whose step times are shown: the slowest."""
NOTICE_S = 15.0
"""A lost node is noticed within this time: its timeline ends where its round did."""
TONES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("interrupt", "fail", "give up", "dead", "hang", "dead link"), "bad"),
        **dict.fromkeys(("stuck", "unkillable", "failed", "save"), "bad"),
        **dict.fromkeys(("straggler", "slow link", "slow storage", "exit", "health"), "warn"),
        **dict.fromkeys(("lease", "ring", "store", "commit", "forkserver", "aside"), "warn"),
        **dict.fromkeys(("world size",), "warn"),
        **dict.fromkeys(("drain", "yield", "leave", "halt", "form"), "note"),
        **dict.fromkeys(("open", "activate", "restore", "finish", "done"), "note"),
    }
)
"""Event -> how the page shows it: something is wrong, or worth a note; others are details."""

NOTHING = "-"
_WORKS = frozenset({Phase.TRAINING, Phase.REPEATING, Phase.SAVING, Phase.STUCK})
"""What a node does until its round ends."""
_STEPS = frozenset({Phase.TRAINING, Phase.REPEATING})
"""What a node does from the first step of a round on."""

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Records:
    """All records of a job that the picture is made of."""

    status: JobStatus
    events: Sequence[Event]
    history: History
    timelines: Mapping[str, Timeline]
    """Node -> its timeline."""
    note: str = ""
    """What the records lack, and why."""


def read(store: KeyValueStore, job: str) -> Records:
    """The records of a job, as they are now.

    Raises:
        NoSuchJob: The job has no keys.
        UnreadableJob: The keys are of another version.
    """
    prefix = events.goodput_prefix(job)
    # None without a span: the picture begins with the first one.
    timelines = {
        item.key.removeprefix(prefix): timeline
        for item in store.range(prefix).items
        if (timeline := events.read_timeline(item)) is not None and timeline.spans
    }
    return Records(
        status=statuses.read(store, job),
        events=events.read(store, job),
        history=events.read_history(store.get(events.history_key(job))),
        timelines=timelines,
    )


def picture(records: Records, *, now_s: float) -> Json:
    """The sections of the page."""
    job, history, told = records.status, records.history, records.events
    end_s = _end_s(records, now_s)
    timelines = [_timeline(records, row, end_s) for row in _rows(records)]
    recovered = [_recovery(band) for band in _without_steps(records, timelines, end_s)]
    wrong = [
        {**asdict(one), "nodes": sorted(one.nodes)}
        for one in problems(told, job, history.points, end_s)
    ]
    used_ns = from_record(job.time_ns)
    all_ns = total_ns(used_ns) or 1
    sections = {
        "job": {**_job(records, end_s, now_s), "note": records.note},
        "tiles": [*_tiles_of_steps(records), *_tiles_of_job(records, end_s)],
        "range": [_start_s(records, end_s), end_s],
        "curve": _curve(history),
        "timelines": timelines,
        "timeline_age_s": GOODPUT.pause_s(len(timelines)) if not job.ended else 0.0,
        "recoveries": recovered,
        "paces": _paces(job),
        "checkpoints": _checkpoints(history, told),
        "problems": wrong,
        "uses": [
            {
                "use": str(use),
                "meaning": meaning,
                "time_s": used_ns[use] / 1e9,
                "part": used_ns[use] / all_ns,
            }
            for use, meaning in USES.items()
            if used_ns.get(use)
        ],
        "events": [_event(event) for event in told],
    }
    return {**sections, "words": _in_words(history, timelines, recovered)}


def without_steps(records: Records, *, now_s: float) -> Sequence[Band]:
    """The recoveries that the page shows."""
    end_s = _end_s(records, now_s)
    timelines = [_timeline(records, row, end_s) for row in _rows(records)]
    return _without_steps(records, timelines, end_s)


def _without_steps(records: Records, timelines: Sequence[Json], end_s: float) -> Sequence[Band]:
    steps_s = [
        from_s
        for timeline in timelines
        for from_s, _, phase in timeline["spans"]
        if phase in _STEPS
    ]
    steps_s += [point.time_s for point in records.history.points]
    # The history has points of many steps; the first one of a round is an event as well.
    steps_s += [e.time_s for e in records.events if e.record.get("event") == "first step"]
    return bands(recoveries(records.events), sorted(steps_s), _over_s(records, end_s))


# ---- time ----


def _end_s(records: Records, now_s: float) -> float:
    """The end of the picture: now, or when the job ended, or when it was last seen."""
    job = records.status
    if not job.ended and job.live_nodes:
        return now_s
    # Nobody works on the job: nothing is known after its last record.
    last_s = [timeline.until_s for timeline in records.timelines.values()]
    last_s += [event.time_s for event in records.events[-1:]]
    last_s += [point.time_s for point in records.history.points[-1:]]
    return max(last_s, default=job.state_time_s or now_s)


def _start_s(records: Records, end_s: float) -> float:
    first_s = [timeline.spans[0].from_s for timeline in records.timelines.values()]
    first_s += [point.time_s for point in records.history.points[:1]]
    if not first_s:
        first_s = [event.time_s for event in records.events[:1]]
    return min(first_s, default=end_s)


def _over_s(records: Records, end_s: float) -> float:
    """The time of the job's end; until then, the end of the picture."""
    ended = [e.time_s for e in records.events if e.record.get("event") in ENDINGS]
    return min(end_s, ended[-1]) if ended and records.status.ended else end_s


# ---- sections ----


def _job(records: Records, end_s: float, now_s: float) -> Json:
    job = records.status
    opened = [e.time_s for e in records.events[:1] if e.record.get("event") == "open"]
    # Not the command line: it may have a secret, and a report is passed on.
    return {
        "name": job.job,
        "owner": job.owner,
        "from_s": min([*opened, _start_s(records, end_s)]),
        "to_s": _over_s(records, end_s),
        "state": job.state or "not begun",
        "ended": job.ended,
        "now": job.now,
        "cause": job.cause,
        "stop": "" if job.ended else job.stop or "",
        "round": job.round,
        "made_s": now_s,
    }


def _tiles_of_steps(records: Records) -> Iterator[Json]:
    """The numbers at the head of the page: how far the training is, and how fast."""
    job, points = records.status, records.history.points
    known = [(row.step, row.loss) for row in job.members if row.step is not None]
    known += [(point.step, point.loss) for point in points[-1:]]
    step, loss = max(known, key=lambda one: one[0], default=(None, None))
    total = "" if job.total_steps is None else f"of {job.total_steps:,}; "
    yield _tile("Step", NOTHING if step is None else f"{step:,}", f"{total}round {job.round}")
    if job.total_steps is not None and job.left_s is not None and not job.ended:
        steps = max(0, job.total_steps - (step or 0))
        left = in_words(job.left_s).replace("minutes", "min").replace("hours", "h")
        yield _tile("Time left", left, f"{steps:,} steps at this speed")
    shown = NOTHING
    if loss is not None:
        shown = f"{loss:.4g}" if math.isfinite(loss) else "not finite"
    yield _tile("Loss", shown, "mean of the last step")
    rates, unit = _rates(points)
    rate = ("0", "no step is taken") if job.stuck else (_short(_last(rates)), unit)
    yield _tile("Throughput", *rate)
    if points and points[-1].tokens:
        rates = _rates_of([float(point.tokens) for point in points], points)
        yield _tile("Tokens per second", _short(_last(rates)), f"{points[-1].tokens:,} in all")
    if (times := job.step_times or job.run_step_times) is not None:
        yield _tile("Step time", f"{times.p50_s:g} s", f"median; p99 {times.p99_s:g} s")


def _tiles_of_job(records: Records, end_s: float) -> Iterator[Json]:
    """Further numbers at the head of the page: nodes, and what failures have cost."""
    job = records.status
    goodput = NOTHING if job.goodput is None else f"{100 * job.goodput:.1f} %"
    yield _tile("Goodput", goodput, "of all nodes' time")
    # After the end, all nodes that have taken part; until then, those of the round.
    nodes = len(records.timelines) if job.ended and records.timelines else len(job.members)
    spares = sum(row.alive for row in job.spares)
    wanted = _count(job.world_size, "worker")
    if job.max_nodes:
        least = f"{job.min_nodes} to " if job.min_nodes < job.max_nodes else ""
        wanted = f"{least}{job.max_nodes} wanted, {wanted}"
    if spares and not job.ended:
        wanted = f"and {_count(spares, 'spare')}; {wanted}"
    yield _tile("Nodes", str(nodes), wanted)
    if records.note:  # without etcd, the budget is not known
        yield _tile("Restarts", str(job.restarts), "in all")
    else:
        spent = f"{job.restarts_spent} of {job.max_restarts}"
        yield _tile("Restarts", spent, "of the budget spent")
    saved, step, note = job.checkpoint, NOTHING, "none on disk"
    if saved is not None and "step" in saved:
        saved_s = number(saved.get("time"))
        ago = "before the end" if job.ended else "ago"
        when = "" if saved_s is None else f", {in_words(end_s - saved_s)} {ago}"
        step, note = f"{saved['step']:,}", f"step on disk{when}"
    yield _tile("Checkpoint", step, note)


def _tile(label: str, value: str, note: str) -> Json:
    return {"label": label, "value": value, "note": note}


def _last(rates: Sequence[float | None]) -> float | None:
    return next((rate for rate in reversed(rates) if rate is not None), None)


def _short(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _curve(history: History) -> Json:
    """The columns of the charts; a value that is not known is None."""
    points = history.points
    rate, unit = _rates(points)
    return {
        "step": [point.step for point in points],
        "time": [point.time_s for point in points],
        # JSON has no NaN, and the page would not be drawn.
        "loss": [number(point.loss) for point in points],
        "low": [number(point.low) for point in points],
        "high": [number(point.high) for point in points],
        "rate": rate,
        "unit": unit,
        "workers": [point.workers for point in points],
        "stride": history.stride,
    }


def _rates(points: Sequence[Point]) -> tuple[list[float | None], str]:
    """The throughput at each point, over the points before it, and its unit."""
    in_samples = any(point.samples for point in points)
    done = [float(point.samples if in_samples else point.step) for point in points]
    return _rates_of(done, points), "samples per second" if in_samples else "steps per second"


def _rates_of(done: Sequence[float], points: Sequence[Point]) -> list[float | None]:
    """The rate per second at each point, over the points before it."""
    back = max(1, len(points) // WINDOWS)
    rates: list[float | None] = []
    for place, point in enumerate(points):
        before = max(0, place - back)
        took_s, more = point.time_s - points[before].time_s, done[place] - done[before]
        rates.append(float(f"{more / took_s:.4g}") if took_s > 0 and more >= 0 else None)
    return rates


def _rows(records: Records) -> list[NodeRow]:
    """All nodes: those of the status, in rank order, then those that are gone, by name."""
    job = records.status
    # An agent that was restarted is there twice: the spare is the one that lives.
    there = {row.node: row for row in (*job.members, *job.spares)}
    gone = sorted(records.timelines.keys() - there.keys())
    return [*there.values(), *map(NodeRow.gone, gone)]


def _timeline(records: Records, row: NodeRow, end_s: float) -> Json:
    timeline, spans = records.timelines.get(row.node), []
    if timeline is not None:
        starts = list(timeline.spans)
        alive = row.alive and not records.status.ended
        # An agent writes its timeline every few seconds, and the page must not lag behind.
        if alive:
            starts += _since_written(records, row.node, timeline)
        elif timeline.until_s < end_s - 1:
            starts.append(Span(from_s=timeline.until_s, phase=Phase.GONE))
        # Whoever is lost wrote its timeline some seconds before: it was there until its round
        # ended, if that was soon after.
        within_s = GOODPUT.pause_s(len(records.timelines)) + NOTICE_S
        for place, span in enumerate(starts):
            if span.phase is Phase.GONE:
                from_s, until_s = span.from_s, span.from_s + within_s
                ended = (e.time_s for e in records.events if e.record.get("event") in ENDS)
                lost_s = next((t for t in ended if from_s <= t <= until_s), from_s)
                starts[place] = replace(span, from_s=lost_s)
        spans = [[*one] for one in intervals(starts, None if alive else end_s)]
    first = row.first_rank
    return {
        "node": row.node,
        "spans": spans,
        "condition": str(row.condition),
        "alive": row.alive,
        "ranks": "" if first is None else in_ranges(range(first, first + row.slots)),
        "address": row.address,
        "host": row.host,
        "devices": row.devices,
        "step": row.step,
        "loss": number(row.loss),
        "told_s": number(row.step_time_s),
    }


def _since_written(records: Records, node: str, timeline: Timeline) -> Iterator[Span]:
    """The spans of a node since it wrote its timeline, by the rounds and steps of the job."""
    phase = timeline.spans[-1].phase
    step_times_s = [point.time_s for point in records.history.points]
    # From the end: of a thousand events the last few are later.
    late = takewhile(lambda event: event.time_s > timeline.until_s, reversed(records.events))
    for event in reversed(list(late)):
        at_s, kind = event.time_s, event.record.get("event")
        place = bisect_left(step_times_s, at_s)
        if kind in ENDS and phase in _WORKS:
            phase = Phase.RECOVERING
            yield Span(from_s=at_s, phase=phase)
        elif kind == "activate" and node not in event.record.get("nodes", ()):
            phase = Phase.IDLE
            yield Span(from_s=at_s, phase=phase)
        elif kind == "activate" and place < len(step_times_s):
            phase = Phase.TRAINING
            yield Span(from_s=step_times_s[place], phase=phase)


def _recovery(band: Band) -> Json:
    """Time without a step, with each attempt to end it."""
    told = [event for one in band.recoveries for event in one.events]
    ends = [event for event in told if event.record.get("event") in ENDS]
    failures = sum(event.record.get("event") == "interrupt" for event in ends)
    return {
        "rounds": [one.round for one in band.recoveries],
        "failures": failures,
        "cause": str(ends[-1].record.get("text", "")),
        "from_s": band.from_s,
        "to_s": band.to_s,
        "over": band.over,
        "phases": [[one.name, round(one.to_s - one.from_s, 3), one.note] for one in phases(band)],
        "events": [
            [round(max(0.0, event.time_s - band.from_s), 3), *_event(event)[2:]] for event in told
        ],
    }


def _paces(job: JobStatus) -> Json:
    """The durations of steps: of all ranks and of the run, and of the slowest ranks."""
    together = (
        ("all ranks, this round", job.step_times),
        ("one rank, all rounds", job.run_step_times),
    )
    ranks = [(f"rank {rank} on {node}", of) for rank, node, of in slowest_ranks(job)]
    # The times of a single rank are those of all ranks.
    shown = [*together, *(ranks[:RANKS] if len(ranks) > 1 else [])]
    return {
        "rows": [[of, q.count, q.p50_s, q.p90_s, q.p99_s] for of, q in shown if q is not None],
        "left_out": max(0, len(ranks) - RANKS),
    }


def _checkpoints(history: History, told: Sequence[Event]) -> Json:
    """The newest checkpoints; each with the round that has loaded, and so verified, it last."""
    # In the order of the events: the last load of a checkpoint stays.
    read = {
        (bool(event.record.get("in_memory")), str(event.record.get("tag"))): [
            event.record.get("round"),
            event.time_s,
            number(event.record.get("load_s")),
            event.record.get("read_bytes"),
        ]
        for event in told
        if event.record.get("event") == "restore"
    }
    found = [(False, one) for one in history.checkpoints]
    found += [(True, one) for one in [history.in_memory] if one is not None]
    return {
        "rows": [
            [
                *(c.step, c.time_s, c.samples, c.tag, c.digest),
                *(read.get((in_memory, c.tag)), _written(c), in_memory),
            ]
            for in_memory, c in sorted(found, key=lambda one: one[1].time_s)
        ],
        "saved": history.saved,
        "kept": history.kept,
    }


def _written(saved: Saved) -> list[float] | None:
    """Bytes, and seconds of stall, write and publication; None: not known."""
    if not saved.size_bytes:
        return None
    return [saved.size_bytes, saved.stall_s, saved.write_s, saved.publish_s]


def _event(event: Event) -> list[Any]:
    """Time, round, node, kind, sentence, tone."""
    record, kind = event.record, str(event.record.get("event", "?"))
    told = [str(record.get(name, "")) for name in ("round", "node")]
    tone = "" if record.get("symptom") else TONES.get(kind, "")
    if withdraws(record):
        tone = "note"
    return [event.time_s, *told, kind, str(record.get("text", "")), tone]


# ---- the same in words, for whoever does not see the charts ----


def _in_words(history: History, timelines: Sequence[Json], found: Iterable[Json]) -> Json:
    loss = "not reported"
    if told := [(point.step, point.loss) for point in history.points if point.loss is not None]:
        (first_step, first), (last_step, last) = told[0], told[-1]
        least_step, least = min(told, key=lambda one: one[1])
        loss = (
            f"{first:.4g} at step {first_step:,}, {last:.4g} at step {last_step:,}, "
            f"least {least:.4g} at step {least_step:,}"
        )
    failed = [one for one in found if one["failures"]]
    lost = "no failure"
    if failed:
        longest_s = max(one["to_s"] - one["from_s"] for one in failed)
        lost = (
            f"failures: {sum(one['failures'] for one in failed)}, longest time without a step "
            f"{longest_s:.1f} s"
        )
    throughput = "not known yet."
    rates, unit = _rates(history.points)
    if known := sorted(rate for rate in rates if rate is not None):
        middle, most = _short(known[len(known) // 2]), _short(known[-1])
        throughput = f"median {middle}, most {most} {unit}."
    return {
        "loss": f"Loss: {loss}.",
        "rate": f"Throughput: {throughput}",
        "timelines": f"{_count(len(timelines), 'node')}, a timeline each; {lost}.",
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
