"""The etcd of a job's own (`--rdzv-backend=c10d`): where it is, and this agent's member of it.

`--rdzv-endpoint=HOST[:PORT][,HOST...]` says where the first member is to be: the agent on the first
host begins it, unless the store is at one of the others already. The other agents wait for it;
`own_members` gives some of them a member as well. The data of a member stay until the job has
ended, so an agent that is started again on its machine serves the same member, and all agents write
down where the members are, so one that is started again finds them without that host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from zero_agent.etcd import signs
from zero_agent.etcd.etcd_access import OPEN, Joining
from zero_agent.etcd.etcd_process import (
    LOOPBACK,
    EtcdProcess,
    FoundEtcd,
    Member,
    Place,
    free_port,
    is_healthy,
    probe,
    start_server,
)
from zero_agent.etcd.local_etcd import SharedDirectory
from zero_agent.node.network import is_local
from zero_agent.node.scratch import Scratch
from zero_contract.decoding import decode, encode
from zero_contract.kernel import text_of
from zero_orchestrator.addresses import family_of, split_host_port
from zero_orchestrator.errors import SpecError, StoreUnavailable
from zero_orchestrator.store import private_etcd
from zero_orchestrator.store.succession import WATCH_S

log = logging.getLogger("zero")

STALE_S = 24 * 3600.0
"""The data of a job that was killed stay for so long."""
_PROBES = 16  # at once: each takes a second where nothing answers
_DATA = ("data", "member")
"""What is here of a member."""


@dataclass
class Seat:
    """This agent's place for a member of the job's own etcd; it may have one, or none."""

    directory: Path
    """Of the data, which outlive this agent."""
    known: tuple[str, ...]
    """Where the store may be: endpoints."""
    joining: Joining
    ports: range
    is_first: bool = False
    """Whether the store was to begin on this machine, where people look for it."""
    ended: bool = False
    """The job is over: nobody needs the data any more."""
    store: str = ""
    """The id of the store; empty: it is not known yet, or nothing was published through it."""
    root: str = ""
    """Where the checkpoints are."""
    news: str = ""
    """What the next keeper of this seat's member has to tell."""
    process: EtcdProcess | None = None
    _made: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Ends the server."""

    @property
    def member(self) -> Member | None:
        """The member that this agent runs, or None."""
        return self.process.member if self.process is not None else None

    def found(self) -> list[str]:
        """The endpoints at which an etcd answers."""
        with ThreadPoolExecutor(_PROBES) as pool:
            answers = pool.map(lambda each: probe(each, self.joining.tls), self.known)
            found = zip(self.known, answers, strict=True)
            return [each for each, answer in found if answer is FoundEtcd.ETCD]

    def is_served(self, endpoints: str) -> bool:
        """Whether a store serves at one of these endpoints."""
        return any(is_healthy(each, self.joining.tls) for each in endpoints.split(","))

    def answering(self) -> list[str]:
        """As `found`. Raises StoreUnavailable: there is none; with who is to serve it."""
        if not (found := self.found()):
            raise StoreUnavailable(
                f"--rdzv-backend=c10d --rdzv-endpoint={','.join(self.known)}: no zero-agent serves "
                "the job's etcd there; start one on that host with the same flags and the same "
                "ZERO_JOIN_TOKEN. With --rdzv-backend=etcd, --rdzv-endpoint names an etcd that "
                "runs already"
            )
        return found

    def learn(self, endpoints: Sequence[str]) -> None:
        """Note where the members are, for an agent that is started here again."""
        new = tuple(dict.fromkeys((*endpoints, *self.known)))
        if new != self.known:
            self.known = new
            # These alone: what the flags name is known anyway, and a former member is gone.
            _replace(self.directory / "endpoints", encode(list(endpoints)))

    def note(self, store: str, root: str) -> None:
        """Note the store and where its checkpoints are: a new one would be announced there."""
        if (store, root) != (self.store, self.root):
            self.store, self.root = store, root
            _replace(self.directory / "store", encode([store, root]))

    def follow(self, endpoints: str, store: str) -> None:
        """The job goes on with another store; the data of the old one are not needed any more."""
        # First: until it is noted, who is started again here finds out anew that this store is it.
        shutil.rmtree(self._aside, ignore_errors=True)
        self.known = ()
        self.learn(endpoints.split(","))
        self.note(store, self.root)

    def follow_heir(self) -> bool:
        """Go where other nodes have begun a new store, while this agent was away; whether so."""
        noted = decode(list[str], text_of(self.directory / "store") or "[]", "store", SpecError)
        heir, place = None, self._noted_place()
        if len(noted) == 2:
            self.store, self.root = noted
            with contextlib.suppress(TimeoutError):  # the old one may live; else its keeper looks
                heir = signs.within(signs.HUNG_S, lambda: signs.newest_heir(self.root, self.store))
        if heir and place and self._member(place).reached in heir.endpoint.split(","):
            self.follow(heir.endpoint, heir.store)  # begun here, by an agent that was killed then
            return False
        self._put_back()  # a new store of this node, which was killed before it was the heir
        if heir is None:
            return False
        self.wipe()
        if self.is_served(heir.endpoint):
            log.info("node %s has begun a new store of this job at %s", heir.node, heir.endpoint)
            self.follow(heir.endpoint, heir.store)
            return True
        # Of a job that was killed, or of one that this node does not reach.
        self.learn(heir.endpoint.split(","))
        self.note(heir.store, self.root)
        return False

    def lives_elsewhere(self) -> bool:
        """Whether the store shows beside the checkpoints that it lives; learns where."""
        where: list[str] = []
        if self.root and "://" not in self.root:
            look = lambda: signs.lives(self.root, self.store)  # noqa: E731
            with contextlib.suppress(TimeoutError):
                if signs.within(WATCH_S + signs.HUNG_S, look):
                    where = signs.places(self.root, self.store)
        if where:
            self.learn(where)
            log.warning(
                "the job's etcd serves at %s, as %s shows: this node waits until it reaches it",
                ", ".join(where),
                self.root,
            )
        return bool(where)

    @contextlib.contextmanager
    def beginning_anew(self, name: str, host: str, address: str) -> Iterator[Member]:
        """Begin a new store with this member; without `follow`, the data of the old one come back.

        It listens on `address`; the others reach this machine by `host`.

        Raises:
            SpecError: No etcd is installed.
            StoreUnavailable: The server does not start; with the end of its log.
        """
        self.stop()
        before = self.store
        # Kept until the file names the new store, also if this process is killed meanwhile.
        shutil.rmtree(self._aside, ignore_errors=True)  # what a full disk, say, has left of it
        self._aside.mkdir(exist_ok=True)
        for each in _DATA:
            with contextlib.suppress(FileNotFoundError):
                (self.directory / each).rename(self._aside / each)
        try:
            process = self._start(self._another_place(name, host, address))
            process.wait_healthy()
            yield process.member
        finally:
            if self.store == before:  # it failed, or another node was first: no `follow`
                self.stop()
                self._put_back()

    @property
    def _aside(self) -> Path:
        return self.directory / "before"

    def _put_back(self) -> None:
        if self._aside.exists():
            self.wipe()
            for each in _DATA:
                with contextlib.suppress(FileNotFoundError):
                    (self._aside / each).rename(self.directory / each)
            self._aside.rmdir()

    def begin(self, at: str, name: str) -> None:
        """Begin a new store with this member.

        Raises:
            SpecError: No etcd is installed.
            StoreUnavailable: The server does not start; with the end of its log.
        """
        host, port = split_host_port(at)
        addresses = tuple(addresses_of(host))
        self._start(self._place(name, host, addresses, port)).wait_healthy()
        log.info("this node serves the job's etcd at %s", at)
        if not self.joining.token and addresses:
            log.warning("%s", OPEN.format(where=at))

    def join(self, name: str, host: str, address: str, add: Callable[[str], str]) -> None:
        """Run another member of the store; it serves once it has all data.

        It listens on `address`; the others reach this machine by `host`. `add` adds the member with
        this peer URL, and returns the --initial-cluster of the others.

        Raises:
            SpecError, StoreError: This node cannot run it, or `add` raised that.
        """
        self.wipe()
        place = self._another_place(name, host, address)
        own = self._member(place).peer_url
        # Added before it is started: etcd refuses a server that its cluster does not know.
        self._start(place, peers=f"{add(own)},{name}={own}")

    def resume(self, name: str = "") -> bool:
        """Start the member again whose data are here; whether there is one."""
        place = self._noted_place()
        if place is None or not (self.directory / "data").exists():
            return False
        self._start(replace(place, name=name or place.name))
        return True

    def wipe(self) -> None:
        """End the member, and remove its data."""
        self.stop()
        shutil.rmtree(self.directory / "data", ignore_errors=True)
        (self.directory / "member").unlink(missing_ok=True)

    def stop(self) -> None:
        """End the member, if this agent runs one; its data stay."""
        process, self.process = self.process, None
        if process is not None:
            process.stop()
        self._made.close()

    def close(self) -> None:
        """End the member; remove its data if the job has ended."""
        self.stop()
        if self.ended:
            self.wipe()
            for each in ("endpoints", "store"):
                (self.directory / each).unlink(missing_ok=True)

    def _another_place(self, name: str, host: str, address: str) -> Place:
        """For a member that is not the first, at the port of --rdzv-endpoint if that is free."""
        addresses = () if address == LOOPBACK else (address,)
        # The last one: what is learnt comes before what the flags name.
        port = split_host_port(self.known[-1])[1]
        try:
            for each in (*addresses, LOOPBACK):
                socket.create_server((each, port), family=family_of(each)).close()
        except OSError:  # another program has it: any other port will do
            port = 0
        return self._place(name, host, addresses, port)

    def _place(self, name: str, host: str, addresses: tuple[str, ...], port: int) -> Place:
        where = (*addresses, LOOPBACK)[0]
        client_port = port or free_port(self.ports, where)
        # Not the same port: nobody listens on that of the clients yet, and it may be of the range.
        others = [each for each in self.ports if each != client_port]
        return Place(
            name=name,
            host=host,
            addresses=addresses,
            client_port=client_port,
            peer_port=free_port(others, where),
        )

    def _noted_place(self) -> Place | None:
        """That of the member whose data are here, if there is one."""
        path = self.directory / "member"
        if not (text := text_of(path)):
            return None
        return decode(Place, text, f"{path} is damaged", SpecError)

    def _member(self, place: Place) -> Member:
        return Member(**vars(place), data=self.directory / "data", tls=self.joining.tls)

    def _start(self, place: Place, peers: str = "") -> EtcdProcess:
        """Start the server, a new one beside these peers; it dies with this thread."""
        member = replace(self._member(place), peers=peers, joins=bool(peers))
        token = self.joining.token
        self.process = start_server(self._made, member, token=token, to_thread=True)
        # An agent that is started again must serve it under the same name and ports.
        _replace(self.directory / "member", encode(place))
        return self.process


@contextlib.contextmanager
def own_server(
    endpoints: Sequence[str], joining: Joining, *, job: str, node: str, ports: range, keep_s: float
) -> Iterator[Seat]:
    """This agent's seat; its member serves, if its data are here or it is to begin the store.

    Args:
        endpoints: Where the store may be; the first is where it is to begin.
        joining: The join token; without one every client is admitted.
        job: The job's name, if it has one: its data are its own.
        node: The id of this node.
        ports: Ports on which this node may listen for others.
        keep_s: Data that were written longer ago are of a job that nobody waits for.

    Raises:
        SpecError: Another program listens there, or no etcd is installed.
        StoreUnavailable: The server does not start; with the end of its log.
    """
    first = endpoints[0]
    host, port = split_host_port(first)
    of_host = f"store-{socket.gethostname()}"
    _sweep(private_etcd.state_directory(), f"{of_host}-*")
    name = f"{of_host}-{port}-{job or 'none'}"
    shared = SharedDirectory(private_etcd.state_directory() / name)
    with contextlib.ExitStack() as made:
        directory, alone = shared.path, made.enter_context(shared.keeping())
        if not alone:  # another agent of this machine has it
            directory = made.enter_context(contextlib.closing(Scratch("zero-seat-"))).path
        if _age_s(directory / "data") > keep_s:  # nobody can wait for them any more
            shutil.rmtree(directory / "data", ignore_errors=True)
        noted = decode(list[str], text_of(directory / "endpoints") or "[]", "endpoints", SpecError)
        seat = Seat(
            directory=directory,
            known=tuple(dict.fromkeys((*noted, *endpoints))),
            joining=joining,
            ports=ports,
            is_first=is_local(host),
        )
        made.callback(seat.close)
        if seat.follow_heir():
            yield seat
            return
        # A store begins on the first host alone, and only if it is at none of the others already:
        # else one job would have two.
        if not seat.resume(node) and alone and seat.is_first and not seat.found():
            if seat.lives_elsewhere():
                yield seat
                return
            if probe(first, joining.tls) is not FoundEtcd.NOTHING:
                raise SpecError(
                    f"--rdzv-endpoint={first}: a program listens there that does not answer "
                    "as etcd does; stop it, or choose another port, the same on all nodes"
                )
            seat.begin(first, node)
        yield seat


def _sweep(parent: Path, pattern: str) -> None:
    """Remove what jobs have left that were killed long ago."""
    for path in parent.glob(pattern):
        with contextlib.suppress(OSError, SpecError):  # another agent removes it
            # The directory's own time is cheap, and rarely old: most need no look inside.
            if time.time() - path.stat().st_mtime > STALE_S and _age_s(path) > STALE_S:
                with SharedDirectory(path).keeping() as free:
                    if free:
                        shutil.rmtree(path)


def addresses_of(host: str) -> list[str]:
    """The IP addresses of a host of this machine, without the loopback that is served anyway."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found = {str(info[4][0]).partition("%")[0] for info in infos}
    return sorted(address for address in found - {LOOPBACK} if is_local(address))


def _replace(path: Path, text: str) -> None:
    """Write a file whole."""
    new = path.with_name(f"{path.name}.new")
    # Renamed: an agent that is killed here leaves no half of what the next one reads. A full disk
    # costs what the file says, not the job.
    with contextlib.suppress(OSError):
        new.write_text(text, encoding="utf-8")
        new.replace(path)


def _age_s(data: Path) -> float:
    """Seconds since anything in a directory was written; 0 if there is none."""
    if not data.exists():
        return 0.0
    written_s = (os.lstat(path).st_mtime for path in data.rglob("*"))
    return time.time() - max(written_s, default=0.0)
