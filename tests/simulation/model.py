"""What simulated workers train: a tensor whose values tell which samples have made it.

Every rank has a run of its elements, as a rank of ZeRO has. The state after step S is a digest of
all samples of the steps up to S, so whoever runs a step twice, leaves out a sample, goes on from
another run's state or mixes two checkpoints ends with other values. It is saved and loaded as any
training is, through `zero_checkpoint.training.Training`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.manifest import Manifest
from zero_checkpoint.format.pieces import PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.loading import restore
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.loading.restore import Loaded
from zero_checkpoint.plain import UNKNOWN_RUN

if TYPE_CHECKING:
    from tests.simulation.training import Worker

MICROBATCHES = 12
ELEMENTS = 60
WEIGHT = TensorId(PARAM, "weight")
TENSORS = {WEIGHT: TensorInfo((ELEMENTS,), torch.int64)}


@cache
def digest_of(steps: int) -> str:
    """The state after so many steps, by whomever they were taken."""
    return after(digest_of(steps - 1), steps, tuple(range(MICROBATCHES))) if steps else ""


def after(digest: str, step: int, samples: tuple[int, ...]) -> str:
    """The state after a step with these samples."""
    return hashlib.sha256(f"{digest}/{step}/{samples}".encode()).hexdigest()[:16]


def values_of(digest: str) -> torch.Tensor:
    """The values of all elements in this state."""
    data = hashlib.shake_128(digest.encode()).digest(8 * ELEMENTS)
    return torch.from_numpy(np.frombuffer(data, np.int64).copy())


@dataclass
class Cursor:
    """Where the training is."""

    step: int = 0
    samples: int = 0
    micro: int = 0


class Model:
    """One rank's share of the training."""

    trains = True
    in_library_loop = False

    def __init__(self, worker: Worker) -> None:
        self.rank, self.world = worker.rank, worker.world
        self.worker = worker
        self.cursor = Cursor()
        self.digest = ""
        begin, end = (ELEMENTS * rank // self.world for rank in (self.rank, self.rank + 1))
        self.share = slice(begin, end)
        self.pieces = (Piece(WEIGHT, begin, values_of("")[self.share].clone()),)
        self.before_change: list[Callable[[], object]] = []
        self._lent: Callable[[], object] | None = None

    def take(self, samples: tuple[int, ...]) -> None:
        """Finish a step."""
        lent, self._lent = self._lent, None
        for hold in (*self.before_change, *([lent] if lent is not None else [])):
            hold()
        self.cursor.step += 1
        self.cursor.samples += MICROBATCHES
        self.digest = after(self.digest, self.cursor.step, samples)
        self.pieces[0].data.copy_(values_of(self.digest)[self.share])

    def capture(
        self, run: Mapping[str, Any], client: Mapping[str, Any], *, exclude_frozen: bool
    ) -> State:
        """As `Training.capture`."""
        cursor = self.cursor
        record = {**UNKNOWN_RUN, **run, "step": cursor.step, "samples": cursor.samples}
        meta = {"engine": {**record, "groups": []}, "client": client, "digest": self.digest}
        return State(TENSORS, self.pieces, meta=meta)

    def weight_hash(self) -> str:
        """As `Training.weight_hash`."""
        return hashlib.sha256(self.digest.encode()).hexdigest()

    def loading(self) -> Resuming:
        """As `Training.loading`."""
        return Resuming(self)

    def settle(self) -> None:
        """No exchange is under way."""

    def lend(self, until: Callable[[], object]) -> None:
        """As `Training.lend`."""
        self._lent = until


class Resuming:
    """A load of everything."""

    resumes = takes_position = True

    def __init__(self, model: Model) -> None:
        self._model = model
        self.options: dict[str, bool] = {}
        self.filled = State(TENSORS, model.pieces)

    def read(
        self, root: Place, consensus: StoreConsensus, tag: str | None, ram: MemorySearch | None
    ) -> Loaded | None:
        """As `Loading.read`."""
        worker = self._model.worker
        worker.training.kernel.park(worker.training.machines.about(0.3))
        worker.training.disk.seen()

        def wanted(manifest: Manifest) -> State:
            return self.filled

        def meet(what: str) -> None:
            assert worker.group is not None
            worker.group.exchange(worker, f"{what} {consensus._asked}", None)

        loaded = restore.load(root, consensus, wanted, meet=meet, tag=tag, ram=ram)
        worker.training.loaded(worker, loaded)
        return loaded

    def adopt(self, run: Mapping[str, Any]) -> None:
        """As `Loading.adopt`."""
        self._model.cursor = Cursor(run["step"], run["samples"])

    def end(self) -> None:
        """As `Loading.end`."""
        self._model.digest = digest_of(self._model.cursor.step)
        if not torch.equal(
            self._model.pieces[0].data, values_of(self._model.digest)[self._model.share]
        ):
            self._model.worker.training.on_problem(
                f"I7: rank {self._model.rank} has loaded another state than that of step "
                f"{self._model.cursor.step}"
            )

    def report(self, loaded: Loaded) -> None:
        """As `Loading.report`."""
