"""Data of libraries in lanes: saved by 4 ranks, resumed by 3 and by 8, the samples of one rank.

Each dataset is made of the lines of this project's documentation, in a format of its library.
A library that is not installed is skipped; `make test-libraries` installs them.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from tests.support.lanes import Trained, stored
from tests.support.lanes import trained as driven
from zero_contract.errors import ConfigError
from zero_data import Lanes, read_ledger, verify
from zero_data.lanes import Mixture, Pack, Shuffle

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]

_DOCS = Path(__file__).parents[2] / "docs"
_LANES, _MICRO_BATCH = 8, 2


def lines(count: int = 150) -> list[dict[str, Any]]:
    text = (_DOCS / "glossary.md").read_text().splitlines()
    assert len(text) >= count
    return [{"id": number, "text": line} for number, line in enumerate(text[:count])]


def files(
    directory: Path, parts: int, suffix: str, write: Callable[[Path, Any], None]
) -> list[str]:
    """Lines in so many files, of which each has its share."""
    paths = [directory / f"{part:02}.{suffix}" for part in range(parts)]
    for part, path in enumerate(paths):
        write(path, lines()[part::parts])
    return [str(path) for path in paths]


# ---- datasets: each is made anew for every rank, as every process does ----


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
    return loader.StatefulDataLoader(_Stateful(), batch_size=_MICRO_BATCH)


def _nodes(path: Path) -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    return nodes.Loader(nodes.IterableWrapper(lines()))


def _jsonl(path: Path, parts: int) -> list[str]:
    def write(path: Path, rows: Any) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return files(path, parts, "jsonl", write)


def _hugging_face(path: Path, parts: int = 8, **options: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    paths = _jsonl(path, parts)
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


def _hf_streaming(path: Path) -> Any:
    return _hugging_face(path, streaming=True)


def _hf_mapped(path: Path) -> Any:
    return _hugging_face(path, streaming=True).map(lambda row: {"size": len(row["text"])})


def _hf_few(path: Path) -> Any:
    return _hugging_face(path, 3, streaming=True)


def _hf_shuffled(path: Path) -> Any:
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


def _tar(path: Path, parts: int) -> list[str]:
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


def _web_dataset(path: Path, parts: int = 8, **options: Any) -> Any:
    webdataset = pytest.importorskip("webdataset")
    options = {"shardshuffle": False, **options}
    return webdataset.WebDataset(_tar(path, parts), **options).map(_of_json)


def _wds_plain(path: Path) -> Any:
    return _web_dataset(path)


def _wds_few(path: Path) -> Any:
    return _web_dataset(path, 3)


def _wds_shuffled(path: Path) -> Any:
    return _web_dataset(path, 16, shardshuffle=16).shuffle(10)


def _wds_resampled(path: Path) -> Any:
    return _web_dataset(path, resampled=True)


def _mosaic(path: Path) -> Any:
    streaming = pytest.importorskip("streaming")
    if not (path / "mds").exists():
        with streaming.MDSWriter(
            out=str(path / "mds"), columns={"id": "int", "text": "str"}, size_limit=2000
        ) as out:
            for row in lines():
                out.write(row)
    streaming.base.util.clean_stale_shared_memory()
    return streaming.StreamingDataset(local=str(path / "mds"), batch_size=2)


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
    energon = pytest.importorskip("megatron.energon")
    _tar(path, 16)
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
    "HF jsonl stream": _hf_streaming,
    "HF stream and map": _hf_mapped,
    "HF stream of 3 files": _hf_few,
    "HF stream and shuffle": _hf_shuffled,
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
_ENDLESS = {"WebDataset, resampled"}
_TWICE = {"Mixture of an HF stream and a list"}
"""Whose epoch has every line twice."""


def _key(sample: Any) -> Any:
    return sample.documents if hasattr(sample, "documents") else sample["id"]


def trained(make: Callable[[], Any], world: int, until: int, **options: Any) -> Trained:
    """See `tests.support.lanes`."""
    return driven(make, world, lanes=_LANES, batch_size=_MICRO_BATCH, until=until, **options)


def _keys(*parts: Trained) -> list[tuple[int, list[Any]]]:
    """Of each step the epoch, and what its samples are known by."""
    return [
        (epoch, [*map(_key, step)])
        for part in parts
        for epoch, step in zip(part.epochs, part.steps, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_by_4_ranks_and_resumed_by_3_and_by_8(kind: str, tmp_path: Path) -> None:
    data, ledger = tmp_path / "data", tmp_path / "ledger"
    data.mkdir()

    def make() -> Any:
        return KINDS[kind](data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the libraries
        alone = _keys(trained(make, 1, 25))
        first = trained(make, 4, 4, ledger=(ledger, 0))
        second = trained(make, 3, 13, state=stored(first.state), ledger=(ledger, 1))
        third = trained(make, 8, 25, state=stored(second.state), ledger=(ledger, 2))
    assert _keys(first, second, third) == alone
    report = verify(read_ledger(ledger), None)
    assert report.problems == ()
    assert set(report.world_by_step.values()) == {4, 3, 8}
    epoch = Counter(chain(*(keys for epoch, keys in alone if epoch == 0)))
    if kind == "HF stream, Shuffle and Pack":
        documents = {document for packed in epoch for document, _, _ in packed}
        assert len(documents) >= 150 // _LANES
    elif kind not in _ENDLESS:
        wanted = [
            row["id"] for row in lines() if kind != "Grain MapDataset and filter" or row["id"] % 5
        ]
        assert epoch == Counter(wanted * (1 + (kind in _TWICE)))


def test_what_a_resume_costs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        return _hf_shuffled(tmp_path)

    saved = trained(make, 2, 4).state
    trained(make, 1, 5, state=stored(saved))
    assert "leaves its buffer out" in caplog.text
    assert "zero_data.lanes.Shuffle" in caplog.text


def test_fewer_files_than_lanes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(lambda: _hf_few(tmp_path), 1, 1)
    assert "has 3 parts for 8 lanes" in caplog.text


def test_a_loader_of_webdataset_is_refused_with_the_remedy(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    loader = webdataset.WebLoader(_web_dataset(tmp_path), batch_size=None)
    with pytest.raises(ConfigError, match="give the WebDataset"):
        Lanes(loader, batch_size=1, lanes=1)


def test_a_stream_that_is_divided_among_ranks_is_refused_with_the_remedy(tmp_path: Path) -> None:
    distributed = pytest.importorskip("datasets.distributed")
    divided = distributed.split_dataset_by_node(_hf_streaming(tmp_path), rank=0, world_size=2)
    with pytest.raises(ConfigError, match="give the dataset from before"):
        Lanes(divided, batch_size=1, lanes=1)


@pytest.mark.parametrize("number", range(5))
def test_an_example_of_the_page_reads_every_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (_DOCS / "data-libraries.md").read_text()
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
    for library in ("datasets", "grain", "webdataset"):
        if f"import {library}\n" in example:
            pytest.importorskip(library)
    data = tmp_path / "data"
    data.mkdir()
    _jsonl(data, 8)
    _tar(data, 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    made: dict[str, Any] = {}
    exec(example, made)
    lanes = made["lanes"]
    for _ in lanes:
        assert lanes.weight >= 0
    assert lanes.samples >= (150 if "Pack" not in example else 8)
