"""The members of the job's own etcd, as this agent keeps them: a thread beside its loop.

An agent that runs a member looks once a second whether the members are as they should be
(`members.decide`), and makes the change that is due while it holds a lock in the store. One that
runs none waits to be invited: then it adds a learner and runs it. All follow the endpoints. A store
that does not answer changes nothing here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zero_agent.etcd import signs
from zero_agent.etcd.etcd_access import Access
from zero_agent.etcd.etcd_process import is_healthy
from zero_agent.etcd.new_store import Estate, Successor, estate_of
from zero_agent.etcd.own_etcd import Seat
from zero_contract.decoding import decode, encode
from zero_contract.errors import ZeroError
from zero_orchestrator.errors import (
    SpecError,
    SpecMismatch,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe.ended import keep
from zero_orchestrator.store.kv import Delete, KeyValue, Put, Read, Watch, absent, unchanged
from zero_orchestrator.store.members import START_S, Change, Member, Place, Step, View, decide
from zero_orchestrator.store.succession import BEAT_S

if TYPE_CHECKING:  # its import begins gRPC's log, see `etcd_access`
    from zero_orchestrator.store.etcd.client import EtcdStore

log = logging.getLogger("zero")

LOOK_S = 1.0
"""Interval at which an agent with a member looks."""
LOOK_PER_NODE_S = 0.005
"""The same for each node of the job: it reads all of them."""
REST_S = 15.0
"""Interval at which an agent without a member looks, if the watch tells it nothing."""
LOCK_S = 15
"""The lock of an agent that dies in the middle of a change ends after so long."""
HAND_OVER_S = 20.0
"""The longest time that a node which leaves waits until another one has its member's place."""
SEE_OFF_S = 15.0
LAST_WORD_S = 6.0
"""An election takes less; after that the store has ended with the other nodes."""
END_S = 10.0
"""How long a closed keeper's last turn may take: with the store, and then again without it."""
_POLL_S = 0.05
_CRASHES = 5
"""A server that has ended more often than this, or does not serve for so long, is given up."""
_HUNG_S = 20.0
SOUND_S = 60.0
"""A server that has run for so long has not crashed in a row."""


