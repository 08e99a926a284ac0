"""The connection to etcd: one of several endpoints, a deadline on every call, login, errors.

etcd3's client has one endpoint and one timeout for all calls, and its login cannot be renewed. A
`Connection` holds one such client at a time. A connection is abandoned if it is broken, or if no
answer at all arrived on it while a call waited: the next call opens a new connection to the next
endpoint (failover). Every call ends within its deadline, and raises only `StoreError`s. Importing
this module imports grpc and etcd3.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from zero_orchestrator.errors import SpecError, StoreError, StoreUnavailable
from zero_orchestrator.store.etcd import messages
from zero_orchestrator.store.etcd.certificates import Certificates
from zero_orchestrator.store.etcd.errors import (
    joined,
    login_again,
    never_sent,
    rpc_error,
    store_error,
)

messages.install()

import etcd3  # noqa: E402 (needs the messages)

rpc: Any = etcd3.etcdrpc
"""Etcd's messages and stubs."""

DEFAULT_PORT = 2379

LOGIN_S = 120.0
"""Timeout of a login: a server with many logins at once is slow, and a retry adds load."""
PATIENT_LOGIN_S = 15.0
"""After this many seconds without an answer to a login, another endpoint is tried if given."""
RELOGIN_S = 1.0
"""A client whose token is refused logs in again after a random pause up to this many seconds."""
SILENT_S = 1.0
"""A call that times out abandons the connection if nothing arrived on it for this many seconds."""

T = TypeVar("T")

