"""The sample ledger: which samples every executed step really consumed, on every rank.

Owns the files and their check. Must always hold: the line of a step is written to the operating
system before the step returns, so a killed process loses no step that has ended. Where there is no
room for it, the training continues, and the line waits in memory for the end of a later step. There
is one file per round and rank, DIR/round<R>-rank<r>.jsonl, with a JSON object per line.

Of a step that was executed several times, in several rounds or in one, the *last* execution counts:
the earlier ones were undone by a rollback to a checkpoint. Each start of a job is a round of its
own here, also one by hand: see `begin_ledger`.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from zero_contract.errors import ZeroError

_log = logging.getLogger(__name__)

_FILE = re.compile(r"round(\d+)-rank\d+\.jsonl")

Documents = tuple[tuple[int, int, int], ...]
"""What a packed sample is made of: of each document, or part of one, its number in its lane and
epoch, its first token, and the one after its last."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The samples that one rank consumed in one step."""

    step: int
    """Counts from 1: the engine's `global_steps` after the step."""
    round: int
    rank: int
    world: int
    microbatches: Mapping[int, tuple[int, ...]]
    """Micro-batch -> sample ids; without padding micro-batches."""
    documents: Mapping[int, tuple[Documents, ...]] = field(default_factory=dict)
    """Micro-batch -> the documents of each of its samples; only of packed ones."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check of the ledger."""

    steps: int
    samples: int
    repeated_steps: int
    """Steps executed more than once: work lost to failures and rollbacks, not an error."""
    world_by_step: Mapping[int, int]
    problems: tuple[str, ...] = field(default=())
    """Empty if every sample of every epoch was consumed exactly once."""

    @property
    def exact(self) -> bool:
        """Whether no sample is lost and none is repeated."""
        return not self.problems


