"""Runs the commands that run the agents, until the job has ended.

One thread decides; one further thread for each process forwards its output. A host that is lost is
retried with backoff while the others continue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from zero_agent.launch.runners import READY, Command
from zero_agent.node import signals
from zero_agent.node.process_control import dying_with_parent
from zero_agent.workers.output import tap as output
from zero_agent.workers.output.tap import PAUSE_S, STDOUT
from zero_contract.exit_codes import ENDS_THE_JOB, LOST, verdict
from zero_orchestrator.errors import SpecError

log = logging.getLogger("zero")

RETRY_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Backoff before a lost host is tried again; the last value stays."""
DRAIN_S = 2.0
"""How long the output of the commands is read after the last of them has ended. A pipe may stay
open for longer: a connection that ssh keeps for later (ControlPersist) holds it."""
PARTING_S = 60.0
"""How long the session waits for the other hosts after the first has reported the job's end."""
_TICK_S = 0.2


@dataclass
class _Host:
    """One command and its state."""

    command: Command
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None
    losses: int = 0
    tries: int = 0
    """How often it may be lost until it is not hoped for; set anew whenever it is reached."""
    retry_at_s: float = 0.0

    @property
    def again(self) -> bool:
        """Whether the host was lost, and will be tried again."""
        return self.process is None and self.code == LOST and self.losses > 0


@dataclass
class Session:
    """The commands of one job, one for each host or one for all, while they run.

    `ask_to_stop` requests that the job ends with a checkpoint.
    """

    commands: Sequence[Command]
    ask_to_stop: Callable[[], None]
    _hosts: list[_Host] = field(init=False)
    _signals: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    _readers: list[threading.Thread] = field(default_factory=list)
    _parting_s: float | None = None
    _stopping: int = 0

    def __post_init__(self) -> None:
        self._hosts = [_Host(command) for command in self.commands]

    def run(self) -> int:
        """Run the commands until the job's end; returns the exit code.

        Raises:
            SpecError: A file for the hosts cannot be written.
        """
        with signals.installed(self._signals.put, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            try:
                for host in self._hosts:
                    for path, text in host.command.files.items():  # only this user may read them
                        try:
                            # A session that was killed left it; or it is a planted link.
                            path.unlink(missing_ok=True)
                            with open(path, "x", opener=partial(os.open, mode=0o600)) as file:
                                file.write(text)
                        except OSError as error:
                            raise SpecError(
                                f"{path}: cannot be written: {error}; use --launcher=ssh"
                            ) from error
                    self._start(host)
                while self._goes_on():
                    self._turn()
            finally:
                # Close the remaining connections; their agents get SIGHUP.
                left = [host.process for host in self._hosts if host.process is not None]
                for process in left:
                    process.terminate()
                for process in left:
                    try:
                        process.wait(10.0)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
                for path in (path for host in self._hosts for path in host.command.files):
                    path.unlink(missing_ok=True)
                deadline_s = time.monotonic() + DRAIN_S
                for reader in self._readers:
                    reader.join(max(0.0, deadline_s - time.monotonic()))
                output.flush()
        code = verdict([LOST if host.code is None else host.code for host in self._hosts])
        # A job that was done when the signal came is done, whoever ended its launcher.
        return 128 + self._stopping if self._stopping and code else code

    # ---- one turn ----

    def _goes_on(self) -> bool:
        if self._parting_s is not None and time.monotonic() > self._parting_s:
            return False
        if any(host.process is not None for host in self._hosts):
            return True
        over = self._stopping or self._parting_s is not None
        # If no host was ever reached, a name or a key is wrong: trying again would not help. Those
        # that were may all be lost at once, with the network here.
        hope = any(host.code != LOST or host.tries > 0 for host in self._hosts)
        return not over and any(host.again for host in self._hosts) and hope

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            number = self._signals.get(timeout=_TICK_S)
            name = signal.Signals(number).name
            if self._stopping:
                log.warning("%s again: all connections are closed", name)
                self._parting_s = 0.0
            else:
                self._stopping = number
                log.info(
                    "%s: the job stops at its next step boundary; once more to end at once", name
                )
                # On another thread: etcd may be out of reach, and the second signal must be
                # handled.
                threading.Thread(target=self.ask_to_stop, daemon=True).start()
        now_s = time.monotonic()
        for host in self._hosts:
            if host.process is not None and (code := host.process.poll()) is not None:
                host.process, host.code = None, code
                # The others learn of the end from etcd, and leave by themselves.
                if code in ENDS_THE_JOB and self._parting_s is None:
                    self._parting_s = time.monotonic() + PARTING_S
                elif code == LOST and not self._stopping and len(self._hosts) > 1:
                    wait_s = RETRY_S[min(host.losses, len(RETRY_S) - 1)]
                    host.losses, host.retry_at_s = host.losses + 1, time.monotonic() + wait_s
                    host.tries -= 1
                    log.warning(
                        "host %s is lost (its own message is above); the job continues without "
                        "it, and it is tried again in %g s",
                        host.command.where,
                        wait_s,
                    )
            # Not once the job is over: there is nothing to come back to.
            elif host.again and self._parting_s is None and now_s > host.retry_at_s:
                self._start(host)

    def _start(self, host: _Host) -> None:
        program, *words = host.command.argv
        host.process = subprocess.Popen(
            dying_with_parent([shutil.which(program) or program, *words]),
            env={**os.environ, **host.command.env},
            stdin=subprocess.PIPE if host.command.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # this process handles Ctrl-C
        )
        what = (host.process, host)
        reader = threading.Thread(target=self._forward_output, args=what, daemon=True)
        # Those of lost connections have ended: a host that is tried for days leaves none behind.
        self._readers = [*filter(threading.Thread.is_alive, self._readers), reader]
        reader.start()

    def _forward_output(self, process: subprocess.Popen[bytes], host: _Host) -> None:
        """Print the lines of a process; send it the variables when it requests them."""
        assert process.stdout is not None
        command = host.command
        prefix = f"{command.where}: " if len(self._hosts) > 1 else ""
        waits = bool(command.stdin)
        with process.stdout as lines:
            for line in lines:
                text = line.rstrip(b"\r\n")
                if not (waits and text.endswith(READY.encode())):
                    # The hosts must not wait for longer than the terminal is slow, nor lose their
                    # connection because of a full disk here: what cannot be written is dropped.
                    while STDOUT.writer.should_wait:
                        time.sleep(PAUSE_S)
                    STDOUT.write(prefix.encode() + text + b"\n")
                    continue
                waits, host.tries = False, len(RETRY_S)
                assert process.stdin is not None
                with contextlib.suppress(OSError):  # it has ended: so does its output
                    process.stdin.write(command.stdin.encode())
                    process.stdin.close()
