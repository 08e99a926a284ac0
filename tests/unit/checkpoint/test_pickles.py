"""No pickle crosses a wire: who could send one could run code in every rank."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("orchestrator", "agent", "engine")
MODULES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
COLLECTIVES = frozenset(
    f"{verb}_object{kind}"
    for verb in ("all_gather", "broadcast", "gather", "recv", "scatter", "send")
    for kind in ("", "_list")
)
READERS = frozenset({"torch.load", "np.load", "numpy.load"})
ALLOWED = {
    "engine/zero_checkpoint/dcp/writer.py": {"torch.load"},
    "engine/zero_checkpoint/tools/conversion/pickles.py": {"pickle", "torch.load"},
    "engine/zero_comm/worker/flight_recorder.py": {"pickle"},
}
"""The writer for torch.distributed.checkpoint, and the reader of torch's flight recorder, unpickle
what their own process has pickled a moment ago. The reader of other people's checkpoints runs
nothing in them unless it is told to."""


def uses(source: str) -> Iterator[str]:
    """What in a file unpickles, by name; a name that is only handed on to scripts is no use."""
    if not any(word in source for word in (*MODULES, "_object", ".load(")):
        return  # most files; parsing takes longer than all else
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Name | ast.Attribute):
            text = ast.unparse(node)
            if text in READERS or text.rpartition(".")[2] in COLLECTIVES:
                yield text


def test_nothing_but_the_reader_of_foreign_checkpoints_unpickles_anything():
    files = [path for room in PRODUCT for path in (ROOT / room).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): names
        for path in files
        if (names := set(uses(path.read_text())))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("dist.broadcast_object_list(verdict)", {"dist.broadcast_object_list"}),
        ("all_gather_object(found, own)", {"all_gather_object"}),
        ("from pickle import loads", {"pickle"}),
        ("state = torch.load(path)", {"torch.load"}),
        ("import marshal", {"marshal"}),
        ("from torch.distributed import all_gather_object", set()),
    ],
)
def test_what_counts_as_unpickling(line, found):
    assert set(uses(line)) == found
