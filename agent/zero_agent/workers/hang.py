"""Which worker of a node is hung, and which only waits for one that is: a pure decision.

All ranks stand still when one hangs, and so does every step clock. A worker that is late is asked
what it waits for (`WaitRequest`). Who waits for another rank is not hung as long as something
elsewhere may explain it: a worker that hangs, a node that is silent and whose lease has not ended,
a dead link. What does not tell who it is, is judged by the time alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zero_contract.worker import WaitReply

ANSWER_S = 1.0
"""A worker answers within this time, if it runs; it is asked so long before its limit."""
_LOOK_S = 0.2
"""Most of the time between two looks that counts."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What there is of the round beside one node's workers."""

    world_size: int = 1
    lease_s: float = 0.0
    """By then the lease of a silent node has ended; seconds."""
    patience_s: float = 0.0
    """By then the cause of a wait is known, if it is another worker, a node, or a link; seconds."""


@dataclass(frozen=True, kw_only=True)
class Late:
    """A worker that has taken no step for longer than its limit."""

    rank: int
    verdict: str
    """For how long, and the limit."""
    since_s: float
    """Seconds without a step in which etcd answered: others can be judged only then."""
    limit_s: float
    begins: bool = False
    """Whether it is the first step of its round: other ranks may still start, or load."""
    can_say: bool = True
    """Whether it can be asked what it waits for; a script that only sends heartbeats cannot."""
    stopped: bool = False
    """Whether the kernel says of one that cannot that it is stopped."""
    owes_s: float = 0.0
    """Seconds for which it has owed an answer."""
    reply: WaitReply | None = None
    """Its answer since it is late."""


class Judgement(NamedTuple):
    """Which worker is hung, and why."""

    rank: int | None
    """None: none is, since another rank may be the cause."""
    reason: str


def judge(late: Sequence[Late], elsewhere: Elsewhere) -> Judgement | None:
    """Which of the late workers of a node is hung; None: none is late, or it is not known yet."""
    # Anything that tells for whom the others wait goes before the time, which tells nothing.
    for one in late:
        if one.stopped:
            why = "its process is stopped"
        elif one.reply is not None:
            why = "" if _waits_in(one) else "it waits for no other rank"
        else:
            why = "it does not answer" if one.can_say and one.owes_s >= ANSWER_S else ""
        if why:
            return Judgement(rank=one.rank, reason=f"{one.verdict}, and {why}")
    late = [one for one in late if not one.begins]  # it may wait for who starts
    if not late or any(one.can_say and one.reply is None for one in late):
        return None  # the answer comes
    # One that may be the cause itself: of the others only a silent node is given its time.
    one = next((one for one in late if not one.can_say), late[0])
    what = f"it waits in {_waits_in(one)}" if one.can_say else "it cannot say what it waits for"
    until_s = one.limit_s + elsewhere.patience_s if one.can_say else elsewhere.lease_s
    others = len(late) < elsewhere.world_size
    if others and one.since_s < until_s:
        return Judgement(rank=None, reason=f"{one.verdict}; {what}: another rank may be the cause")
    why = f"; {what}" if others or one.can_say else ""
    return Judgement(rank=one.rank, reason=f"{one.verdict}{why}")


def _waits_in(one: Late) -> str:
    """The exchange in which a worker waits, its own or one of torch's; empty: in none."""
    if one.reply is None:
        return ""
    under_way = [each for each in one.reply.collectives if not each.get("ended", True)]
    return one.reply.awaits or (str(under_way[0].get("name", "")) if under_way else "")


class Inquiry:
    """What a worker that is about to be late was asked, and has answered."""

    def __init__(self) -> None:
        self.owes_s = 0.0
        """Seconds for which it has owed an answer."""
        self._owes = False
        self._asked_s = float("-inf")
        self._reply: tuple[float, WaitReply] | None = None

    def is_due(self, now_s: float, late_s: float, pause_s: float) -> bool:
        """Whether to ask now, after a pause since the last look; it is late from `late_s` on."""
        if self._owes:
            # Its answer may lie in the socket while the agent stood still.
            self.owes_s += min(pause_s, _LOOK_S)
            return False
        # What it said before it was late may be of a step that it has nearly finished.
        stale = self._asked_s < late_s <= now_s
        due = stale or now_s - self._asked_s >= ANSWER_S
        if due:
            self._asked_s, self._owes, self.owes_s = now_s, True, 0.0
        return due

    def answered(self, now_s: float, reply: WaitReply) -> None:
        """The worker has said what it waits for."""
        self._owes, self._reply = False, (now_s, reply)

    def since(self, late_s: float) -> WaitReply | None:
        """Its last answer, if it came when it was late."""
        return self._reply[1] if self._reply is not None and self._reply[0] >= late_s else None
