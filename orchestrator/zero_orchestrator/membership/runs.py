"""The job name of a command typed without `--rdzv-id`.

The same command typed in several terminals must meet in one job, and the same command typed
again after that job has ended must start a new one. So each command has a numbered series of
runs, `/zero/runs/<command>` holds the current number, and an agent moves it on when that run
is over: DONE, FAILED, STOPPED, or left by all its agents.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.membership.job_state import ENDED, Head, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.store.kv import KeyValue, KeyValueStore, Put, Write, unchanged

ATTEMPTS = 20
"""Most lost races: after each, another agent has started the next run, which this one joins."""


def command_name(program: str, command: Sequence[str], *, is_module: bool) -> str:
    """A readable, collision-free name for a command: `train_gpt-5f3a9c21`.

    `program` is the path of a script or the name of a module, `command` what the other nodes know
    it as, and its arguments. A module that runs a script, as `zero_deepspeed.as_deepspeed
    train.py`, has the name of the script.
    """
    runs_script = is_module and any(argument.endswith(".py") for argument in command[1:2])
    if runs_script or not is_module:
        program = Path(command[1] if runs_script else program).stem
    digest = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()[:8]
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in program).strip("._-")
    return f"{stem[:80] or 'job'}-{digest}"


def run_key(name: str) -> str:
    """The key of the number of a command's current run."""
    return f"/zero/runs/{name}"


def current_run(store: KeyValueStore, name: str) -> str:
    """The job of the run to take part in: the current one, or the next if that is over.

    Raises:
        StoreUnavailable: The store does not answer, or its keys change faster than they can
            be read.
    """
    key = run_key(name)
    for _ in range(ATTEMPTS):
        held = store.get(key)
        number = int(held.value) if held else 0
        job, following = f"{name}.{number}", f"{name}.{number + 1}"
        head = store.get(Keys(job).round)
        # A run without a round has just begun, and one that goes on in a new store has no agent
        # there yet; a run that all its agents have left is over.
        if held and (
            head is None
            or _goes_on(head)
            or (not _has_ended(head) and store.range(Keys(job).nodes, limit=1).items)
        ):
            return job
        compares = [unchanged(key, held.mod_revision if held else 0)]
        writes: list[Write] = [Put(key, str(number + 1))]
        if head is not None and not _has_ended(head):
            compares.append(unchanged(head.key, head.mod_revision))
            # All agents have left this run. The same transaction stops it for good: one that only
            # hung, and resumes, must not train beside the new run.
            cause = (
                f"all its agents were gone, and the same command was started again as {following}"
            )
            end = replace(
                Head.from_json(head.value), state=State.STOPPED, cause=cause, at=time.time()
            )
            writes.append(Put(head.key, end.to_json()))
        if store.txn(compares, writes).succeeded:
            return following
    raise StoreUnavailable(f"{key} changed {ATTEMPTS} times while it was read; try again")


def standing_run(store: KeyValueStore, name: str) -> str | None:
    """The job of the current run, whether or not that is over; None before the first.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    held = store.get(run_key(name))
    return f"{name}.{held.value}" if held is not None else None


def _has_ended(head: KeyValue) -> bool:
    return Head.from_json(head.value).state in ENDED


def _goes_on(head: KeyValue) -> bool:
    """Whether a run was brought into this store, and has had no round here."""
    course = Head.from_json(head.value)
    once = head.create_revision == head.mod_revision
    return once and course.state is State.FORMING and course.n > 0
