"""Small states, cut unevenly among ranks, and ranks as threads that vote through a HashStore."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore

from zero_checkpoint import Manifest, StoreConsensus
from zero_checkpoint.files.object_disk import ObjectDisk
from zero_checkpoint.files.objects import ObjectPath, file_system
from zero_checkpoint.files.place import Place
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.format.dtypes import DTYPES, byte_view
from zero_checkpoint.format.pieces import BUFFER, PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.loading.restore import Loaded, load
from zero_checkpoint.saving.commit import save

T = TypeVar("T")
Full = dict[TensorId, Tensor]
"""Whole tensors, in the order of the table."""


class SmallBlocks(Disk):
    """Blocks of one page, so that small states have many."""

    block_bytes = 4096


class SmallObjects(ObjectDisk):
    """Blocks of 64 KiB, and the shortest parts that S3 takes."""

    block_bytes = 1 << 16
    part_bytes = 5 << 20


SMALL, SMALL_OBJECTS = SmallBlocks(), SmallObjects()


def adam_state(seed: int = 0, width: int = 37) -> Full:
    """A model with odd sizes, a scalar, an empty tensor and buffers, and its Adam moments."""
    shapes = {"wte.weight": (width, 11), "norm.bias": (width,), "scale": (), "none": (0, 5)}
    full = {
        TensorId(kind, fqn): random_bits(shape, torch.float32, seed + 7 * k + i)
        for k, kind in enumerate([PARAM, "exp_avg", "exp_avg_sq"])
        for i, (fqn, shape) in enumerate(shapes.items())
    }
    full[TensorId(BUFFER, "mask")] = random_bits((3, 3), torch.bool, seed + 90)
    full[TensorId(BUFFER, "count")] = random_bits((), torch.int64, seed + 91)
    return full


def every_dtype(seed: int = 0) -> Full:
    """One tensor of each dtype that the format knows."""
    return {
        TensorId(PARAM, name): random_bits((5, 7), dtype, seed + i)
        for i, (name, dtype) in enumerate(DTYPES.items())
    }


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern, NaNs included: checkpoints keep bits, not values."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    limit = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, limit, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def table(full: Full) -> dict[TensorId, TensorInfo]:
    return {t: TensorInfo(tuple(data.shape), data.dtype) for t, data in full.items()}


def interval(rank: int, world: int, total: int) -> tuple[int, int]:
    """Uneven on purpose: later ranks own more."""
    cut = [round(total * (r / world) ** 1.3) for r in range(world + 1)]
    return cut[rank], cut[rank + 1]


def share(full: Full, rank: int, world: int, **extra: object) -> State:
    """The state of one rank: its interval of each kind's flat concatenation; views of `full`."""
    pieces: list[Piece] = []
    for kind in dict.fromkeys(t.kind for t in full):
        mine = {t: data.reshape(-1) for t, data in full.items() if t.kind == kind}
        if kind == BUFFER:
            pieces += [Piece(t, 0, data) for t, data in mine.items() if rank == 0]
            continue
        low, high = interval(rank, world, sum(data.numel() for data in mine.values()))
        at = 0
        for tensor, data in mine.items():
            begin, end = max(low - at, 0), min(high - at, data.numel())
            if begin < end:
                pieces.append(Piece(tensor, begin, data[begin:end]))
            at += data.numel()
    return State(table(full), tuple(pieces), **extra)  # type: ignore[arg-type]


def blank(full: Full) -> Full:
    """Tensors of the same shapes that hold other bits."""
    return {
        t: (byte_view(data.reshape(-1)) ^ 1).view(data.dtype).reshape(data.shape)
        for t, data in full.items()
    }


def same_bits(left: Full, right: Full) -> bool:
    return list(left) == list(right) and all(
        left[t].shape == right[t].shape
        and torch.equal(byte_view(left[t].reshape(-1)), byte_view(right[t].reshape(-1)))
        for t in left
    )


def flip(path: Path, position: int) -> None:
    """Damage one byte, keeping the size."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def on_ranks(
    world: int,
    work: Callable[[StoreConsensus], T],
    timeout_s: float = 50,
    store: HashStore | None = None,
    key: str | None = None,
) -> list[T]:
    """What `work` returns on each rank, or the exception it raised."""
    store, results = store or HashStore(), [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(StoreConsensus(store, rank, world, timeout_s=timeout_s, key=key))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def save_all(root: Place, full: Full, world: int = 2, **options: object) -> list[Place]:
    """Save on `world` ranks; the path, or the error, of each."""
    settings = {"step": 1, "tag": "t", "round": 0, "fence": None, "disk": disk_for(root), **options}
    extra = {key: settings.pop(key) for key in ("aliases", "meta") if key in settings}

    def work(consensus: StoreConsensus) -> Place:
        state = share(full, consensus.rank, consensus.world, **extra)
        return save(root, state, consensus, **settings)  # type: ignore[arg-type]

    return on_ranks(world, work)


def load_all(root: Place, target: Full, world: int = 2, **options: object) -> list[Loaded | None]:
    """Load on `world` ranks into the shared tensors of `target`."""
    extra = {key: options.pop(key) for key in ("aliases",) if key in options}

    def work(consensus: StoreConsensus) -> Loaded | None:
        def wanted(_: Manifest) -> State:
            return share(target, consensus.rank, consensus.world, **extra)

        return load(root, consensus, wanted, **options)  # type: ignore[arg-type]

    return on_ranks(world, work)


def saved(root: Place, full: Full, world: int = 2, **options: object) -> Place:
    """The directory of a save that must succeed on every rank."""
    paths = save_all(root, full, world, **options)
    assert len(set(paths)) == 1, paths
    assert not isinstance(paths[0], Exception), paths
    return paths[0]


def disk_for(root: Place) -> Disk:
    return SMALL if isinstance(root, Path) else SMALL_OBJECTS


def names(root: Place) -> list[str]:
    """Everything under a root, for claims that nothing was left behind."""
    if isinstance(root, ObjectPath):
        return sorted(file_system(root.url).find(root.url)) if root.exists() else []
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
