"""What an error of etcd means to a caller: tables from gRPC's codes and etcd's words.

Must always hold: an answer "no" is StoreRefused, the lack of an answer StoreUnavailable; each
message says who was asked and, where there is one, the remedy. Who calls it: `connection`
and `watch`.

Source of the words: go.etcd.io/etcd/api/v3/v3rpc/rpctypes/error.go.
"""

from __future__ import annotations

import grpc

from zero_orchestrator.errors import (
    Compacted,
    LeaseLost,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)

_BY_CODE = {
    grpc.StatusCode.UNAVAILABLE: StoreUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: StoreUnavailable,
    grpc.StatusCode.CANCELLED: StoreUnavailable,
    grpc.StatusCode.ABORTED: StoreUnavailable,
    # The connection broke in the middle of an answer, or the server is about to stop.
    grpc.StatusCode.INTERNAL: StoreUnavailable,
    grpc.StatusCode.UNKNOWN: StoreUnavailable,
}
"""Every other code is an answer: no."""

_BY_TEXT = {
    "requested lease not found": LeaseLost,
    "required revision has been compacted": Compacted,
    "too many requests": StoreUnavailable,
    "not leader": StoreUnavailable,
    "database space exceeded": StoreFull,
}
"""Goes before the code."""

_NEVER_SENT = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
"""gRPC's words for a call that did not leave this machine."""

_LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old")


REMEDY_WHEN_FULL = (
    "compact and defragment etcd, then disarm its alarm: `zero-ctl gc`, `etcdctl compact "
    "REVISION`, `etcdctl defrag --cluster`, `etcdctl alarm disarm` (deploy/README.md)"
)
_REMEDIES = {
    "user name is empty": "give the user and the password of an etcd user",
    "authentication is not enabled": "leave the user and the password out",
    "permission denied": (
        "grant the user's role readwrite on the prefix /zero/, or for the job JOB alone on "
        "/zero/v1/JOB/, /zero/events/JOB/ and /zero/progress/JOB/"
    ),
    "database space exceeded": REMEDY_WHEN_FULL,
}


def rpc_error(error: Exception) -> grpc.RpcError:
    """The gRPC error itself: etcd3 raises its own, without details, for some codes."""
    cause = error if isinstance(error, grpc.RpcError) else error.__context__
    assert isinstance(cause, grpc.RpcError), error
    return cause


def store_error(code: grpc.StatusCode | None, text: str, endpoint: str) -> StoreError:
    """What etcd's answer, or the lack of one, means to a caller."""
    by_text = (kind for known, kind in _BY_TEXT.items() if known in text)
    kind = next(by_text, _BY_CODE.get(code, StoreRefused))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return kind(f"etcd at {endpoint} did not answer in time")
    if never_sent(text):
        return kind(f"cannot reach etcd at {endpoint} ({text}); is it running there?")
    remedy = next((remedy for known, remedy in _REMEDIES.items() if known in text), None)
    return kind(f"etcd at {endpoint}: {text}" + (f"; {remedy}" if remedy else ""))


def never_sent(text: str) -> bool:
    """Whether the call did not leave this machine, and so was not carried out."""
    return any(known in text for known in _NEVER_SENT)


def login_again(text: str) -> bool:
    """Whether the server has forgotten our token, and so has not looked at the call."""
    return any(known in text for known in _LOGIN_AGAIN)
