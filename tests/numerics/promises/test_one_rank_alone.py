"""What one rank alone does wrong is an error of all ranks within seconds, under any back end.

Else each would train weights of its own, or the sum would lack the gradients of some.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.numerics.promises.back_ends import STEPS, Recipe, Training, training
from tests.support.inside import looking_often
from tests.support.waiting import wait_for
from tests.support.world import GROUP_TIMEOUT_S, WorldPool
from zero_comm.exchange import deadlock
from zero_comm.exchange.collectives import Collectives
from zero_contract.errors import PeerLost, ZeroError
from zero_step.agree import Agreement
from zero_step.checks.replicas import PIECE, Replicas

CPU = torch.device("cpu")


def freezes(own: Training) -> None:
    """Fewer gradients than the others have."""
    own.module.get_submodule("down").requires_grad_(False)


def writes(own: Training) -> None:
    with torch.no_grad():
        own.module.get_parameter("down.bias").add_(1.0)


def loses_a_bit(own: Training) -> None:
    """No version tells of it."""
    own.module.get_parameter("up.weight").data.view(torch.int32)[3, 2] ^= 1


def saves(own: Training) -> None:
    """In the background: it goes on with its steps."""
    own.session.save(tempfile.mkdtemp(), blocking=False)


def saves_and_waits(own: Training) -> None:
    own.session.save(tempfile.mkdtemp(), blocking=True)


def loads(own: Training) -> None:
    own.session.load(tempfile.mkdtemp())


def ends(own: Training) -> None:
    """The others save once more."""
    if dist.get_rank() == 1:
        own.close()
    else:
        own.session.save(tempfile.mkdtemp(), blocking=True)


def exits(own: Training) -> None:
    """As a script of DeepSpeed, which closes nothing."""
    if dist.get_rank() == 1:
        deadlock._end_all()
    else:
        own.session.save(tempfile.mkdtemp(), blocking=True)


WHOLE = ("ddp", "stage0", "stage1")
"""Each rank holds all weights."""
ALL = (*WHOLE, "fsdp2", "stage3")
SAVED = r"(a save|the hash of the weights|\w+ of root.*)"
_ENDED = rf"rank 0 waits for {SAVED}, which rank 1 has not begun|connection closed by rank 1"
ALONE: dict[Callable[[Training], None], tuple[str, tuple[str, ...]]] = {
    freezes: (r"down.weight is trained on rank 0 and not on rank 1", (*WHOLE, "stage3")),
    writes: (r"down.bias has different values on rank 0 and on rank 1", WHOLE),
    loses_a_bit: (r"up.weight has different values on rank 0 and on rank 1", WHOLE),
    saves: (r"rank 1 waits for a save, which rank 0 has not begun", ALL),
    saves_and_waits: (r"rank 1 waits for a save, which rank 0 has not begun", ALL),
    loads: (r"rank 1 waits for a load, which rank 0 has not begun", ALL),
    ends: (_ENDED, ALL),
    exits: (_ENDED, ALL),
}
"""What it does, what is said of it, and under which back ends."""
CASES = [
    pytest.param(alone, back_end, id=f"{alone.__name__}-{back_end}")
    for alone, (_, back_ends) in ALONE.items()
    for back_end in back_ends
]


@looking_often()
def errors_of(alone: Callable[[Training], None], back_end: str) -> tuple[str, float]:
    """The error of this rank, and the seconds until it came."""
    own = training(Recipe(), back_end)
    own.train(1)
    began_s, error = time.monotonic(), ""
    try:
        if dist.get_rank() == 1 or alone in (ends, exits):
            alone(own)
        if alone not in (ends, exits):
            own.train(3)
    except (ZeroError, PeerLost) as raised:
        error = str(raised)
        # The interpreter joins them at its end.
        wait_for(lambda: not saving_threads(), GROUP_TIMEOUT_S, "a save that nobody waits for ends")
    return error, time.monotonic() - began_s


def saving_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("zero-checkpoint")]


@pytest.mark.parametrize(("alone", "back_end"), CASES)
@pytest.mark.corners(
    alone=[freezes, loses_a_bit, saves, saves_and_waits, loads, ends, exits],
    back_end=["ddp", "stage1"],
)
def test_what_one_rank_does_alone_is_an_error_of_all_within_seconds(
    worlds: WorldPool, alone: Callable[[Training], None], back_end: str
) -> None:
    found = worlds.run(2, errors_of, alone, back_end)
    assert all(error for error, _ in found) or alone in (ends, exits)
    assert any(re.search(ALONE[alone][0], error) for error, _ in found)
    assert max(took_s for _, took_s in found) < GROUP_TIMEOUT_S / 2


def written_and_sent(back_end: str) -> tuple[list[str], int]:
    """The hashes of a run whose first rank writes weights, and sends them to the others."""
    own = training(Recipe(), back_end)
    own.train(1)
    weight = own.module.get_parameter("down.bias")
    with torch.no_grad():
        if dist.get_rank() == 0:
            weight.fill_(0.5)
        dist.broadcast(weight, 0)
    found = list(own.hashes(STEPS))
    compared = own.session._collectives.detector.begun["what the parameters are on each rank"]
    own.close()
    return found, compared


@pytest.mark.parametrize("back_end", WHOLE)
@pytest.mark.corners(back_end=["ddp"])
def test_a_rank_may_write_weights_that_it_sends_to_all_others(
    worlds: WorldPool, back_end: str
) -> None:
    """They are compared once, in the step that follows."""
    ((expected, _),) = worlds.run(1, written_and_sent, "plain")
    assert worlds.run(2, written_and_sent, back_end) == [(expected, 1)] * 2


def compared_after_a_join() -> int:
    """How often all of the weights are compared, if one rank has done fewer steps than the other.

    As one that joins beside a survivor; the weights are larger than what a step compares.
    """
    group = Collectives(name="replicas")
    weights = {"weight": nn.Parameter(torch.randn(3 * PIECE, generator=torch.Generator()))}
    replicas = Replicas(weights, group, whole=True)
    if dist.get_rank() == 0:
        replicas.digest(CPU)
    agreement, notes = Agreement(group), torch.zeros(1)
    compared = 0
    for _ in range(4):
        if not agreement.reach([], notes, replicas.digest(CPU)).alike:
            replicas.check()
            compared += 1
    return compared


def test_a_rank_that_has_joined_compares_the_same_part_of_the_weights(worlds: WorldPool) -> None:
    assert worlds.run(2, compared_after_a_join) == [1, 1]
