"""The collector of cycles stands still while records are made, and never longer."""

import gc
import threading

import pytest

from zero_checkpoint.format.table import uncollected


def test_the_collector_runs_again_when_the_last_thread_has_left():
    first_in, first_out, seen = threading.Event(), threading.Event(), []

    def other():
        with uncollected():
            first_in.set()
            assert first_out.wait(30)
            seen.append(gc.isenabled())

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        assert first_in.wait(30)
        assert not gc.isenabled()
    first_out.set()
    thread.join(30)
    assert seen == [False], "the other thread was still inside"
    assert gc.isenabled()


def test_the_collector_runs_again_after_an_error():
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_script_has_stopped_stays_stopped():
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
