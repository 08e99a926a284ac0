"""The verdicts that hold now about the ranks of a job, as the store keeps them.

The agent of rank 0 makes and writes them (`zero_agent.loop.observed.judging`), with its lease, so
they vanish with it.

To add a verdict: a `Kind` here, in STOPS if no step is taken with it; a detector in `detectors/`,
and its class in DETECTORS of `zero_agent.loop.observed.judging`. Status, metrics, page and events
follow from `Kind`. `Finding.key` keeps one finding of each kind, one of each rank for stragglers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from zero_contract.decoding import encode
from zero_orchestrator.membership.records import kept
from zero_orchestrator.store.kv import KeyValue


class Kind(StrEnum):
    """What a verdict says."""

    STRAGGLER = "straggler"
    """A rank computes longer than the others, which wait for it."""
    STUCK = "stuck"
    """No rank takes a step: some ranks wait for others."""
    DEAD_LINK = "dead link"
    """No rank takes a step: two nodes do not reach each other."""
    SLOW_STORAGE = "slow storage"
    """A rank, or all of them, write checkpoints slower than others, or than before."""
    SLOW_LINK = "slow link"
    """The network between two nodes is slower than that between others, or than before."""

    @property
    def flag(self) -> str:
        """The field of its events that says whether it holds."""
        return "stuck" if self in STOPS else "slow"


STOPS = frozenset({Kind.STUCK, Kind.DEAD_LINK})
"""Verdicts during which the job takes no step."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One verdict."""

    kind: Kind
    text: str
    """The verdict in a sentence, with the cause where it can be seen."""
    rank: int | None = None
    """The rank that it names; None: all ranks."""
    node: str = ""
    """The node of that rank."""
    since_step: int | None = None
    """The last step before it began."""
    factor: float | None = None
    """How many times as long as others, or as usual, the rank, the write or the link takes."""


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The record of all that hold."""

    verdicts: tuple[Verdict, ...]


def to_value(verdicts: Iterable[Verdict]) -> str:
    """The value of the key of the verdicts."""
    return encode(_Held(verdicts=tuple(verdicts)))


def from_item(item: KeyValue | None) -> tuple[Verdict, ...]:
    """The verdicts in that key; none without it, or if it is unreadable."""
    # Of another version, perhaps: then the job is shown without verdicts.
    found = kept(_Held, item)
    return () if found is None else found.verdicts
