"""The connection to etcd: one of several endpoints, a deadline on every call, login, errors.

etcd3's client knows one endpoint and one timeout for all calls, and its login cannot be
renewed. A `Connection` holds one such client at a time. A connection that is broken, or on which
nothing at all was heard while a call waited for its answer, is given up: the next call starts on a
fresh one, at the next endpoint. That also gets away from a server that is stopped, cut off, or
without a leader, whose TCP connection looks healthy for minutes. A slow answer alone gives nothing
up: calls, watches and the login of all others hang on the same connection. One channel per
endpoint, rather than one for all, lets gRPC resolve names again at each attempt and check a TLS
certificate against the name it was reached by.

Must always hold: every call ends within its deadline; nothing but `StoreError`s leaves here; a
write is sent again only if it certainly was not carried out. Who calls it: `etcd` and
`watch`. Importing this module imports grpc and etcd3.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from zero_orchestrator.errors import SpecError, StoreError, StoreUnavailable
from zero_orchestrator.store.etcd import messages
from zero_orchestrator.store.etcd.errors import login_again, never_sent, rpc_error, store_error

messages.install()

import etcd3  # noqa: E402 (needs the messages)

rpc: Any = etcd3.etcdrpc
"""Etcd's messages and stubs."""

DEFAULT_PORT = 2379

LOGIN_S = 120.0
"""A server that many log in to at once takes its time; asking again would cost it more."""
PATIENT_LOGIN_S = 15.0
"""After so long without an answer to a login another endpoint is asked, if there is one."""
RELOGIN_S = 1.0
"""Those whose token is refused log in again within so long, not all at once."""
SILENT_S = 1.0

T = TypeVar("T")

