"""Which nodes this one does not reach: looks at its links while its workers make no progress.

While the workers of a round have lost a peer, take no step, or have not met, this agent connects to
the agents of the other members (`node.ring`), and reports what it finds; the round machine decides
(`rounds`). Nothing is reported of workers that make progress, or do not say whether they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zero_agent.loop.node_workers import NodeWorkers, Post
from zero_agent.node.ring import AnotherProcess, Ring
from zero_agent.node.state import LOST_PEER, Workers
from zero_contract.clock import Clock
from zero_contract.journal import Journal
from zero_orchestrator.membership.dead_links import DeadLink
from zero_orchestrator.membership.job_state import Node, Snapshot, State
from zero_orchestrator.membership.rendezvous import Rendezvous

PAUSE_S = 1.0
"""Between two looks; while they find nothing each pause is longer than the one before, up to:"""
LONGEST_PAUSE_S = 10.0
GROWTH = 1.5
MOST = 64
"""The members after this one, in rank order, that it looks at; a large job has thousands."""
# A single attempt may fail for a moment's congestion, and a dead link may cost a restart. Any of
# several that overlap is enough: of a slow cable the first answer may come last.
AGAIN_S = 0.75
"""Between two attempts to connect; none is given up as long as the look lasts."""
REFUSALS = 2
"""So many attempts are enough where all are refused, or fail at once."""
SILENT_S = 3.0
"""A look lasts so long where nothing comes back: as the lease of a silent node does."""
MUTE_S = 6.0
"""The same where the other kernel accepts connections and no agent answers: a loaded host."""
LOOKS_TO_RETURN = 2
"""A node that is set aside comes back when so many looks in a row have reached all others."""
MOST_PATIENT = 8
"""A node that is set aside again and again looks so many times as often before it comes back; it
looks twice as often after each time."""

Reach = Callable[[Sequence[Node]], Sequence[DeadLink]]
"""Connects to the agents of some nodes; those that cannot be reached."""


class _Attempts:
    """The attempts of one look to connect to one node."""

    def __init__(self, ring: Ring, node: Node, changed: threading.Event) -> None:
        self._ring, self.node, self._changed = ring, node, changed
        self.reached = self._connected = False
        self._begun = 0
        self._failed: list[str] = []
        """Of each attempt that has failed: why, if not for want of an answer."""

    def begin(self) -> None:
        """Try once more, on a thread of its own."""
        self._begun += 1
        threading.Thread(target=self._dial, daemon=True).start()

    def _dial(self) -> None:
        where = self.node.ring
        try:
            self._ring.dial(self.node, MUTE_S, self._on_connected).close()
            self.reached = True
        except AnotherProcess:
            self.reached = True  # the node answers
        # Whatever the reason: the workers' connections take the same way.
        except ConnectionRefusedError:
            self._failed.append(f"{where} refuses connections")
        except TimeoutError:
            self._failed.append("")
        except OSError as error:
            self._failed.append(f"{where} cannot be reached ({error.strerror or error})")
        self._changed.set()

    def _on_connected(self) -> None:
        self._connected = True

    def why_dead(self, after_s: float) -> str:
        """Why it is not reached, after this time; empty: it is, or may be yet."""
        refused = len(self._failed) == self._begun >= REFUSALS and all(self._failed)
        limit_s = MUTE_S if self._connected else 0.0 if refused else SILENT_S
        if self.reached or after_s < limit_s:
            return ""
        silent = (
            "accepts connections, and does not answer" if self._connected else "does not answer"
        )
        why = next((each for each in self._failed if each), "")
        return why or f"{self.node.ring} {silent}"


def reach_by(ring: Ring, clock: Clock) -> Reach:
    """A `Reach` through this agent's ring; it takes as long as the slowest of its connections."""

    def reach(nodes: Sequence[Node]) -> list[DeadLink]:
        changed, dead = threading.Event(), []
        left = [_Attempts(ring, node, changed) for node in nodes if node.ring]
        began_s = due_s = clock.now()
        while left:
            changed.clear()
            after_s = clock.now() - began_s
            found = [(each, each.why_dead(after_s)) for each in left]
            dead += [DeadLink(to=each.node.id, why=why) for each, why in found if why]
            left = [each for each, why in found if not (why or each.reached)]
            if left and clock.now() >= due_s:
                due_s += AGAIN_S
                for each in left:
                    each.begin()
            changed.wait(max(0.0, due_s - clock.now()) if left else 0.0)
        return dead

    return reach


