"""A module of a script, which keeps a generator of random numbers in a variable."""

from __future__ import annotations

import random

RNG = random.Random(1)


def draw() -> float:
    """A number of it."""
    return RNG.random()
