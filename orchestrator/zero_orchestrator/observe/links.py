"""The links between the nodes of a job: which are probed when, and what the agents have measured.

All nodes probe at the same time, in turns. In a small job every node probes every other one; in a
large job `TURNS` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_orchestrator.observe.queries import Answer, ask_each
from zero_orchestrator.store.kv import KeyValueStore

TURNS = 4
TURN_S = 12.0
"""Wait for the answers of one turn: longer than an agent may take for a probe."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network from one node to another one, as the agent of the first has measured it."""

    source: str
    """The node that has sent."""
    target: str
    """The node that has received."""
    latency_s: float = 0.0
    """The shortest round trip; 0: not measured."""
    bytes_per_s: float = 0.0
    """The rate of one connection; 0: not measured."""
    cpu_wait: float = 0.0
    """The part of the time of the probe in which either end waited for a CPU, 0 to 1."""
    problem: str = ""
    """Why nothing was measured; empty if it was."""

    @property
    def way(self) -> tuple[str, str]:
        """The nodes that send and receive."""
        return self.source, self.target

    @property
    def figures(self) -> str:
        """Rate and latency in words."""
        return in_figures(self.bytes_per_s, self.latency_s)


def in_figures(bytes_per_s: float, latency_s: float) -> str:
    """A rate and a latency in words."""
    return f"{rate_in_words(bytes_per_s)}, {1e3 * latency_s:.3g} ms"


def rate_in_words(bytes_per_s: float) -> str:
    """A rate in MB/s."""
    rate = bytes_per_s / 1e6
    return f"{rate:,.0f} MB/s" if rate >= 100 else f"{rate:.3g} MB/s"


def turns(nodes: Sequence[str]) -> list[dict[str, str]]:
    """Whom each node probes, turn by turn."""
    others = len(nodes) - 1
    count = min(TURNS, others)
    # One stride for all in a turn: each node sends to one and receives from one, so no probe
    # competes with another for the network of its node. The strides are spread out: neighbours in
    # rank are often neighbours in the network.
    strides = [1 + turn * others // count for turn in range(count)]
    return [
        {node: nodes[(at + stride) % len(nodes)] for at, node in enumerate(nodes)}
        for stride in strides
    ]


def probe(store: KeyValueStore, job: str, nodes: Sequence[str]) -> list[Link]:
    """Let the agents of some nodes probe each other.

    Raises:
        StoreError: etcd does not answer, or does not allow it.
    """
    found = []
    for turn in turns(nodes):
        arguments = {source: {"to": target} for source, target in turn.items()}
        answers = ask_each(store, job, "probe", arguments, within_s=TURN_S)
        found += [link_of(source, target, answers[source]) for source, target in turn.items()]
    return found


def link_of(source: str, target: str, answer: Answer) -> Link:
    """The link that an agent has measured."""
    # Of an agent, and perhaps of another version: a link with a figure missing is not measured.
    record: Mapping[str, object] = answer.record
    names = ("latency_s", "bytes_per_s", "cpu_wait")
    figures: dict[str, Any] = {name: record.get(name) for name in names}
    if all(isinstance(value, float) for value in figures.values()):
        return Link(source=source, target=target, **figures)
    problem = answer.problem or str(record.get("problem", "")) or "an answer without figures"
    return Link(source=source, target=target, problem=problem)
