"""What a preloaded module may not leave behind in a process that is going to be forked."""

from __future__ import annotations

import _thread

import pytest

from zero_agent.workers.forkserver import Native, hindrance

BLAS = frozenset({"libscipy_openblas64_.so"})


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (Native(), Native(), ""),
        (Native(), Native(name="python", threads={7: "python"}, blas=BLAS), ""),
        (
            Native(name="python", threads={7: "python"}, blas=BLAS),
            Native(name="python", threads={7: "python"}, blas=BLAS),
            "",
        ),
        (
            Native(blas=BLAS),
            Native(name="python", threads={8: "python", 9: "python"}, blas=BLAS),
            "importing m starts 2 threads, which forked workers would lack",
        ),
        (
            Native(),
            Native(name="python", threads={7: "python", 8: "poller"}, blas=BLAS),
            "importing m starts a thread (poller), which forked workers would lack",
        ),
        (Native(), Native(name="python", threads={7: "jemalloc_bg_thd"}), ""),
        (
            Native(),
            Native(name="python", threads={8: "cuda-EvtHandlr"}, cuda=True),
            "importing m initializes CUDA, which does not work in forked workers",
        ),
        (Native(cuda=True), Native(cuda=True), ""),  # it has been told of another module
    ],
)
def test_a_module_that_hinders_a_fork_is_named_with_what_it_has_done(
    before: Native, after: Native, told: str
) -> None:
    assert hindrance("m", before, after) == told


def test_threads_that_python_does_not_count_are_seen() -> None:
    before, running, go = Native.here(), _thread.allocate_lock(), _thread.allocate_lock()
    running.acquire()
    go.acquire()

    def wait() -> None:
        running.release()
        go.acquire()

    _thread.start_new_thread(wait, ())
    running.acquire()
    try:
        assert "importing m starts a thread" in hindrance("m", before, Native.here())
    finally:
        go.release()
