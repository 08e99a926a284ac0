"""How a worker leaves on a drain, a preemption or a join: with a save now, the next save, or none.

A pure function of what the script has done so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from zero_checkpoint.files.place import Place

ClientSource = Callable[[], Mapping[str, Any]]
"""Returns the current client_state of the script."""


@dataclass
class Script:
    """The calls of a script so far, for one training."""

    client_source: ClientSource | None = None
    """Its client_state, in checkpoints that it does not make itself."""
    places: set[Place] = field(default_factory=set)
    """Those that it has saved to, and the one that it has resumed from."""
    begins: Place | None = None
    """The first that it has resumed from; not what it has loaded a part of, or gone back to."""
    home: Place | None = None
    """That one, if this run saves there: nothing or its own was in it, or it has saved to it."""
    has_state: bool = False
    """Whether it has saved or loaded a client_state that is not empty."""
    has_saved: bool = False
    """Whether it has saved or loaded a checkpoint: before, nobody knows of a client_state."""
    asks: bool = False
    """Whether it calls `checkpoint_due()`, and saves when that returns True."""
    saved_step: int | None = None
    """The step of its last save where it leaves to; anywhere, where that is not known."""

    @property
    def leaves_to(self) -> Place | None:
        """Where a save goes that it does not make itself; None: not known, such as beside the best.

        A start finds it there, and nothing else is in its place.
        """
        (only,) = self.places if len(self.places) == 1 else (None,)
        return self.home or only

    def resumes(self, directory: Place, *, is_own: bool) -> None:
        """Note what it begins with; `is_own`: nothing is there, or this run has saved it."""
        self.places.add(directory)
        self.begins = self.begins or directory
        self.home = self.home or (directory if is_own else None)

    def saves(self, directory: Place) -> None:
        """Note a save."""
        self.places.add(directory)
        self.home = self.home or (directory if directory == self.begins else None)

    def client_state(self) -> Mapping[str, Any]:
        """The client_state of a checkpoint that it does not make itself."""
        return self.client_source() if self.client_source is not None else {}


class Departure(StrEnum):
    """Action of `engine.step()` at the first boundary at which all ranks know of the request."""

    SAVE_AND_LEAVE = "save and leave"
    AWAIT_SAVE = "leave after the script's next save"
    LEAVE = "leave without saving"


def choose_departure(
    *,
    directory_known: bool,
    script_has_state: bool,
    script_has_saved: bool,
    script_asks: bool,
    in_doubt: bool = False,
    engines: int = 1,
) -> tuple[Departure, str]:
    """How to leave, and why.

    Args:
        directory_known: The script has saved to or loaded from a checkpoint directory.
        script_has_state: The script has saved or loaded a client_state that is not empty, or runs a
            library's loop: only the script can make a complete checkpoint.
        script_has_saved: The script has saved or loaded a checkpoint.
        script_asks: The script calls `checkpoint_due()`, and saves when it returns True.
        in_doubt: It has saved to several directories, and resumed from none of them.
        engines: The number of engines that train in this process; the other arguments are True if
            they are True of any of them.
    """
    if script_has_state:
        return Departure.AWAIT_SAVE, (
            "its client_state is known to the script alone; registered with keep_client_state(), "
            "it is saved at once"
        )
    # Before its first save or load, nobody knows whether it has a client_state.
    if script_asks and not script_has_saved:
        return Departure.AWAIT_SAVE, "the script saves when checkpoint_due() says so"
    if in_doubt:
        return Departure.AWAIT_SAVE, "which of its directories the script loads, it alone knows"
    if directory_known and engines > 1:
        return Departure.AWAIT_SAVE, (
            f"there are {engines} trainings in this process, and only the script can save them at "
            "the same point of its loop"
        )
    if directory_known:
        return Departure.SAVE_AND_LEAVE, "the checkpoint directory is known"
    return Departure.LEAVE, (
        "nothing was saved, and nothing whole loaded, so no directory is known: the steps so far "
        "are lost"
    )
