"""The liveness ring, a failure detector: each agent holds a TCP connection to the next node's.

A lease expires some seconds after its node has died; the kernel closes the sockets of a dead
process within a millisecond. A closed connection alone proves nothing, so the agent dials again and
reports a death that is *certain*, or a *suspicion* (`suspects`). Both ends prove that they know the
key of the ring (`handshake`); after that, nothing is sent but the frames of a `probe`.

Source of the idea: NVRx and torchft notice peers by heartbeat or lease; using the kernel's own
notice, with a confirmation, is ours.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence

from zero_agent.node import identity, probe
from zero_agent.node.last_word import TIMEOUT_S, answer
from zero_agent.node.network import ANY_PORT, PatientServer, first_free
from zero_contract import handshake
from zero_contract.handshake import StrangerError
from zero_contract.signing import Key
from zero_orchestrator.addresses import host_port, split_host_port
from zero_orchestrator.membership.job_state import Node

log = logging.getLogger("zero")

RETRY_S = 1.0
"""Pause between two attempts to reach a neighbour that was never reached."""
CONFIRM_S = 0.02
"""The first pause before a neighbour is dialled again whose connection has just ended."""
CONFIRM_GROWTH = 1.2
"""Factor of that pause's exponential backoff, up to `RETRY_S`."""


def neighbour(me: Node, nodes: Sequence[Node]) -> Node | None:
    """The node to watch: the next live node in the order of ids; None if there is no other."""
    # By id, as all nodes see them: in this order each node is watched by exactly one other.
    others = sorted((node for node in nodes if node.id != me.id and node.ring), key=lambda n: n.id)
    after = [node for node in others if node.id > me.id]
    return next(iter(after or others), None)


