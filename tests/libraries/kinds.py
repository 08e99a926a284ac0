"""Data of libraries: lines of this project's documentation, in a format of each library.

Each dataset is made anew for every rank, as every process does.
"""

from __future__ import annotations

import importlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from zero_data.lanes import Mixture, Pack, Shuffle

DOCS = Path(__file__).parents[2] / "docs"
MICRO_BATCH, WIDTH = 2, 6


def _beside_torchvision(library: str) -> Any:
    """A library that imports torchvision: built for one torch, that loads beside no other."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{library} imports torchvision, which cannot be imported here: {error}")
    return pytest.importorskip(library)


def lines(count: int = 150) -> list[dict[str, Any]]:
    text = (DOCS / "glossary.md").read_text().splitlines()
    assert len(text) >= count
    return [{"id": number, "text": line} for number, line in enumerate(text[:count])]


def files(
    directory: Path, parts: int, suffix: str, write: Callable[[Path, Any], None]
) -> list[str]:
    """Lines in so many files, of which each has its share; ranks find them written."""
    paths = [directory / f"{part:02}.{suffix}" for part in range(parts)]
    for part, path in enumerate(paths):
        if not path.exists():
            write(path, lines()[part::parts])
    return [str(path) for path in paths]


def inputs(samples: list[Any]) -> tuple[Tensor]:
    """Some bytes of each line, or tokens."""
    rows = [
        sample["input_ids"].tolist() if "input_ids" in sample else [*sample["text"].encode()]
        for sample in samples
    ]
    return (torch.tensor([(row + [0] * WIDTH)[:WIDTH] for row in rows]) / 128,)


def _torch(path: Path) -> Any:
    class Lines(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            yield from lines()[info.id :: info.num_workers]

    return Lines()


class _Stateful(IterableDataset):
    def __init__(self) -> None:
        self.lines, self.next = lines(), 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.lines):
            self.next += 1
            yield self.lines[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def _loader(path: Path) -> Any:
    loader = pytest.importorskip("torchdata.stateful_dataloader")
    return loader.StatefulDataLoader(_Stateful(), batch_size=MICRO_BATCH, collate_fn=inputs)


def _nodes(path: Path) -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    return nodes.Loader(nodes.IterableWrapper(lines()))


def jsonl(path: Path, parts: int) -> list[str]:
    def write(path: Path, rows: Any) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return files(path, parts, "jsonl", write)


def _hugging_face(path: Path, parts: int = 8, **options: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    paths = jsonl(path, parts)
    cache = str(path / "cache")
    return datasets.load_dataset(
        "json", data_files=paths, split="train", cache_dir=cache, **options
    )


def _hf_map(path: Path) -> Any:
    return _hugging_face(path)


def _hf_parquet(path: Path) -> Any:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    paths = files(
        path, 8, "parquet", lambda p, rows: parquet.write_table(arrow.Table.from_pylist(rows), p)
    )
    return datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)


def hf_streaming(path: Path) -> Any:
    return _hugging_face(path, streaming=True)


def _hf_mapped(path: Path) -> Any:
    return _hugging_face(path, streaming=True).map(lambda row: {"size": len(row["text"])})


def hf_few(path: Path) -> Any:
    return _hugging_face(path, 3, streaming=True)


def hf_shuffled(path: Path) -> Any:
    return _hugging_face(path, streaming=True).shuffle(seed=1, buffer_size=7)


def _hf_our_shuffle(path: Path) -> Any:
    return Shuffle(_hugging_face(path, streaming=True), buffer=7, seed=1)


def _hf_interleaved(path: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    whole = _hugging_face(path, streaming=True)
    return datasets.interleave_datasets(
        [
            whole.filter(lambda row: row["id"] % 3 != 0),
            whole.filter(lambda row: row["id"] % 3 == 0),
        ],
        probabilities=[0.6, 0.4],
        seed=1,
        stopping_strategy="all_exhausted_without_replacement",
    )


def _hf_packed(path: Path) -> Any:
    return Pack(_hf_our_shuffle(path), 64, tokens=lambda row: list(row["text"].encode()))


def _hf_mixture(path: Path) -> Any:
    sources = {"stream": _hugging_face(path, streaming=True), "map": lines()}
    return Mixture(sources, {"stream": 2, "map": 1}, when_exhausted="continue")


def tar(path: Path, parts: int) -> list[str]:
    def write(path: Path, rows: Any) -> None:
        with tarfile.open(path, "w") as tar:
            for row in rows:
                data = json.dumps(row).encode()
                member = tarfile.TarInfo(f"{row['id']:04}.json")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    return files(path, parts, "tar", write)


def _of_json(sample: dict[str, Any]) -> Any:
    return json.loads(sample["json"])


def web_dataset(path: Path, parts: int = 8, **options: Any) -> Any:
    webdataset = pytest.importorskip("webdataset")
    options = {"shardshuffle": False, **options}
    return webdataset.WebDataset(tar(path, parts), **options).map(_of_json)


def _wds_plain(path: Path) -> Any:
    return web_dataset(path)


def _wds_few(path: Path) -> Any:
    return web_dataset(path, 3)


def _wds_shuffled(path: Path) -> Any:
    return web_dataset(path, 16, shardshuffle=16).shuffle(10)


def _wds_resampled(path: Path) -> Any:
    return web_dataset(path, resampled=True)


def _mds(path: Path) -> None:
    streaming = _beside_torchvision("streaming")
    columns = {"id": "int", "text": "str"}
    with streaming.MDSWriter(out=str(path / "mds"), columns=columns, size_limit=2000) as out:
        for row in lines():
            out.write(row)


def _mosaic(path: Path) -> Any:
    streaming = _beside_torchvision("streaming")
    if not (path / "mds").exists():
        _mds(path)
    streaming.base.util.clean_stale_shared_memory()  # of processes that were killed; collective
    return streaming.StreamingDataset(local=str(path / "mds"), batch_size=MICRO_BATCH)


def _grain_map(path: Path) -> Any:
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(lines()).shuffle(seed=3)


def _grain_filtered(path: Path) -> Any:
    return _grain_map(path).filter(lambda row: row["id"] % 5 != 0)


def _grain_iter(path: Path) -> Any:
    grain = pytest.importorskip("grain")
    stream = grain.MapDataset.source(lines()).shuffle(seed=3).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(stream, window_size=5, seed=2)


def _json_of(sample: dict[str, Any]) -> Any:
    return sample["json"]


def _energon(path: Path) -> Any:
    energon = _beside_torchvision("megatron.energon")
    tar(path, 16)
    meta = path / ".nv-meta"
    if not meta.exists():
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors import BaseWebdatasetFactory

        BaseWebdatasetFactory.prepare_dataset(
            EPath(path),
            [f"{part:02}.tar" for part in range(16)],
            split_parts_ratio=[("train", 1)],
            workers=1,
        )
        (meta / "dataset.yaml").write_text(
            "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
        )

    class Lines(energon.DefaultTaskEncoder):
        cookers: ClassVar = [energon.Cooker(energon.stateless(_json_of))]

        @energon.stateless
        def batch(self, samples: Any) -> Any:
            return samples[0]

    def of_lane(lane: int, lanes: int) -> Any:
        place = energon.WorkerConfig(rank=lane, world_size=lanes, num_workers=0)
        data = energon.get_train_dataset(
            path,
            batch_size=1,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            worker_config=place,
            task_encoder=Lines(),
            repeat=False,
        )
        return energon.get_loader(data)

    return of_lane


KINDS: dict[str, Callable[[Path], Any]] = {
    "IterableDataset": _torch,
    "StatefulDataLoader": _loader,
    "torchdata.nodes": _nodes,
    "HF map-style": _hf_map,
    "HF parquet stream": _hf_parquet,
    "HF jsonl stream": hf_streaming,
    "HF stream and map": _hf_mapped,
    "HF stream of 3 files": hf_few,
    "HF stream and shuffle": hf_shuffled,
    "HF stream and Shuffle": _hf_our_shuffle,
    "HF interleaved": _hf_interleaved,
    "HF stream, Shuffle and Pack": _hf_packed,
    "Mixture of an HF stream and a list": _hf_mixture,
    "WebDataset": _wds_plain,
    "WebDataset of 3 archives": _wds_few,
    "WebDataset, shuffled": _wds_shuffled,
    "WebDataset, resampled": _wds_resampled,
    "MosaicML Streaming": _mosaic,
    "Grain MapDataset": _grain_map,
    "Grain MapDataset and filter": _grain_filtered,
    "Grain IterDataset": _grain_iter,
    "Megatron-Energon": _energon,
}
ENDLESS = {"WebDataset, resampled"}
TWICE = {"Mixture of an HF stream and a list"}
"""Whose epoch has every line twice."""
WRITES: dict[str, Callable[[Path], object]] = {**KINDS, "MosaicML Streaming": _mds}
"""Of each what writes its files, or skips the test."""
OF_ONE_JOB = {"MosaicML Streaming"}
"""Whose names in shared memory live as long as a process, and are of one job."""
