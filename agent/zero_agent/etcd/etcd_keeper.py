"""The keeper of the shared etcd: a daemon that belongs to no agent.

Run as `python -m zero_agent.etcd.etcd_keeper --client-port 2379 --directory DIR`. The command goes
into the background and returns when the server serves (0) or has failed (1). The keeper is the
server's parent: it starts the server again after a crash, and ends the server and itself when no
node has been alive in any job for the idle timeout. When the keeper is killed its server dies with
it, and the next agent starts a new keeper on the same data.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import sys
import time
from pathlib import Path

from zero_agent.etcd.etcd_process import EtcdProcess, Member
from zero_agent.etcd.local_etcd import IDLE_TIMEOUT_S, SharedDirectory
from zero_contract.errors import ZeroError
from zero_orchestrator.errors import StoreError
from zero_orchestrator.observe.gc import collect
from zero_orchestrator.observe.status import JOBS_PREFIX
from zero_orchestrator.store.kv import KeyValueStore

_log = logging.getLogger("keeper")

_NODE = re.compile(rf"{JOBS_PREFIX}[^/]+/nodes/")
"""The keys of live agents. Others have leases, too: what workers printed last, for an hour."""

_LOOKS = 20
"""How often the keeper looks within the idle timeout, at most every `_LONGEST_LOOK_S`."""
_LONGEST_LOOK_S = 5.0
_DECIDE_S = 10.0
_CRASHES = 5
"""The keeper gives up after more crashes of the server in a row than this."""
_SOUND_S = 10.0
"""A crash does not count as one in a row if the server had run for longer than this."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerUse:
    """What the keeper sees of the jobs on its server."""

    revision: int
    nodes: bool
    """Whether any node holds a lease: a job is running."""
    handed_out_ns: int
    """When an agent last got the server (a file's time: compared, never subtracted)."""


class Idleness:
    """How long nothing has used the server; a change of anything counts as use."""

    def __init__(self, now: float) -> None:
        self._used = now
        self._seen: ServerUse | None = None

    def look(self, use: ServerUse, now: float) -> float:
        """Record what was seen; returns the seconds of idleness up to `now`."""
        if use.nodes or use != self._seen:
            self._used = now
        self._seen = use
        return now - self._used


def look(store: KeyValueStore, directory: SharedDirectory) -> ServerUse:
    """Read what uses the server now. Raises StoreError if the server does not answer."""
    jobs = store.range(JOBS_PREFIX)
    nodes = any(item.lease and _NODE.match(item.key) for item in jobs.items)
    handed_out_ns = directory.used.stat().st_mtime_ns if directory.used.exists() else 0
    return ServerUse(jobs.revision, nodes, handed_out_ns)


class Keeper:
    """Starts the server, watches over it, ends it."""

    def __init__(self, member: Member, directory: SharedDirectory, idle_timeout_s: float) -> None:
        self._directory = directory
        self._idle_timeout_s = idle_timeout_s
        self._look_s = min(_LONGEST_LOOK_S, idle_timeout_s / _LOOKS)
        self._member = member
        self._started = 0.0
        self._crashes = 0
        self._process = self._start()
        self._idleness = Idleness(time.monotonic())
        from zero_orchestrator.store.etcd.client import EtcdStore

        self._store = EtcdStore(member.endpoint)
        # The data of this server lasts, and no other process collects its garbage.
        try:
            for doomed in collect(self._store, now_s=time.time(), lost=True):
                _log.info("job %s is deleted: %s", doomed.remains.job, doomed.reason)
        except StoreError as error:  # the next start tries again
            _log.warning("old jobs stay: %s", error)

    def run(self) -> None:
        """Watch over the server until it is idle.

        Raises:
            ZeroError: The server crashes again and again.
            StoreUnavailable: The server does not start again.
        """
        while not self._end_if_idle():
            if self._process.wait(self._look_s):
                sound = time.monotonic() - self._started > _SOUND_S
                self._crashes = 1 if sound else self._crashes + 1
                _log.warning(
                    "the server has crashed (%d in a row); starting it again", self._crashes
                )
                if self._crashes > _CRASHES:
                    raise ZeroError(f"the server has crashed {self._crashes} times in a row")
                self._process = self._start()
        self._store.close()

    def _start(self) -> EtcdProcess:
        self._started = time.monotonic()
        process = EtcdProcess(self._member, self._directory.log).start()
        process.wait_healthy()
        return process

    def _end_if_idle(self) -> bool:
        if self._idle_s() < self._idle_timeout_s:
            return False
        try:
            with self._directory.deciding(_DECIDE_S):
                # Look again: an agent has perhaps got the server. Under the lock none can.
                if self._idle_s() < self._idle_timeout_s:
                    return False
                _log.info("no node for %g s: the server ends", self._idle_timeout_s)
                self._process.stop()
                return True
        except StoreError as error:  # an agent holds the lock: not idle after all
            _log.info("%s", error)
            return False

    def _idle_s(self) -> float:
        try:
            return self._idleness.look(look(self._store, self._directory), time.monotonic())
        except StoreError as error:  # it may have crashed, and be in use after its next start
            _log.warning("cannot see whether the server is in use: %s", error)
            return 0.0


def main(arguments: list[str]) -> int:
    """Start a keeper in the background; returns 0 when its server serves, 1 if it fails."""
    parser = argparse.ArgumentParser(prog="python -m zero_agent.etcd.etcd_keeper")
    parser.add_argument("--client-port", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--idle-timeout-s", type=float, default=IDLE_TIMEOUT_S)
    options = parser.parse_args(arguments)
    ready_read, ready_write = os.pipe()
    # A daemon: the agent that starts it waits for this command alone, and does not end with it.
    if os.fork():
        os.close(ready_write)
        return 0 if os.read(ready_read, 1) else 1  # the end of the keeper closes the pipe
    os.close(ready_read)
    os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    directory = SharedDirectory(options.directory)
    member = Member(data=directory.data, client_port=options.client_port)
    try:
        with directory.keeping() as alone:
            if not alone:
                raise ZeroError(f"another keeper runs on {directory.path}")
            keeper = Keeper(member, directory, options.idle_timeout_s)
            os.write(ready_write, b"1")
            os.close(ready_write)
            keeper.run()
    except ZeroError as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
