"""Several agents on this machine, as one process tree.

`python -m zero_agent.launch.local_agents N FLAG ...`

Each agent has its own session and gets every signal that comes here, so Ctrl-C drains them all.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence

from zero_agent.node.process_control import dying_with_parent
from zero_contract.exit_codes import verdict

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TICK_S = 0.1


def run(count: int, flags: Sequence[str]) -> int:
    """Run `count` agents with the same flags until they end; returns the exit code of the job."""
    # A handler that forwards signals itself would miss the agent that is being started.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in _FORWARDED:
        signal.signal(number, lambda got, frame: signals.put(got))
    # Who starts this process has blocked it up to here, as is done for each agent below.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # However this process ends, the agents leave as on any other SIGTERM.
    agent = dying_with_parent([sys.executable, "-m", "zero_agent", *flags], by=signal.SIGTERM)
    started: list[subprocess.Popen[bytes]] = []
    while len(started) < count and signals.empty():
        # The new agent inherits the mask: until it has a handler, Ctrl-C would print a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            started.append(subprocess.Popen(agent, start_new_session=True))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if not started:
        return 128 + signals.get()
    while None in [process.poll() for process in started]:
        with contextlib.suppress(queue.Empty):
            got = signals.get(timeout=_TICK_S)
            for process in started:
                process.send_signal(got)  # does nothing once it has ended
    return verdict([process.returncode for process in started])


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
