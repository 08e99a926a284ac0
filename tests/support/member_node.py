"""A node without workers, for tests of the job's own store: it registers and keeps its member.

    python -m tests.support.member_node NODE ENDPOINTS ADDRESS

Its seat, its keeper, its etcd and its client are those of an agent. It writes a key five times a
second. SIGTERM drains it, as an agent is drained; SIGINT is the end of the job, at which it says
how many of the writes that etcd has acknowledged are lost. What becomes of its member is on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import time

from zero_agent.etcd.etcd_access import Access, Joining, joined
from zero_agent.etcd.etcd_choice import endpoints_of
from zero_agent.etcd.own_etcd import Seat, own_server
from zero_agent.etcd.own_members import MemberKeeper
from zero_agent.node.network import ANY_PORT
from zero_orchestrator.errors import LeaseLost, StoreError
from zero_orchestrator.membership.job_state import Node
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.store import retry
from zero_orchestrator.store.etcd.client import EtcdStore

JOB = "job"
LEASE_S = 3
"""As an agent's."""
PATIENCE_S = 30.0
"""An agent tries a write that etcd has not answered again for longer."""
TURN_S = 0.2


def say(text: str) -> None:
    print(f"{time.time():.2f} {text}", flush=True)


class Present:
    """This node's record, under a lease that is renewed when it was lost; and its writes."""

    def __init__(self, store: EtcdStore, node: Node) -> None:
        self._store, self.node, self._lease = store, node, 0
        self._prefix, self._wrote = f"/wrote/{node.id}-{os.getpid()}/", list[str]()
        self._silent = self._written = False

    def turn(self) -> None:
        try:
            self._turn()
        except LeaseLost:
            self._lease = 0
        except StoreError as error:
            if not self._silent:
                say(f"silent: {error}")
            self._silent = True
        else:
            if self._silent:
                say("heard again")
            self._silent = False
        time.sleep(TURN_S)

    def _turn(self) -> None:
        if self._lease:
            self._store.keep_alive(self._lease)
        else:
            self._lease, self._written = self._store.grant(LEASE_S), False
        if not self._written:
            self._store.put(Keys(JOB).node(self.node.id), self.node.to_json(), lease=self._lease)
            self._written = True
        key = f"{self._prefix}{len(self._wrote)}-{time.monotonic()}"
        self._store.put(key, "")
        self._wrote.append(key)

    def become(self, **facts: object) -> None:
        self.node, self._written = dataclasses.replace(self.node, **facts), False

    def leave(self) -> None:
        retry.within(PATIENCE_S)(self._leave)

    def _leave(self) -> None:
        found = {item.key for item in self._store.range(self._prefix).items}
        say(f"lost {len(set(self._wrote) - found)} of {len(self._wrote)}")
        self._store.revoke(self._lease)


def take_part(name: str, address: str, seat: Seat, joining: Joining, told: list[int]) -> None:
    while not (found := seat.found()):
        time.sleep(TURN_S)
    tls = joining.tls
    files = {} if tls is None else {"ca": tls.ca, "cert": tls.cert, "key": tls.key}
    access = Access(endpoints=",".join(found), timeout_s=2.0, **files)
    with (
        access.store() as store,
        contextlib.closing(MemberKeeper(seat, store.sibling(), name)) as keeper,
    ):
        present = Present(store, Node(id=name, incarnation=name, address=address, slots=1))
        present.turn()
        keeper.serve(JOB, address, address, say)
        say("here")
        while not told:
            present.turn()
        if told[0] == signal.SIGTERM:
            present.become(draining=True)
            present.turn()
            while keeper.holds():
                present.turn()
        present.leave()
        keeper.see_off(told[0] == signal.SIGINT)


def main(name: str, endpoints: str, address: str) -> None:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, frame: told.append(got))
    flags = argparse.Namespace(etcd_ca=None, etcd_cert=None, etcd_key=None)
    where = endpoints_of(endpoints)
    seen = {"job": JOB, "node": name, "ports": ANY_PORT, "keep_s": 600.0}
    with (
        joined(flags, os.environ, given=False, wanted=True) as joining,
        own_server(where, joining, **seen) as seat,
    ):
        take_part(name, address, seat, joining, told)
    say("gone")


if __name__ == "__main__":
    main(*sys.argv[1:])
