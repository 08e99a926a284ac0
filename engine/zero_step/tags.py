"""What all ranks give a save: its options alike, and a name, which is rank 0's.

Ranks with another name are logged, or the save is refused before anything is written, see
checkpoint.tag_validation: DeepSpeed's key, whose tutorials name them after a rank's own loss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.options import FAIL, IGNORE
from zero_comm.exchange.collectives import Collectives
from zero_step.checks import alike

_log = logging.getLogger(__name__)

TAG, CLIENT_STATE, ASKS = "tag", "client_state", "checkpoint_due()"
"""What counts as it is on rank 0."""


class TagsDiffer(CheckpointError, AssertionError):
    """Ranks gave a checkpoint different names, which DeepSpeed asserts."""


def text_of(tag: object) -> str | None:
    """The name that a script has given, as text; None without one.

    DeepSpeed takes the text of anything, and its tutorials give a loss.
    """
    return None if tag in (None, "") else str(tag)


def agree_on_save(
    given: Mapping[str, Any], mode: str, collectives: Collectives, call: str
) -> Mapping[str, Any]:
    """What rank 0 is given for a save; `given` is what this rank is. Collective, named `call`.

    Raises:
        TagsDiffer: The names differ, and `mode` is FAIL; on every rank.
        ConfigError: Something differs that has to be alike; on every rank.
    """
    differing = alike.differences(given, collectives.everybodys, call)
    alike.refuse(each for each in differing if each[1] not in (TAG, CLIENT_STATE, ASKS))
    others = [rank for rank, name, _, _ in differing if name == TAG]
    if others and mode != IGNORE:
        what = (
            f"save_checkpoint(tag={given[TAG]!r}): rank{'s' if len(others) > 1 else ''} "
            f"{', '.join(map(str, others))} gave another name than rank 0; name it after a value "
            "that is equal on all ranks, such as engine.global_steps or engine.mean_loss"
        )
        if mode == FAIL:
            raise TagsDiffer(what)
        if collectives.rank == 0:
            _log.warning("%s: rank 0's name is used", what)
    return {**given, **{name: ours for _, name, ours, _ in differing}}
