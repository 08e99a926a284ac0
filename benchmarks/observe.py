"""What the observation of a training costs: times, reports to the agent, verdicts, goodput ledger.

    python benchmarks/observe.py --rounds 20

An agent runs workers that train a small model. They observe, and do not observe, in turns of some
steps each, so both are measured under the same load. **step** is the median of all steps, with the
range of the medians of the turns; **in the step** is the CPU time that the observing code itself
takes in the training thread of rank 0, the median of all steps: other load on the machine does not
change it. **agent** is the CPU time of the agent's process, all of its duties included, as a part
of one CPU. "Not observed" workers send no heartbeats either, so the agent does less then, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT = 0.01
"""The part of a step that observing may take."""


# ---- a worker ----


class Meter:
    """The CPU time that the observing code takes in its thread."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **options: Any) -> Any:
            begin_s = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.spent_s += time.thread_time() - begin_s

        return measured

    @contextlib.contextmanager
    def around_wait(self, waits: Any, *args: Any) -> Iterator[None]:
        context = waits.waiting(*args)
        self.around(context.__enter__)()
        try:
            yield
        finally:
            self.around(context.__exit__)(None, None, None)


class NoWaits:
    """A `WaitClock` that measures nothing."""

    begun, last = 0, ""

    def begin(self, what: str) -> None:
        del what

    def waiting(self, *args: Any) -> contextlib.AbstractContextManager[None]:
        del args
        return contextlib.nullcontext()


class MeteredWaits(NoWaits):
    """A `WaitClock` whose own time is measured."""

    def __init__(self, waits: Any, meter: Meter) -> None:
        self.begin = meter.around(waits.begin)  # type: ignore[method-assign]
        self._waits, self._meter = waits, meter

    def waiting(self, *args: Any) -> contextlib.AbstractContextManager[None]:
        return self._meter.around_wait(self._waits, *args)


def make(args: argparse.Namespace) -> Any:
    """The engine of a small model, with data."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import zero_engine

    width = args.width
    layers = [each for _ in range(args.layers) for each in (nn.Linear(width, width), nn.Tanh())]
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": args.stage},
        "checkpoint": {"keep_last": 2},
    }
    rows = TensorDataset(torch.randn(1 << 12, width))
    return zero_engine.initialize(nn.Sequential(*layers), config=config, training_data=rows)


def switch(link: Any, meter: Meter) -> Callable[[bool], None]:
    """A function that begins and ends the observation of this worker."""
    from zero_comm.exchange import collectives
    from zero_comm.worker import rank_times

    names = ("progress", "step_times", "everyones_times")
    on = {name: meter.around(getattr(link, name)) for name in names}
    off = {"progress": _nothing, "step_times": lambda: (0.0,) * 4, "everyones_times": _nothing}
    waits = {True: MeteredWaits(rank_times.WAITS, meter), False: NoWaits()}

    def observe(observes: bool) -> None:
        for name, call in (on if observes else off).items():
            setattr(link, name, call)
        collectives.WAITS = waits[observes]  # type: ignore[assignment]

    return observe


def work(args: argparse.Namespace) -> None:
    """Train; rank 0 writes what it has measured."""
    engine, meter = make(args), Meter()
    observe, batches = switch(engine._link, meter), endless(engine.training_dataloader)

    def step() -> float:
        (batch,) = next(batches)
        begin_s = time.perf_counter()
        engine.backward(engine(batch).square().mean())
        engine.step()
        return time.perf_counter() - begin_s

    for _ in range(args.turn):
        step()
    directory, observing_s = Path(args.directory), []
    times_s: dict[bool, list[list[float]]] = {True: [], False: []}
    if engine.global_rank == 0:
        (directory / "begun").touch()
    for turn in range(2 * args.rounds):
        observe(observes := bool(turn % 2))
        times_s[observes].append([])
        for _ in range(args.turn):
            meter.spent_s = 0.0
            times_s[observes][-1].append(step())
            observing_s += [meter.spent_s] * observes
    if engine.global_rank == 0:
        median_s = statistics.median(observing_s)
        found = {"on": times_s[True], "off": times_s[False], "observing_s": median_s}
        (directory / "found.new").write_text(json.dumps(found))
        (directory / "found.new").rename(directory / "found")
    observe(True)
    engine.destroy()


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _nothing(*args: Any) -> None:
    del args


# ---- the measurement ----


def cpu_s(pid: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def await_file(path: Path, agent: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for a file of the workers."""
    until_s = time.monotonic() + limit_s
    while not path.exists():
        if agent.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"no {path.name} within {limit_s:g} s; the agent's output is above")
        time.sleep(0.02)


def measure(arguments: list[str], args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """What rank 0 has measured, and the part of a CPU that the agent has used meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        worker = [__file__, f"--directory={directory}", *arguments]
        flags = ["--standalone", f"--nproc-per-node={args.ranks}"]
        agent = subprocess.Popen(
            [sys.executable, "-m", "zero_agent", *flags, *worker],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=sys.stderr,
        )
        try:
            await_file(Path(directory, "begun"), agent, 120)
            begin_s, used_s = time.monotonic(), cpu_s(agent.pid)
            await_file(Path(directory, "found"), agent, 1200)
            part = (cpu_s(agent.pid) - used_s) / (time.monotonic() - begin_s)
            found = json.loads(Path(directory, "found").read_text())
            agent.wait(60)
            return found, part
        finally:
            agent.kill()
            agent.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each kind")
    parser.add_argument("--turn", type=int, default=20, help="steps of a turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="rows of a micro-batch")
    args = parser.parse_args()
    if args.directory:
        work(args)
        return
    found, agent = measure(sys.argv[1:], args)
    median_s = {}
    for kind, words in (("off", "not observed"), ("on", "observed")):
        turns_s = [statistics.median(turn) for turn in found[kind]]
        median_s[kind] = statistics.median(time_s for turn in found[kind] for time_s in turn)
        spread = f"{1e3 * min(turns_s):.2f}-{1e3 * max(turns_s):.2f}"
        print(f"step, {words}: {1e3 * median_s[kind]:.2f} ms ({spread})")
    print(f"difference: {median_s['on'] / median_s['off'] - 1:+.2%}")
    part = found["observing_s"] / median_s["off"]
    verdict = "under" if part < LIMIT else "OVER"
    print(f"in the step: {1e6 * found['observing_s']:.0f} us, {part:.2%}: {verdict} {LIMIT:.0%}")
    print(f"agent: {agent:.1%} of a CPU")


if __name__ == "__main__":
    main()
