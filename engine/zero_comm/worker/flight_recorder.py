"""The exchanges that torch issues by itself, from its flight recorder, as the agents compare them.

Those of `Collectives` are counted by themselves. Others, such as the gathers of FSDP2, are known to
torch alone: it keeps the last 2000, with the stack of each (TORCH_FR_BUFFER_SIZE).
"""

from __future__ import annotations

import logging
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

from torch._C import _distributed_c10d

from zero_contract.user_files import is_own

_log = logging.getLogger(__name__)

KEPT = 16
"""The number of the last collectives of each process group that are told."""
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
"""The functions that read the recorder of NCCL, and that of other backends."""


def recorded() -> list[dict[str, Any]]:
    """The last collectives of each group, oldest first; none if torch cannot tell."""
    entries: list[Mapping[str, Any]] = []
    for name in _DUMPS:
        dump: Callable[[], bytes] | None = getattr(_distributed_c10d, name, None)
        try:
            # Bytes that torch has just made in this process: no stranger's pickle.
            entries += pickle.loads(dump())["entries"] if dump is not None else []
        except Exception as error:  # another version of torch: the verdict has less to go by
            _log.debug("the flight recorder cannot be read: %r", error)
    return in_short(entries)


def in_short(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last `KEPT` entries of each group, as the agents compare them."""
    groups = defaultdict(list)
    for entry in entries:
        # The agents compare what all ranks of a group issue, so not what goes from one to one.
        if not entry["is_p2p"]:
            group = "/".join(entry["process_group"])
            groups[group].append(
                {
                    "group": group,
                    "number": entry["collective_seq_id"],
                    "name": entry["profiling_name"].rpartition(":")[2],
                    "sizes": str(entry["input_sizes"]),
                    "at": _place(entry["frames"]),
                    "ended": bool(entry["retired"] or entry["state"] == "completed"),
                }
            )
    return [one for found in groups.values() for one in found[-KEPT:]]


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost function that is the user's own."""
    own = (one for one in frames if is_own(one["filename"]))
    frame = next(own, None)
    if frame is None:
        return ""
    return f"{frame['name']} ({PurePath(frame['filename']).name}:{frame['line']})"