class MemberKeeper:
    """Keeps this agent's member, and with the others the members of the store."""

    def __init__(self, seat: Seat, store: EtcdStore, node: str) -> None:
        """Nothing happens before `serve`; then its thread owns the server of the seat.

        The store belongs to the keeper, which closes it.
        """
        self._seat = seat
        self._store = store
        self._node = node
        self._keys = Keys("")
        self._host = self._address = ""
        self._tell: Callable[[str], None] = log.info
        self._wake = threading.Event()
        self._closed = False
        self._gone: dict[int, float] = {}
        self._invited: tuple[int, float] = (0, 0.0)
        """The revision of the last invitation, and when it was first seen."""
        self._view = View(members=(), nodes=(), gone_s={})
        self._looked_s = 0.0
        """When that was read, by the monotonic clock."""
        self._crashes = 0
        self._began_s = self._sound_s = time.monotonic()
        """When the server was started, and when it was healthy last."""
        self._asked_s: float | None = None
        self._said = ""
        self._watches: list[Watch] = []
        self._estate: Estate | None = None
        self._replaced = ""
        self._thread = threading.Thread(target=self._run, name="members", daemon=True)
        self._ending = threading.Event()
        self._signs = threading.Thread(target=self._look_beside, name="signs", daemon=True)

    def serve(self, job: str, host: str, address: str, tell: Callable[[str], None]) -> None:
        """From now on keep the members for this job.

        This node listens on `address`, and others reach it by `host`. `tell` records what was done,
        and why, on the keeper's thread.
        """
        self._watch_nothing()
        self._keys, self._tell = Keys(job), tell
        self._host, self._address = host, address
        self._estate = None  # of the run before this one
        for prefix in (self._keys.store_part(""), self._keys.charges, self._keys.latest):
            self._watches.append(
                self._store.watch(
                    prefix,
                    lambda changes, prefix=prefix: self._hear(prefix),  # type: ignore[misc]
                    after=0,
                    # Changes are lost then: a look finds what they have led to.
                    on_compacted=lambda revision: self._wake.set(),
                )
            )
        if self._thread.ident is None:
            self._thread.start()
            self._signs.start()
        if self._seat.news:
            tell(self._seat.news)
            self._seat.news = ""
        self._wake.set()

    @property
    def job(self) -> str:
        """The job that it serves."""
        return self._keys.job

    def replaced(self) -> str:
        """Why this store is no longer the job's; empty: it is."""
        return self._replaced

    def go_on(self, access: Access, *, begins: bool) -> str:
        """The endpoints of the store with which the job goes on, after `close`.

        `begins`: this node may begin that store itself.

        Raises:
            StoreError, SpecError: As `Successor.go_on`.
        """
        return Successor(
            seat=self._seat,
            access=access,
            keys=self._keys,
            estate=self._estate if begins else None,
            node=self._node,
            host=self._host,
            address=self._address,
            say=lambda text: log.warning("%s", text),
        ).go_on()

    def holds(self) -> str:
        """Why this node, which is told to leave, has to stay a moment; empty: it can go."""
        if self._seat.member is None:
            return ""
        now_s = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now_s
            self._wake.set()
        fresh = self._looked_s > self._asked_s  # a node may have come just before
        others = any(each.node != self._node for each in self._view.staying)
        if now_s - self._asked_s > HAND_OVER_S or (fresh and not others):
            return ""
        return "another node is taking over its member of the store"

    def see_off(self, ended: bool) -> None:
        """Serve the others, up to `SEE_OFF_S`, until they have read the end, or need it no more.

        `ended`: the job is over, rather than this node's part in it.
        """
        self._seat.ended = ended
        heard_s = began_s = time.monotonic()
        # The store ends with the job: how that ended is kept on this machine.
        if self._seat.is_first or self._seat.member is not None:
            with contextlib.suppress(ZeroError):
                keep(self._store, self._keys.job)
        while self._seat.member is not None and time.monotonic() - began_s < SEE_OFF_S:
            with contextlib.suppress(StoreError):
                if not self._store.range(self._keys.nodes, limit=1).items:
                    self._seat.ended = True  # nobody is left who needs the data
                    return
                heard_s = time.monotonic()
            if time.monotonic() - heard_s > LAST_WORD_S:
                return  # the others have gone
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the thread, and with it the member."""
        self._closed = True
        self._ending.set()
        self._watch_nothing()
        self._wake.set()
        started = self._thread.ident is not None
        if started:
            self._thread.join(END_S)
        self._store.close()
        # Its last turn may have several calls that nobody answers, and these end now. When it ends
        # it stops the server of the seat, which must not be one that has begun since.
        if started:
            self._thread.join(END_S)

    def _hear(self, prefix: str) -> None:
        """Look at once."""
        # Publications may be many, and only the first is waited for: there is an estate from then
        # on.
        if prefix != self._keys.latest or self._estate is None:
            self._wake.set()

    def _watch_nothing(self) -> None:
        while self._watches:
            self._watches.pop().cancel()

    # ---- the thread ----

    def _run(self) -> None:
        while not self._closed:
            wait_s = REST_S
            try:
                wait_s = self._turn()
            except StoreError as error:
                self._say(f"the members of the store are not looked after: {error}")
                wait_s = LOOK_S
            except Exception:  # the store must not be left without a keeper
                log.exception("zero-agent: internal error in the keeper of the store's members")
                wait_s = REST_S
            self._wake.wait(wait_s)
            self._wake.clear()
        # On this thread, which has started the server: the kernel ties the one to the other.
        self._seat.stop()

    def _turn(self) -> float:
        """Do what is due; returns the seconds until the next look."""
        with contextlib.suppress(StoreUnavailable):
            found = estate_of(self._store, self._keys, self._estate)
            # What a new store would need; one that has followed this one is not asked for it.
            if found is not None and (self._estate is None or self._estate.store == found.store):
                self._estate = found
                self._seat.note(found.store, found.published.root)
        if self._seat.member is None:
            members, invited = self._store.read(
                [Read(self._keys.store_part("members")), Read(self._keys.store_part("invited"))]
            )
            for item in members.items:
                self._follow(_endpoints(item))
            if any(item.value == self._node for item in invited.items):
                self._begin(invited.items[0])
                return LOOK_S
            return REST_S
        self._tend()
        view = self._look()
        change, reason = decide(view)
        self._say(reason)
        look_s = LOOK_S + LOOK_PER_NODE_S * len(view.nodes)
        if change is None:
            return look_s
        # One agent at a time makes a change; the lock of one that dies ends by itself.
        lock, lease = self._keys.store_part("change"), self._store.grant(LOCK_S)
        try:
            if self._store.txn([absent(lock)], [Put(lock, self._node, lease)]).succeeded:
                change, reason = decide(self._look())  # once more: another one was made meanwhile
                if change is not None and _CHANGES[change.step](self, change):
                    self._tell(reason)
        finally:
            self._store.revoke(lease)
        return look_s

    def _look_beside(self) -> None:
        """Show beside the checkpoints that the store lives, and look there for one in its place."""
        # On a thread of its own, which may hang as long as a file server does.
        while not self._ending.wait(BEAT_S if self._seat.member is not None else REST_S):
            store, root = self._seat.store, self._seat.root
            if not root or "://" in root:
                continue
            if (heir := signs.newest_heir(root, store)) is not None:
                self._replaced = f"node {heir.node} has begun a new store, at {heir.endpoint}"
                return
            if self._leads():
                signs.show_life(root, store, self._view.endpoints)

    def _leads(self) -> bool:
        """Whether this node's member is the first of those that live."""
        # One of them shows it, not all, and only after a look that had a quorum a moment ago: a
        # member that is cut off must not.
        alive = [one.node for one in self._view.voters if one.id not in self._view.gone_s]
        fresh = time.monotonic() - self._looked_s < 2 * BEAT_S
        return fresh and alive[:1] == [self._node]

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            log.debug("%s", reason)

    # ---- this agent's member ----

    def _follow(self, endpoints: tuple[str, ...]) -> None:
        """Send this agent's calls to these members from now on."""
        if endpoints and endpoints != self._store.endpoints.known:
            self._store.endpoints.become(endpoints)
            self._seat.learn(endpoints)

    def _begin(self, invitation: KeyValue) -> None:
        """Run a learner, as was asked; if that fails, say so: another node is asked."""
        mine = unchanged(invitation.key, invitation.mod_revision)
        try:
            self._seat.join(self._node, self._host, self._address, self._add)
        except StoreRefused:  # etcd waits until all voters have been connected for 5 s
            self._seat.wipe()
            self._ending.wait(LOOK_S)  # the write wakes this thread, which asks again at once
            self._store.txn([mine], [Put(invitation.key, self._node)])
        except (SpecError, OSError) as error:
            self._seat.wipe()
            self._unable(str(error))
        else:
            self._crashes = 0
            self._began_s = self._sound_s = time.monotonic()
            self._tell(f"node {self._node} runs a member of the store, without a vote yet")
            self._store.txn([mine], [Delete(invitation.key)])

    def _add(self, peer: str) -> str:
        members = self._store.cluster.add_learner(peer)
        others = (one for one in members if one.peer != peer)
        return ",".join(f"m{one.id:x}={one.peer}" for one in others)

    def _unable(self, why: str) -> None:
        self._store.put(self._keys.store_part("unable", self._node), encode(why))
        self._tell(f"node {self._node} can run no member of the store: {why}")

    def _tend(self) -> None:
        """Start the server again if it has ended or hangs; forget it if it was removed."""
        process, member = self._seat.process, self._seat.member
        assert process is not None
        assert member is not None
        now_s = time.monotonic()
        if process.running and is_healthy(member.endpoint, member.tls):
            self._sound_s = now_s
            if now_s - self._began_s > SOUND_S:
                self._crashes = 0
            return
        if process.running and now_s - self._sound_s < _HUNG_S:
            return
        # Slurm and systemd signal every process of a job, all servers too. Without a quorum nobody
        # can say whether this one was removed: it is started again, and finds out itself.
        with contextlib.suppress(StoreUnavailable):
            if member.peer_url not in {one.peer for one in self._store.cluster.members()}:
                self._seat.wipe()  # etcd refuses to start with the data of a removed member
                self._tell(f"node {self._node} runs no member of the store any more")
                return
        self._crashes += 1
        # Another node gets its place; meanwhile it is started again all the same.
        if self._crashes > _CRASHES:
            # Nobody can be told as long as the store needs this very member for its quorum.
            with contextlib.suppress(StoreUnavailable):
                self._unable(f"its server has ended {self._crashes} times")
        self._seat.stop()
        try:
            self._seat.resume()
        except OSError as error:
            # A disk that is full ends a server, and may have no room for the next one either. The
            # seat keeps the one that has ended, so the next look tries again.
            self._seat.process = process
            log.warning("the server of the store cannot be started again: %s", error.strerror)
        self._began_s = self._sound_s = time.monotonic()

    # ---- all members ----

    def _look(self) -> View:
        """The members and the nodes as they are now. Raises StoreError."""
        members, now_s = self._store.cluster.members(), time.monotonic()
        found, own = self._store.read(
            [Read(self._keys.nodes, prefix=True), Read(self._keys.store_part(""), prefix=True)]
        )
        keys = {item.key: item for item in own.items}
        arrived = sorted(found.items, key=lambda item: item.create_revision)
        nodes = tuple(
            Place(
                node=node.id,
                machine=node.machine,
                leaving=node.draining,
                unable=self._keys.store_part("unable", node.id) in keys,
            )
            for node in (Node.from_json(item.value) for item in arrived)
        )
        invited = keys.get(self._keys.store_part("invited"))
        announced = keys.get(self._keys.store_part("members"))
        self._view = View(
            members=members,
            nodes=nodes,
            gone_s=self._gone_s(members, {each.node for each in nodes}, now_s),
            invited=invited.value if invited else "",
            announced=_endpoints(announced) if announced else (),
        )
        self._looked_s = now_s
        self._follow(self._view.announced)
        if invited is not None and self._invited[0] != invited.mod_revision:
            self._invited = (invited.mod_revision, now_s)
        elif invited is not None and now_s - self._invited[1] > START_S:
            # Another node is invited. Only if the invitation still is this one: the node may just
            # have begun.
            late = Put(self._keys.store_part("unable", invited.value), encode("it did not begin"))
            same = unchanged(invited.key, invited.mod_revision)
            self._store.txn([same], [Delete(invited.key), late])
        return self._view

    def _gone_s(
        self, members: tuple[Member, ...], live: set[str], now_s: float
    ) -> dict[int, float]:
        gone = [one.id for one in members if one.node not in live]
        self._gone = {each: self._gone.get(each, now_s) for each in gone}
        return {each: now_s - since_s for each, since_s in self._gone.items()}

    def _announce(self, change: Change) -> bool:
        endpoints = self._view.endpoints
        self._store.put(self._keys.store_part("members"), encode(list(endpoints)))
        self._follow(endpoints)
        return True

    def _invite(self, change: Change) -> bool:
        self._store.put(self._keys.store_part("invited"), change.node)
        return False  # it says itself when it has begun

    def _promote(self, change: Change) -> bool:
        assert change.member is not None
        with contextlib.suppress(StoreRefused):  # it has not all data yet
            self._store.cluster.promote(change.member)
            return True
        return False

    def _remove(self, change: Change) -> bool:
        assert change.member is not None
        self._store.cluster.remove(change.member)
        return True


_CHANGES: dict[Step, Callable[[MemberKeeper, Change], bool]] = {
    Step.ANNOUNCE: MemberKeeper._announce,
    Step.INVITE: MemberKeeper._invite,
    Step.PROMOTE: MemberKeeper._promote,
    Step.REMOVE: MemberKeeper._remove,
}
"""What each step is; it returns whether that is worth an event."""


def _endpoints(item: KeyValue) -> tuple[str, ...]:
    return tuple(decode(list[str], item.value, "the endpoints in etcd are damaged", SpecMismatch))
