"""What torch loads of the plug-in for torchrun in every program that saves with DCP."""

from __future__ import annotations

import subprocess
import sys

from tests.support.cluster import environment

LOADED = """
import sys
from importlib.metadata import entry_points

[entry] = entry_points(group="torchrun.handlers", name="zero-etcd")
assert callable(entry.load()())
print({"torch", "grpc", "zero_orchestrator"} & sys.modules.keys())
"""


def test_a_program_that_asks_for_no_rendezvous_imports_nothing_for_one():
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")
