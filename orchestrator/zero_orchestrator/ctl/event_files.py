"""The records of a job from the event files of its agents alone, when its etcd is gone.

The files are those of `zero-agent --log-dir`, of all nodes in one directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_orchestrator.ctl.page.picture import Records
from zero_orchestrator.membership.job_state import ENDED, State
from zero_orchestrator.membership.moves import LEGAL, Move
from zero_orchestrator.observe.events import Event, parse
from zero_orchestrator.observe.goodput import add_up, from_record, goodput, to_record
from zero_orchestrator.observe.history import History
from zero_orchestrator.observe.status import JobStatus, NodeRow, NoSuchJob

ABSENT = (
    "Made from the event files in {directory} alone, without etcd. Loss, throughput, timelines and "
    "the list of checkpoints are absent, because only etcd keeps them"
)
_PATTERNS = ("events-*.jsonl.1", "events-*.jsonl")
_STATES: Mapping[str, State] = {str(move): state for move, (_, state) in LEGAL.items()}


def choose(log_dir: Path, job: str | None) -> str:
    """The job whose files are meant: the named one, or the only one.

    Raises:
        NoSuchJob: There are no event files of that job, or of more than one.
    """
    found = sorted({path.parent.name for path in log_dir.glob("*/events-*.jsonl")})
    if job in found or (job is None and len(found) == 1):
        return job or found[0]
    there = f"there are those of {', '.join(found)}" if found else "there are none of any job"
    wanted = f"no event files of job {job}" if job else "the event files of no single job"
    raise NoSuchJob(
        f"--log-dir={log_dir} has {wanted}: {there}; name the directory that --log-dir of "
        "zero-agent named, and the job"
    )


def read(log_dir: Path, job: str) -> Records:
    """The records in the event files of a job. Raises OSError: a file cannot be read."""
    lines = [
        line
        for pattern in _PATTERNS
        for path in sorted((log_dir / job).glob(pattern))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    told = [record for line in lines if (record := _record(line)) is not None]
    records = sorted(told, key=lambda record: float(record["time"]))
    begins = [at for at, record in enumerate(records) if record.get("event") == Move.OPEN]
    # Former jobs of that name have written to the same files.
    del records[: begins[-1] if begins else 0]
    note = ABSENT.format(directory=log_dir / job)
    if unread := len(lines) - len(told):
        note += f". Lines that are no events: {unread}"
    return Records(
        status=_status(job, records),
        events=[Event(number, record) for number, record in enumerate(records, 1)],
        history=History(),
        timelines={},
        note=note,
    )


def _record(line: str) -> dict[str, Any] | None:
    """The event of a line; None if it is none."""
    record = parse(line)
    # As the last line of a node that has lost power.
    if record is None or "time" not in record:
        return None
    # Only transitions have one: the order of all events is that of the clocks.
    record.pop("revision", None)
    return record


def _status(job: str, records: Sequence[Mapping[str, Any]]) -> JobStatus:
    """The status that the events show."""
    moves = [record for record in records if record.get("event") in _STATES]
    last = moves[-1] if moves else {}
    state = _STATES.get(str(last.get("event")), None)
    rounds = [record for record in moves if record.get("event") == Move.ACTIVATE]
    interrupts = sum(record.get("event") == Move.INTERRUPT for record in moves)
    members = rounds[-1].get("nodes", ()) if rounds else ()
    sizes = [record["world_size"] for record in records if "world_size" in record]
    of_job, of_agents = (
        [from_record(record.get("ns", {})) for record in records if record.get("event") == kind]
        for kind in ("job time", "time")
    )
    # The ledger of the job at its end; until then those of the agents that have ended.
    used_ns = add_up(of_job[-1:] or of_agents)
    return JobStatus(
        job=job,
        state=str(state or ""),
        round=int(last.get("round", 0)),
        cause=str(last.get("text", "")),
        now="" if state in ENDED else "whether it still runs is not known without etcd",
        world_size=sizes[-1] if sizes else 0,
        members=tuple(NodeRow.gone(str(node)) for node in members),
        restarts=interrupts,
        # How many of them count no more is known from etcd alone.
        restarts_spent=interrupts,
        state_time_s=last.get("time"),
        seen_time_s=records[-1]["time"] if records else None,
        goodput=goodput(used_ns),
        time_ns=to_record(used_ns),
    )
