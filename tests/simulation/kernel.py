"""One clock, one seed, one thing at a time: the processes and threads of a simulated cluster.

A simulated thread is a `Task`. Product code blocks where it waits, so each task has a stack of its
own, a greenlet. All share one thread of the operating system, and one runs until it waits. What is
due at the same moment runs in an order that the seed decides. Nothing waits for real time.

Must always hold: the same seed gives the same order of events; a task of a process that was killed
has no effect any more; a process that is frozen runs nothing until it is thawed.

Source of the idea: FoundationDB's simulation, TigerBeetle's VOPR.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

Work = Callable[[], object]


class Killed(BaseException):
    """The process of this task was killed; nothing catches it."""


class Stack:
    """A stack of its own for a task, on the one thread of a simulation."""

    def __init__(self, work: Work | None) -> None:
        """`work` begins when the stack is passed to for the first time; None: the present stack."""
        self._own = outermost = getcurrent()
        if work is not None:
            while outermost.parent is not None:
                outermost = outermost.parent
            self._own = greenlet(lambda *_: work(), outermost)

    def pass_to(self, other: Stack) -> None:
        """Let another stack run until one passes back."""
        other._own.switch()

    def end_with(self, other: Stack) -> None:
        """The work of this stack is done, and returns to another one."""
        self._own.parent = other._own


@dataclass(eq=False)
class Process:
    """A simulated process: its tasks live, stand still and die together."""

    name: str
    alive: bool = True
    ended_s: float = 0.0
    frozen: bool = False
    stuck: bool = False
    """Its main task never runs again."""
    lag_s: float = 0.0
    """Every task wakes up to so much later than it should: the machine is overloaded."""
    wall_offset_s: float = 0.0
    """What its machine adds to the time of day."""
    owner: Any = None
    """Whoever has made it."""
    tasks: list[Task] = field(default_factory=list)
    deferred: list[tuple[Task | Work, int]] = field(default_factory=list)
    """What was due while it was frozen."""

    def is_held(self, now_s: float) -> bool:
        """Whether its main task stands still for a while, and answers nobody."""
        return not self.stuck and any(each.held_s > now_s for each in self.tasks[:1])


class Task:
    """A simulated thread."""

    def __init__(self, process: Process, name: str, target: Work, ident: int) -> None:
        self.process, self.name, self.target, self.ident = process, name, target, ident
        self.turn = 0
        """Number of the wait that it is in; an earlier wake-up is of no use."""
        self.woken = self.killed = self.ended = False
        self.held_s = 0.0
        """It does not run before then: its loop stands still."""
        self.joining: list[Task] = []
        self.thread: Any = None
        """The object of `threading` that stands for it, once somebody has asked."""
        self.stack: Stack
        self.unwinds_to: Task | None = None
        """Whoever has killed it waits until it has ended."""


class Kernel:
    """The scheduler."""

    def __init__(self, seed: object) -> None:
        self.now = 0.0
        self.seed = seed
        self.current: Task | None = None
        """The task that runs; None: an event of the world."""
        self._order = random.Random(f"{seed} order")
        self._events: list[tuple[float, float, int, Process | None, Task | Work, int]] = []
        self._numbers = itertools.count(1)
        self._idents = itertools.count(1)
        self._driver = Task(Process("driver"), "driver", lambda: None, 0)
        self._driver.stack = Stack(None)
        self._on = self._driver
        """The task on whose stack something runs now, be it an event of the world."""
        self._next: Task | None = None
        """Whose turn it is already."""
        self._until_s = 0.0
        self._failure: BaseException | None = None
        self.events = 0

    def random(self, name: str) -> random.Random:
        """A source of random numbers that no other part uses."""
        return random.Random(f"{self.seed} {name}")

    # ---- what is to happen ----

    def after(self, seconds: float, work: Work, process: Process | None = None) -> None:
        """Run `work` later; not at all if `process` is dead by then."""
        self._push(self.now + seconds, process, work, 0)

    def spawn(self, process: Process, name: str, target: Work, after_s: float = 0.0) -> Task:
        """Start a task."""
        task = Task(process, name, target, next(self._idents))
        process.tasks.append(task)
        task.stack = Stack(lambda: self._live(task))
        self._push(self.now + after_s, process, task, task.turn)
        return task

    def hold(self, task: Task, seconds: float) -> None:
        """Let a task stand still, while the others of its process run."""
        task.held_s = self.now + seconds

    def freeze(self, process: Process) -> None:
        """Stop a process, as SIGSTOP does."""
        process.frozen = True

    def thaw(self, process: Process) -> None:
        """Let a frozen process go on."""
        process.frozen = False
        deferred, process.deferred = process.deferred, []
        for what, turn in deferred:
            self._push(self.now, process, what, turn)

    def kill(self, process: Process) -> None:
        """End a process at once: its tasks do nothing more."""
        process.alive, process.ended_s = False, self.now
        for task in process.tasks:
            if task.ended or task is self.current:
                continue
            task.killed = True
            if task is self._on:  # this very event happens on its stack, which unwinds afterwards
                continue
            before, self.current = (self.current, self._on), task
            task.unwinds_to, self._on = self._on, task
            task.unwinds_to.stack.pass_to(task.stack)
            self.current, self._on = before
        process.tasks.clear()
        process.deferred.clear()

    # ---- waiting, for tasks ----

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait until `wake`, or for this time; False if nobody has woken the task."""
        me = self.current
        assert me is not None, "an event of the world cannot wait"
        if me.killed:
            raise Killed
        me.woken = False
        if timeout_s is not None:
            self._push(self.now + max(timeout_s, 0.0), me.process, me, me.turn)
        self._pass_on(me)
        if me.killed:
            raise Killed
        return me.woken

    def wake(self, task: Task) -> None:
        """Let a waiting task go on; no effect if it does not wait."""
        if not task.woken and not task.ended:
            task.woken = True
            self._push(self.now, task.process, task, task.turn)

    # ---- the driver ----

    def run(self, until_s: float) -> None:
        """Let everything happen that is due by then. Raises what an event of the world raises."""
        self._until_s = until_s
        self._pass_on(self._driver)
        self.current = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def stop(self) -> None:
        """Let `run` return after the present event."""
        self._until_s = self.now - 1.0

    # ---- whose turn it is ----

    def _push(self, at_s: float, process: Process | None, what: Task | Work, turn: int) -> None:
        if process is not None and process.lag_s:
            at_s += self._order.uniform(0, process.lag_s)
        tie = self._order.random()
        heapq.heappush(self._events, (at_s, tie, next(self._numbers), process, what, turn))

    def _pass_on(self, me: Task) -> None:
        """Let what is due run, until it is this task's turn again."""
        due = self._due()
        if me.killed and due is not me:
            self._next, self.current, self._on = due, me, me
            raise Killed
        self.current = self._on = due
        if due is not me:
            me.stack.pass_to(due.stack)

    def _due(self) -> Task:
        """The task whose turn it is; the events of the world on the way happen here."""
        due, self._next = self._next, None
        if due is not None and not due.ended:  # whoever unwound may have killed it
            return due
        while self._failure is None and self._events and self._events[0][0] <= self._until_s:
            at_s, _, _, process, what, turn = heapq.heappop(self._events)
            self.now = max(self.now, at_s)
            if process is not None:
                if not process.alive:
                    continue
                if process.frozen:
                    process.deferred.append((what, turn))
                    continue
            if isinstance(what, Task):
                if what.turn != turn or what.ended:
                    continue
                if what.held_s > self.now:
                    self._push(what.held_s, process, what, turn)
                    continue
                what.turn += 1
                self.events += 1
                return what
            self.current = None
            self.events += 1
            try:
                what()
            except BaseException as error:
                self._failure = error
        self.now = max(self.now, min(self._until_s, self._events[0][0] if self._events else 1e18))
        return self._driver

    def _live(self, task: Task) -> None:
        """What runs on the stack of a task."""
        try:
            if not task.killed:
                task.target()
        except Killed:
            pass
        except BaseException as error:
            if not task.killed:
                self._failure = error
        task.ended = True
        for waiting in task.joining:
            self.wake(waiting)
        next_one = task.unwinds_to
        if next_one is None:
            if task in task.process.tasks:
                task.process.tasks.remove(task)
            next_one = self.current = self._on = self._due()
        task.stack.end_with(next_one.stack)
