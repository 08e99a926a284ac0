"""Several engines in one process: what the checkpoints of one say about the others.

A checkpoint is one engine's. A script with several (a GAN, actor and critic) saves them one after
the other at the same point of its loop; a node that is lost in between leaves some of them newer
than others, and so do checkpoints in memory, which each engine makes at the end of its own steps.
Each checkpoint therefore says at which step the others were, and a load that puts together what
never was together says so.

Called by `persistence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BESIDE = "beside"
"""The key of `Moment.beside` in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where the engines of a process were when a checkpoint of one of them was made."""

    number: int
    """Of the engine, in the order in which the script makes them."""
    step: int
    beside: Mapping[str, int]
    """Number of each other engine that trains -> its step then. JSON has no other keys."""


def inconsistent(mine: Moment, others: list[Moment]) -> str:
    """How the checkpoints that engines go on from contradict each other, or "".

    Two belong together if the later one was made while the other engine was at the step that it
    goes on from: nobody knows which was later, so either may say so.
    """
    for other in others:
        seen, was_seen = mine.beside.get(str(other.number)), other.beside.get(str(mine.number))
        unknown = seen is None and was_seen is None
        if not unknown and seen != other.step and was_seen != mine.step:
            return (
                f"engine {other.number} of this process goes on from step {other.step} and engine "
                f"{mine.number} from step {mine.step}, but engine {other.number} was at step "
                f"{seen if seen is not None else 'unknown'} when the latter was saved: if one is "
                "trained on what the other computes, the results are from here on not those of "
                "the uninterrupted run; to go on from a common point, load checkpoints of one "
                "point of your loop by their tags, and leave out checkpoint.ram"
            )
    return ""
