"""A watch as tests use one: it remembers what it was told, and waits for more."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.waiting import wait_for
from zero_orchestrator.store.kv import Change, KeyValueStore

SOON_S = 150.0


class Seen:
    """Remembers the batches of one watch."""

    def __init__(self) -> None:
        self.batches: list[list[Change]] = []
        self.compacted: list[int] = []

    def __call__(self, changes: Sequence[Change]) -> None:
        self.batches.append(list(changes))

    @property
    def changes(self) -> list[Change]:
        return [change for batch in self.batches for change in batch]

    @property
    def values(self) -> list[str]:
        return [change.item.value for change in self.changes if change.item]

    def wait(self, count: int) -> list[Change]:
        """All changes, when there are so many."""
        wait_for(lambda: len(self.changes) >= count, SOON_S, f"{count} changes")
        return self.changes

    def wait_value(self, value: str) -> list[str]:
        """All values, when this one has come."""
        wait_for(lambda: value in self.values, SOON_S, f"the change to {value!r}")
        return self.values


def revision_of(store: KeyValueStore) -> int:
    """The present one: a watch after it sees what comes from now on."""
    return store.range("/").revision
