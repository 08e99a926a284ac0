"""The verdicts about the ranks of a job: made by the agent of rank 0, from what the ranks measure.

A verdict is an event when it is made, and another one when it is withdrawn. While it holds,
`zero-ctl status` shows it. The cause of a slow rank is looked for in what its node has published.
When no rank takes a step, the agents of all nodes are asked which others they reach; if they reach
each other, where their workers are and what they wait for, as `zero-ctl stack` asks them.

Must always hold: a verdict changes nothing in the job, and no wait for it delays the agent; nothing
is said of what ranks wait for while a link between them is dead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zero_agent.loop.network_watch import NetworkWatch
from zero_contract.journal import Journal
from zero_contract.worker import RankTimes
from zero_orchestrator.errors import StoreError
from zero_orchestrator.membership.dead_links import Pair
from zero_orchestrator.membership.job_state import NOBODY, Node, Snapshot, link_in_words
from zero_orchestrator.observe.detectors.hang import RankState, judge, states
from zero_orchestrator.observe.detectors.slow_link import SlowLink
from zero_orchestrator.observe.detectors.slow_storage import Storage
from zero_orchestrator.observe.detectors.straggler import Straggler, Stragglers
from zero_orchestrator.observe.detectors.strain import cause
from zero_orchestrator.observe.events import Publisher
from zero_orchestrator.observe.links import rate_in_words
from zero_orchestrator.observe.queries import ask_once
from zero_orchestrator.observe.verdicts import Kind, Verdict
from zero_orchestrator.store.kv import KeyValueStore

log = logging.getLogger("zero")

Post = Callable[[Callable[..., None]], Callable[..., None]]
"""Wraps a handler so that it runs on the agent's thread."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the agents of all nodes answer when no rank takes a step."""

    dead: Mapping[Pair, str] = field(default_factory=dict)
    """The dead links between them, and what was found."""
    stacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The stacks and waits of their workers, by node; empty if a link is dead."""


Ask = Callable[[Sequence[str]], Evidence]
"""Asks the agents of some nodes."""
ASK_S = 8.0
"""How long their answers are waited for."""
AGAIN_S = 15.0
"""After this time they are asked again if their answers name no rank, and later whenever the time
since the last step has doubled: a question interrupts all workers, and etcd keeps its answers for
an hour."""
LISTEN_S = 5.0
"""The interval at which other agents read the verdicts of that of rank 0, while no step is taken.
"""


class Verdicts:
    """The verdicts of the round; used on the agent's thread alone."""

    def __init__(
        self, publisher: Publisher, journal: Journal, post: Post, ask: Ask, network: NetworkWatch
    ) -> None:
        """No verdict yet.

        Args:
            publisher: Writes the verdicts, and reads what other nodes have published.
            journal: Receives the events.
            post: Wraps handlers so that they run on the agent's thread.
            ask: Called on a thread of its own.
            network: Finds slow links; nobody else uses it.
        """
        self._ask = ask
        self._publisher = publisher
        self._journal = journal
        self._post = post
        self._round, self._members = 0, NOBODY
        self._lease = 0
        self._stragglers = Stragglers()
        self._asked: set[int] = set()
        """Slow ranks whose nodes are being asked for the cause."""
        self._slow: dict[int, Verdict] = {}
        self._storage = Storage()
        self._slow_storage: Verdict | None = None
        self._network = network
        self._network.on_change = self._judge_link
        self._slow_link: Verdict | None = None
        self._step = 0
        """The last step that rank 0 has reported."""
        self._stuck: Verdict | None = None
        self._heard: Verdict | None = None
        """The same on another node than that of rank 0, as far as it has been read."""
        self._asks_again_s: float | None = None
        """When the agents are asked where their workers are; None: steps are taken."""

    def follow(self, job: Snapshot, lease: int) -> None:
        """Forget the verdicts of a round that is over, and keep the key of the others alive."""
        (before, self._lease), holds = (self._lease, lease), bool(self._held)
        over = job.n != self._round
        if over:
            self._round, self._members = job.n, job.members
            self._stragglers, self._asked, self._slow = Stragglers(), set(), {}
            self._storage, self._slow_storage = Storage(), None
            self._slow_link, self._step = None, 0
            self._network.begin(job.n, [node.id for node in job.members.nodes])
            self._stuck = self._heard = self._asks_again_s = None
        if holds and (over or lease != before):
            self._write()

    def times(self, report: RankTimes) -> None:
        """Judge the times of all ranks, as rank 0 has reported them."""
        if len(report.compute_s) != self._members.world_size:
            return
        self._step = report.step
        self._judge_storage(report)
        self._network.times(report)
        self._stragglers = self._stragglers.add(report)
        found = {one.rank: one for one in self._stragglers.verdicts}
        self._asked &= found.keys()
        for rank in self._slow.keys() - found.keys():
            self._withdraw(rank, report.step)
        for rank in found.keys() - self._slow.keys() - self._asked:
            self._asked.add(rank)
            name = partial(self._post(self._name), found[rank], self._round)
            self._publisher.read_progress(name)

    def _name(self, straggler: Straggler, n: int, published: Mapping[str, Any]) -> None:
        """Make the verdict about a straggler of round n, given what all nodes have published."""
        rank = straggler.rank
        if n != self._round or rank not in self._asked:
            return  # meanwhile it was withdrawn
        self._asked.discard(rank)
        node = self._members.node_of(rank).id
        slow = {self._members.node_of(one.rank).id for one in self._stragglers.verdicts}
        strain = {name: of.get("strain") or {} for name, of in published.items()}
        others = [strain.get(one.id, {}) for one in self._members.nodes if one.id not in slow]
        why = cause(strain.get(node, {}), others)
        text = (
            f"rank {rank} on {node} computes {straggler.factor:.1f} x slower since step "
            f"{straggler.since_step:,}, and each step takes {straggler.lost_s:.2g} s longer"
        )
        text += f": {why}" if why else ""
        self._slow[rank] = Verdict(
            kind=Kind.STRAGGLER,
            text=text,
            rank=rank,
            node=node,
            since_step=straggler.since_step,
            factor=round(straggler.factor, 3),
        )
        self._journal.tell(
            "straggler",
            text,
            level=logging.WARNING,
            rank=rank,
            host=node,
            slow=True,
            factor=straggler.factor,
            since_step=straggler.since_step,
            lost_s=straggler.lost_s,
            cause=why,
        )
        self._write()

    def _withdraw(self, rank: int, step: int) -> None:
        node = self._slow.pop(rank).node
        text = f"rank {rank} on {node} computes as fast as the other ranks again, at step {step:,}"
        self._journal.tell("straggler", text, rank=rank, host=node, step=step, slow=False)
        self._write()

    def look(self, idle_s: float | None, step: int, *, warming_up: bool = False) -> None:
        """Find out who is waited for, if no rank takes a step; call it often.

        Args:
            idle_s: Seconds since the last step, if that is unusually long; else None.
            step: The last step.
            warming_up: The first steps of the round may take long: only a dead link counts.
        """
        if idle_s is None:
            if self._stuck is not None:
                kind, self._stuck = self._stuck.kind, None
                text = f"steps are taken again, after step {step:,}"
                self._journal.tell(str(kind), text, step=step, stuck=False)
                self._write()
            self._asks_again_s = None
        elif self._stuck is None and (self._asks_again_s is None or idle_s > self._asks_again_s):
            self._asks_again_s = idle_s + max(AGAIN_S, idle_s)
            nodes = [node.id for node in self._members.nodes]
            found = partial(self._post(self._name_stuck), self._round, idle_s, step, warming_up)
            threading.Thread(target=lambda: found(self._ask(nodes)), daemon=True).start()

    def listen(self, idle_s: float | None) -> None:
        """Find out, on another node than that of rank 0, what its agent says; call it often.

        Args:
            idle_s: As for `look`.
        """
        if idle_s is None:
            self._heard = self._asks_again_s = None
        elif self._asks_again_s is None or idle_s > self._asks_again_s:
            self._asks_again_s = idle_s + LISTEN_S
            self._publisher.read_verdicts(partial(self._post(self._hear), self._round))

    def _hear(self, n: int, verdicts: Sequence[Verdict]) -> None:
        if n == self._round and self._asks_again_s is not None:
            stuck = (one for one in verdicts if one.kind in {Kind.STUCK, Kind.DEAD_LINK})
            self._heard = next(stuck, None)

    @property
    def why_stuck(self) -> str:
        """Who is waited for, if no rank takes a step and it is known; else empty."""
        stuck = self._stuck or self._heard
        return "" if stuck is None else stuck.text.partition(": ")[2]

    def _name_stuck(
        self, n: int, idle_s: float, step: int, warming_up: bool, found: Evidence
    ) -> None:
        """Make the verdict about round n, given what the agents of all nodes have answered."""
        if n != self._round or self._asks_again_s is None:
            return  # meanwhile a step was taken
        if found.dead:
            self._name_dead_links(idle_s, step, found.dead)
        elif not warming_up:
            self._name_ranks(idle_s, step, found.stacks)

    def _name_dead_links(self, idle_s: float, step: int, dead: Mapping[Pair, str]) -> None:
        links = "; ".join(link_in_words(self._members, pair, why) for pair, why in dead.items())
        text = f"no step for {idle_s:.0f} s, since step {step:,}: {links}"
        self._stuck = Verdict(kind=Kind.DEAD_LINK, text=text, since_step=step)
        hosts = sorted({node for pair in dead for node in pair})
        self._journal.tell(
            "dead link", text, level=logging.WARNING, hosts=hosts, step=step, stuck=True
        )
        self._write()

    def _name_ranks(
        self, idle_s: float, step: int, answers: Mapping[str, Mapping[str, Any]]
    ) -> None:
        first, ranks = 0, states(answers)
        for node in self._members.nodes:
            if not answers.get(node.id):
                ranks += _silent(node, first)
            first += node.slots
        hang = judge(ranks)
        if hang is None:
            return  # all ranks do the same
        hosts = sorted({self._members.node_of(rank).id for rank in hang.ranks})
        text = f"no step for {idle_s:.0f} s, since step {step:,}: {hang.text}"
        alone = len(hang.ranks) == 1
        self._stuck = Verdict(
            kind=Kind.STUCK,
            text=text,
            rank=hang.ranks[0] if alone else None,
            node=hosts[0] if len(hosts) == 1 else "",
            since_step=step,
        )
        self._journal.tell(
            "stuck",
            text,
            level=logging.WARNING,
            ranks=list(hang.ranks),
            hosts=hosts,
            step=step,
            stuck=True,
        )
        self._write()

    def _judge_storage(self, report: RankTimes) -> None:
        self._storage = self._storage.add(report)
        found, known = self._storage.verdict, self._slow_storage
        if (found is None) == (known is None):
            return
        if found is None:
            self._slow_storage = None
            text = f"checkpoints are written as fast as before again, at step {report.step:,}"
            self._journal.tell("slow storage", text, step=report.step, slow=False)
        else:
            who, usual = "all ranks write", "earlier"
            node = self._members.node_of(found.rank).id if found.rank is not None else ""
            if found.rank is not None:
                who, usual = f"rank {found.rank} on {node} writes", "the other ranks"
            text = (
                f"{who} checkpoints at {rate_in_words(found.bytes_per_s)}; {usual}: "
                f"{rate_in_words(found.usual_bytes_per_s)}"
            )
            self._slow_storage = Verdict(
                kind=Kind.SLOW_STORAGE,
                text=text,
                rank=found.rank,
                node=node,
                since_step=report.step,
                factor=round(found.usual_bytes_per_s / found.bytes_per_s, 3),
            )
            self._journal.tell(
                "slow storage",
                text,
                level=logging.WARNING,
                rank=found.rank,
                host=node,
                step=report.step,
                slow=True,
                bytes_per_s=found.bytes_per_s,
                usual_bytes_per_s=found.usual_bytes_per_s,
            )
        self._write()

    def _judge_link(self, found: SlowLink, holds: bool) -> None:
        """Make the verdict about a link, or withdraw it."""
        link, text = found.link, found.text
        if not holds:
            text = f"the link from {link.source} to {link.target} is as fast as usual again"
        self._slow_link = None
        if holds:
            self._slow_link = Verdict(
                kind=Kind.SLOW_LINK,
                text=text,
                node=found.node,
                since_step=self._step,
                factor=round(found.factor, 3),
            )
        self._journal.tell(
            "slow link",
            text,
            level=logging.WARNING if holds else logging.INFO,
            source=link.source,
            target=link.target,
            host=found.node,
            step=self._step,
            slow=holds,
            bytes_per_s=link.bytes_per_s,
            usual_bytes_per_s=found.usual_bytes_per_s,
            latency_s=link.latency_s,
            usual_latency_s=found.usual_latency_s,
        )
        self._write()

    @property
    def _held(self) -> list[Verdict]:
        """The verdicts that hold now."""
        others = (self._slow_storage, self._slow_link, self._stuck)
        return [*self._slow.values(), *(one for one in others if one is not None)]

    def _write(self) -> None:
        self._publisher.verdicts(self._held, lease=self._lease)


def _silent(node: Node, first_rank: int) -> list[RankState]:
    """The workers of a node whose agent does not answer."""
    ranks = range(first_rank, first_rank + node.slots)
    return [RankState(rank=r, node=node.id, problem="its agent does not answer") for r in ranks]


def ask_why_stuck(store: KeyValueStore, job: str, nodes: Sequence[str]) -> Evidence:
    """An `Ask` through etcd; nothing if etcd does not answer."""
    try:
        reached = ask_once(store, job, nodes, "reach", {}, within_s=ASK_S)
        dead = {
            frozenset((node, link["to"])): link["why"]
            for node, answer in reached.items()
            for link in answer.record.get("dead", ())
        }
        if dead:
            return Evidence(dead=dead)
        answers = ask_once(store, job, nodes, "stack", {"waits": True}, within_s=ASK_S)
    except StoreError as error:
        log.debug("who is waited for is not known: %s", error)
        return Evidence()
    return Evidence(stacks={node: answer.record for node, answer in answers.items()})
