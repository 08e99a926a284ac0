"""What a job is: its bounds, its budget and its command, agreed on by every agent.

The first agent of a job writes its `JobSpec`; every later one compares its own with it and is
refused with the difference. What may differ between nodes (processes per node, log directory)
is not part of it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass

from zero_orchestrator.errors import SpecError

_NNODES = re.compile(r"(\d+)(?::(\d+))?")
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def parse_nnodes(text: str) -> tuple[int, int]:
    """`"4"` -> (4, 4), `"1:4"` -> (1, 4).

    Raises:
        SpecError: Not of that form, or bounds that no cluster can meet.
    """
    match = _NNODES.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"--nnodes={text}: not a number of nodes; write 4, or 1:4 for 1 to 4 nodes")
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        raise SpecError(
            f"--nnodes={text}: minimum {low} exceeds maximum {high}; write {high}:{low}"
        )
    if low < 1:
        raise SpecError(f"--nnodes={text}: a job needs at least 1 node; write 1:{max(high, 1)}")
    return low, high


def check_job_name(name: str) -> str:
    """`name` itself, if it can be part of a key and of a directory name.

    Raises:
        SpecError: It cannot.
    """
    if _JOB_NAME.fullmatch(name) is None:
        raise SpecError(
            f"--rdzv-id={name}: use letters, digits, '.', '_' and '-', at most 128 of them, "
            "starting with a letter or a digit"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The part of a job's description that all its agents must agree on."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    """Failures the whole job may survive; joins, drains and spares are free."""
    command: tuple[str, ...] = ()
    """Script or module and its arguments, as the user typed them."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise SpecError(
                f"{self.min_nodes}:{self.max_nodes} nodes: want 1 <= minimum <= maximum"
            )
        if self.max_restarts < 0:
            raise SpecError(f"--max-restarts={self.max_restarts}: must not be negative; write 0")

    def to_json(self) -> str:
        """The value of the job's `spec` key."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """The inverse of `to_json`."""
        record = json.loads(text)
        return cls(**{**record, "command": tuple(record["command"])})

    def check_same(self, running: JobSpec, job: str) -> None:
        """Refuse to join a job that was started with another specification.

        Raises:
            SpecError: Names every field that differs, with both values.
        """
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(running)
        different = [
            f"{name} is {_show(theirs[name])} there and {_show(mine[name])} here"
            for name in mine
            if mine[name] != theirs[name]
        ]
        if different:
            raise SpecError(
                f"job {job} runs with another specification: {'; '.join(different)}. "
                "Start this agent with the same values, or choose another --rdzv-id"
            )


def _show(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
