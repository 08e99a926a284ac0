"""A process group on the CPU with NCCL's semantics, for tests: the backend "queued".

What holds for NCCL and not for gloo holds here, and each rule is kept strictly, so that a program
that breaks it fails on every run:

- A communicator is a queue: its operations run one after the other, in the order of issue. Ranks
  match them by that order alone. Tags, names and kinds are not compared: what has the same size is
  delivered, to whatever it belongs; another size never ends.
- Connections are made by the first operation, in which all ranks have to take part.
- A send ends when its receive has begun; only within `batch_isend_irecv` do they run together.
- Buffers belong to the operation until somebody waits for it. What is received is poisoned at once
  and appears with the wait; what is sent must not have changed by then.
- `is_completed` is false until somebody has waited: the host runs ahead of the device.
- A lost peer is not noticed. Only `abort` ends a wait, and a shutdown waits for what is queued.

Source of the rules: NCCL's user guide (streams, group calls) and torch's ProcessGroupNCCL.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

BACKEND = "queued"
_HEADER = struct.Struct("q")
_NOTHING = timedelta(0)


class _Aborted(Exception):
    """The communicator was aborted."""


@dataclass
class _Message:
    """Bytes to or from a peer; what is received fills `data`."""

    peer: int
    data: bytearray
    done: int = 0


def _bytes(tensor: Tensor) -> bytearray:
    flat = tensor.detach().contiguous().flatten()
    return bytearray(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else bytearray()


def _poison(tensor: Tensor) -> None:
    flat = tensor.detach()
    if flat.is_floating_point():
        flat.fill_(float("nan"))
    elif flat.dtype != torch.bool:
        flat.fill_(0x55)


class QueuedWork(Work):
    """An operation in the queue of a communicator."""

    def __init__(self, group: QueuedGroup) -> None:
        super().__init__()
        self._group = group
        self._sent: list[tuple[Tensor, bytearray]] = []
        self._wanted: list[tuple[Tensor, bytearray]] = []
        self.sends: list[_Message] = []
        self.receives: list[_Message] = []
        self.finish: Callable[[], object] = lambda: None
        """Called when what was received is there."""
        self.ended = threading.Event()
        self._waited = False
        self._taking = threading.Lock()

    def send(self, peer: int, tensor: Tensor) -> None:
        """Read a tensor for a peer."""
        data = _bytes(tensor)
        self._sent.append((tensor, data))
        self.sends.append(_Message(peer, data))

    def receive(self, peer: int, tensor: Tensor) -> None:
        """Fill a tensor with what a peer sends."""
        _poison(tensor)
        data = bytearray(tensor.nbytes)
        self._wanted.append((tensor, data))
        self.receives.append(_Message(peer, data))

    def is_completed(self) -> bool:
        """Whether somebody has waited for it."""
        return self._waited

    def wait(self, timeout: timedelta = _NOTHING) -> bool:
        """Block, and nothing but an abort gets out of it; then what was received is there."""
        del timeout  # it is the watchdog's, which ends the process
        while not self.ended.wait(0.02):
            if self._group.aborted:
                raise dist.DistBackendError("NCCL communicator was aborted")
        with self._taking:
            if self._waited:
                return True
            for tensor, data in self._sent:
                if not tensor.untyped_storage().nbytes() or _bytes(tensor) != data:
                    raise AssertionError("a buffer was changed before its send was waited for")
            for tensor, data in self._wanted:
                if not tensor.untyped_storage().nbytes():
                    raise AssertionError("a buffer was freed before its receive was waited for")
                if tensor.numel():
                    arrived = torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype)
                    tensor.detach().copy_(arrived.view(tensor.shape))
            self.finish()
            self._waited = True
        return True


@dataclass(frozen=True)
class _Options:
    """As those of torch's own backends."""

    _timeout: timedelta


