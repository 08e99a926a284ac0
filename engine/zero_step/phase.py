"""Where in a step a rank is: the states of its micro-step, and the table of the legal moves.

Must always hold: a call of a script makes a legal move, or raises an error that names the order and
its remedy and changes nothing. Which micro-step it is, and which is the last of a step, the global
batch decides (`zero_data.global_batch`); a `Turn` says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from zero_contract.errors import ZeroError


class State(StrEnum):
    """The state of a rank's micro-step."""

    READY = "ready"
    """There is none: it is between two micro-batches."""
    DRAWN = "drawn"
    """Its batch is there, and no gradient of it."""
    BACKWARD = "backward"
    """Its gradients are coming; outside of autograd: they were, and the backward has failed."""
    RUN = "run"
    """Its gradients are there."""
    SHARED = "shared"
    """They are, and the same backward has left gradients in other engines."""
    STEPPED = "stepped"
    """The script has called step() for it, which has done what there is to do."""
    FAILED = "failed"
    """A part of its gradients is in the sums of the step, and cannot be taken back."""


class Move(StrEnum):
    """Events that change it."""

    DRAW = "draw"
    """A batch is drawn, or a backward of one that nobody has seen is about to begin."""
    AGAIN = "again"
    """A further loss of the same batch is about to have its backward."""
    BEGIN = "begin"
    """The first gradient comes."""
    RECALL = "recall"
    """A backward has failed that began the sums of its step: they can begin again."""
    FAIL = "fail"
    """A backward has failed, or what belongs to a step after its optimizer has acted."""
    FINISH = "finish"
    """The last gradient has been added."""
    SHARE = "share"
    """Other engines have got gradients of the same backward."""
    STEP = "step"
    """The script calls step(): the optimizer acts, if the micro-step is the last of its step."""
    PASS = "pass"
    """The next micro-step of the same step may begin."""
    ACT = "act"
    """The optimizer acts on gradients that are the script's own."""
    END = "end"
    """The next step may begin."""
    KEEP = "keep"
    """The gradients count as zero, and the batch is counted."""
    DROP = "drop"
    """The batch is not counted, or not yet."""
    LOAD = "load"
    """A checkpoint is loaded: the step is dropped."""


_RUN = (State.RUN, State.SHARED)
LEGAL: Mapping[Move, tuple[tuple[State, ...], State]] = {
    Move.DRAW: ((State.READY,), State.DRAWN),
    Move.AGAIN: ((State.RUN,), State.DRAWN),
    Move.BEGIN: ((State.DRAWN,), State.BACKWARD),
    Move.RECALL: ((State.BACKWARD,), State.READY),
    Move.FAIL: ((State.BACKWARD, State.STEPPED), State.FAILED),
    Move.FINISH: ((State.BACKWARD,), State.RUN),
    Move.SHARE: ((State.RUN,), State.SHARED),
    Move.STEP: (_RUN, State.STEPPED),
    Move.PASS: ((*_RUN, State.STEPPED), State.READY),
    Move.ACT: ((State.READY,), State.STEPPED),
    Move.END: ((State.STEPPED,), State.READY),
    Move.KEEP: (_RUN, State.RUN),
    Move.DROP: (tuple(each for each in State if each is not State.BACKWARD), State.READY),
    Move.LOAD: (tuple(State), State.READY),
}
"""Every legal move: from which states, to which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """The names of a script's calls, for errors."""

    backward: str
    """To compute gradients."""
    step: str
    """To end a micro-step."""
    batch: str
    """The call that must come before a `step`, for there to be a micro-batch."""
    reduced: str
    """The condition of a backward, for its gradients to come."""
    resume: str
    """The remedy when a backward has failed half way."""


_HALF_WAY = (
    "a backward() of this step has failed half way, and what it has added to the gradients of the "
    "micro-batches before it cannot be taken back; {resume}"
)
_NOT_DROPPED = (
    "a loss.backward() went through several engines, and this one has neither made a step() of its "
    "gradients nor dropped them by zero_grad() before the next backward; call one of the two, or "
    "{backward} of the engine that the loss is to train, which leaves no gradients in the others"
)
_NOT_TAKEN = "the step was not taken: call {step} for every batch"
_SECOND = (
    "a micro-batch got a second gradient: call {backward} once for each, with the sum of its losses"
)
_TWICE = "the optimizer was stepped twice in one step; step it once"
_EARLY = "a backward() outside of a micro-batch: its gradients belong to no step; {batch}"

ILLEGAL: Mapping[tuple[Move, State], str] = {
    (Move.DRAW, State.RUN): _NOT_TAKEN,
    (Move.DRAW, State.SHARED): _NOT_DROPPED,
    (Move.BEGIN, State.READY): _EARLY,
    (Move.BEGIN, State.RUN): _SECOND,
    (Move.BEGIN, State.STEPPED): _SECOND,
    (Move.BEGIN, State.FAILED): _HALF_WAY,
    (Move.STEP, State.READY): "step() without backward(): {batch}",
    (Move.STEP, State.DRAWN): "step() without backward(): {reduced}",
    (Move.STEP, State.STEPPED): _TWICE,
    (Move.PASS, State.DRAWN): "{reduced}",
    (Move.END, State.RUN): _NOT_TAKEN,
    (Move.DROP, State.BACKWARD): _HALF_WAY,
    **{
        (move, state): _HALF_WAY
        for move in (Move.DRAW, Move.PASS, Move.END)
        for state in (State.BACKWARD, State.FAILED)
    },
    **{
        (Move.STEP, state): "step() without backward(): " + _HALF_WAY
        for state in (State.BACKWARD, State.FAILED)
    },
}
"""Mistakes of a script, and their remedies, in the words of `Calls`."""


class Phase:
    """The state of one rank's micro-step."""

    def __init__(self, calls: Calls) -> None:
        self.state = State.READY
        self._calls = calls

    def check(self, move: Move) -> State:
        """The state after a move. Raises ZeroError if it is illegal; says what to do."""
        sources, target = LEGAL[move]
        if self.state in sources:
            return target
        if text := ILLEGAL.get((move, self.state)):
            names = type(self._calls).__slots__
            raise ZeroError(text.format(**{name: getattr(self._calls, name) for name in names}))
        raise ValueError(f"{move} in the state {self.state}")

    def move(self, move: Move) -> None:
        """Make a move; raises what `check` raises, and then the state is what it was."""
        self.state = self.check(move)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A micro-step that is none of the script's; afterwards the state is what it was."""
        state, self.state = self.state, State.DRAWN
        try:
            yield
        finally:
            self.state = state

    @property
    def begun(self) -> bool:
        """Whether a gradient of the micro-step has come."""
        return self.state not in (State.READY, State.DRAWN)

    @property
    def has_run(self) -> bool:
        """Whether the gradients of the micro-step are there."""
        return self.state in (*_RUN, State.STEPPED)
