"""Which nodes this one does not reach: looks at its links while its workers make no progress.

While the workers of a round have lost a peer, take no step, or have not met, this agent connects to
the agents of the other members (`node.ring`), and reports what it finds; the round machine decides
(`rounds`). Nothing is reported of workers that make progress, or do not say whether they do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from zero_agent.loop.node_workers import NodeWorkers, Post
from zero_agent.node.beside import beside
from zero_agent.node.ring import AnotherProcess, Ring
from zero_agent.node.state import LOST_PEER, Workers
from zero_contract.clock import Clock
from zero_contract.journal import Journal
from zero_orchestrator.membership.dead_links import DeadLink
from zero_orchestrator.membership.job_state import Node, Snapshot, State
from zero_orchestrator.membership.rendezvous import Rendezvous

log = logging.getLogger("zero")

TURNS = 3
"""Attempts of a look to reach a node, which overlap. A single one may fail for a moment's
congestion, and a dead link may cost a restart; a silent node has as long, in its lease."""
TURN_S = 1.0
"""From one attempt to the next, as a kernel sends its first packet again."""
LONGEST_LOOK_S = 60.0
"""Each attempt has a deadline of seconds; of one that has not ended by then nothing is known."""
REFUSALS = 2
"""So many attempts are enough if each has ended with an error."""
LOOKS = 2
"""A node that is set aside comes back when so many looks in a row have reached all others."""
PAUSE_S = 1.0
"""Between two looks; while they find nothing each pause is longer than the one before, up to:"""
LONGEST_PAUSE_S = 10.0
GROWTH = 1.5
MOST = 64
"""The members after this one, in rank order, that it looks at; a large job has thousands."""
EARLY = 0.2
"""The part of the time after which a step counts as missing, after which a node says that it
reaches all others: 3 s, or a usual long step. Few steps are to cost all nodes a write."""
MOST_PATIENT = 8
"""A node that is set aside again and again looks so many times as often before it comes back; it
looks twice as often after each time."""

Reach = Callable[[Sequence[Node]], Sequence[DeadLink]]
"""Connects to the agents of some nodes; those that cannot be reached."""


def verdict(ends: Sequence[str | None]) -> str | None:
    """Why a node is not reached; empty: it is; None: it is not known yet.

    Args:
        ends: Of each attempt, in order: why it has failed; empty: it has an answer; None: it lasts.
    """
    if "" in ends:
        return ""
    return None if None in ends or len(ends) < REFUSALS else ends[-1]


def reach_by(ring: Ring) -> Reach:
    """A `Reach` through this agent's ring: a look takes 3 s where nothing answers.

    Only attempts that have ended count, each with what the kernel had until then: a process that
    has stood still meanwhile takes nobody for dead.
    """

    def reach(nodes: Sequence[Node]) -> list[DeadLink]:
        ended = threading.Condition()
        # torchrun's agents with the plug-in have no ring: nothing can be said of them.
        ends: dict[Node, list[str | None]] = {node: [] for node in nodes if node.ring}

        def attempt(node: Node, turn: int) -> None:
            end = _attempt(ring, node, (TURNS - turn) * TURN_S)
            with ended:
                ends[node][turn] = end
                ended.notify_all()

        def known() -> bool:
            return all(verdict(each) is not None for each in ends.values())

        with ended:
            for turn in range(TURNS):
                for node in (one for one, each in ends.items() if verdict(each) is None):
                    ends[node].append(None)
                    threading.Thread(target=attempt, args=(node, turn), daemon=True).start()
                ended.wait_for(known, TURN_S)
            ended.wait_for(known, LONGEST_LOOK_S)
            return [
                DeadLink(to=node.id, why=why) for node, of in ends.items() if (why := verdict(of))
            ]

    return reach


def _attempt(ring: Ring, node: Node, within_s: float) -> str:
    """Connect to the agent of a node: why it cannot be reached; empty: it answers."""
    try:
        # Where its kernel accepts connections it has twice the time: on a loaded host, until its
        # lease has ended as well.
        ring.dial(node, within_s, 2 * within_s).close()
    except AnotherProcess:
        pass  # the node answers
    # Whatever the reason: the workers' connections take the same way.
    except ConnectionRefusedError:
        return f"{node.ring} refuses connections"
    except TimeoutError:
        return f"{node.ring} does not answer"
    except OSError as error:
        return f"{node.ring} cannot be reached ({error.strerror or error})"
    return ""


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
        self.dead: tuple[DeadLink, ...] | None = None
        """The dead links, as the last look has found; None: it is not known yet."""
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
        found = partial(self._post(self._found), self._number)
        # On a thread: a connection attempt takes seconds where packets are dropped.
        beside(lambda: self._reach(nodes), found, "links")

    def _found(self, number: int, dead: Sequence[DeadLink] | Exception) -> None:
        if number != self._number:  # a look at nodes of which nobody asks any more
            return
        self._looking = False
        if isinstance(dead, Exception):
            log.warning("the links to other nodes cannot be looked at: %s", dead)
            self._due_s = self._clock.now() + LONGEST_PAUSE_S
            return
        self.dead = tuple(sorted(dead, key=lambda link: link.to))
        self.in_a_row = 0 if dead else self.in_a_row + 1
        self._pause_s = PAUSE_S if dead else min(self._pause_s * self._growth, LONGEST_PAUSE_S)
        self._due_s = self._clock.now() + self._pause_s


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
        # That all is well, all nodes of a large job would write at each step that takes longer.
        part = EARLY if len(job.members.nodes) <= MOST else 1.0
        found = self._in_round.dead
        return found if found or lost or workers.steps.is_missing(part) else None

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
        if self._aside.in_a_row >= LOOKS * min(2 ** (self._times - 1), MOST_PATIENT):
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
