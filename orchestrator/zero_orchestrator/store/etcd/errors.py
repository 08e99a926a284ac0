"""Errors of etcd as `StoreError`s: tables from gRPC's status codes and etcd's error texts.

Source of the texts: go.etcd.io/etcd/api/v3/v3rpc/rpctypes/error.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import grpc

from zero_orchestrator.errors import (
    Compacted,
    LeaseLost,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)

_BY_CODE: Mapping[grpc.StatusCode | None, type[StoreError]] = {
    grpc.StatusCode.UNAVAILABLE: StoreUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: StoreUnavailable,
    grpc.StatusCode.CANCELLED: StoreUnavailable,
    grpc.StatusCode.ABORTED: StoreUnavailable,
    # The connection broke in the middle of an answer, or the server is about to stop.
    grpc.StatusCode.INTERNAL: StoreUnavailable,
    grpc.StatusCode.UNKNOWN: StoreUnavailable,
}
"""Every other code is a refusal."""

_BY_TEXT = {
    "requested lease not found": LeaseLost,
    "required revision has been compacted": Compacted,
    "too many requests": StoreUnavailable,
    "not leader": StoreUnavailable,
    "database space exceeded": StoreFull,
}
"""Part of an error text -> the error; takes precedence over the code."""

_NEVER_SENT = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
"""gRPC's texts for a call that did not leave this machine."""

_UNREACHED, _RUNNING = "cannot reach etcd at", "; is it running there?"

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
        "/zero/v1/JOB/, /zero/secret/JOB/, /zero/events/JOB/ and /zero/progress/JOB/; to look at "
        "the job, read on all of them but /zero/secret/JOB/"
    ),
    "database space exceeded": REMEDY_WHEN_FULL,
}


def rpc_error(error: Exception) -> grpc.RpcError:
    """The gRPC error behind an error of etcd3, which has no details for some codes."""
    # etcd3 raises its own error while it handles gRPC's.
    cause = error if isinstance(error, grpc.RpcError) else error.__context__
    assert isinstance(cause, grpc.RpcError), error
    return cause


def store_error(code: grpc.StatusCode | None, text: str, endpoint: str) -> StoreError:
    """The error for a status code and text from `endpoint`, with the remedy if one is known."""
    by_text = (kind for known, kind in _BY_TEXT.items() if known in text)
    kind = next(by_text, _BY_CODE.get(code, StoreRefused))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return kind(f"etcd at {endpoint} did not answer in time")
    if never_sent(text):
        cause = text.rpartition("Failed to connect to remote host: ")[2]  # or the whole text
        return kind(f"{_UNREACHED} {endpoint} ({cause}){_RUNNING}")
    remedy = next((remedy for known, remedy in _REMEDIES.items() if known in text), None)
    return kind(f"etcd at {endpoint}: {text}" + (f"; {remedy}" if remedy else ""))


def joined(failures: Iterable[str]) -> str:
    """The messages of one call to several endpoints in one sentence, equal ones once."""
    text = "; ".join(dict.fromkeys(failures))
    return text.replace(f"{_RUNNING}; {_UNREACHED}", ",")


def never_sent(text: str) -> bool:
    """Whether the call did not leave this machine, and so was not carried out."""
    return any(known in text for known in _NEVER_SENT)


def login_again(text: str) -> bool:
    """Whether the server refused the token, and so did not carry out the call."""
    return any(known in text for known in _LOGIN_AGAIN)
