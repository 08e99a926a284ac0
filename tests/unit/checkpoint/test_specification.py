"""docs/checkpoint-format.md is enough to write a reader from: the one that it shows is run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "checkpoint-format.md").read_text()
[CHECKPOINT] = (ROOT / "tests/data/checkpoints/before_the_libraries").glob("step-*")


def test_the_reader_of_the_specification_finds_the_weights_that_were_saved() -> None:
    [source] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    space: dict[str, Any] = {}
    exec(source, space)
    tensors, meta = space["read"](CHECKPOINT)
    digests = {
        name: hashlib.sha256(
            f"{name}\0torch.float32\0{data.shape}\0".encode() + data.tobytes()
        ).digest()
        for (kind, name), data in tensors.items()
        if kind == "param"
    }
    whole = hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()
    assert whole == meta["engine"]["weight_hash"]
    assert tensors["buffer", "seen"].tolist() == [0, 1, 2]
    assert meta["client"] == {"epoch": 0, "note": "before the libraries"}


def test_the_blocks_of_the_specification_have_the_digests_of_the_manifest() -> None:
    manifest = json.loads((CHECKPOINT / "MANIFEST.json").read_bytes())
    for file in manifest["files"]:
        data, size = (CHECKPOINT / file["name"]).read_bytes(), manifest["block_bytes"]
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        expected = np.frombuffer(base64.b64decode(file["xxh3_64"]), "<u8").tolist()
        assert [xxhash.xxh3_64_intdigest(block) for block in blocks] == expected
