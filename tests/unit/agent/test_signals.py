"""Signals of a process: held where nothing may stay half done, heard in every wait, never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from zero_agent.node.signals import call_until_signal, held, installed


class Told(BaseException):
    """What a handler raises."""


def tell(number: int) -> None:
    raise Told(number)


@pytest.fixture
def raising() -> Iterator[None]:
    with installed(tell, [signal.SIGUSR1, signal.SIGUSR2]):
        yield


@pytest.mark.usefixtures("raising")
def test_what_a_handler_raises_comes_when_the_work_is_whole():
    done = []

    def work() -> None:
        with held():
            signal.raise_signal(signal.SIGUSR2)
            done.append("whole")

    with pytest.raises(Told) as raised:
        work()
    assert (done, raised.value.args) == (["whole"], (signal.SIGUSR2,))
    with pytest.raises(Told):  # and from then on at once
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("raising")
def test_a_signal_is_not_lost_when_the_work_fails():
    def work() -> None:
        with held():
            signal.raise_signal(signal.SIGUSR1)
            raise OSError("failed")

    with pytest.raises(Told) as raised:
        work()
    assert isinstance(raised.value.__context__, OSError)


def test_a_signal_that_was_ignored_stays_so():
    with installed(tell, [signal.SIGUSR1]):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with held():
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_wait_ends_with_the_signal_and_its_call_goes_on_alone():
    may_end, ended = threading.Event(), threading.Event()

    def call() -> None:
        signal.raise_signal(signal.SIGUSR1)
        may_end.wait(60)
        ended.set()

    assert call_until_signal(call, [signal.SIGUSR1]) == signal.SIGUSR1
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(60)


def test_a_wait_without_a_signal_ends_as_its_call_does():
    assert call_until_signal(lambda: None, [signal.SIGUSR1]) is None
    with pytest.raises(OSError, match="of the call"):
        call_until_signal(lambda: (_ for _ in ()).throw(OSError("of the call")), [signal.SIGUSR1])
