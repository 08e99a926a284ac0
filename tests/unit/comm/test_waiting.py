"""Waits that end by themselves, by an interrupt, by a signal, and with the transport's error."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.waiting import wait_for
from zero_comm import waiting
from zero_comm.waiting import Interrupt, Waiter, transport_failures
from zero_contract.errors import ConfigError, PeerLost


class Exchange:
    """An exchange that ends when it is told to."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise self.error


class EndsOnceWaitedFor(Exchange):
    """An exchange that is under way until somebody waits for it."""

    def wait(self) -> None:
        self.over.set()


def nothing() -> None:
    """Look at nobody."""


def works(*exchanges: Exchange) -> Any:
    return exchanges


def test_a_wait_ends_with_its_exchange() -> None:
    exchange = Exchange()
    threading.Timer(0.02, exchange.over.set).start()
    assert Waiter(None).wait(works(exchange), nothing)
    assert exchange.over.is_set()


def test_an_interrupt_ends_a_wait_under_way_and_every_later_one() -> None:
    interrupt = Interrupt()
    waiter = Waiter(None, interrupt)
    threading.Timer(0.02, interrupt.request, ["lost node b"]).start()
    assert not waiter.wait(works(Exchange()), nothing)
    assert interrupt.reason == "lost node b"
    assert not waiter.wait(works(Exchange()), nothing)


def test_a_backward_that_has_failed_covers_no_loss_behind_it() -> None:
    """What is exchanged then may be a checkpoint, or an evaluation."""
    interrupt, weight = Interrupt(), torch.ones(1, requires_grad=True)
    error, covered = PeerLost("gone"), list[bool]()

    def fail(_: torch.Tensor) -> None:
        covered.append(interrupt.covers(error))
        raise RuntimeError("out of memory")

    weight.register_hook(fail)
    interrupt.fills_backward = True
    with pytest.raises(RuntimeError, match="out of memory"):
        weight.sum().backward()
    assert [*covered, interrupt.covers(error)] == [True, False]


@pytest.mark.parametrize("at_once", [True, False])
def test_the_transports_error_reaches_the_caller(at_once: bool) -> None:
    exchange = Exchange()
    exchange.error = RuntimeError("Connection closed by peer")
    if at_once:
        exchange.over.set()
    else:
        threading.Timer(0.02, exchange.over.set).start()
    with pytest.raises(RuntimeError, match="Connection closed"):
        Waiter(None).wait(works(exchange), nothing)


def test_a_signal_ends_a_wait() -> None:
    def on_alarm(*_: Any) -> None:
        raise KeyboardInterrupt

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        Waiter(None).wait(works(Exchange()), nothing)

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_long_wait_is_looked_at_and_what_the_look_raises_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)
    looks = []

    def look() -> None:
        looks.append(None)
        if len(looks) == 3:
            raise RuntimeError("a circle")

    with pytest.raises(RuntimeError, match="a circle"):
        Waiter(None).wait(works(Exchange()), look)


def test_the_thread_keeps_no_exchange_and_ends_with_its_waiter() -> None:
    exchange = EndsOnceWaitedFor()
    gone = weakref.ref(exchange)
    waiter = Waiter(None)
    assert waiter.wait(works(exchange), nothing)
    thread = waiter._waits._thread
    assert thread is not None
    del exchange
    wait_for(lambda: gc.collect() >= 0 and gone() is None, 60, "the exchange is let go")
    del waiter
    thread.join(60)
    assert not thread.is_alive()


def test_a_device_is_asked_again_and_again_until_it_has_got_there_or_an_interrupt_comes() -> None:
    asked = iter([False, False, True])
    assert Waiter(None).poll(lambda: next(asked), nothing)
    interrupt = Interrupt()
    threading.Timer(0.02, interrupt.request, ["lost node b"]).start()
    assert not Waiter(None, interrupt).poll(lambda: False, nothing)


def test_a_device_that_never_gets_there_is_an_error_after_the_groups_timeout() -> None:
    with pytest.raises(RuntimeError, match=r"timed out waiting for 0\.02 s"):
        Waiter(None, timeout_s=0.02).poll(lambda: False, nothing)


