"""Data of libraries in lanes: saved by 4 ranks, resumed by 3 and by 8, the samples of one rank.

A library that is not installed is skipped; `make test-libraries` installs them.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.libraries.kinds import (
    DOCS,
    ENDLESS,
    KINDS,
    MICRO_BATCH,
    TWICE,
    hf_few,
    hf_shuffled,
    hf_streaming,
    jsonl,
    lines,
    tar,
    web_dataset,
)
from tests.support.lanes import Trained, stored
from tests.support.lanes import trained as driven
from zero_contract.errors import ConfigError
from zero_data import Lanes, read_ledger, verify

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]

_LANES = 8


def _key(sample: Any) -> Any:
    return sample.documents if hasattr(sample, "documents") else sample["id"]


def trained(make: Callable[[], Any], world: int, until: int, **options: Any) -> Trained:
    """See `tests.support.lanes`."""
    return driven(make, world, lanes=_LANES, batch_size=MICRO_BATCH, until=until, **options)


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
    elif kind not in ENDLESS:
        wanted = [
            row["id"] for row in lines() if kind != "Grain MapDataset and filter" or row["id"] % 5
        ]
        assert epoch == Counter(wanted * (1 + (kind in TWICE)))


def test_what_a_resume_costs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        return hf_shuffled(tmp_path)

    saved = trained(make, 2, 4).state
    trained(make, 1, 5, state=stored(saved))
    assert "leaves its buffer out" in caplog.text
    assert "zero_data.lanes.Shuffle" in caplog.text


def test_fewer_files_than_lanes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(lambda: hf_few(tmp_path), 1, 1)
    assert "has 3 parts for 8 lanes" in caplog.text


def test_a_loader_of_webdataset_is_refused_with_the_remedy(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    loader = webdataset.WebLoader(web_dataset(tmp_path), batch_size=None)
    with pytest.raises(ConfigError, match="give the WebDataset"):
        Lanes(loader, batch_size=1, lanes=1)


def test_a_stream_that_is_divided_among_ranks_is_refused_with_the_remedy(tmp_path: Path) -> None:
    distributed = pytest.importorskip("datasets.distributed")
    divided = distributed.split_dataset_by_node(hf_streaming(tmp_path), rank=0, world_size=2)
    with pytest.raises(ConfigError, match="give the dataset from before"):
        Lanes(divided, batch_size=1, lanes=1)


@pytest.mark.parametrize("number", range(5))
def test_an_example_of_the_page_reads_every_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "data-libraries.md").read_text()
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
    for library in ("datasets", "grain", "webdataset"):
        if f"import {library}\n" in example:
            pytest.importorskip(library)
    data = tmp_path / "data"
    data.mkdir()
    jsonl(data, 8)
    tar(data, 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    made: dict[str, Any] = {}
    exec(example, made)
    lanes = made["lanes"]
    for _ in lanes:
        assert lanes.weight >= 0
    assert lanes.samples >= (150 if "Pack" not in example else 8)
