"""The number of exchanges of each kind, their bytes, and how long this rank has waited for them.

They count the engine's exchanges, and not a script's calls of torch.distributed. Source of the
idea: DeepSpeed's comms logger.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from zero_contract.errors import ConfigError

_log = logging.getLogger(__name__)


OPERATIONS = ("gradients", "gather", "pieces", "broadcast", "reduce")
"""The kinds of exchange: gradients to the owners of their sums; shards, norms and notes to all
ranks; pieces of sums and of whole parameters to one rank, and these back; tensors of one rank to
all; sums by the backend itself."""


@dataclass(frozen=True, kw_only=True)
class CommsLogger:
    """Count the engine's exchanges, for `zero_deepspeed.comm.log_summary`."""

    enabled: bool = False
    """Whether exchanges are counted."""
    verbose: bool = False
    """Log a line for each exchange when it has ended."""
    debug: bool = False
    """Name in that line what was exchanged."""
    prof_all: bool = True
    """Count every kind of exchange."""
    prof_ops: tuple[str, ...] = ()
    """With `prof_all` false: count only these kinds: gradients, gather, pieces, broadcast,
    reduce."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.prof_ops if name not in OPERATIONS]
        if unknown and not self.prof_all:
            raise ConfigError(
                f"comms_logger.prof_ops: {unknown[0]!r} is not one of {', '.join(OPERATIONS)}"
            )


@dataclass(slots=True)
class Tally:
    """The exchanges of one kind and size."""

    count: int = 0
    waited_s: float = 0.0


class CommsLog:
    """The tallies of one process, by kind and by the bytes that this rank sends each time."""

    def __init__(self) -> None:
        self._settings = CommsLogger()
        self._tallies: defaultdict[tuple[str, int], Tally] = defaultdict(Tally)

    def configure(self, settings: CommsLogger) -> None:
        """Clear the tallies, and count as the config says from now on."""
        self._settings = settings
        self._tallies.clear()

    @contextmanager
    def waiting(self, operation: str, what: str, size_bytes: int) -> Iterator[None]:
        """Measure the wait for one exchange."""
        chosen = self._settings.prof_all or operation in self._settings.prof_ops
        if not (self._settings.enabled and chosen and operation):
            yield
            return
        # The wait, not the transfer: an exchange during a computation costs nothing.
        begun_s = perf_counter()
        yield
        waited_s = perf_counter() - begun_s
        tally = self._tallies[operation, size_bytes]
        tally.count += 1
        tally.waited_s += waited_s
        if self._settings.verbose:
            name = f" of {what}" if self._settings.debug else ""
            _log.info("%s%s: %d bytes, waited %.3f ms", operation, name, size_bytes, waited_s * 1e3)

    @property
    def waited_s(self) -> float:
        """The time that this rank has waited in all."""
        return sum(tally.waited_s for tally in self._tallies.values())

    def lines(self) -> list[str]:
        """The tallies as a table, largest exchanges first within each kind."""
        if not self._settings.enabled:
            return ['exchanges were not counted; set "comms_logger": {"enabled": true}']
        head = (
            f"{'exchange':<10} {'bytes sent':>12} {'count':>7} {'MB in all':>11} {'waited ms':>11}"
        )
        rows = [
            f"{operation:<10} {size:>12,} {tally.count:>7,} {size * tally.count / 1e6:>11.1f} "
            f"{tally.waited_s * 1e3:>11.1f}"
            for (operation, size), tally in sorted(
                self._tallies.items(), key=lambda item: (item[0][0], -item[0][1])
            )
        ]
        return [head, *rows]


LOG = CommsLog()
"""The log of this process."""
