"""Every exit code of this package, and what each means to whatever started the process.

Only codes that no shell, interpreter or broken installation produces by accident say that a job is
over; what went wrong on one node never does. Kubernetes' podFailurePolicy, the systemd unit, the
batch script and `zero-ctl launch` follow this table, and tests compare them. This module imports
nothing that could fail to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

CRASHED = 70
"""An error inside a program of this package (EX_SOFTWARE of sysexits.h): never a verdict."""


class AgentExit(IntEnum):
    """Exit codes of `zero-agent`; an agent ended by a signal exits with 128 + its number."""

    OK = 0
    """The job is done (also the code of an agent that came late, or was a spare)."""
    USAGE = 2
    """The command line or the script is wrong; nothing was started."""
    NO_STORE = 3
    """etcd could not be reached, for longer than --etcd-wait at the start or --etcd-grace later."""
    NO_NODES = 4
    """Too few nodes joined within --join-timeout."""
    STOPPED = 5
    """The job was stopped by `zero-ctl stop` (also the code of an agent that came late).
    --stop-exit-code sets another code: our files for Kubernetes set 0, lest a stop fail the Job."""
    DRAINED = 6
    """This node left because of `zero-ctl drain`; the job continues without it."""
    NO_PROGRESS = 7
    """The job failed early: too many restarts in a row finished no new step (crash loop)."""
    UNHEALTHY = 8
    """This node cannot take part (its health checks, GPUs, directory or imports failed, its
    workers did not warm up in time, or one cannot be killed); the job is not over."""
    MISMATCH = 9
    """The job runs with another specification or protocol version than this agent's."""
    CRASHED = CRASHED
    """An error inside this agent, with a traceback; the job continues without it."""
    JOB_FAILED = 91
    """The job has failed, on every node; the root cause is printed."""


class CtlExit(IntEnum):
    """Exit codes of `zero-ctl`."""

    OK = 0
    TOO_LATE = 1
    """The request was not carried out within --wait; it still may be."""
    USAGE = 2
    """Wrong usage, or no such job or node."""
    NO_STORE = 3
    """etcd could not be reached, or refused the request."""


class CkptExit(IntEnum):
    """Exit codes of `zero-ckpt`."""

    OK = 0
    FOUND = 1
    """Damage or differences were found."""
    TROUBLE = 2
    """The command could not be carried out."""


class Kubernetes(StrEnum):
    """What the Job controller does with a pod whose agent exits with a code."""

    COMPLETE = "the Job is complete"
    FAIL_JOB = "the Job fails (`FailJob`)"
    FAIL_INDEX = "this pod is given up (`FailIndex`)"
    IGNORE = "the pod is replaced, and nothing counted (`Ignore`)"
    COUNT = "the pod is replaced, `backoffLimitPerIndex` times"


class Systemd(StrEnum):
    """What systemd does with the unit whose agent exits with a code."""

    STAYS_DOWN = "stays down"
    RESTARTS = "is started again"


class Launch(StrEnum):
    """What `zero-ctl launch` does when the agent of one host exits with a code."""

    ENDS = "ends with it"
    GOES_ON = "continues with the other hosts"
    RETRIES = "retries the host"


class Meaning(NamedTuple):
    """One exit code of an agent, and what follows from it."""

    codes: tuple[int, ...]
    kubernetes: Kubernetes
    systemd: Systemd
    launch: Launch


_BROKEN = (Kubernetes.COUNT, Systemd.RESTARTS, Launch.GOES_ON)
_OVER = (Kubernetes.FAIL_JOB, Systemd.STAYS_DOWN, Launch.ENDS)
_LEFT = (Kubernetes.IGNORE, Systemd.STAYS_DOWN, Launch.GOES_ON)
_WRONG = (Kubernetes.FAIL_INDEX, Systemd.STAYS_DOWN, Launch.GOES_ON)

SIGTERM = 128 + 15
LOST = 255
"""Exit code of ssh itself: no connection, a broken connection, or a command ended by a signal."""

AGENT: Sequence[Meaning] = (
    Meaning((AgentExit.OK,), Kubernetes.COMPLETE, Systemd.STAYS_DOWN, Launch.ENDS),
    Meaning((1,), *_BROKEN),
    Meaning((AgentExit.USAGE,), *_WRONG),
    Meaning((AgentExit.NO_STORE,), *_BROKEN),
    Meaning((AgentExit.NO_NODES,), *_BROKEN),
    Meaning((AgentExit.STOPPED,), *_OVER),
    Meaning((AgentExit.DRAINED,), *_LEFT),
    Meaning((AgentExit.NO_PROGRESS,), *_OVER),
    Meaning((AgentExit.UNHEALTHY,), *_BROKEN),
    Meaning((AgentExit.MISMATCH,), *_WRONG),
    Meaning((AgentExit.CRASHED,), *_BROKEN),
    Meaning((AgentExit.JOB_FAILED,), *_OVER),
    Meaning((126, 127), *_BROKEN),
    Meaning((SIGTERM,), *_LEFT),
    Meaning((LOST,), Kubernetes.COUNT, Systemd.RESTARTS, Launch.RETRIES),
)
"""What each exit code of an agent means; every other one is treated as a crash."""

ENDS_THE_JOB = frozenset(
    code for meaning in AGENT if meaning.launch is Launch.ENDS for code in meaning.codes
)
"""Exit codes of an agent that has seen the job's end."""


def verdict(codes: Iterable[int]) -> int:
    """One exit code for all agents of a job: that of an agent that saw the job's end, if any did.

    A signal is its negative number, or 128 + it.
    """
    known = [128 - code if code < 0 else code for code in codes]
    ends = [code for code in known if code in ENDS_THE_JOB]
    others = [code for code in known if code != LOST]
    # One that has seen the job's end knows more than all that were lost.
    return min(ends) if ends else max(others, default=LOST)