class Ledger:
    """Appends one rank's entries of one round."""

    def __init__(self, directory: str | Path, *, round: int, rank: int, world: int) -> None:
        """Open the file of one rank.

        Of repeated steps the latest round, the number of a start of the job, counts.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._common = {"round": round, "rank": rank, "world": world}
        self._microbatches: dict[int, list[int]] = {}
        self._documents: dict[int, list[Documents]] = {}
        path = directory / f"round{round}-rank{rank}.jsonl"
        if path.exists():
            # A killed process may have left a part of a line, whose step had not ended.
            with path.open("r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        # Unbuffered: each write is one system call, after which it survives the process.
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size
        """Of the whole lines in the file."""
        self._left = b""
        """Lines that are not in the file yet."""

    def consume(
        self, microbatch: int, ids: Iterable[int], documents: Iterable[Documents] = ()
    ) -> None:
        """Record a micro-batch of the current step; `documents` of each sample, if it is packed."""
        self._microbatches.setdefault(microbatch, []).extend(ids)
        if documents:
            self._documents.setdefault(microbatch, []).extend(documents)

    def forget(self) -> None:
        """Drop what is recorded of the current step: it is not going to end."""
        self._microbatches, self._documents = {}, {}

    def end_step(self, step: int) -> None:
        """Write the entry of the step that has just ended, and those that had no room before."""
        record = {"step": step, **self._common, "microbatches": self._microbatches}
        if self._documents:
            record["documents"] = self._documents
        waited = bool(self._left)
        self._left += json.dumps(record, separators=(",", ":")).encode() + b"\n"
        self.forget()
        self._write(waited)

    def _write(self, waited: bool) -> None:
        try:
            if waited:  # a part of a line may be there, to which the next line would be glued
                self._file.truncate(self._end)
            if (written := self._file.write(self._left)) != len(self._left):
                raise OSError(f"{written} of {len(self._left)} bytes were written")
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            if not waited:
                _log.warning("%s waits for room, the run goes on: %s", self._file.name, error)
        else:
            self._end, self._left = self._end + len(self._left), b""

    def close(self) -> None:
        """Close the file."""
        if self._left:
            self._write(waited=True)
        self._file.close()


def begin_ledger(
    directory: str | None,
    round: int,
    everybodys: Callable[[Tensor, str], Tensor],
    *,
    rank: int,
    world: int,
) -> Ledger | None:
    """The ledger of a rank for a start in a round; None without a directory. Collective."""
    if not directory:
        return None
    # A job that is started again by hand, or under another name, counts its rounds from 0 or 1: its
    # start gets a number after all that the ledger has. Rank 0's view of the directory counts.
    found = (_FILE.fullmatch(path.name) for path in Path(directory).glob("round*-rank*.jsonl"))
    newest = max((int(match[1]) for match in found if match), default=-1)
    own = torch.tensor([max(round, newest + 1)], device="cpu")
    start = int(everybodys(own, "the number of this start in the ledger")[0].item())
    return Ledger(directory, round=start, rank=rank, world=world)


def read_ledger(directory: str | Path) -> list[Entry]:
    """Every entry under a ledger directory.

    An incomplete last line, after a kill, is left out: its step had not ended.

    Raises:
        ZeroError: A line is no entry; the message names file and line.
    """
    entries = []
    for path in sorted(Path(directory).glob("round*-rank*.jsonl")):
        *lines, _cut_short = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                microbatches = {
                    int(index): tuple(ids) for index, ids in record["microbatches"].items()
                }
                documents = {
                    int(index): tuple(
                        tuple((number, begin, end) for number, begin, end in sample)
                        for sample in samples
                    )
                    for index, samples in record.get("documents", {}).items()
                }
                executed = record["step"], record["round"], record["rank"], record["world"]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ZeroError(f"{path}:{number}: not a ledger entry: {line[:80]!r}") from error
            entries.append(Entry(*executed, microbatches, documents))
    return entries


def verify(entries: Iterable[Entry], dataset_size: int | None) -> Report:
    """Check that the committed steps consumed every sample of every epoch exactly once.

    The last epoch may be incomplete; then no sample of it may occur twice. `dataset_size` is the
    number of samples per epoch, so it is for runs that keep the tail of every epoch. None: of a run
    with lanes, whose length nobody knows. There the key of a sample is its micro-batch, which is
    its lane, and its number in that; those of a lane must follow each other without a gap, all
    lanes begin an epoch with the same step, and a step that was done again had the same samples. Of
    packed samples no token of a document may occur twice, nor lack in the middle of one.
    """
    executions: defaultdict[int, defaultdict[int, dict[int, Entry]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    repeated: set[int] = set()
    for entry in entries:
        rounds = executions[entry.step]
        if rounds.keys() - {entry.round} or entry.rank in rounds[entry.round]:
            repeated.add(entry.step)
        rounds[entry.round][entry.rank] = entry
    committed = {
        step: [*rounds[max(rounds)].values()] for step, rounds in sorted(executions.items())
    }
    missing = sorted(set(range(1, max(committed, default=0) + 1)) - committed.keys())
    problems = [f"step {step} is in no ledger" for step in missing]
    consumed: list[int] = []
    for step, ranks in committed.items():
        ids, wrong = _in_microbatch_order(step, ranks, lanes=dataset_size is None)
        consumed += ids
        problems += wrong
    if dataset_size is None:
        epochs, wrong = _epochs_of_lanes(committed)
        problems += wrong + _again_problems(executions)
        for number, epoch in enumerate(epochs):
            problems += _document_problems(number, epoch, ended=number < len(epochs) - 1)
    else:
        problems += _epoch_problems(consumed, dataset_size)
    return Report(
        steps=len(committed),
        samples=len(consumed),
        repeated_steps=len(repeated),
        world_by_step={step: ranks[0].world for step, ranks in committed.items()},
        problems=tuple(problems),
    )


def _in_microbatch_order(
    step: int, ranks: list[Entry], *, lanes: bool
) -> tuple[list[int], list[str]]:
    """The samples of one execution in micro-batch order, and its problems."""
    microbatches = [
        (microbatch, ids) for entry in ranks for microbatch, ids in entry.microbatches.items()
    ]
    counts = Counter(microbatch for microbatch, _ in microbatches)
    problems = [
        f"step {step}: micro-batch {microbatch} ran {n} times"
        for microbatch, n in counts.items()
        if n > 1
    ]
    # A lane that has ended has no micro-batch, so none of them need be there.
    numbers = range(0 if lanes else max(counts, default=-1) + 1)
    absent = sorted(set(numbers) - counts.keys())
    problems += [f"step {step}: micro-batch {microbatch} ran on no rank" for microbatch in absent]
    world = ranks[0].world
    if len(ranks) != world:
        problems.append(f"step {step}: {len(ranks)} of {world} ranks have an entry")
    return [i for _, ids in sorted(microbatches) for i in ids], problems


def _epochs_of_lanes(committed: Mapping[int, list[Entry]]) -> tuple[list[list[Entry]], list[str]]:
    """The entries of each epoch, and gaps and repetitions within a lane, in the order of steps."""
    problems: list[str] = []
    epochs: list[list[Entry]] = [[]]
    # The next number of each lane that has begun.
    expected = Counter[int]()
    ended: set[int] = set()
    for step, ranks in committed.items():
        lanes = {lane: ids for each in ranks for lane, ids in each.microbatches.items()}
        # All lanes begin an epoch with the same step.
        if expected and all(ids[:1] == (0,) for ids in lanes.values()):
            epochs.append([])
            expected, ended = Counter(), set()
        begins = not expected
        epochs[-1] += ranks
        for lane, ids in sorted(lanes.items()):
            name = f"step {step}, epoch {len(epochs) - 1}, lane {lane}"
            if lane in ended or (lane not in expected and not begins):
                problems.append(f"{name}: it had ended before")
            first = expected[lane]
            if ids != tuple(range(first, first + len(ids))):
                problems.append(f"{name}: has samples {list(ids)}, and {first} comes next")
            expected[lane] = ids[-1] + 1 if ids else first
        ended |= expected.keys() - lanes.keys()
    return epochs, problems


def _document_problems(epoch: int, entries: Iterable[Entry], *, ended: bool) -> list[str]:
    """Tokens of packed documents that occur twice, or, in an epoch that has ended, never."""
    parts: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for entry in entries:
        for lane, samples in entry.documents.items():
            for number, begin, end in chain(*samples):
                parts[lane, number].append((begin, end))
    problems = []
    for (lane, number), pieces in sorted(parts.items()):
        name, expected = f"epoch {epoch}, lane {lane}, document {number}", 0
        # How long a document is stands nowhere, so its end may lack.
        for begin, end in sorted(pieces):
            if begin < expected:
                problems.append(f"{name}: token {begin} consumed twice")
            elif begin > expected and ended:
                problems.append(f"{name}: token {expected} never consumed")
            expected = max(expected, end)
    return problems


def _again_problems(executions: Mapping[int, Mapping[int, Mapping[int, Entry]]]) -> list[str]:
    """Steps that had other samples when they were done again."""
    problems = []
    for step, rounds in sorted(executions.items()):
        # A failure may have come in the middle of the step, before all ranks had written.
        whole = [
            {
                lane: (ids, each.documents.get(lane))
                for each in ranks.values()
                for lane, ids in each.microbatches.items()
            }
            for ranks in rounds.values()
            if len(ranks) == next(iter(ranks.values())).world
        ]
        if any(each != whole[0] for each in whole):
            problems.append(f"step {step} had other samples when it was done again")
    return problems


def _epoch_problems(consumed: list[int], dataset_size: int) -> list[str]:
    problems = []
    for start in range(0, len(consumed), dataset_size):
        epoch = consumed[start : start + dataset_size]
        counts = Counter(epoch)
        name = f"epoch {start // dataset_size}"
        foreign = [i for i in counts if not 0 <= i < dataset_size]
        problems += [f"{name}: sample {i} is not in the dataset" for i in foreign]
        problems += [f"{name}: sample {i} consumed {n} times" for i, n in counts.items() if n > 1]
        if len(epoch) == dataset_size:
            lost = set(range(dataset_size)) - counts.keys()
            problems += [f"{name}: sample {i} never consumed" for i in sorted(lost)]
    return problems