class QueuedGroup(dist.ProcessGroup):
    """One rank of a communicator."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)
        self.options = _Options(timeout)
        self._store = store
        self._rank_here, self._world_here = rank, world
        self.aborted = False
        self.batch: QueuedWork | None = None
        """The sends and receives that are going to run together."""
        self.issued: list[str] = []
        """The operations of this rank, in the order of issue."""
        self._connections: dict[int, socket.socket] = {}
        self._queue: SimpleQueue[QueuedWork | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=BACKEND)
        self._thread.start()

    # ---- the queue ----

    def _issue(self, kind: str, work: QueuedWork) -> QueuedWork:
        self.issued.append(kind)
        self._queue.put(work)
        return work

    def _run(self) -> None:
        try:
            while (work := self._queue.get()) is not None:
                if not self._connections and self._world_here > 1:
                    self._connect()
                self._exchange(work)
                work.ended.set()
                del work
        except (_Aborted, OSError):  # a lost peer: nothing ends any more
            return

    def _connect(self) -> None:
        """Connect to all other ranks; ends when all of them do it."""
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(0.05)
        self._store.set(f"port/{self._rank_here}", str(listener.getsockname()[1]))
        for peer in range(self._rank_here):
            while not self._store.check([f"port/{peer}"]):
                self._check_aborted()
            port = int(self._store.get(f"port/{peer}"))
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            connection.sendall(_HEADER.pack(self._rank_here))
            self._connections[peer] = connection
        while len(self._connections) < self._world_here - 1:
            self._check_aborted()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.setblocking(True)
            greeting = connection.recv(_HEADER.size, socket.MSG_WAITALL)
            self._connections[_HEADER.unpack(greeting)[0]] = connection
        listener.close()
        for connection in self._connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def _check_aborted(self) -> None:
        if self.aborted:
            raise _Aborted

    def _exchange(self, work: QueuedWork) -> None:
        """Send and receive everything of one operation; of each pair in the order of calls."""
        out: dict[int, bytearray] = {}
        into: dict[int, list[_Message]] = {}
        for message in work.sends:
            frames = out.setdefault(message.peer, bytearray())
            frames += _HEADER.pack(len(message.data)) + message.data
        for message in work.receives:
            into.setdefault(message.peer, []).append(message)
        if self._rank_here in out:  # to itself
            self._deliver_to_self(out.pop(self._rank_here), into.pop(self._rank_here, []))
        with selectors.DefaultSelector() as selector:
            for peer in out.keys() | into.keys():
                wanted = selectors.EVENT_WRITE * (peer in out) | selectors.EVENT_READ * (
                    peer in into
                )
                selector.register(self._connections[peer], wanted, peer)
            while out or into:
                self._check_aborted()
                for key, events in selector.select(0.02):
                    if events & selectors.EVENT_WRITE:
                        self._push(key.data, out)
                    if events & selectors.EVENT_READ:
                        self._pull(key.data, into)
                    left = selectors.EVENT_WRITE * (key.data in out) | selectors.EVENT_READ * (
                        key.data in into
                    )
                    if left:
                        selector.modify(key.fileobj, left, key.data)
                    else:
                        selector.unregister(key.fileobj)

    def _deliver_to_self(self, frames: bytearray, wanted: Sequence[_Message]) -> None:
        at = 0
        for message in wanted:
            (size,) = _HEADER.unpack_from(frames, at)
            self._check_size(size, message)
            at += _HEADER.size
            message.data[:] = frames[at : at + size]
            at += size

    def _push(self, peer: int, out: dict[int, bytearray]) -> None:
        sent = self._connections[peer].send(out[peer])
        del out[peer][:sent]
        if not out[peer]:
            del out[peer]

    def _pull(self, peer: int, into: dict[int, list[_Message]]) -> None:
        """Read what has come from a peer for its next message."""
        connection, message = self._connections[peer], into[peer][0]
        if message.done == 0:
            header = connection.recv(_HEADER.size, socket.MSG_PEEK)
            if header and len(header) < _HEADER.size:
                return
            if header:
                self._check_size(_HEADER.unpack(header)[0], message)
                connection.recv(_HEADER.size)
                message.done = _HEADER.size
        else:
            left = len(message.data) + _HEADER.size - message.done
            piece = connection.recv(min(left, 1 << 20))
            if not piece:
                self._hang()
            at = message.done - _HEADER.size
            message.data[at : at + len(piece)] = piece
            message.done += len(piece)
        if message.done == 0:
            self._hang()  # the peer is gone
        if message.done == len(message.data) + _HEADER.size:
            into[peer].pop(0)
            if not into[peer]:
                del into[peer]

    def _check_size(self, size: int, message: _Message) -> None:
        if size != len(message.data):
            self._hang()

    def _hang(self) -> None:
        """A kernel that never ends."""
        done = threading.Event()
        while not done.wait(0.02):
            self._check_aborted()

    # ---- the calls of torch ----

    def abort(self) -> None:
        """End every operation with an error."""
        self.aborted = True
        self._queue.put(None)
        self._thread.join(5)
        for connection in self._connections.values():
            connection.close()

    def shutdown(self) -> None:
        """Wait for everything in the queue, for ever, if it never ends."""
        if not self.aborted:
            self._queue.put(None)
            self._thread.join()
            for connection in self._connections.values():
                connection.close()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        del opts
        rows, own = outputs[0], inputs[0]
        work = QueuedWork(self)
        for peer in range(self._world_here):
            work.send(peer, own)
        for peer, row in enumerate(rows):
            is_own = row.data_ptr() == own.data_ptr() and row.nbytes == own.nbytes
            work.receive(peer, torch.empty_like(row) if is_own else row)
        return self._issue("all_gather", work)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> QueuedWork:
        rows = list(output.view(self._world_here, -1))
        return self.allgather([rows], [own.reshape(-1)], opts)

    _allgather_base = all_gather_single

    def all_to_all_single(
        self, output: Tensor, given: Tensor, into: Any, out: Any, opts: Any = None
    ) -> QueuedWork:
        del opts
        work = QueuedWork(self)
        even = [given.numel() // self._world_here] * self._world_here
        for peer, part in enumerate(given.split(list(out) or even)):
            work.send(peer, part)
        for peer, part in enumerate(output.split(list(into) or even)):
            work.receive(peer, part)
        return self._issue("all_to_all", work)

    alltoall_base = all_to_all_single

    def _sum(self, kind: str, given: Sequence[Tensor], into: Tensor) -> QueuedWork:
        """Send each rank its part; the sum of what all ranks send here."""
        work = QueuedWork(self)
        parts = [torch.empty_like(into) for _ in given]
        for peer, part in enumerate(given):
            work.send(peer, part)
        for peer, part in enumerate(parts):
            work.receive(peer, part)
        work.finish = lambda: into.copy_(torch.stack(parts).sum(0))
        return self._issue(kind, work)

    def reduce_scatter_single(self, own: Tensor, full: Tensor, opts: Any = None) -> QueuedWork:
        del opts
        _poison(own)
        return self._sum("reduce_scatter", full.view(self._world_here, -1).unbind(), own)

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: Any, opts: Any = None) -> QueuedWork:
        del opts
        return self._sum("all_reduce", [tensors[0]] * self._world_here, tensors[0])

    def broadcast(self, tensors: Any, opts: Any) -> QueuedWork:
        work = QueuedWork(self)
        if self._rank_here == opts.rootRank:
            for peer in range(self._world_here):
                if peer != self._rank_here:
                    work.send(peer, tensors[0])
        else:
            work.receive(opts.rootRank, tensors[0])
        return self._issue("broadcast", work)

    def barrier(self, opts: Any = None) -> QueuedWork:
        return self.all_gather_single(torch.zeros(self._world_here), torch.zeros(1), opts)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> QueuedWork:
        del tag
        work = self.batch or QueuedWork(self)
        work.send(peer, tensors[0])
        if self.batch is not None:
            return work
        work.receives.append(_Message(peer, bytearray()))  # it ends when the peer has received
        return self._issue("send", work)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> QueuedWork:
        del tag
        work = self.batch or QueuedWork(self)
        work.receive(peer, tensors[0])
        if self.batch is not None:
            return work
        work.sends.append(_Message(peer, bytearray()))
        return self._issue("receive", work)

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.pg_name

    def _get_backend(self, device: torch.device) -> Any:
        del device
        return self

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND


_torch_batch = dist.batch_isend_irecv


def _batch_isend_irecv(calls: Any) -> Any:
    """torch groups the calls only for its own groups; as it does there, here they are one."""
    group = calls[0].group or dist.group.WORLD
    if not isinstance(group, QueuedGroup):
        return _torch_batch(calls)
    group.batch = QueuedWork(group)
    try:
        for call in calls:
            peer = {"group_dst" if call.op is dist.isend else "group_src": call.group_peer}
            call.op(call.tensor, group=call.group, tag=call.tag, **peer)
        return [group._issue("batch", group.batch)]
    finally:
        group.batch = None


def register() -> None:
    """Make the backend known, once in a process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, QueuedGroup, devices=["cpu"])
        dist.batch_isend_irecv = _batch_isend_irecv
