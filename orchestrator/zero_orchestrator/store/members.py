"""Who has a member of the job's own store, and what changes next, with the reason.

The agents of a job run the members: one in a job of one or two machines, three from three machines
on, five from five. `decide` is a pure function of what one agent sees; the agents that have a
member call it, and one of them at a time carries the change out (`zero_agent.etcd.own_members`):
each quorum has a voter in common with the next, so two halves never both go on. No change leaves
fewer voters alive than a quorum.

Source of the ideas: D. Ongaro, "Consensus: Bridging Theory and Practice", chapter 4; the learners
of etcd 3.4 (https://etcd.io/docs/v3.5/learning/design-learner/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

PATIENCE_S = 5.0
"""A member is replaced when its node has been out of the job for so long: an agent that crashes is
started again meanwhile, and serves its data again."""
START_S = 30.0
"""The time in which an invited node begins its member."""


class Step(StrEnum):
    """A kind of change of the members."""

    ANNOUNCE = "announce"
    """Write for all agents where the voters are."""
    INVITE = "invite"
    """Ask a node to add a learner, and to run it."""
    PROMOTE = "promote"
    """Give a learner its vote; etcd refuses until it has all data."""
    REMOVE = "remove"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member as etcd lists it."""

    id: int
    node: str
    """The node whose agent runs it; empty: it has not started yet."""
    is_learner: bool = False
    endpoint: str = ""
    """`HOST:PORT` for clients; empty: it has not started yet."""
    peer: str = ""
    """Its URL for the other members."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A live node of the job."""

    node: str
    machine: str
    leaving: bool = False
    unable: bool = False
    """It could not run a member."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the members."""

    step: Step
    member: Member | None = None
    """Which one is promoted or removed."""
    node: str = ""
    """The node that is invited."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The members and the nodes as one agent sees them."""

    members: tuple[Member, ...]
    nodes: tuple[Place, ...]
    """In order of arrival."""
    gone_s: Mapping[int, float]
    """The id of a member -> for how long its node has not been in the job, or, of a learner
    without a node, for how long it has not started; those of live nodes are left out."""
    invited: str = ""
    """The node that was invited last."""
    announced: tuple[str, ...] = ()
    """The endpoints that all agents have been told."""

    @cached_property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints that serve clients: a learner does not."""
        return tuple(sorted(one.endpoint for one in self.voters if one.endpoint))

    @cached_property
    def voters(self) -> tuple[Member, ...]:
        """The members with a vote."""
        return tuple(one for one in self.members if not one.is_learner)

    @cached_property
    def alive(self) -> int:
        """The number of voters that have a live node."""
        return sum(one.id not in self.gone_s for one in self.voters)

    @cached_property
    def staying(self) -> tuple[Place, ...]:
        """One node of each machine that can have a member, in order of arrival.

        It is the one that has a member already; else the one that came first.
        """
        fit = [each for each in self.nodes if not (each.leaving or each.unable)]
        of_members = {one.node for one in self.members}
        fit.sort(key=lambda each: each.node not in of_members)  # stable
        first = {each.machine: each for each in reversed(fit)}  # the first one is written last
        return tuple(each for each in self.nodes if first.get(each.machine) == each)

    @cached_property
    def firm(self) -> tuple[Member, ...]:
        """The voters that may stay, the one of the node that came last at the end."""
        order = {each.node: index for index, each in enumerate(self.staying)}
        found = [one for one in self.voters if one.node in order]
        return tuple(sorted(found, key=lambda one: order[one.node]))

    @property
    def wanted(self) -> int:
        """The number of voters that these nodes should have."""
        return wanted(len(self.staying))

    def may_lose(self, voter: Member) -> bool:
        """Whether a quorum of the others lives when a voter is removed."""
        # A lease tells late that a node is lost, or is back: etcd checks the same once more, by its
        # connections (--strict-reconfig-check).
        others = self.alive - (voter.id not in self.gone_s)
        return len(self.voters) > 1 and others >= quorum(len(self.voters) - 1)


def quorum(voters: int) -> int:
    """The number of voters that must agree, of so many."""
    return voters // 2 + 1


def wanted(machines: int) -> int:
    """The number of voters for a job of so many machines: an even one survives no more losses."""
    return 5 if machines >= 5 else 3 if machines >= 3 else min(machines, 1)


Decision = tuple[Change | None, str]


def decide(view: View) -> Decision:
    """The next change of the members, or None, and the reason."""
    if not view.staying:
        return None, "every node leaves: the members stay until the end"
    for rule in _RULES:
        if (found := rule(view)) is not None:
            return found
    return None, f"{len(view.voters)} of {view.wanted} voters, {view.alive} of them alive"


def _announce(view: View) -> Decision | None:
    if view.endpoints == view.announced or not view.endpoints:
        return None
    return Change(step=Step.ANNOUNCE), f"the store is at {', '.join(view.endpoints)} now"


def _drop_learner(view: View) -> Decision | None:
    """Remove a learner that gets no vote."""
    for one in view.members:
        if not one.is_learner:
            continue
        # At any time, since no quorum counts on it. One without a node has not started yet.
        limit_s = PATIENCE_S if one.node else START_S
        if view.gone_s.get(one.id, 0.0) > limit_s:
            return _remove(one, f"{_whose(one)} has not caught up, and is gone")
        if one.node and one.id not in view.gone_s and not _stays(view, one):
            return _remove(one, f"{_whose(one)} leaves before it has a vote")
        if len(view.firm) >= view.wanted:
            return _remove(one, f"{_whose(one)} is not needed any more")
    return None


def _drop_dead(view: View) -> Decision | None:
    """Remove a voter whose node is lost, or wait while there is one: no other change is made."""
    gone = [one for one in view.voters if one.id in view.gone_s]
    # A quorum of fewer voters needs no more of the living.
    for one in gone:
        if view.gone_s[one.id] > PATIENCE_S and view.may_lose(one):
            return _remove(one, f"node {one.node} is lost, {view.alive} voters are alive")
    if not gone:
        return None
    # The first may come back at once. If it is late, too few are alive for any change.
    late = view.gone_s[gone[0].id] > PATIENCE_S
    hope = f"is lost, and only {view.alive} voters are alive" if late else "may come back"
    return None, f"node {gone[0].node} {hope}"


def _promote(view: View) -> Decision | None:
    for one in view.members:
        if one.is_learner and one.node and one.id not in view.gone_s:
            return Change(step=Step.PROMOTE, member=one), f"{_whose(one)} has caught up"
    return None


def _invite(view: View) -> Decision | None:
    if len(view.firm) >= view.wanted:
        return None
    # One at a time: without a flag of its own etcd takes no second learner.
    if any(one.is_learner for one in view.members):
        return None, "a learner is starting"
    taken = {one.node for one in view.members}
    free = next((each for each in view.staying if each.node not in taken), None)
    if free is None:
        return None
    if free.node == view.invited:
        return None, f"node {free.node} is to begin a member"
    why = f"node {free.node} is to begin a member: {len(view.firm)} of {view.wanted} voters stay"
    return Change(step=Step.INVITE, node=free.node), why


def _shrink(view: View) -> Decision | None:
    """Remove the voter of a live node that leaves, or the newest of too many."""
    # Who leaves has been replaced by now, if anybody can: `_invite` comes before. And no voter is
    # gone: `_drop_dead` comes before as well.
    for one in view.voters:
        if not _stays(view, one) and view.may_lose(one):
            return _remove(one, f"node {one.node} leaves, and {len(view.firm)} voters stay")
    # An even number survives no more losses than one less: of two, either one's stops the store.
    if len(view.firm) <= view.wanted or not view.may_lose(view.firm[-1]):
        return None
    one = view.firm[-1]
    count = len(view.staying)
    return _remove(one, f"{view.wanted} voters are enough for {count} machines, not {one.node}'s")


# Dead voters go before anybody gets a vote, and living ones after it: in this order the store
# survives the most further losses at every moment.
_RULES: tuple[Callable[[View], Decision | None], ...] = (
    _announce,
    _drop_learner,
    _drop_dead,
    _promote,
    _invite,
    _shrink,
)
"""The first rule that has something to do, or to wait for, decides."""


def _stays(view: View, member: Member) -> bool:
    return any(each.node == member.node for each in view.staying)


def _remove(member: Member, why: str) -> Decision:
    return Change(step=Step.REMOVE, member=member), why


def _whose(member: Member) -> str:
    return f"the learner of node {member.node}" if member.node else "a learner"
