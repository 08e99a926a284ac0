"""A new store for a job whose own is lost for good: what it is made of, and how it is begun.

`succession.decide` says who does what; here is what is done. While the store answers, each agent
keeps the keys which a new store needs (`Estate`). After --etcd-grace without an answer it begins an
etcd of its own, fills it, and then creates the file that names it beside the checkpoints,
exclusively (`signs`). Whoever is second removes what it has begun, and goes to the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from zero_agent.etcd import signs
from zero_agent.etcd.etcd_access import Access
from zero_agent.etcd.own_etcd import Seat
from zero_contract.clock import wait_until
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.membership.failures import Exclusion
from zero_orchestrator.membership.job_state import ENDED, Head, Published, State
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.membership.moves import Move
from zero_orchestrator.membership.runs import run_key
from zero_orchestrator.store.kv import NO_LEASE, KeyValue, KeyValueStore, Put, Read, absent
from zero_orchestrator.store.succession import WATCH_S, Act, Heir, Seen, decide, next_round

HEIR_S = 30.0
"""A store that has not served for so long where its heir should be is lost as well."""
_MOST = 16
"""The most heirs that are waited for, one after the other."""
_PUTS = 64
"""etcd takes up to 128 in a transaction."""
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Estate:
    """What a new store of the job needs of the old one."""

    store: str
    """The id of the old one."""
    head: Head
    published: Published
    items: tuple[KeyValue, ...]
    """The keys that are carried over as they are."""
    members: str
    """The value of the key of the last round's members."""


def estate_of(store: KeyValueStore, keys: Keys, before: Estate | None) -> Estate | None:
    """Read it; None: nothing was published yet, or the job has ended. Raises StoreError."""
    run = run_key(keys.job.rpartition(".")[0])  # if the job is named after its command
    single = (keys.round, keys.latest, keys.spec, keys.secret, keys.stop, run)
    prefixes = (keys.charges, keys.excluded(""), keys.heir(""))
    course, latest, *others = store.read(
        [*map(Read, single), *(Read(each, prefix=True) for each in prefixes)]
    )
    if not course.items or not latest.items:
        return None
    head = Head.from_json(course.items[0].value)
    if head.state in ENDED:
        return None
    # The members of a round never change, and are long: they are read once in each.
    members = before.members if before is not None and before.head.n == head.n else ""
    if not members and (found := store.get(keys.of_round(head.n, "members"))) is not None:
        members = found.value
    return Estate(
        store=f"{course.cluster:x}",
        head=head,
        published=Published.from_json(latest.items[0].value),
        items=tuple(item for each in others for item in each.items),
        members=members,
    )


def fill(
    store: KeyValueStore,
    keys: Keys,
    estate: Estate,
    *,
    lost: Sequence[str],
    last_round: int,
    cause: str,
) -> None:
    """Write a job into an empty store, which follows the `lost` ones; its next round is to form.

    `cause` says for people why the job has a new store.

    Raises:
        StoreError: The store has not taken all of it.
    """
    puts = [Put(item.key, item.value, _lease(store, keys, item)) for item in estate.items]
    puts += [Put(keys.heir(each), cause) for each in lost]
    puts += [Put(keys.latest, estate.published.to_json())]
    puts += [Put(keys.of_round(last_round, "members"), estate.members)] if estate.members else []
    for first in range(0, len(puts), _PUTS):
        store.txn([], puts[first : first + _PUTS])
    # Last: with this key the job has begun, and agents would miss what is not there yet. FORM
    # charges no restart: an outage of the store costs none, and each new store takes --etcd-grace.
    head = Head(n=last_round, state=State.FORMING, cause=cause, by=Move.FORM, at=time.time())
    store.txn([absent(keys.round)], [Put(keys.round, head.to_json())])


def _lease(store: KeyValueStore, keys: Keys, item: KeyValue) -> int:
    """A lease for what ends by itself."""
    if not item.key.startswith(keys.excluded("")):
        return NO_LEASE
    # An exclusion begins again: how much of it is over, only the old store knew.
    for_s = Exclusion.from_json(item.value).for_s
    return store.grant(for_s) if for_s else NO_LEASE


