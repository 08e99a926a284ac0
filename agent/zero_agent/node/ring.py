"""The liveness ring: each agent holds a TCP connection to the next, and hears at once if it ends.

A lease says that a node is gone some seconds after it is; a kernel says so in a millisecond, by
closing the sockets of a dead process. A closed connection alone says nothing: networks and
middle boxes close connections of healthy nodes. So the agent dials again. If another process of
the same node answers (its successor, or the forkserver that it has left behind), or the process was
one of this machine and is gone, its death is *certain*.
If nothing listens there (connection refused) that is a *suspicion*: a firewall that rejects looks
the same, and the lease is the counter-evidence (`suspects`). Anything else (no answer, no route)
proves nothing and is left to the lease.

Must always hold: only a process that this very agent has talked to, at that address, is reported,
and as long as it is not talked to again only once. Both ends prove that they know the job's secret
(`handshake`); nothing else is ever sent. Who calls it: the agent's loop.

Source of the idea: NVRx and torchft notice peers by heartbeat or lease; using the kernel's own
notice, with a confirmation, is ours.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence

from zero_agent.node import identity
from zero_agent.node.handshake import TIMEOUT_S, answer, digest, read_line
from zero_agent.node.network import ANY_PORT, PatientServer, first_free
from zero_orchestrator.addresses import host_port, split_host_port
from zero_orchestrator.membership.job_state import Node

log = logging.getLogger("zero")

RETRY_S = 1.0
"""Between two attempts to reach a neighbour that was never met."""
CONFIRM_S = 0.02
"""The same for one whose connection has just ended..."""
CONFIRM_GROWTH = 1.2
"""...and so many times longer after each attempt, up to `RETRY_S`."""


def neighbour(me: Node, nodes: Sequence[Node]) -> Node | None:
    """Whom to watch: the next live node in the order of ids, or None when alone."""
    others = sorted((node for node in nodes if node.id != me.id and node.ring), key=lambda n: n.id)
    after = [node for node in others if node.id > me.id]
    return next(iter(after or others), None)


class Ring:
    """This agent's place in the ring: one listener, one connection to a neighbour."""

    def __init__(
        self, address: str, on_dead: Callable[[Node, bool], None], ports: range = ANY_PORT
    ) -> None:
        """Listen; nobody is answered or watched before `start`.

        Args:
            address: The node's own address; the ring listens there and nowhere else.
            on_dead: Called with a neighbour that seems to be dead, and whether that is certain, on
                the ring's thread.
            ports: One of them.

        Raises:
            OSError: It cannot listen there.
        """
        self._on_dead = on_dead
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = type("Server", (_Server,), {"address_family": family})
        self._server: _Server = first_free(ports, lambda port: server((address, port), _Answer))
        self.port = int(self._server.server_address[1])
        self.address = host_port(address, self.port)
        self._target: Node | None = None
        self._changed = threading.Condition()
        self._open = True
        self._connection: socket.socket | None = None
        self._met: tuple[str, str] | None = None
        """The last process that was talked to, and not reported since."""
        self._misses = 0
        """Attempts in vain since then."""

    def start(self, me: Node, secret: str) -> None:
        """Answer and watch from now on."""
        self._secret = secret
        self._server.answer = lambda connection: answer(connection, secret, me.id, me.incarnation)
        for name, work in (("answers", self._server.serve_forever), ("watches", self._watch)):
            threading.Thread(target=work, name=f"zero-ring-{name}", daemon=True).start()

    def follow(self, me: Node, nodes: Sequence[Node]) -> None:
        """Watch whoever is next among the live nodes."""
        target = neighbour(me, nodes)
        with self._changed:
            before, self._target = self._target, target
            if _key(before) == _key(target):
                return
            self._hang_up()
            self._changed.notify_all()

    @property
    def listener(self) -> int:
        """The descriptor of the socket at which it is dialled."""
        return self._server.fileno()

    def close(self) -> None:
        """Stop watching and answering; returns at once."""
        with self._changed:
            self._open = False
            self._hang_up()
            self._changed.notify_all()
        if hasattr(self, "_secret"):
            threading.Thread(target=self._server.shutdown, daemon=True).start()
        self._server.server_close()

    # ---- watching ----

    def _hang_up(self) -> None:
        """End the connection under the watching thread, which then looks at the target again."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        while (target := self._wait_for_target()) is not None:
            refused, by = False, ""
            try:
                with self._dial(target) as connection:
                    self._met, self._misses = _key(target), 0
                    self._stay_on(connection, target)
                continue
            except ConnectionRefusedError:
                refused = True
            except _AnotherProcess as error:
                refused, by = True, error.node
            except OSError as error:
                log.debug("ring: %s at %s cannot be reached: %s", target.id, target.ring, error)
            if self._met == _key(target):
                gone = by == target.id or identity.is_gone(target.process)
                self._report(target, refused=refused, gone=gone)
            self._misses += 1
            quick_s = CONFIRM_S * CONFIRM_GROWTH ** min(self._misses, 100)
            self._pause(min(quick_s, RETRY_S) if self._met == _key(target) else RETRY_S)

    def _report(self, target: Node, *, refused: bool, gone: bool | None) -> None:
        """Say once what is known of a neighbour that was met; None: it is not of this machine.

        One that is neither known to be gone nor refuses may be dying: it is dialled again soon.
        """
        if not gone and (gone is False or not refused):
            return
        if self._wants(target):
            self._on_dead(target, bool(gone))
        self._met = None

    def _wait_for_target(self) -> Node | None:
        with self._changed:
            self._changed.wait_for(lambda: self._target is not None or not self._open)
            return self._target if self._open else None

    def _pause(self, seconds: float) -> None:
        """Wait a moment, or until there is another neighbour to watch."""
        with self._changed:
            before = _key(self._target)
            self._changed.wait_for(lambda: _key(self._target) != before or not self._open, seconds)

    def _wants(self, target: Node) -> bool:
        with self._changed:
            return self._open and _key(self._target) == _key(target)

    def _stay_on(self, connection: socket.socket, target: Node) -> None:
        """Until the connection ends, for whatever reason."""
        with self._changed:
            if not self._open or _key(self._target) != _key(target):
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

    def _dial(self, target: Node) -> socket.socket:
        """A connection to the very process that `target` describes.

        Raises:
            _AnotherProcess: Somebody of this job answers, but not that process.
            OSError: It cannot be reached, or does not know the secret.
        """
        where = split_host_port(target.ring)
        connection = socket.create_connection(where, TIMEOUT_S)
        try:
            connection.settimeout(TIMEOUT_S)
            theirs = read_line(connection)
            mine = secrets.token_hex(16)
            connection.sendall(f"{digest(self._secret, theirs)} {mine}\n".encode())
            node, incarnation, proof = read_line(connection).split(" ")
            expected = digest(self._secret, f"{mine} {node} {incarnation}")
            if not hmac.compare_digest(proof, expected):
                raise ConnectionAbortedError("it does not know the job's secret")
            if (node, incarnation) != (target.id, target.incarnation):
                raise _AnotherProcess(node)
        except ValueError as error:
            connection.close()
            raise ConnectionAbortedError("it does not speak the ring's protocol") from error
        except BaseException:
            connection.close()
            raise
        return connection


class _AnotherProcess(ConnectionError):
    """The address belongs to another process of the job now."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} answers")
        self.node = node


class _Server(PatientServer):
    """Answers whoever watches this agent; one thread per watcher, normally one."""

    daemon_threads = True
    allow_reuse_address = False
    block_on_close = False
    answer: Callable[[socket.socket], bool]

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("ring: %s went away during the handshake", client_address)


class _Answer(socketserver.BaseRequestHandler):
    """One watcher: prove who we are to one that knows the secret, then hold the line."""

    def handle(self) -> None:
        server: _Server = self.server  # type: ignore[assignment]
        if not server.answer(self.request):
            log.warning("ring: %s does not know the job's secret", self.client_address)
            return
        self.request.settimeout(None)
        while self.request.recv(64):
            pass


def _key(node: Node | None) -> tuple[str, str] | None:
    return (node.id, node.incarnation) if node else None
