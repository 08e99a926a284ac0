"""Which transport connects which devices, which device a worker uses, and whose order differs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from zero_comm.exchange.cpu.transport import CpuTransport, HostTransport
from zero_comm.exchange.issue_order import IssueOrder, difference
from zero_comm.exchange.transport import Transport
from zero_comm.exchange.transports import StagedTransport, way
from zero_comm.worker.distributed import backend_for, device_index
from zero_contract.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "backends", "transport"),
    [
        ("cpu", {"cpu": "gloo", "cuda": "nccl"}, CpuTransport),
        ("cuda", {"cpu": "gloo", "cuda": "nccl"}, Transport),
        ("cpu", {"cuda": "nccl"}, CpuTransport),
        ("cuda", {"cuda": "nccl"}, Transport),
        ("cuda", {"cpu": "gloo", "cuda": "gloo"}, StagedTransport),
        ("cuda", {"cpu": "gloo"}, StagedTransport),
        ("cpu", {"cpu": "mpi"}, HostTransport),
    ],
)
def test_the_backend_decides_how_tensors_of_a_device_travel(
    kind: str, backends: dict[str, str], transport: type[Transport]
) -> None:
    assert way(kind, backends)[0] is transport


@pytest.mark.parametrize(
    ("local", "visible", "current", "expected"),
    [
        (0, 8, 0, 0),
        (5, 8, 0, 5),
        (5, 1, 0, 0),  # the launcher shows each worker one device
        (2, 8, 7, 7),  # the script has chosen
    ],
)
def test_a_worker_uses_the_device_of_its_number_unless_somebody_has_chosen(
    local: int, visible: int, current: int, expected: int
) -> None:
    assert device_index(local, visible, current) == expected


def test_more_workers_than_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="LOCAL_RANK=4, but this worker sees 4 devices"):
        device_index(4, 4, 0)


@pytest.mark.parametrize(
    ("has_gpu", "has_nccl", "backend"),
    [
        (False, True, "gloo"),  # torch for GPUs on a machine without one
        (True, True, "cpu:gloo,cuda:nccl"),
        (True, False, "cpu:gloo,cuda:gloo"),
    ],
)
def test_a_torch_without_nccl_trains_on_gpus_over_gloo(
    has_gpu: bool, has_nccl: bool, backend: str
) -> None:
    assert backend_for(has_gpu=has_gpu, has_nccl=has_nccl) == backend


def test_orders_of_exchange_are_equal_if_and_only_if_each_communicators_is() -> None:
    first, second = IssueOrder(), IssueOrder()
    lanes = [(order.lane(), order.lane()) for order in (first, second)]
    for gathers, _ in lanes:
        gathers.note("parameters of a")
    lanes[0][0].note("parameters of b")
    lanes[0][1].note("gradients of a")
    lanes[1][1].note("gradients of a")  # earlier than b here: another communicator
    lanes[1][0].note("parameters of b")
    assert first.checksum() == second.checksum()
    lanes[0][0].note("parameters of c")
    assert first.checksum() != second.checksum()
    assert difference([first.names(), second.names()]) == (
        "as exchange 3 of the step rank 0 began parameters of c and rank 1 nothing"
    )
    for order in (first, second):
        order.clear()
    assert first.checksum() == second.checksum()


def test_memory_of_an_exchange_in_two_parts_is_kept_for_the_stream_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no device here: what a driver would be asked is recorded, in its order."""
    asked: list[str] = []
    current, side = (
        SimpleNamespace(wait_stream=lambda other, name=name: asked.append(f"{name} waits"))
        for name in ("current", "side")
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)

    def exchange(name: str) -> SimpleNamespace:
        asked.append(f"begin {name}")
        return SimpleNamespace(wait=lambda: asked.append(f"wait for {name}"))

    buffer = SimpleNamespace(record_stream=lambda on: asked.append(f"kept for side: {on is side}"))
    transport = Transport(None, 0, 2, torch.device("cuda"))
    transport.then(lambda: [exchange("one")], lambda: [exchange("two")], None, [buffer])
    assert asked == [
        "side waits",
        "kept for side: True",
        "begin one",
        "wait for one",
        "begin two",
    ]


def test_what_a_peer_may_send_is_told_before_this_rank_sends_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over gloo both directions of a link are busy only then; what is called is recorded."""
    called: list[tuple[object, int]] = []

    def record(calls: list[dist.P2POp]) -> list[dist.Work]:
        called.extend((call.op, call.group_peer) for call in calls)
        return []

    monkeypatch.setattr(dist, "P2POp", lambda op, *_, **given: SimpleNamespace(op=op, **given))
    monkeypatch.setattr(dist, "batch_isend_irecv", record)
    transport = CpuTransport(None, 1, 3, torch.device("cpu"))
    tensors = {0: torch.zeros(1), 2: torch.zeros(1)}
    rows = torch.zeros(3, 1)
    for begin in (
        lambda: transport.exchange(tensors, tensors, "pieces", 0),
        lambda: transport.gather(rows, list(rows), "weights", 0),
        lambda: transport.scatter(rows, rows[:2], "gradients", 0),
    ):
        called.clear()
        begin()
        assert [op for op, _ in called] == [dist.irecv, dist.irecv, dist.isend, dist.isend]
        assert {peer for _, peer in called} == {0, 2}
