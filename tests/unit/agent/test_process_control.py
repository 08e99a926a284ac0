"""Processes end at any time, also while somebody looks at them."""

from __future__ import annotations

import subprocess

from tests.support.listing import before_listing
from zero_agent.node.process_control import children


def test_a_process_that_ends_while_its_children_are_looked_for_has_none():
    process = subprocess.Popen(["sleep", "60"])

    def end() -> None:
        process.kill()
        process.wait()

    before_listing(f"/proc/{process.pid}/task", end)
    assert children(process.pid) == []
    assert process.poll() is not None
