"""etcd's members, by its cluster API: list them, add one without a vote, promote and remove it.

Source: https://etcd.io/docs/v3.5/learning/design-learner/; rpc.proto of etcd 3.5.
"""

from __future__ import annotations

from typing import Any

from zero_orchestrator.store.etcd.connection import Connection, rpc
from zero_orchestrator.store.members import Member


class EtcdCluster:
    """The members of the cluster behind a connection.

    Every call raises StoreUnavailable if there is no quorum, or StoreRefused.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def members(self) -> tuple[Member, ...]:
        """All members, in the order of their ids, as a quorum knows them."""
        request = rpc.MemberListRequest(linearizable=True)
        return _members(self._call("MemberList", request, repeatable=True).members)

    def add_learner(self, peer: str) -> tuple[Member, ...]:
        """Add a member without a vote, which begins then at this peer URL; all members."""
        # Without a vote: it cannot cost the quorum before it has all data.
        request = rpc.MemberAddRequest(peerURLs=[peer], isLearner=True)
        return _members(self._call("MemberAdd", request).members)

    def promote(self, member: Member) -> None:
        """Give a learner its vote; StoreRefused until it has all data."""
        self._call("MemberPromote", rpc.MemberPromoteRequest(ID=member.id))

    def remove(self, member: Member) -> None:
        """Remove a member; its server ends."""
        self._call("MemberRemove", rpc.MemberRemoveRequest(ID=member.id))

    def _call(self, name: str, request: Any, *, repeatable: bool = False) -> Any:
        def send(etcd: Any) -> Any:
            stub = rpc.ClusterStub(etcd.channel)
            return getattr(stub, name)(request, etcd.timeout, metadata=etcd.metadata)

        return self._connection.call(send, repeatable=repeatable)


def _members(found: Any) -> tuple[Member, ...]:
    made = (
        Member(
            id=one.ID,
            node=one.name,
            is_learner=one.isLearner,
            endpoint=one.clientURLs[0].partition("://")[2] if one.clientURLs else "",
            peer=one.peerURLs[0] if one.peerURLs else "",
        )
        for one in found
    )
    return tuple(sorted(made, key=lambda one: one.id))
