"""The schedule of a run of `chaos.py`: which fault happens when, to whom, for how long.

A pure function of the seed: the same seed has the same schedule on every machine. A fault never
hits what another one has taken already, and at least two nodes are untouched at any time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

NODES = ("a", "b", "c", "d")
GUEST = "e"
"""A fifth node that joins for a while; the jobs have at most four, so it is a spare."""
JOBS = ("engine", "fsdp2")
MEMBERS = ("m0", "m1", "m2")
TOUCHED_NODES = 2
"""Most nodes of the four that faults have taken at a time."""


class Subject(StrEnum):
    """What a fault hits, and takes until it is healed."""

    JOB_ON_NODE = "a job on a node"
    NODE = "a node"
    LINK = "two nodes"
    HOST = "a node and a member of etcd"
    ETCD = "etcd"
    DISK = "the disk"
    JOB = "a job"
    GUEST = "the guest"


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    subject: Subject
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest time until it is healed."""
    weight: float = 1.0
    """How often it is drawn, beside the others."""
    free: bool = False
    """It must cost no restart."""
    unknown_s: float = 0.0
    """How long the job stands still before anybody can know of it: by its lease, a look at a link,
    or `--hang-timeout`."""


@dataclass(frozen=True, order=True)
class Fault:
    """Something that happens to the cluster."""

    at_s: float
    kind: str
    job: str = ""
    node: str = ""
    other: str = ""
    for_s: float = 0.0
    draw: int = 0
    """A random number, for choices that depend on what there is: a member, a file, a byte."""

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.job, self.node, self.other)))
        lasts = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.at_s:7.1f}  {self.kind}{': ' if where else ''}{where}{lasts}"


_ON_NODES = frozenset({Subject.JOB_ON_NODE, Subject.NODE, Subject.LINK, Subject.HOST})

REST_S = 5.0
"""A subject is left alone for so long after a fault."""


def schedule(
    kinds: Mapping[str, Kind], *, seed: int, minutes: float, every_s: float
) -> tuple[Fault, ...]:
    """The faults of a seed, in order of time; one in each `every_s`, at a random time of it.

    Each kind comes once before any comes twice, so that a run of many faults has all of them.
    """
    source = random.Random(f"{seed} chaos")
    waiting = _shuffled(source, kinds)
    taken: dict[str, float] = {}  # subject -> until when
    faults: list[Fault] = []
    for number in range(int(60 * minutes / every_s)):
        at_s = round((number + source.uniform(0.1, 0.9)) * every_s, 1)
        touched = {name for name, until_s in taken.items() if until_s > at_s}
        fault = next(
            (
                fault
                for kind in (*waiting, *_shuffled(source, kinds))
                if (fault := _draw(source, at_s, kind, kinds[kind], touched)) is not None
            ),
            None,
        )
        if fault is None:
            continue
        if fault.kind in waiting:
            waiting.remove(fault.kind)
        waiting = waiting or _shuffled(source, kinds)
        faults.append(fault)
        for name in _subjects(fault, kinds[fault.kind]):
            taken[name] = at_s + fault.for_s + REST_S
    return tuple(faults)


def _shuffled(source: random.Random, kinds: Mapping[str, Kind]) -> list[str]:
    """Every kind once, and as often more as its weight says, in random order."""
    names = [name for name, kind in kinds.items() for _ in range(max(1, round(kind.weight)))]
    source.shuffle(names)
    return names


def _draw(
    source: random.Random, at_s: float, name: str, kind: Kind, touched: set[str]
) -> Fault | None:
    """A fault of a kind that hits nothing that is touched; None if there is nothing left."""
    for_s = round(source.uniform(*kind.lasts_s), 1)
    node, other = source.sample(NODES, 2)
    job, draw = source.choice(JOBS), source.randrange(1 << 30)
    subject = kind.subject
    fault = Fault(
        at_s,
        name,
        job=job if subject in {Subject.JOB_ON_NODE, Subject.JOB} else "",
        node=node if subject in _ON_NODES else "",
        other=other if subject is Subject.LINK else "",
        for_s=for_s,
        draw=draw,
    )
    mine = _subjects(fault, kind)
    nodes = touched & set(NODES) | set(mine) & set(NODES)
    return fault if not touched & set(mine) and len(nodes) <= TOUCHED_NODES else None


def _subjects(fault: Fault, kind: Kind) -> Sequence[str]:
    match kind.subject:
        case Subject.JOB_ON_NODE | Subject.NODE:
            return (fault.node,)
        case Subject.HOST:
            return (fault.node, Subject.ETCD)
        case Subject.LINK:
            return (fault.node, fault.other)
        case subject:
            return (str(subject),)


def summary(faults: Sequence[Fault]) -> str:
    """How many faults of each kind there are."""
    counts = Counter(fault.kind for fault in faults)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