class Ring:
    """This agent's part of the ring: one listener, one connection to a neighbour."""

    def __init__(
        self, address: str, on_dead: Callable[[Node, bool], None], ports: range = ANY_PORT
    ) -> None:
        """Listen at this address alone; nobody is answered or watched before `start`.

        `on_dead` receives, on the ring's thread, a neighbour that seems to be dead, and whether
        that is certain.

        Raises:
            OSError: It cannot listen there.
        """
        self._on_dead = on_dead
        self._server = first_free(ports, lambda port: _Server((address, port), _Answer))
        self.port = int(self._server.server_address[1])
        self.address = host_port(address, self.port)
        self._target: Node | None = None
        self._changed = threading.Condition()
        self._open = True
        self._connection: socket.socket | None = None
        self._met: tuple[str, str] | None = None
        """The process of the last handshake, unless it was reported since."""
        self._misses = 0
        """Failed attempts since that handshake."""

    def start(self, me: Node, key: Key) -> None:
        """Answer and watch from now on, with the key of the ring."""
        self._key = key
        self._server.answer = lambda connection: answer(connection, key, me.id, me.incarnation)
        for name, work in (("answers", self._server.serve_forever), ("watches", self._watch)):
            threading.Thread(target=work, name=f"zero-ring-{name}", daemon=True).start()

    def follow(self, me: Node, nodes: Sequence[Node]) -> None:
        """Watch this node's neighbour among the live nodes."""
        target = neighbour(me, nodes)
        with self._changed:
            before, self._target = self._target, target
            if _key(before) == _key(target):
                return
            self._hang_up()
            self._changed.notify_all()

    @property
    def listener(self) -> int:
        """The descriptor of the listening socket."""
        return self._server.fileno()

    def close(self) -> None:
        """Stop watching and answering; returns at once."""
        with self._changed:
            self._open = False
            self._hang_up()
            self._changed.notify_all()
        if hasattr(self, "_key"):  # else nobody serves, and `shutdown` would wait for ever
            threading.Thread(target=self._server.shutdown, daemon=True).start()
        self._server.server_close()

    # ---- watching ----

    def _hang_up(self) -> None:
        """Have the watching thread leave its connection, and read the target again."""
        # Shut down, not closed: to close it here would not end that thread's `recv`.
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._target is not None or not self._open)
                target = self._target
                if target is None or not self._open:
                    return
            refused, by = False, ""
            try:
                with self.dial(target) as connection:
                    self._met, self._misses = _key(target), 0
                    self._stay_on(connection, target)
                continue
            except ConnectionRefusedError:
                refused = True
            except AnotherProcess as error:
                refused, by = True, error.node
            except OSError as error:
                log.debug("ring: %s at %s cannot be reached: %s", target.id, target.ring, error)
            # Only a process that has answered here before, and once until it answers again.
            if self._met == _key(target):
                # Certain: another process of the node answers (its successor, or the forkserver
                # that it has left behind), or it was one of this machine. None: it was not.
                gone = by == target.id or identity.is_gone(target.process)
                # A refusal is a suspicion: a firewall that rejects looks the same. Any other error
                # proves nothing: the neighbour may be dying, and is dialled again soon.
                if gone or (gone is None and refused):
                    if self._is_target(target):
                        self._on_dead(target, bool(gone))
                    self._met = None
            self._misses += 1
            # A hundred is enough for `RETRY_S`; after days of attempts the power would overflow.
            quick_s = CONFIRM_S * CONFIRM_GROWTH ** min(self._misses, 100)
            self._pause(min(quick_s, RETRY_S) if self._met == _key(target) else RETRY_S)

    def _pause(self, seconds: float) -> None:
        """Wait for this time, or until there is another neighbour to watch."""
        with self._changed:
            before = _key(self._target)
            self._changed.wait_for(lambda: _key(self._target) != before or not self._open, seconds)

    def _is_target(self, node: Node) -> bool:
        with self._changed:
            return self._open and _key(self._target) == _key(node)

    def _stay_on(self, connection: socket.socket, target: Node) -> None:
        """Wait until the connection ends, for whatever reason."""
        with self._changed:
            if not self._is_target(target):  # it has changed during the handshake
                return
            self._connection = connection
        try:
            connection.settimeout(None)  # ended by the kernel, or by `_hang_up`
            while connection.recv(1):
                pass
        except OSError:
            pass  # a reset: a suspicion like an orderly end
        finally:
            with self._changed:
                self._connection = None

    def dial(
        self, target: Node, connect_s: float = TIMEOUT_S, answer_s: float = TIMEOUT_S
    ) -> socket.socket:
        """Connect to exactly the process that `target` describes; on any thread.

        Its machine has `connect_s` to answer, and then the process `answer_s` for each message.

        Raises:
            AnotherProcess: Another process of this job answers, an `OSError` as well.
            OSError: The address cannot be reached, or its process does not know the secret; or this
                ring has not started.
        """
        if not hasattr(self, "_key"):
            raise ConnectionAbortedError("this agent has not joined the job yet")
        where = split_host_port(target.ring)
        connection = socket.create_connection(where, connect_s)
        try:
            connection.settimeout(answer_s)
            # Another process may have this port now, of another node or the successor of this one.
            name, _ = handshake.greet(connection, self._key)
            node, _, incarnation = name.rpartition(" ")
            if (node, incarnation) != (target.id, target.incarnation):
                raise AnotherProcess(node)
        except BaseException:
            connection.close()
            raise
        return connection


class AnotherProcess(ConnectionError):
    """The address belongs to another process of the job now."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} answers")
        self.node = node


class _Server(PatientServer):
    """Answers the nodes that watch this agent, normally one."""

    answer: Callable[[socket.socket], None]


class _Answer(socketserver.BaseRequestHandler):
    """One watcher or prober: prove this agent's identity to it, then answer its frames, if any."""

    def handle(self) -> None:
        server: _Server = self.server  # type: ignore[assignment]
        try:
            server.answer(self.request)
        except StrangerError as error:
            log.warning("ring: refused %s: %s", self.client_address[0], error)
            return
        probe.serve(self.request)


def _key(node: Node | None) -> tuple[str, str] | None:
    return (node.id, node.incarnation) if node else None
