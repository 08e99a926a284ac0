"""Consensus of ranks through a torch Store: votes and one verdict; never a collective.

A save runs beside training and may outlive its process group, so it must not use the group's
collectives. Each rank puts its vote under its own key, rank 0 judges all votes, and every rank
reads the one verdict: ranks cannot disagree.

Source of the idea: torchsnapshot's LinearBarrier on a store.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, NoReturn

from msgspec import Meta, Struct
from torch._C._distributed_c10d import HashStore, Store

from zero_checkpoint.errors import CheckpointError
from zero_contract.decoding import decode, inflate, parse
from zero_contract.errors import PeerLost
from zero_contract.signing import PROOF_BYTES, Key, sign, verify

_log = logging.getLogger(__name__)

COORDINATOR = 0
"""The rank that judges."""

Record = Mapping[str, Any]
"""A vote or a verdict: JSON, and `bytes` for values that are too long to be encoded as text."""
Judge = Callable[[list[Record]], Record]
"""From the votes in rank order to the verdict. Must not raise. Where no vote came in time, its
`problem` says so."""
NO_VOTE = "rank {} did not report in time: it has died or stalls"

_MOST_PARTS = 1 << 12
"""The most parts of one record: 16 GiB."""
_MOST_TEXT_BYTES = 256 << 20
"""The most JSON of one record: a few bytes that are compressed may stand for any number."""
_PART_BYTES = 4 << 20
"""A TCPStore refuses values of more than 8 MiB (libuv backend), so long ones go in parts."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_ANSWERED_S = 5.0
"""The time that rank 0 waits until all others have read a verdict; a dead rank never reads it."""


class _Envelope(Struct, array_like=True):
    """A record as it is in the store: without its `bytes` values, which follow in this order."""

    record: dict[str, Any]
    sizes: dict[str, Annotated[int, Meta(ge=0)]]


