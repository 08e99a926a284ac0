"""Several engines in one process: whether the checkpoints that they load are consistent.

A checkpoint belongs to one engine. A script with several (a GAN, actor and critic) saves them one
after the other at the same point of its loop; if a node is lost in between, some are newer than
others, and so are in-memory checkpoints, which each engine makes at the end of its own steps. Each
checkpoint therefore records the steps of the other engines, and a load of checkpoints that are
inconsistent with each other is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BESIDE = "beside"
"""The key of `Moment.beside` in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The steps of a process's engines when a checkpoint of one of them was made."""

    number: int
    """The engine's number, in the order in which the script makes them."""
    step: int
    beside: Mapping[str, int]
    """Number of each other engine that trains -> its step then. Text, because JSON has no other
    keys."""


def inconsistent(mine: Moment, others: list[Moment]) -> str:
    """Why the checkpoints that engines resume from are inconsistent, or "".

    Two are consistent if the later one was made while the other engine was at the step from which
    it resumes. Which one was later is unknown, so it is enough if either of them records it.
    """
    for other in others:
        seen, was_seen = mine.beside.get(str(other.number)), other.beside.get(str(mine.number))
        unknown = seen is None and was_seen is None
        if not unknown and seen != other.step and was_seen != mine.step:
            return (
                f"engine {other.number} of this process resumes from step {other.step} and engine "
                f"{mine.number} from step {mine.step}, but engine {other.number} was at step "
                f"{seen if seen is not None else 'unknown'} when the latter was saved: if one is "
                "trained on the output of the other, the results are from here on not those of "
                "the uninterrupted run; to resume from a common point, load checkpoints of one "
                "point of your loop by their tags, and leave out checkpoint.ram"
            )
    return ""
