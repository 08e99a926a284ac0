"""What do lanes cost beside torch's DataLoader, and how fast do they find a position again?

**rate**: samples per second of one rank that reads lines of text as tokens, or samples that cost
nothing, through lanes and through torch's DataLoader with the same dataset and number of processes,
in turns. Target: 0.95 of the DataLoader's, of tokens. Without loading processes these are seconds
of CPU time, in turns of a few batches: the load of the machine changes those less. **find**:
seconds from a saved position behind --samples samples to the next batch, with the dataset's state
(target: 1 s) and without it, when they are all read again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    from zero_data import Lanes
except KeyboardInterrupt:
    sys.exit("interrupted; nothing was measured")

LENGTH = 512


class Lines(IterableDataset[torch.Tensor]):
    """Lines of one file for each part, as tokens: bytes, padded."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.read = paths, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        for path in self.paths[number::workers]:
            with path.open("rb") as file:
                for line in file:
                    self.read += 1
                    yield torch.tensor([*line[:LENGTH].ljust(LENGTH)])

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}


class Ready(Lines):
    """The same sample as often, which is there already."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is None or info.id < info.num_workers  # as in `Numbers`
        sample = torch.zeros(LENGTH)
        for _ in range(1 << 30):
            yield sample


class Numbers(IterableDataset[int]):
    """As many numbers in each part, as fast as an iterable may be."""

    def __init__(self, size: int) -> None:
        self.size, self.next = size, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        assert info.id < info.num_workers  # by which it says that each lane has a part of its own
        while self.next < self.size:
            self.next += 1
            yield self.next


class Stateful(Numbers):
    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def rates_of(
    loaders: Iterable[Iterable[Any]], turn: int, count: int, clock: Callable[[], float]
) -> list[float]:
    """Batches per second of each, after the first few; they take turns of so many batches."""
    running, found_s = [iter(each) for each in loaders], []
    for each in running:
        list(islice(each, 20))
    for _ in range(count // turn):
        for each in running:
            begin_s = clock()
            list(islice(each, turn))
            found_s.append(clock() - begin_s)
    return [count // turn * turn / sum(found_s[k :: len(running)]) for k in range(len(running))]


def rates(directory: Path, options: argparse.Namespace) -> None:
    paths = [directory / f"{part}.txt" for part in range(options.lanes)]
    line = "The position in the data is a number of samples. " * 8 + "\n"
    for path in paths:
        path.write_text(line * (options.batches * options.batch))

    print("| samples | processes | DataLoader, samples/s | lanes, samples/s | lanes / DataLoader |")
    print("| --- | --- | --- | --- | --- |")
    for name, kind in ("lines as tokens", Lines), ("ready", Ready):
        for workers in options.workers:
            clock = time.perf_counter if workers else time.process_time
            more = {"batch_size": options.batch, "num_workers": workers}
            found: list[tuple[float, float]] = []
            for _ in range(options.trials):
                pair = (
                    DataLoader(kind(paths), **more),
                    Lanes(kind(paths), lanes=options.lanes, **more),
                )
                turn = options.batches if workers else min(10, options.batches)
                theirs, ours = rates_of(pair, turn, options.batches, clock)
                found.append((theirs * options.batch, ours * options.batch))
            cells = [spread([*each], 0) for each in zip(*found, strict=True)]
            ratio = spread([ours / theirs for theirs, ours in found], 2)
            print(f"| {name} | {workers} | {' | '.join(cells)} | {ratio} |", flush=True)


def find(
    kind: type[Numbers], samples: int, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds, and those of CPU time, to the first batch behind a position."""

    def lanes(batch: int) -> Lanes:
        size = samples // options.lanes + 10 * big
        return Lanes(kind(size), batch_size=batch, lanes=options.lanes, collate_fn=len)

    big = max(1, samples // options.lanes // options.batch // 100) * options.batch
    reading = lanes(big)
    for _ in reading:
        if reading.last and reading.samples >= samples:
            break
    state, found_s = reading.state_dict(), []
    state["lanes"]["micro_batch"] = options.batch  # small ones would have ended there as well
    for _ in range(options.trials):
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        again = lanes(options.batch)
        again.load_state_dict(state)
        next(iter(again))
        found_s.append((time.perf_counter() - begin_s, time.process_time() - begin_cpu_s))
    return found_s


def spread(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--workers", type=lambda text: [*map(int, text.split(","))], default=[0, 2])
    parser.add_argument("--samples", type=int, default=10**7)
    parser.add_argument("--quick", action="store_true", help="seconds: checks that it runs here")
    options = parser.parse_args()
    counts = (options.trials, options.lanes, options.batch, options.batches, options.samples)
    if min(counts) < 1 or min(options.workers) < 0:
        parser.error("a number of worker processes is 0 or more, any other number 1 or more")
    if options.quick:
        options.trials, options.batches, options.samples = 1, 20, 10**4
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        rates(Path(directory), options)
    print(f"\n| behind {options.samples} samples | s to the next batch | of CPU time |")
    print("| --- | --- | --- |")
    for name, kind in ("with a state", Stateful), ("without", Numbers):
        found = zip(*find(kind, options.samples, options), strict=True)
        print(f"| {name} | {' | '.join(spread([*each], 2) for each in found)} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what is above was measured")
