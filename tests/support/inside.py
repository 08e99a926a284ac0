"""The one way to look at the parts of a training that its script does not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.waiting import wait_for
from zero_checkpoint.persistence import Persistence
from zero_comm import waiting
from zero_comm.exchange import collectives
from zero_engine.core.engine import Engine
from zero_step import Session


def session_of(training: Engine | Session) -> Session:
    """The session of an engine, or what `zero_torch.protect` returns."""
    return training._session if isinstance(training, Engine) else training


def persistence_of(training: Engine | Session) -> Persistence:
    """What saves and loads it."""
    return session_of(training)._persistence


def await_memory(training: Engine | Session) -> None:
    """Wait until what is being kept in memory is there; a rank knows of it at its next step."""
    ram = persistence_of(training).ram
    if ram is not None:
        wait_for(lambda: not ram.busy, 60, "the step is in memory")


@contextmanager
def looking_often() -> Iterator[None]:
    """Ranks that wait look every tenth of a second at what the others wait for, not every 3 s."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (waiting, collectives):
            patch.setattr(module, "LOOK_S", 0.1)
        yield
