"""The job name of a command typed without `--rdzv-id`.

The same command typed in several terminals must meet in one job, and the same command typed
again after that job has ended must start a new one. So each command has a numbered series of
runs, `/zero/runs/<command>` holds the current number, and an agent moves it on when that run
is over: DONE, FAILED, STOPPED, or left by all its agents.

Must always hold: two agents that start together agree on one run. A new number is written by
compare-and-set, and a run without a round yet has just begun, so it is joined, not skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.job_state import ENDED, Keys
from zero_orchestrator.kv import KeyValueStore, Put, Range, unchanged

ATTEMPTS = 20
"""Each lost race means that another agent moved the run on; joining that one ends the loop."""


def command_name(program: str, command: Sequence[str]) -> str:
    """A readable, collision-free name for a command: `train_gpt-5f3a9c21`."""
    digest = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()[:8]
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in program).strip("._-")
    return f"{stem[:80] or 'job'}-{digest}"


def current_run(store: KeyValueStore, name: str) -> str:
    """The job of the run to take part in: the current one, or the next if that is over.

    Raises:
        StoreUnavailable: The store does not answer, or its keys change faster than they can
            be read.
    """
    key = f"/zero/runs/{name}"
    for _ in range(ATTEMPTS):
        held = store.get(key)
        number = int(held.value) if held else 0
        if held and not _is_over(store.range(Keys(_job(name, number)).prefix), _job(name, number)):
            return _job(name, number)
        revision = held.mod_revision if held else 0
        if store.txn([unchanged(key, revision)], [Put(key, str(number + 1))]).succeeded:
            return _job(name, number + 1)
    raise StoreUnavailable(f"{key} changed {ATTEMPTS} times while it was read; try again")


def _job(name: str, number: int) -> str:
    return f"{name}.{number}"


def _is_over(found: Range, job: str) -> bool:
    keys = Keys(job)
    items = {item.key: item for item in found.items}
    if keys.round not in items:
        return False
    if json.loads(items[keys.round].value)["state"] in ENDED:
        return True
    return not any(key.startswith(keys.node("")) for key in items)
