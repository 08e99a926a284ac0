"""torch's c10d dynamic rendezvous, for `rendezvous.py`: all handlers in this process."""

from __future__ import annotations

import os
import pickle
import threading
import time

from zero_agent.etcd.etcd_process import free_port

LIMIT_S = 120.0


def c10d_join(count: int) -> float:
    """Seconds from the last of `count` joins until all have their ranks.

    As in the trial of our own agents, all but one are there and wait, and the minimum and the
    maximum are `count`: nobody waits for a last call.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    port = free_port()
    handlers, backends = [], []
    for index in range(count):
        params = RendezvousParameters(
            *("c10d", f"127.0.0.1:{port}", "bench", count, count),
            local_addr="127.0.0.1",
            is_host=str(int(index == 0)),
        )
        backend, store = create_backend(params)
        handlers.append(dynamic_rendezvous.create_handler(store, backend, params))
        backends.append(backend)
    done: list[float] = []

    def join(index: int) -> None:
        handlers[index].next_rendezvous()
        done.append(time.monotonic())

    threads = [threading.Thread(target=join, args=(i,), daemon=True) for i in range(count)]
    for thread in threads[:-1]:
        thread.start()
    _wait_for_participants(backends[-1], count - 1)
    began = time.monotonic()
    threads[-1].start()
    for thread in threads:
        thread.join(LIMIT_S)
    for handler in handlers:
        handler._stop_heartbeats()
    return max(done) - began


def _wait_for_participants(backend: object, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        state = backend.get_state()  # type: ignore[attr-defined]
        if state is not None and len(pickle.loads(state[0]).participants) >= count:
            return
        time.sleep(0.02)
    raise TimeoutError(f"{count} handlers did not join within {LIMIT_S:g} s")
