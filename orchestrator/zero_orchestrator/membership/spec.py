"""The specification of a job, which all its agents share: bounds, restart budget, command.

The first agent of a job writes its `JobSpec`; every later one compares its own with it and is
refused with the difference. What may differ between nodes (processes per node, log directory)
is not part of it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from zero_orchestrator.errors import SpecError, SpecMismatch
from zero_orchestrator.membership.failures import FOR_EVER_S
from zero_orchestrator.membership.records import (
    PROTOCOL,
    Record,
    check_protocol,
)

_NNODES = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")
_COUNTS = ("max_restarts", "refill_after_steps", "max_restarts_without_progress", "exclude_after")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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
    """Returns the name of a job if it is valid. Raises SpecError."""
    return check_name("--rdzv-id", name)


def check_name(flag: str, name: str) -> str:
    """Returns the name of a job or a node if it can be part of a key and of a directory name.

    Raises:
        SpecError: It has other characters, or too many; names the flag.
    """
    if _NAME.fullmatch(name) is None:
        raise SpecError(
            f"{flag}={name}: use letters, digits, '.', '_' and '-', at most 128 of them, "
            "starting with a letter or a digit"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class JobSpec(Record):
    """The part of a job's description that all its agents must agree on."""

    min_nodes: int
    max_nodes: int
    node_unit: int = 1
    """The nodes of a round are a multiple of this; the others are spares."""
    max_restarts: int = 0
    """Failures the whole job may survive; joins, drains and spares are free."""
    refill_after_steps: int = 0
    """Committed steps after which a restart returns to the budget; 0: never."""
    max_restarts_without_progress: int = 0
    """Restarts in a row without a new step; one more such failure ends the job. 0: no limit."""
    exclude_after: int = 0
    """Failures in a row after which a host is excluded; 0: never."""
    exclude_for_s: int = 60
    """Seconds of a host's first exclusion."""
    command: tuple[str, ...] = ()
    """Script or module and its arguments, as the user typed them."""
    owner: str = dataclasses.field(default="", compare=False)
    """`USER@HOST` of whoever started the first agent; it need not be equal at all agents."""
    protocol: int = PROTOCOL
    """The version of the protocol that its agents speak."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise SpecError(
                f"{self.min_nodes}:{self.max_nodes} nodes: want 1 <= minimum <= maximum"
            )
        for name in _COUNTS:
            if (value := getattr(self, name)) < 0:
                flag = f"--{name.replace('_', '-')}"
                raise SpecError(f"{flag}={value}: must not be negative; write 0")
        if not 1 <= self.exclude_for_s <= FOR_EVER_S:
            text = f"--exclude-for={self.exclude_for_s}: write 1 to {FOR_EVER_S} seconds"
            raise SpecError(text)
        unit, low, high = self.node_unit, self.min_nodes, self.max_nodes
        if unit < 1:
            raise SpecError(f"--node-unit={unit}: write how many nodes belong together, from 1")
        if not self.is_enough(high):
            remedy = f"{self.fewest}:{max(high, self.fewest)}"
            raise SpecError(
                f"--node-unit={unit} with --nnodes={low}:{high}: no multiple of {unit} lies "
                f"between; write --nnodes={remedy}"
            )

    def usable(self, count: int) -> int:
        """How many of `count` nodes a round can use; it may be fewer than the minimum."""
        return min(count, self.max_nodes) // self.node_unit * self.node_unit

    def is_enough(self, count: int) -> bool:
        """Whether a round can begin with `count` nodes, or with some of them."""
        return self.usable(count) >= self.min_nodes

    @property
    def fewest(self) -> int:
        """The size of the smallest round there can be."""
        return -(-self.min_nodes // self.node_unit) * self.node_unit

    def check_same(self, running: JobSpec, job: str) -> None:
        """Refuse to join a job that was started with another specification.

        Raises:
            SpecMismatch: Names every field that differs, with both values.
        """
        check_protocol(running.protocol, self.protocol, job)
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(running)
        different = [
            f"{name} is {_show(theirs[name])} there and {_show(mine[name])} here"
            for name in mine
            if name != "owner" and mine[name] != theirs[name]  # another user may add a node
        ]
        if different:
            raise SpecMismatch(
                f"job {job} runs with another specification: {'; '.join(different)}. "
                "Start this agent with the same values, or choose another --rdzv-id"
            )


def _show(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