_CHANNEL_OPTIONS = (
    # A new channel must open a new TCP connection; otherwise gRPC may reuse the dead one.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's defaults are 20 s for an attempt to connect and up to 120 s between attempts.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # etcd is on the local network: an HTTP proxy for the web does not lead to it.
    ("grpc.enable_http_proxy", 0),
    # etcd does not limit the size of the answer to a range.
    ("grpc.max_receive_message_length", -1),
    # For a name with several addresses (a headless service), start at a random one.
    (
        "grpc.service_config",
        '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}',
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """Login and TLS files. Without `ca` the connection is not encrypted."""

    user: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    ca: Path | None = None
    """Certificate of the authority that signed the server's certificate, PEM."""
    cert: Path | None = None
    """Certificate of this client, PEM, if the server demands one."""
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise SpecError("a login to etcd needs both a user and a password")
        if (self.cert is None) != (self.key is None):
            raise SpecError("a client certificate for etcd needs both its cert and its key file")
        if self.cert is not None and self.ca is None:
            raise SpecError("a client certificate for etcd needs the ca file of the server as well")


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Parse `HOST[:PORT][,HOST[:PORT]...]` into endpoints with a port; IPv6 hosts in brackets.

    Raises:
        SpecError: The text has no endpoint, has a scheme, or has a port that is not a number.
    """
    endpoints = []
    for endpoint in filter(None, (part.strip() for part in text.split(","))):
        if "://" in endpoint:
            raise SpecError(f"etcd endpoint {endpoint!r}: write HOST:PORT, without the scheme")
        host, colon, port = endpoint.rpartition(":")
        if not colon or endpoint.endswith("]"):
            host, port = endpoint, str(DEFAULT_PORT)
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise SpecError(f"etcd endpoint {endpoint!r}: write an IPv6 address as [ADDRESS]:PORT")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise SpecError(
                f"etcd endpoint {endpoint!r}: write HOST:PORT with a port of 1 to 65535"
            )
        endpoints.append(f"{host}:{port}")
    if not endpoints:
        raise SpecError(f"no etcd endpoint in {text!r}; write HOST:PORT[,HOST:PORT...]")
    return tuple(endpoints)


class Endpoints:
    """The endpoints of one cluster, which all connections to it share. Thread-safe.

    They change with the members of the cluster (`become`); a connection that is in use stays.
    """

    def __init__(self, text: str) -> None:
        """Parse them; raises SpecError as `parse_endpoints`."""
        self.known = parse_endpoints(text)

    def become(self, endpoints: Sequence[str]) -> None:
        """From now on the cluster is served there."""
        self.known = tuple(endpoints)

    def after(self, endpoint: str) -> str:
        """The endpoint that is tried after this one; the first, if it is none of them any more."""
        known = self.known  # once: `become` may be called meanwhile
        index = known.index(endpoint) + 1 if endpoint in known else 0
        return known[index % len(known)]


class NoAnswer(Exception):
    """A request was not answered in time; treated as a call's DEADLINE_EXCEEDED."""


class Login:
    """A user's token, shared by all connections to one etcd, also by those opened later."""

    def __init__(self, credentials: Credentials) -> None:
        """Nothing is sent."""
        self._who = credentials
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[Any, float]] = {}
        """Endpoint -> the login request, and the monotonic time at which it was sent."""
        self.token: str | None = None
        """The token of etcd's auth; None: there is no user, or no token yet."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The login, as gRPC metadata: call credentials would be refused without TLS."""
        token = self.token
        return (("token", token),) if token else ()

    def ensure(self, session: EtcdSession, timeout_s: float) -> None:
        """Log in if there is a user and no token yet.

        Raises:
            NoAnswer: The login was not answered within `timeout_s`.
            grpc.RpcError: As every call.
        """
        if self._who.user is None:
            return
        request = rpc.AuthenticateRequest(name=self._who.user, password=self._who.password)
        with self._lock:
            if self.token is not None:
                return
            # One request for each endpoint, which all callers share. It continues when a caller's
            # timeout ends: a login costs the server a tenth of a second of CPU (bcrypt), so a
            # thousand agents that log in again at every slow answer would overload it.
            attempt, _ = self._under_way.get(session.endpoint, (None, 0.0))
            if attempt is None:
                stub = rpc.AuthStub(session.client.channel)
                attempt = stub.Authenticate.future(request, LOGIN_S)
                self._under_way[session.endpoint] = (attempt, time.monotonic())
        try:
            token = attempt.result(max(0.0, timeout_s)).token
        except grpc.FutureTimeoutError:
            raise NoAnswer("no answer to the login") from None
        except (grpc.RpcError, grpc.FutureCancelledError):
            self._settle(session, attempt, None)
            raise
        self._settle(session, attempt, token)

    def under_way_s(self, session: EtcdSession) -> float | None:
        """Seconds since the login request was sent; None if none is pending."""
        found = self._under_way.get(session.endpoint)
        return None if found is None else time.monotonic() - found[1]

    def forget(self, token: str | None) -> None:
        """Drop a token that the server has refused, unless another one has replaced it.

        The next call then logs in again.
        """
        with self._lock:
            if self.token == token:
                self.token = None

    def _settle(self, session: EtcdSession, attempt: Any, token: str | None) -> None:
        with self._lock:
            found, _ = self._under_way.get(session.endpoint, (None, 0.0))
            if found is attempt:
                del self._under_way[session.endpoint]
            if token is not None and self.token is None:
                self.token = token


@dataclasses.dataclass(eq=False)
class EtcdSession:
    """One connection to one endpoint, until it is abandoned."""

    endpoint: str
    client: etcd3.Etcd3Client
    login: Login
    answered_s: float = 0.0
    """When the server last sent an answer here, by this machine's monotonic clock."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The login, as gRPC metadata."""
        return self.login.metadata

    def note_answer(self) -> None:
        """Record that the server has sent an answer."""
        self.answered_s = time.monotonic()

    def with_deadline(self, timeout_s: float) -> Any:
        """The client with another timeout: a shallow copy that shares channel and stubs."""
        client = copy.copy(self.client)
        client.timeout = max(0.0, timeout_s)
        client.metadata = self.metadata
        return client


class _Client(etcd3.Etcd3Client):  # type: ignore[misc]
    """etcd3's client, to which credentials are given instead of the paths of files."""

    def _get_secure_creds(self, ca_cert: Any, *_: None) -> Any:
        return ca_cert


class Connection:
    """Calls to etcd with failover between its endpoints. Thread-safe."""

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        timeout_s: float,
        credentials: Credentials | None = None,
        login: Login | None = None,
        silent_s: float = SILENT_S,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            endpoints: Members of one cluster.
            timeout_s: Timeout of a call that passes none.
            credentials: Login and TLS.
            login: Login shared with other connections to the same etcd.
            silent_s: A call that times out abandons the connection if no answer arrived on it
                for this many seconds.
            on_move: Called after a connection was abandoned and a new one opened.

        Raises:
            SpecError: A TLS file is not right.
        """
        self._endpoints = endpoints
        self.timeout_s = timeout_s
        who = credentials or Credentials()
        self._certificates = Certificates(who.ca, who.cert, who.key) if who.ca else None
        self.login = login or Login(who)
        self._silent_s = silent_s
        self._on_move = on_move
        self._lock = threading.Lock()
        self._closed = False
        # A random start spreads the clients over the members of a cluster.
        self.session = self._open(random.choice(endpoints.known))
        """The connection in use."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The members of the cluster, as far as they are known."""
        return self._endpoints.known

    def call(
        self,
        send: Callable[[Any], T],
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> T:
        """Make one call within one deadline, with failover to the other endpoints.

        Args:
            send: Makes the call on an etcd3 client.
            repeatable: The call is idempotent. Another call is retried only if it did not leave
                this machine.
            timeout_s: Seconds for all tries together; the connection's timeout by default.

        Raises:
            StoreUnavailable: No endpoint answered; the call may have been carried out.
            StoreRefused, LeaseLost, Compacted: The server refused the call.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        failures: list[str] = []
        while True:
            session, began_s = self.session, time.monotonic()
            # While another endpoint remains to be tried, a call that may be repeated waits here for
            # half of the time that is left; but a login would be as slow at the other one.
            more = repeatable and len(failures) + 1 < len(self.endpoints)
            more = more and self.login.under_way_s(session) is None
            try:
                answer = self._send(session, send, (began_s + deadline) / 2 if more else deadline)
                session.note_answer()
                return answer
            except (grpc.RpcError, etcd3.Etcd3Exception, NoAnswer) as error:
                failure = self.failed(session, error, began_s)
                failures.append(str(failure))
                # The first endpoint once more: its connection may have broken while it was idle.
                tried_enough = len(failures) > len(self.endpoints) or time.monotonic() > deadline
                # Another try may succeed, and cannot carry out a write twice.
                may_repeat = isinstance(failure, StoreUnavailable) and (
                    repeatable or never_sent(_facts(error)[1])
                )
                if tried_enough or not may_repeat:
                    raise type(failure)(joined(failures)) from error
            # gRPC's error for a channel that `close` has taken away under a call.
            except ValueError as error:
                if not self._closed:
                    raise
                raise StoreUnavailable("this store is closed") from error

    def logged_in(self) -> EtcdSession:
        """The connection in use, logged in if there is a user; streams are opened on it.

        Raises:
            StoreUnavailable, StoreRefused: The login failed.
        """
        session, began_s = self.session, time.monotonic()
        try:
            self.login.ensure(session, self.timeout_s)
        except (grpc.RpcError, NoAnswer) as error:
            raise self.failed(session, error, began_s) from error
        return session

    def failed(self, session: EtcdSession, error: Exception, began_s: float = 0.0) -> StoreError:
        """The `StoreError` for an error of gRPC or etcd3, or a NoAnswer, which came on `session`.

        Abandons the session if another connection is better. `began_s`: when the request was sent
        that got no answer, by the monotonic clock.
        """
        code, text = _facts(error)
        failure = store_error(code, text, session.endpoint)
        if not isinstance(failure, StoreUnavailable):
            session.note_answer()
            return failure
        timed_out = code is grpc.StatusCode.DEADLINE_EXCEEDED
        login_s = self.login.under_way_s(session)
        useless = True  # another connection may answer what this one did not
        if timed_out and login_s is not None:  # busy with other logins; so would be another one
            useless = login_s > PATIENT_LOGIN_S and len(self.endpoints) > 1
        elif timed_out:
            # The TCP connection to a server that is stopped or cut off looks healthy for minutes.
            # One slow answer says nothing: other calls, the watches and the login use it, too.
            useless = time.monotonic() - max(session.answered_s, began_s) >= self._silent_s
        elif "etcdserver:" in text:  # an answer: this member cannot serve now, another may
            useless = len(self.endpoints) > 1 and "too many requests" not in text
        if useless:
            self.give_up(session)
        return failure

    def give_up(self, session: EtcdSession) -> None:
        """Fail over to the next endpoint, unless another thread has done so already."""
        with self._lock:
            if session is not self.session or self._closed:
                return
            # The old channel is not closed: calls of other threads may still be answered on it. It
            # is freed when the last of them has ended, each by its deadline.
            self.session = self._open(self._endpoints.after(session.endpoint))
        self._on_move()

    def close(self) -> None:
        """Close the channel; calls in progress end with StoreUnavailable. Safe to call twice."""
        with self._lock:
            self._closed = True
        self.session.client.close()

    def _open(self, endpoint: str) -> EtcdSession:
        # A channel for each endpoint, instead of one for all: gRPC resolves the name again at each
        # attempt, and checks the certificate against the name that was dialled.
        host, _, port = endpoint.rpartition(":")
        client = _Client(
            host=f"dns:///{host}",
            port=int(port),
            ca_cert=self._certificates and self._certificates.newest(),
            grpc_options=_CHANNEL_OPTIONS,
        )
        return EtcdSession(endpoint, client, self.login)

    def _send(self, session: EtcdSession, send: Callable[[Any], T], deadline: float) -> T:
        if self._closed:
            raise StoreUnavailable("this store is closed")
        token = self.login.token
        try:
            return self._send_once(session, send, deadline)
        except grpc.RpcError as error:
            # Tokens expire. A call refused for that was not carried out, so a retry is safe.
            if not login_again(error.details() or ""):
                raise
            # A restarted server has lost the tokens of all agents: spread their logins.
            left_s = max(0.0, deadline - time.monotonic())
            time.sleep(random.uniform(0, min(RELOGIN_S, left_s / 4)))
            self.login.forget(token)  # unless another thread has logged in meanwhile
            return self._send_once(session, send, deadline)

    def _send_once(self, session: EtcdSession, send: Callable[[Any], T], deadline: float) -> T:
        self.login.ensure(session, deadline - time.monotonic())
        return send(session.with_deadline(deadline - time.monotonic()))


def _facts(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status code and the text of an error of gRPC or etcd3, or of a NoAnswer."""
    if isinstance(error, NoAnswer):
        return grpc.StatusCode.DEADLINE_EXCEEDED, str(error)
    cause = rpc_error(error)
    return cause.code(), cause.details() or ""