NCCL = "NCCL error in: NCCLUtils.cpp:77, {} (run with NCCL_DEBUG=WARN for details)\nLast error:\n{}"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (
            NCCL.format("remote process exited or there was a network error", "ncclRemoteError: a"),
            PeerLost,
            r"meeting: a peer is gone: NCCL error",
        ),
        (
            NCCL.format(
                "invalid usage",
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
                "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            ),
            ConfigError,
            "^meeting: two ranks use one device, which NCCL refuses: start at most as many workers",
        ),
        (
            NCCL.format("invalid argument", "ncclInvalidArgument: Invalid value for an argument."),
            dist.DistBackendError,
            "Invalid value",
        ),
        (
            NCCL.format("unhandled cuda error", "Cuda failure 2 'out of memory'"),
            dist.DistBackendError,
            "out of memory",
        ),
        (
            NCCL.format(
                "unhandled cuda error",
                "ncclUnhandledCudaError: Call to CUDA function failed.\n"
                "Cuda failure 719 'unspecified launch failure'",
            ),
            dist.DistBackendError,
            "Cuda failure 719",
        ),
        (
            NCCL.format(
                "unhandled cuda error",
                "ncclUnhandledCudaError: Call to CUDA function failed.\n"
                "Cuda failure 710 'device-side assert triggered'",
            ),
            dist.DistBackendError,
            "Cuda failure 710",
        ),
        (
            "[Rank 1] Process group watchdog thread terminated with exception: CUDA error: an "
            "illegal memory access was encountered",
            dist.DistBackendError,
            "illegal memory access",
        ),
        (
            NCCL.format(
                "internal error - please report this issue to the NCCL developers",
                "ncclInternalError: Internal check failed.\nMessage truncated : received 1024",
            ),
            dist.DistBackendError,
            "Internal check failed",
        ),
        (
            NCCL.format(
                "internal error - please report this issue to the NCCL developers",
                "ncclInternalError: Internal check failed.\nProxy Call to rank 1 failed (Connect): "
                "socketProgress: Connection closed by remote peer 10.0.0.2<41234>",
            ),
            PeerLost,
            "a peer is gone",
        ),
        (
            NCCL.format(
                "unhandled system error",
                "ncclSystemError: System call or external library call failed "
                "or device error.\nsocketPollConnect: Connect to 10.0.0.2<5> returned 113",
            ),
            PeerLost,
            "a peer is gone",
        ),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
            "OpType=ALLREDUCE) ran for 600011 milliseconds before timing out.",
            PeerLost,
            "a peer is gone",
        ),
        (
            NCCL.format(
                "unhandled system error",
                "Error while creating shared memory segment /dev/shm/nccl-7 (size 9637888)",
            ),
            dist.DistBackendError,
            "/dev/shm/nccl-7",
        ),
    ],
)
def test_what_nccl_cannot_do_on_this_host_is_no_lost_peer(
    text: str, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says), transport_failures("meeting"):
        raise dist.DistBackendError(text)


GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/{}] {}. This is typically caused by a peer that "
    "has crashed"
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(GLOO.format("pair.cc:534", "Connection closed by peer [::1]:9")), PeerLost),
        *(
            (RuntimeError(GLOO.format("pair.cc:538", f"Read error [::1]:9: {words}")), PeerLost)
            for words in (
                "Broken pipe",
                "Connection reset by peer",
                "Connection timed out",
                "Network is unreachable",
                "No route to host",
                "Software caused connection abort",
            )
        ),
        (
            RuntimeError(
                GLOO.format("unbound_buffer.cc:81", "Timed out waiting 600000ms for recv operation")
            ),
            PeerLost,
        ),
        (dist.DistNetworkError("Broken pipe"), PeerLost),
        (
            dist.DistBackendError(
                NCCL.format("unhandled cuda error", "Cuda failure 719 'unspecified launch failure'")
            ),
            dist.DistBackendError,
        ),
        (RuntimeError("the token service timed out waiting for a reply"), RuntimeError),
        (RuntimeError("data service: broken pipe"), RuntimeError),
        (RuntimeError("redis: connection refused"), RuntimeError),
        (RuntimeError("CUDA error: device-side assert triggered"), RuntimeError),
    ],
)
def test_an_error_of_the_scripts_own_backward_is_no_lost_peer(
    error: RuntimeError, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as raised, transport_failures("the backward", of_script=True):
        raise error
    assert type(raised.value) is kind