@dataclass(frozen=True, kw_only=True)
class Successor:
    """A node whose store is lost, and goes on without it; on the main thread."""

    seat: Seat
    access: Access
    keys: Keys
    estate: Estate | None
    """None: it can only go where another node has begun a new store."""
    node: str
    host: str
    """By which other nodes reach this one."""
    address: str
    """On which this node listens."""
    say: Callable[[str], None]

    def go_on(self) -> str:
        """The endpoints of the store with which the job goes on; this node's, if it was first.

        Raises:
            StoreUnavailable: The job cannot go on from here; the message says why.
            StoreError, SpecError: This node cannot run an etcd.
        """
        lost = [self.seat.store]
        while len(lost) <= _MOST:
            seen = self._look(lost[-1])
            if seen.root and self.estate is None and seen.heir is None:
                raise StoreUnavailable("no other node has begun a new store")
            act, why = decide(seen)
            if act is Act.END:
                raise StoreUnavailable(f"no new store was begun: {why}")
            self.say(why)
            if (heir := seen.heir) is not None:
                if wait_until(partial(self.seat.is_served, heir.endpoint), HEIR_S, _POLL_S):
                    self.seat.wipe()
                    self.seat.follow(heir.endpoint, heir.store)
                    return heir.endpoint
                lost.append(heir.store)  # nobody serves it any more
            # "": another node was first, and the next look finds its file.
            elif found := self._begin(lost, seen, why):
                return found
        raise StoreUnavailable(
            f"no new store was begun: {_MOST} that followed one another are lost as well, says "
            f"{self.seat.root}. Start the agents again, under another --rdzv-id"
        )

    def _look(self, store: str) -> Seen:
        """Look beside the checkpoints, for a while in which a sign of life would come.

        Raises:
            StoreUnavailable: The file server does not answer.
        """
        root, estate = self.seat.root, self.estate
        seen = Seen(root=root)
        if estate is not None:
            seen = replace(seen, round=estate.head.n, step=estate.published.step)
        if not root or "://" in root:
            return seen
        try:
            return signs.within(WATCH_S + signs.HUNG_S, lambda: self._watch(store, seen))
        except TimeoutError as error:
            text = f"{root} cannot be read on this node: {error.strerror}"
            raise StoreUnavailable(f"no new store was begun: {text}") from error

    def _watch(self, store: str, seen: Seen) -> Seen:
        root = seen.root
        lives = signs.lives(root, store)
        newest = signs.newest(root) if self.estate is not None else None
        # An heir that comes after this look wins all the same: `_begin` finds its file.
        return replace(seen, newest=newest, lives=lives, heir=signs.heir_of(root, store))

    def _begin(self, lost: Sequence[str], seen: Seen, why: str) -> str:
        """Begin a store, fill it, and create the file; "" if another node was first."""
        assert self.estate is not None
        with self.seat.beginning_anew(self.node, self.host, self.address) as member:
            with replace(self.access, endpoints=member.endpoint).store() as store:
                new = f"{store.range(self.keys.prefix, limit=1).cluster:x}"
                cause = f"{why}; node {self.node} has begun a new store"
                last = next_round(seen)
                fill(store, self.keys, self.estate, lost=lost, last_round=last, cause=cause)
            # After `fill`: a store is whole when the file names it.
            heir = Heir(store=new, endpoint=member.reached, node=self.node)
            try:
                won = signs.within(signs.HUNG_S, lambda: signs.claim(seen.root, lost[-1], heir))
            except OSError as error:
                text = f"{seen.root} cannot be written on this node: {error.strerror}"
                raise StoreUnavailable(f"no new store was begun: {text}") from error
            if won:
                self.seat.follow(heir.endpoint, new)
                self.seat.news = cause
        return heir.endpoint if won else ""
