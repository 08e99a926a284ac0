"""The store of real jobs: `KeyValueStore` on an etcd v3 server or cluster, over etcd3.

Each method is one etcd call, made through `Connection` (endpoints, deadline, login, errors);
watches share one stream (`EtcdWatches`). Values are text in UTF-8. Importing this module imports
grpc and etcd3, so import it only when a store is needed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from zero_orchestrator.errors import LeaseLost, StoreError
from zero_orchestrator.store.etcd.cluster import EtcdCluster
from zero_orchestrator.store.etcd.connection import (
    Connection,
    Credentials,
    Endpoints,
    Login,
    NoAnswer,
    rpc,
)
from zero_orchestrator.store.etcd.errors import REMEDY_WHEN_FULL
from zero_orchestrator.store.etcd.keep_alives import KeepAlives
from zero_orchestrator.store.etcd.versions import complaint
from zero_orchestrator.store.etcd.watch import EtcdWatch, EtcdWatches, key_range, key_value
from zero_orchestrator.store.kv import (
    NO_LEASE,
    Change,
    Compare,
    Delete,
    Field,
    KeyValue,
    Put,
    Range,
    Read,
    TxnResult,
    Write,
)

__all__ = ["Credentials", "EtcdStore"]

_log = logging.getLogger(__name__)

_SIDES = {Field.CREATE_REVISION: "CREATE", Field.MOD_REVISION: "MOD"}
"""What a comparison looks at, by etcd's names."""
_LOOK_S = 0.5
"""A transaction that is not answered for so long looks whether etcd has another leader."""
_CLOSE_S = 1.0
"""`close` waits up to this many seconds for the watches' thread, and for gRPC."""