_CHANNEL_OPTIONS = (
    # A fresh channel must be a fresh TCP connection, or a dead one would be found again.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own limits are 20 s for an attempt to connect and 120 s between attempts.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # etcd is a neighbour: a proxy for the web is not the way to it.
    ("grpc.enable_http_proxy", 0),
    # etcd itself sets no limit to what a range returns.
    ("grpc.max_receive_message_length", -1),
    # A name with several addresses (a headless service) starts at any of them.
    (
        "grpc.service_config",
        '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}',
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """How to log in and whom to trust. Without `ca` the connection is not encrypted."""

    user: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    ca: Path | None = None
    """The authority that signed the server's certificate, PEM."""
    cert: Path | None = None
    """This client's certificate, PEM, where the server asks for one."""
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise SpecError("a login to etcd needs both a user and a password")
        if (self.cert is None) != (self.key is None):
            raise SpecError("a client certificate for etcd needs both its cert and its key file")
        if self.cert is not None and self.ca is None:
            raise SpecError("a client certificate for etcd needs the ca file of the server as well")


def parse_endpoints(text: str) -> tuple[str, ...]:
    """`HOST[:PORT][,HOST[:PORT]...]` as endpoints with a port each; IPv6 hosts in brackets.

    Raises:
        SpecError: The text names no endpoint, a scheme, or a port that is no number.
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


class NoAnswer(Exception):
    """What was asked was not answered in time; as a call's DEADLINE_EXCEEDED."""


class Login:
    """A user's token, for all connections to one etcd, and however often those are given up.

    A password costs the server a tenth of a second of computing (bcrypt), so a thousand agents that
    log in anew whenever something is slow would keep it from everything else.
    """

    def __init__(self, credentials: Credentials) -> None:
        """Nothing is sent."""
        self._who = credentials
        self._lock = threading.Lock()
        self._fetched_s = 0.0
        self._under_way: dict[str, tuple[Any, float]] = {}
        """By endpoint: the request, and since when."""
        self.token: str | None = None
        """None: there is no user, or no token yet."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The login, as gRPC metadata: call credentials would be refused without TLS."""
        token = self.token
        return (("token", token),) if token else ()

    def ensure(self, session: Session, timeout_s: float) -> None:
        """Fetch a token, if there is a user to log in and none was fetched before.

        One request at a time is under way to an endpoint, whoever waits for it, and it goes on
        when a caller's time is up: asking again would only cost the server more.

        Raises:
            NoAnswer: It was not answered within this time.
            grpc.RpcError: As any call.
        """
        if self._who.user is None or self.token is not None:
            return
        request = rpc.AuthenticateRequest(name=self._who.user, password=self._who.password)
        with self._lock:
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

    def under_way_s(self, session: Session) -> float | None:
        """For how long the server has been asked; None: it has not, or has answered."""
        found = self._under_way.get(session.endpoint)
        return None if found is None else time.monotonic() - found[1]

    def forget(self, token: str | None, *, younger_s: float = 0.0) -> None:
        """The server does not know this token any more.

        Args:
            token: The one that was refused; another may have taken its place.
            younger_s: One that was fetched less long ago is kept: it was refused for another
                reason.
        """
        with self._lock:
            if self.token == token and time.monotonic() - self._fetched_s >= younger_s:
                self.token = None

    def _settle(self, session: Session, attempt: Any, token: str | None) -> None:
        with self._lock:
            found, _ = self._under_way.get(session.endpoint, (None, 0.0))
            if found is attempt:
                del self._under_way[session.endpoint]
            if token is not None and self.token is None:
                self.token, self._fetched_s = token, time.monotonic()


@dataclasses.dataclass(eq=False)
class Session:
    """One connection to one endpoint, until it is given up."""

    endpoint: str
    client: etcd3.Etcd3Client
    login: Login
    heard_s: float = 0.0
    """When the server last answered anything here, by this machine's monotonic clock."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The login, as gRPC metadata."""
        return self.login.metadata

    def heard(self) -> None:
        """The server has answered."""
        self.heard_s = time.monotonic()

    def with_deadline(self, timeout_s: float) -> Any:
        """The client with another timeout: a shallow copy, sharing channel and stubs."""
        client = copy.copy(self.client)
        client.timeout = max(0.0, timeout_s)
        client.metadata = self.metadata
        return client


class Connection:
    """Calls to whichever endpoint answers. Thread-safe."""

    def __init__(
        self,
        endpoints: str,
        *,
        timeout_s: float,
        credentials: Credentials | None = None,
        login: Login | None = None,
        silent_s: float = SILENT_S,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            endpoints: `HOST:PORT[,HOST:PORT...]`, members of one cluster.
            timeout_s: For a call that names no timeout of its own.
            credentials: Login and TLS.
            login: Shared with other connections to the same etcd.
            silent_s: A call whose time is up gives the connection up if nothing was heard on it
                for so long.
            on_move: Called when a connection was given up for a new one.
        """
        self.endpoints = parse_endpoints(endpoints)
        self.timeout_s = timeout_s
        self._credentials = credentials or Credentials()
        self.login = login or Login(self._credentials)
        self._silent_s = silent_s
        self._on_move = on_move
        self._lock = threading.Lock()
        self._closed = False
        # Not all clients of a cluster start at the same member.
        self._index = random.randrange(len(self.endpoints))
        self._session = self._open()

    @property
    def session(self) -> Session:
        """The connection in use."""
        return self._session

    def call(
        self,
        send: Callable[[Any], T],
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> T:
        """Make one call, wherever it is answered, within one deadline.

        Each endpoint is tried once, and the first a second time: its connection may have
        broken while nobody used it. A call that may be carried out twice waits at an endpoint for
        half of the time that is left, as long as there is another one to ask.

        Args:
            send: Makes the call on an etcd3 client.
            repeatable: The call may be carried out twice. One that may not is tried again
                only if it did not leave this machine.
            timeout_s: For all tries together; the store's timeout by default.

        Raises:
            StoreUnavailable: No answer from any; the call may have been carried out.
            StoreRefused, LeaseLost, Compacted: The answer was no.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        failures: list[str] = []
        while True:
            session, began_s = self._session, time.monotonic()
            more = repeatable and len(failures) + 1 < len(self.endpoints)
            more = more and self.login.under_way_s(session) is None
            try:
                answer = self._send(session, send, (began_s + deadline) / 2 if more else deadline)
                session.heard()
                return answer
            except (grpc.RpcError, etcd3.Etcd3Exception, NoAnswer) as error:
                failure = self.failed(session, error, began_s)
                failures.append(str(failure))
                tried_enough = len(failures) > len(self.endpoints) or time.monotonic() > deadline
                # Another try may succeed, and cannot carry out a write twice.
                may_repeat = isinstance(failure, StoreUnavailable) and (
                    repeatable or never_sent(_facts(error)[1])
                )
                if tried_enough or not may_repeat:
                    raise type(failure)("; ".join(dict.fromkeys(failures))) from error
            except ValueError as error:  # gRPC's error for a channel closed under a call
                if not self._closed:
                    raise
                raise StoreUnavailable("this store is closed") from error

    def logged_in(self) -> Session:
        """The connection in use, with a token if there is a user: for streams.

        Raises:
            StoreUnavailable, StoreRefused: The login failed.
        """
        session, began_s = self._session, time.monotonic()
        try:
            self.login.ensure(session, self.timeout_s)
        except (grpc.RpcError, NoAnswer) as error:
            raise self.failed(session, error, began_s) from error
        return session

    def failed(self, session: Session, error: Exception, began_s: float = 0.0) -> StoreError:
        """What an error means; gives `session` up if that is of no more use.

        Args:
            session: On which it came.
            error: Of gRPC or etcd3, or a NoAnswer.
            began_s: When that was asked for which there was no answer in time.
        """
        code, text = _facts(error)
        failure = store_error(code, text, session.endpoint)
        if not isinstance(failure, StoreUnavailable):
            session.heard()
        elif self._is_useless(session, code, text, began_s):
            self.give_up(session)
        return failure

    def _is_useless(
        self, session: Session, code: grpc.StatusCode, text: str, began_s: float
    ) -> bool:
        """Whether a connection without an answer is better left."""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            login_s = self.login.under_way_s(session)
            if login_s is not None:  # it checks the passwords of others first; so would another one
                return login_s > PATIENT_LOGIN_S and len(self.endpoints) > 1
            return time.monotonic() - max(session.heard_s, began_s) >= self._silent_s
        if "etcdserver:" in text:  # an answer: this member can not now, another one may
            return len(self.endpoints) > 1 and "too many requests" not in text
        return True

    def give_up(self, session: Session) -> None:
        """Go on at the next endpoint, unless another thread has done so already.

        The old channel is not closed: calls of other threads may get their answers yet. It
        goes when the last of them has ended, each by its deadline.
        """
        with self._lock:
            if session is not self._session or self._closed:
                return
            self._index = (self._index + 1) % len(self.endpoints)
            self._session = self._open()
        self._on_move()

    def close(self) -> None:
        """Close the channel; calls in progress end with StoreUnavailable. Safe to call twice."""
        with self._lock:
            self._closed = True
        self._session.client.close()

    def _open(self) -> Session:
        endpoint, who = self.endpoints[self._index], self._credentials
        host, _, port = endpoint.rpartition(":")
        client = etcd3.Etcd3Client(
            host=f"dns:///{host}",
            port=int(port),
            ca_cert=who.ca,
            cert_cert=who.cert,
            cert_key=who.key,
            grpc_options=_CHANNEL_OPTIONS,
        )
        return Session(endpoint, client, self.login)

    def _send(self, session: Session, send: Callable[[Any], T], deadline: float) -> T:
        if self._closed:
            raise StoreUnavailable("this store is closed")
        token = self.login.token
        try:
            return self._send_once(session, send, deadline)
        except grpc.RpcError as error:
            # Tokens expire. A call refused for that was not carried out: any may be repeated.
            if not login_again(error.details()):
                raise
            # A server that was started again has forgotten those of all agents at once.
            left_s = max(0.0, deadline - time.monotonic())
            time.sleep(random.uniform(0, min(RELOGIN_S, left_s / 4)))
            self.login.forget(token)
            return self._send_once(session, send, deadline)

    def _send_once(self, session: Session, send: Callable[[Any], T], deadline: float) -> T:
        self.login.ensure(session, deadline - time.monotonic())
        return send(session.with_deadline(deadline - time.monotonic()))


def _facts(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The code and the words of what gRPC, etcd3 or a wait has raised."""
    if isinstance(error, NoAnswer):
        return grpc.StatusCode.DEADLINE_EXCEEDED, str(error)
    cause = rpc_error(error)
    return cause.code(), cause.details() or ""
