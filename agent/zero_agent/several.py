"""Several agents on this machine, as one process tree: `python -m zero_agent.several N FLAG ...`.

Each agent is in a session of its own and gets every signal that comes here, so Ctrl-C drains them
all. Must always hold: no agent outlives this process for longer than it takes to drain. However
it ends, the kernel sends them SIGTERM, and they leave as on any other. Who calls it: `zero-ctl run`
becomes it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from zero_agent.tether import tethered

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(count: int, flags: Sequence[str]) -> int:
    """Run so many agents with the same flags to their end; the exit code of the job."""
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: object) -> None:
        for process in started:
            process.send_signal(number)  # does nothing once it has ended

    for number in _FORWARDED:
        signal.signal(number, forward)
    agent = tethered([sys.executable, "-m", "zero_agent", *flags], by=signal.SIGTERM)
    started.extend(subprocess.Popen(agent, start_new_session=True) for _ in range(count))
    return verdict([process.wait() for process in started])


def verdict(codes: Sequence[int]) -> int:
    """One exit code from those of all agents: 0 if any of them saw the job done."""
    return 0 if 0 in codes else max(128 - code if code < 0 else code for code in codes)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
