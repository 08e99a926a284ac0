"""The stacks of a job's workers: read from what agents send, and grouped by equality.

Pure. Two sources have formats of their own: faulthandler, which a worker's interpreter writes
(CPython 3.11 to 3.14), and `py-spy dump --json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from zero_contract.decoding import MalformedError, decode

_HEAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call")
_STARTER = "/zero_agent/workers/worker_main.py"
"""The file that starts the user's program: its frame and those outside of it are left out."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One call on a stack."""

    function: str
    file: str
    line: int | None
    """Line in `file`; None in native code."""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}{'' if self.line is None else f':{self.line}'})"


@dataclass(frozen=True, kw_only=True)
class Thread:
    """The stack of one thread."""

    name: str
    """Name, or the number that the interpreter gives it."""
    main: bool
    """Whether it is the main thread of its process."""
    frames: tuple[Frame, ...]
    """The most recent call first."""


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """The stacks of one worker."""

    rank: int | None
    """Rank of the worker; None: the problem is that of the whole node."""
    node: str
    host: str = ""
    pid: int | None = None
    threads: tuple[Thread, ...] = ()
    """The main thread first."""
    problem: str = ""
    """Why there are no stacks; empty if there are."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Workers whose stacks are equal."""

    members: tuple[RankStack, ...]
    """By rank."""
    threads: tuple[Thread, ...]


@dataclass(frozen=True, kw_only=True)
class _Told:
    """The stacks of one worker, as its agent tells them."""

    rank: int | None
    pid: int | None = None
    problem: str = ""
    spy: str | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What an agent tells of its workers."""

    host: str = ""
    ranks: tuple[_Told, ...] = ()


def from_answer(node: str, record: Mapping[str, Any]) -> Iterator[RankStack]:
    """The stacks in the answer of a node."""
    try:
        answer = decode(_Answer, record, "its stacks cannot be read")
    except MalformedError as error:
        yield RankStack(rank=None, node=node, problem=str(error))
        return
    for one in answer.ranks:
        problem, threads = one.problem, tuple[Thread, ...]()
        try:
            threads = from_faulthandler(one.text) if one.spy is None else from_spy(one.spy)
        except (ValueError, KeyError, TypeError) as error:  # it is of another version, or damaged
            problem = f"its stacks cannot be read: {error!r}"
        yield RankStack(
            rank=one.rank,
            node=node,
            host=answer.host,
            pid=one.pid,
            threads=threads,
            problem=problem,
        )


def from_faulthandler(text: str) -> tuple[Thread, ...]:
    """The threads in the output of faulthandler, the main thread first."""
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            found.append((head[2] or head[1], []))
        elif (frame := _FRAME.match(line)) and found:
            number = int(frame[2]) if frame[2].isdecimal() else None
            found[-1][1].append(Frame(function=frame[3], file=frame[1], line=number))
    return tuple(
        # The interpreter begins with the newest thread, and ends with the main thread.
        Thread(name=name, main=place == 0, frames=_users(frames))
        for place, (name, frames) in enumerate(reversed(found))
    )


def from_spy(text: str) -> tuple[Thread, ...]:
    """The threads in the output of `py-spy dump --json`."""
    threads = [
        Thread(
            name=str(one.get("thread_name") or one["thread_id"]),
            # Linux gives the main thread the number of its process.
            main=one.get("os_thread_id") == one["pid"] or one.get("thread_name") == "MainThread",
            frames=_users(
                [
                    Frame(function=its["name"], file=its["filename"], line=its.get("line") or None)
                    for its in one["frames"]
                ]
            ),
        )
        for one in json.loads(text)
    ]
    return tuple(sorted(threads, key=lambda thread: not thread.main))


def _users(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of the user's program, without those that started it."""
    starts = (place for place, one in enumerate(frames) if one.file.endswith(_STARTER))
    own = list(frames[: next(starts, len(frames))])
    # `python -m` runs a module by these; frozen or not, as the interpreter was built.
    while own and own[-1].file in ("<frozen runpy>", "runpy.py"):
        own.pop()
    return tuple(own)


def groups(stacks: Iterable[RankStack], *, all_threads: bool = False) -> list[Group]:
    """Workers with equal stacks, the smallest group first."""
    by_calls: dict[tuple[tuple[Frame, ...], ...], list[RankStack]] = {}
    for stack in stacks:
        if stack.threads:
            # By the calls alone: each process has its own numbers of threads.
            shown = stack.threads if all_threads else stack.threads[:1]
            by_calls.setdefault(tuple(thread.frames for thread in shown), []).append(stack)
    found = [
        Group(
            members=tuple(sorted(members, key=lambda stack: stack.rank or 0)),
            threads=members[0].threads if all_threads else members[0].threads[:1],
        )
        for members in by_calls.values()
    ]
    # One looks for the odd one out.
    return sorted(found, key=lambda group: (len(group.members), group.members[0].rank or 0))


def whose(members: Sequence[RankStack]) -> str:
    """`rank 0-3 on node a (host gpu-1), rank 4 on node b (host gpu-2)`."""
    words = []
    for (node, host), of_node in groupby(members, lambda stack: (stack.node, stack.host)):
        where = node if host in ("", node) else f"{node} (host {host})"
        words.append(f"rank {in_ranges([stack.rank or 0 for stack in of_node])} on node {where}")
    return ", ".join(words)


def in_ranges(ranks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2, 5`; the numbers must be in order."""
    words = []
    # Numbers that follow each other have the same distance from their places.
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        of_run = [rank for _, rank in run]
        words.append(f"{of_run[0]}-{of_run[-1]}" if len(of_run) > 1 else str(of_run[0]))
    return ", ".join(words)
