"""The name of a checkpoint, which is rank 0's.

Ranks with another name are logged, or the save is refused before anything is written, see
checkpoint.tag_validation: DeepSpeed's key, whose tutorials name them after a rank's own loss.
"""

from __future__ import annotations

import hashlib
import logging

import torch

from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.options import FAIL, IGNORE
from zero_comm.exchange.collectives import Collectives

_log = logging.getLogger(__name__)


class TagsDiffer(CheckpointError, AssertionError):
    """Ranks gave a checkpoint different names, which DeepSpeed asserts."""


def text_of(tag: object) -> str | None:
    """The name that a script has given, as text; None without one.

    DeepSpeed takes the text of anything, and its tutorials give a loss.
    """
    return None if tag in (None, "") else str(tag)


def agree_on_tag(tag: str | None, mode: str, collectives: Collectives) -> None:
    """Compare the names that the script gave on the ranks. Collective, if it gave one.

    Raises:
        TagsDiffer: They differ, and `mode` is FAIL; on every rank.
    """
    if tag is None or mode == IGNORE or collectives.world == 1:
        return
    # Python's own hash of a text is another one in each process.
    own = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:8], "big", signed=True)
    digest = torch.tensor([own], device="cpu")
    digests = collectives.everybodys(digest, "the name of a checkpoint").flatten()
    others = [rank for rank, digest in enumerate(digests.tolist()) if digest != digests[0]]
    if not others:
        return
    what = (
        f"save_checkpoint(tag={tag!r}): rank{'s' if len(others) > 1 else ''} "
        f"{', '.join(map(str, others))} gave another name than rank 0; name it after a value that "
        "is equal on all ranks, such as engine.global_steps or engine.mean_loss"
    )
    if mode == FAIL:
        raise TagsDiffer(what)
    if collectives.rank == 0:
        _log.warning("%s: rank 0's name is used", what)