class EtcdStore:
    """A client of etcd. Thread-safe; must not be used across a fork."""

    def __init__(
        self,
        endpoints: str | Endpoints,
        *,
        timeout_s: float = 5.0,
        credentials: Credentials | None = None,
        login: Login | None = None,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            endpoints: `HOST:PORT[,HOST:PORT...]`, members of one cluster; IPv6 in brackets. Or
                those of another store of the same etcd, which follow its members.
            timeout_s: Every call ends within this many seconds.
            credentials: Login and TLS.
            login: Login shared with another store of the same etcd.

        Raises:
            SpecError: The endpoints or the credentials are malformed.
        """
        shared: dict[str, Any] = {"timeout_s": timeout_s, "credentials": credentials}
        self.endpoints = Endpoints(endpoints) if isinstance(endpoints, str) else endpoints
        """Where the cluster is served; `become` follows a change of its members."""
        self._connection = Connection(self.endpoints, login=login, on_move=self._moved, **shared)
        self.cluster = EtcdCluster(self._connection)
        # A lease must be refreshed soon, at any endpoint, so a timeout abandons this connection at
        # once; no other call uses it.
        self._keep_alives_of = Connection(
            self.endpoints, login=self._connection.login, silent_s=0.0, **shared
        )
        self._keep_alives = KeepAlives(self._keep_alives_of)
        self._shared = shared
        self._watches = EtcdWatches(self._connection, self._check_version)
        self._warned: set[str] | None = None
        """The warnings about versions of servers so far; None: none is to be given."""
        self._ttl_s: dict[int, float] = {}
        self._term = 0
        """That of etcd's leader at the last transaction; 0: none was answered."""

    def sibling(self) -> EtcdStore:
        """Another store of the same etcd, with separate connections and the same login.

        Use it for calls that must not delay the calls of this store. The caller closes it.
        """
        return EtcdStore(self.endpoints, login=self._connection.login, **self._shared)

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._connection.session.endpoint

    def full_note(self) -> str:
        """A message with the remedy if etcd's space quota is exceeded (NOSPACE alarm), else empty.

        Raises:
            StoreUnavailable, StoreRefused: As every call.
        """
        alarms = self._status().errors
        if not any("NOSPACE" in alarm for alarm in alarms):
            return ""
        return f"etcd at {self.endpoint} is full; {REMEDY_WHEN_FULL}"

    def version_note(self) -> str:
        """What is known against the version of the server in use; empty: nothing.

        Raises:
            StoreUnavailable, StoreRefused: As every call.
        """
        if why := complaint(self._status().version):
            return f"at {self.endpoint}: {why}"
        return ""

    def warn_of_versions(self) -> None:
        """Log what is known against the version of the server in use, and of each one to come."""
        # Later members, and this one after an upgrade, are asked when the watches begin there.
        self._warned = set()
        self._check_version()

    def _check_version(self) -> None:
        if self._warned is None:
            return
        with contextlib.suppress(StoreError):  # a warning is no reason to fail
            note = self.version_note()
            if note and note not in self._warned:
                self._warned.add(note)
                _log.warning("%s", note)

    def _status(self) -> Any:
        return self._connection.call(lambda etcd: _status_of(etcd, etcd.timeout), repeatable=True)

    # ---- keys ----

    def get(self, key: str) -> KeyValue | None:
        """As `KeyValueStore.get`."""
        found = self._connection.call(lambda etcd: etcd.get_response(key), repeatable=True)
        return key_value(found.kvs[0]) if found.kvs else None

    def range(self, prefix: str, *, limit: int = 0) -> Range:
        """As `KeyValueStore.range`."""
        key, end = key_range(prefix)
        request = rpc.RangeRequest(key=key, range_end=end, limit=limit)

        def send(etcd: Any) -> Any:  # etcd3's range calls take no limit
            return etcd.kvstub.Range(request, etcd.timeout, metadata=etcd.metadata)

        found = self._connection.call(send, repeatable=True)
        return _range(found.header, found)

    def read(self, reads: Sequence[Read]) -> tuple[Range, ...]:
        """As `KeyValueStore.read`."""
        request = rpc.TxnRequest()
        for read in reads:
            key, end = _keys_of(read)
            one = rpc.RangeRequest(key=key, range_end=end, limit=read.limit)
            request.success.append(rpc.RequestOp(request_range=one))
        found = self._txn(request, repeatable=True)
        return tuple(_range(found.header, part.response_range) for part in found.responses)

    def put(self, key: str, value: str, *, lease: int = NO_LEASE) -> int:
        """As `KeyValueStore.put`."""
        return self.txn((), (Put(key, value, lease),)).revision

    def delete(self, key: str) -> bool:
        """As `KeyValueStore.delete`."""
        return bool(self._connection.call(lambda etcd: etcd.delete(key)))

    def txn(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TxnResult:
        """As `KeyValueStore.txn`."""
        request = rpc.TxnRequest()
        for compare in compares:
            key, side = compare.key.encode(), _SIDES[compare.field]
            of_side = {compare.field: compare.revision}
            request.compare.append(rpc.Compare(key=key, result="EQUAL", target=side, **of_side))
        for write in writes:
            if isinstance(write, Put):
                key, value = write.key.encode(), write.value.encode()
                put = rpc.PutRequest(key=key, value=value, lease=write.lease)
                request.success.append(rpc.RequestOp(request_put=put))
            else:
                key, end = _keys_of(write)
                delete = rpc.DeleteRangeRequest(key=key, range_end=end)
                request.success.append(rpc.RequestOp(request_delete_range=delete))
        # Not repeatable: one whose answer was lost may have been made, and another one of somebody
        # else since.
        answer = self._txn(request)
        return TxnResult(answer.succeeded, answer.header.revision)

    def _txn(self, request: Any, *, repeatable: bool = False) -> Any:
        def send(etcd: Any) -> Any:  # etcd3's `transaction` does not return the revision
            pending = etcd.kvstub.Txn.future(request, etcd.timeout, metadata=etcd.metadata)
            answer = self._await(pending, etcd, self._term)
            self._term = answer.header.raft_term
            return answer

        return self._connection.call(send, repeatable=repeatable)

    def _await(self, pending: Any, etcd: Any, term: int) -> Any:
        """The answer to a transaction that was sent in a term of etcd's leader; 0: in any.

        Raises:
            NoAnswer: There is a leader of a later term. It may have been carried out.
        """
        # A member hands it on to the leader that it knows. If that one dies, nobody answers, and
        # the call would last to its deadline, seconds after the others have a new leader.
        lost = False
        while True:
            with contextlib.suppress(grpc.FutureTimeoutError):
                return pending.result(_LOOK_S)
            if lost:
                pending.cancel()
                raise NoAnswer("etcd has another leader since")
            with contextlib.suppress(grpc.RpcError):  # the deadline of the call bounds it all
                status = _status_of(etcd, min(_LOOK_S, etcd.timeout))
                term = term or status.raftTerm
                if status.leader and status.raftTerm > term:
                    # The new one answers soon what has waited for it. And where each is slow, the
                    # next is not taken for lost with the same leader.
                    lost, self._term = True, status.raftTerm

    # ---- leases ----

    def grant(self, ttl_s: int) -> int:
        """As `KeyValueStore.grant`; etcd makes very short leases longer (2 s at least)."""
        # Repeatable: a lease whose answer was lost, and which nobody keeps alive, ends.
        lease = self._connection.call(lambda etcd: etcd.lease(ttl_s), repeatable=True)
        self._ttl_s[lease.id] = lease.ttl
        return int(lease.id)

    def keep_alive(self, lease: int) -> float:
        """As `KeyValueStore.keep_alive`; gives up after a third of the time to live."""
        # A longer wait would use up the time in which another endpoint could refresh the lease.
        timeout_s = min(self._connection.timeout_s, self._ttl_s.get(lease, float("inf")) / 3)
        ttl_s = self._keep_alives.refresh(lease, timeout_s)
        if ttl_s <= 0:  # etcd answers 0 if there is no such lease
            raise LeaseLost(f"lease {lease:x} has ended")
        return ttl_s

    def time_left(self, lease: int) -> float:
        """As `KeyValueStore.time_left`."""
        found = self._connection.call(lambda etcd: etcd.get_lease_info(lease), repeatable=True)
        return max(0.0, float(found.TTL))  # -1 for one that has ended

    def revoke(self, lease: int) -> None:
        """As `KeyValueStore.revoke`."""
        self._ttl_s.pop(lease, None)
        with contextlib.suppress(LeaseLost):  # ended already, by its time or by a lost answer
            self._connection.call(lambda etcd: etcd.revoke_lease(lease), repeatable=True)

    # ---- watches ----

    def watch(
        self,
        prefix: str,
        on_changes: Callable[[Sequence[Change]], None],
        *,
        after: int,
        cluster: int = 0,
        on_compacted: Callable[[int], None] | None = None,
    ) -> EtcdWatch:
        """As `KeyValueStore.watch`."""
        watch = EtcdWatch(
            self._watches,
            prefix,
            on_changes,
            after=after,
            cluster=cluster,
            on_compacted=on_compacted,
        )
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """As `KeyValueStore.close`."""
        self._watches.close(_CLOSE_S)
        self._keep_alives.close()
        # gRPC closes a channel when the last of its calls has ended, and sets no bound to that.
        closing = threading.Thread(target=self._close_channels, name="close-etcd", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _close_channels(self) -> None:
        self._keep_alives_of.close()
        self._connection.close()

    def _moved(self) -> None:
        self._watches.resume()


def _status_of(etcd: Any, timeout_s: float) -> Any:
    # etcd3's `status` does not return the alarms.
    stub = rpc.MaintenanceStub(etcd.channel)
    return stub.Status(rpc.StatusRequest(), timeout_s, metadata=etcd.metadata)


def _range(header: Any, found: Any) -> Range:
    """The keys in an answer."""
    return Range(header.revision, tuple(map(key_value, found.kvs)), header.cluster_id)


def _keys_of(one: Read | Delete) -> tuple[bytes, bytes]:
    """The (key, range_end) of one key, or of every key that starts with it."""
    return key_range(one.key) if one.prefix else (one.key.encode(), b"")