class StoreConsensus:
    """One rank's end of the votes; make one per process group, on a store with a unique prefix."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        timeout_s: float = 600,
        on_wait: Callable[[], None] | None = None,
        key: Key | None = None,
    ) -> None:
        """Join the votes of a group.

        Args:
            store: Shared by all ranks; wrap it in a PrefixStore of this group.
            rank: This rank, 0 <= rank < world.
            world: The number of ranks that vote.
            timeout_s: The time that rank 0 waits for all votes of one question. The others wait
                twice as long for its verdict, and as long again once rank 0 has their votes.
            on_wait: Called between looks at the store; may raise to leave a broken group, for
                example on a message of the agent.
            key: Signs the records of the ranks of this group. None if no agent has given them one.
        """
        self.rank = rank
        self.world = world
        self._store = store
        self._timeout_s = timeout_s
        self.on_wait = on_wait or (lambda: None)
        """Raises if the group is lost; may be replaced while a wait is under way."""
        self._key = key
        self._asked = 0
        self._refused: set[str] = set()
        self._published: list[str] = []
        """Keys that rank 0 has set and not deleted yet."""

    @classmethod
    def alone(cls) -> StoreConsensus:
        """The consensus of a process without a group: its vote is judged alone."""
        return cls(HashStore(), 0, 1)

    def ask(self, vote: Record, judge: Judge) -> Record:
        """Cast this rank's vote and return rank 0's verdict on all of them.

        Raises:
            CheckpointError: Rank 0 gave no verdict in time.
            PeerLost: The store, and so the rank or agent that hosts it, is gone.
        """
        question = self._next_question()
        if self.rank != COORDINATOR:
            names = self._put(f"{question}/{self.rank}", vote)
            return self._await_verdict(question, lambda: self._delete(names[:1]))
        others = {f"{question}/{rank}": rank for rank in range(self.world) if rank != COORDINATOR}
        keys = list(others)
        votes: dict[str, Record] = {}
        complete = self._await(partial(self._take_all, keys, votes), self._timeout_s)
        if not complete:  # late: take the votes that are there, one by one
            for key in keys:
                self._take_all([key], votes)
        silent = {key: {"problem": NO_VOTE.format(rank)} for key, rank in others.items()}
        return self._publish(question, judge([vote, *({**silent, **votes}[key] for key in keys)]))

    def announce(self, make: Callable[[], Record], *, voted_on: str | None = None) -> Record:
        """Return on every rank the record that `make` returns on rank 0. Raises as `ask`.

        `make` must not raise. `voted_on` is a key of records that all ranks vote on next: then rank
        0 need not wait until all of them have read the record.
        """
        question = self._next_question()
        if self.rank == COORDINATOR:
            record = make()
            return self._publish(question, record, waits=voted_on not in record)
        return self._await_verdict(question)

    def _next_question(self) -> str:
        # No key is used twice: all ranks make the same calls in the same order.
        self._asked += 1
        return f"consensus/{self._asked}"

    def _take_all(self, keys: list[str], votes: dict[str, Record]) -> bool:
        """Move the missing votes from the store once all are there; returns whether all came."""
        missing = [key for key in keys if key not in votes]
        if self._has(missing):
            for key in missing:
                with suppress(_Unsigned):  # a stranger's; the rank's own may still replace it
                    record, names = self._get(key)
                    if self._delete(names):  # or its rank has given up, and taken it back
                        votes[key] = record
        return all(key in votes for key in keys)

    def _publish(self, question: str, verdict: Record, *, waits: bool = True) -> Record:
        """Publish a verdict, and wait until all have read it: this process may host the store."""
        if self.world > 1:
            heard, count = f"{question}/heard", f"{question}/count"
            self._published += [*self._put(question, verdict), heard, count]
            limit_s = min(self._timeout_s, _ANSWERED_S)
            # A group that is lost now does not change the verdict.
            if waits and self._await(partial(self._has, [heard]), limit_s, to_the_end=True):
                # A rank that has read this verdict has read all before it.
                self._delete(self._published)
                self._published = []
        return verdict

    def _await_verdict(self, question: str, take_back: Callable[[], bool] = lambda: True) -> Record:
        """Rank 0's verdict; `take_back` withdraws this rank's vote, unless rank 0 has it."""
        # Rank 0 may wait for votes up to its own limit before it begins to judge.
        limit_s = 2 * self._timeout_s
        verdict: dict[str, Record] = {}

        def has_arrived() -> bool:
            if self._has([question]):
                # A stranger's; that of rank 0 may still replace it.
                with suppress(_Unsigned):
                    verdict[question], _ = self._get(question)
            return question in verdict

        # No verdict counts the vote of a rank that gives up. Once rank 0 has it, rank 0 judges.
        if not self._await(has_arrived, limit_s) and (
            take_back() or not self._await(has_arrived, limit_s)
        ):
            raise CheckpointError(
                f"rank {self.rank}: no verdict from rank {COORDINATOR} within {limit_s:g} s; "
                "it has died or its storage stalls; raise timeout_s if it is only slow"
            )
        with _store_errors():
            # The last one to read it says so: rank 0 waits for one key, and not for one of each.
            if self._store.add(f"{question}/count", 1) == self.world - 1:
                self._store.set(f"{question}/heard", "")
        return verdict[question]

    def _has(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        with _store_errors():
            return not keys or self._store.check(keys)

    def _await(
        self, arrived: Callable[[], bool], limit_s: float, *, to_the_end: bool = False
    ) -> bool:
        """Wait until `arrived` returns True; returns whether it did so before the limit."""
        # Not by the store's own `wait`: a TCPStore warns on stderr when one times out, and
        # `on_wait` could not raise meanwhile.
        begin = time.monotonic()
        while not arrived():
            waited_s = time.monotonic() - begin
            if waited_s >= limit_s:
                return False
            if not to_the_end:
                self.on_wait()
            # Quick answers are seen at once; a thousand ranks that wait long rarely ask the store.
            pause_s = min(max(_FIRST_PAUSE_S, waited_s / 20), _LONGEST_PAUSE_S)
            time.sleep(min(pause_s, limit_s - waited_s))
        return True

    def _put(self, key: str, record: Record) -> list[str]:
        """Store a record; returns the keys that it takes."""
        # The length of the compressed JSON, and the JSON; then each `bytes` value as it is.
        raw = {name: value for name, value in record.items() if isinstance(value, bytes)}
        others = {name: value for name, value in record.items() if name not in raw}
        sizes = {name: len(value) for name, value in raw.items()}
        text = zlib.compress(json.dumps([others, sizes]).encode(), level=1)
        packed = b"".join([b"%d " % len(text), text, *raw.values()])
        # With its name: a stranger can neither forge a record nor pass one off as another.
        proof = sign(self._key, key.encode(), packed) if self._key else b""  # of the name, too
        value = proof + packed
        parts = [value[i : i + _PART_BYTES] for i in range(0, len(value), _PART_BYTES)]
        names = _part_names(key, len(parts))
        # The first part is written last and holds the number of parts: a reader that sees it finds
        # the others.
        parts[0] = b"%d " % len(parts) + parts[0]
        with _store_errors():
            for name, part in reversed(list(zip(names, parts, strict=True))):
                self._store.set(name, part)  # type: ignore[arg-type]  # bytes, in truth
        return names

    def _get(self, key: str) -> tuple[Record, list[str]]:
        """A record that is there, and the keys that it takes. Raises _Unsigned."""
        with _store_errors():
            count, _, first = self._store.get(key).partition(b" ")
        names: list[str] = []
        # The signature is not checked yet: bound the digits of the number, and then its value.
        if count.isdigit() and len(count) <= len(str(_MOST_PARTS)):
            names = _part_names(key, int(count)) if 0 < int(count) <= _MOST_PARTS else []
        if not names or not self._has(names[1:]):
            self._refuse(key)
        with _store_errors():
            value = b"".join([first, *(self._store.get(name) for name in names[1:])])
        proof, packed = (value[:PROOF_BYTES], value[PROOF_BYTES:]) if self._key else (b"", value)
        if self._key and not verify(self._key, proof, key.encode(), packed):
            self._refuse(key)
        try:
            length, rest = packed.split(b" ", 1)
            at = int(length)
            text = parse(inflate(rest[:at], _MOST_TEXT_BYTES), wide=True)
            vote = decode(_Envelope, text, key)
        except (ValueError, RecursionError):  # without a key anybody may have written anything
            self._refuse(key)
        for name, size in vote.sizes.items():
            vote.record[name], at = rest[at : at + size], at + size
        return vote.record, names

    def _refuse(self, key: str) -> NoReturn:
        if key not in self._refused:
            self._refused.add(key)
            _log.warning(
                "rank %d: what is in the store as %s is no signed record of a rank of this job and "
                "is ignored: a stranger can reach the job's network, see SECURITY.md",
                self.rank,
                key,
            )
        # Counts as not there yet: the rank's own record may still come.
        raise _Unsigned(key)

    def _delete(self, keys: Iterable[str]) -> bool:
        """Delete keys; returns whether the first of them was there."""
        # A job saves for weeks into one rank's TCPStore, whose memory is freed by nothing else.
        with _store_errors():
            first, *_ = [self._store.delete_key(key) for key in keys]
        return first


class _Unsigned(Exception):
    """The record under a name in the store was not signed by a rank of this group."""


def _part_names(key: str, count: int) -> list[str]:
    return [key, *(f"{key}/part{number}" for number in range(1, count))]


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raise PeerLost for every error of a store: torch raises RuntimeErrors of many kinds."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the store that the ranks vote through is gone: {error}") from error