class LinkWatch:
    """Looks at the links to some nodes, again and again, as long as it is asked to."""

    def __init__(self, clock: Clock, post: Post, reach: Reach, growth: float = 1.0) -> None:
        """Nothing is known of any link; `reach` is called on a thread of its own.

        The pause after a look that finds nothing is `growth` times the one before.
        """
        self._clock, self._post, self._reach, self._growth = clock, post, reach, growth
        self._number = 0
        """Grows with each `forget`: what a look finds that began before is dropped."""
        self.forget()

    def forget(self) -> None:
        """Stop looking."""
        self._number += 1
        self._nodes: tuple[Node, ...] = ()
        self._looking = False
        self._due_s = self._clock.now()
        self._pause_s = PAUSE_S
        self._dead: tuple[DeadLink, ...] | None = None
        self.in_a_row = 0
        """The number of last looks that have all reached all nodes."""

    def look(self, nodes: Sequence[Node]) -> None:
        """Look at the links to these nodes, unless that is under way; call it often."""
        if tuple(nodes) != self._nodes:
            self.forget()
            self._nodes = tuple(nodes)
        if self._looking or self._clock.now() < self._due_s:
            return
        self._looking = True
        found = self._post(self._found)
        number = self._number
        # On a thread: a connection attempt takes seconds where packets are dropped.
        threading.Thread(target=lambda: found(number, self._reach(nodes)), daemon=True).start()

    def _found(self, number: int, dead: Sequence[DeadLink]) -> None:
        if number != self._number:  # a look at nodes of which nobody asks any more
            return
        self._looking = False
        self._dead = tuple(sorted(dead, key=lambda link: link.to))
        self.in_a_row = 0 if dead else self.in_a_row + 1
        self._pause_s = PAUSE_S if dead else min(self._pause_s * self._growth, LONGEST_PAUSE_S)
        self._due_s = self._clock.now() + self._pause_s

    @property
    def dead(self) -> tuple[DeadLink, ...] | None:
        """The dead links, as the last look has found; None: it is not known yet."""
        return self._dead


class Links:
    """This node's links; used on the agent's thread alone."""

    def __init__(self, clock: Clock, journal: Journal, post: Post, reach: Reach) -> None:
        """As `LinkWatch`."""
        self._journal = journal
        self._in_round = LinkWatch(clock, post, reach, GROWTH)
        self._aside = LinkWatch(clock, post, reach)
        self._round = 0
        self._told: tuple[DeadLink, ...] | None = None
        """What was reported of this round."""
        self._times = 0
        """How often this node has been set aside."""
        self._is_aside = False

    def run(self, rdzv: Rendezvous, workers: NodeWorkers) -> None:
        """Look where it is due, and report what has changed; call it often.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        job, me = rdzv.snapshot, rdzv.node
        if job.n != self._round:
            self._round, self._told = job.n, None
            self._in_round.forget()
        found = self._look(job, me, workers)
        if found != self._told:
            rdzv.report_links(job.n, found)
            self._told = found  # after the write: one that fails is tried again
        self._come_back(rdzv)

    def _look(self, job: Snapshot, me: Node, workers: NodeWorkers) -> tuple[DeadLink, ...] | None:
        """The dead links to report; None: nothing."""
        if job.state is not State.ACTIVE or workers.group.round != job.n or not job.has_member(me):
            self._in_round.forget()
            return self._told  # nothing new, and nothing to withdraw
        lost, runs = workers.group.state in LOST_PEER, workers.group.state is Workers.RUNNING
        if not (lost or (runs and workers.steps.is_late)):
            self._in_round.forget()
            return None
        others = others_of(job, me)
        if not others:
            return ()
        self._in_round.look(others)
        found = self._in_round.dead
        # That all is well, nobody needs to know at each step that takes a little longer.
        return found if found or lost or job.links else None

    def _come_back(self, rdzv: Rendezvous) -> None:
        """Take part again, if this node is set aside and reaches the others."""
        job, me = rdzv.snapshot, rdzv.node
        mine = next((one for one in job.aside if one.node == me.id), None)
        if mine is None:
            if self._is_aside:
                self._is_aside = False
                self._journal.tell("aside", f"{me.id} takes part again", aside=False)
            self._aside.forget()
            return
        if not self._is_aside:
            self._is_aside, self._times = True, self._times + 1
            text = f"{mine}; it takes part again when it reaches the others"
            self._journal.tell("aside", text, others=list(mine.others), aside=True)
        # The node's registration of today, where it has come back since the round began.
        here = {node.id: node for node in (*job.members.nodes, *job.nodes)}
        self._aside.look([here[one] for one in sorted(here) if one != me.id][:MOST])
        # Each return is a new round: a link that comes and goes must not interrupt the others.
        if self._aside.in_a_row >= LOOKS_TO_RETURN * min(2 ** (self._times - 1), MOST_PATIENT):
            rdzv.come_back()

    def meeting(self, rank: int) -> str:
        """What keeps workers from their first step, if it is a link; else empty."""
        dead = self._in_round.dead
        if not dead:
            return ""
        return f"meeting the other ranks; rank {rank} cannot reach {dead[0].to}: {dead[0].why}"


def others_of(job: Snapshot, me: Node) -> list[Node]:
    """The members that a node looks at: those after it, in the order of ranks."""
    members, index = job.members.nodes, job.members.index(me) or 0
    return [*members[index + 1 :], *members[:index]][:MOST]
