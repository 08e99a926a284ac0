"""When a change of the world size is a warning: which scripts are told, when, and how often."""

from __future__ import annotations

import pytest

from tests.support.manual_clock import ManualClock
from zero_agent.workers.world_size import QUIET_S, WorldSize


@pytest.mark.parametrize(
    ("world_sizes", "tells", "announces", "runs_s", "done", "told"),
    [
        ([2, 1], True, False, 0.0, True, "the world size is 1 and was 2, and the script"),
        ([2, 1, 2, 2], True, False, QUIET_S + 1, False, "the world size is 2 and was 1, and"),
        ([2, 1], True, False, QUIET_S, False, ""),  # it may still make its engine
        ([2, 1], True, True, QUIET_S + 1, True, ""),
        ([2, 1], False, False, QUIET_S + 1, True, ""),  # another node says it
        ([2, 2, 2], True, False, QUIET_S + 1, True, ""),
        ([1], True, False, QUIET_S + 1, True, ""),
    ],
)
def test_a_script_without_engine_and_protect_is_told_that_the_world_size_has_changed(
    world_sizes, tells, announces, runs_s, done, told
):
    clock = ManualClock()
    watch = WorldSize(clock)
    for world_size in world_sizes:
        clock.advance(QUIET_S)
        watch.begin(world_size, tells=tells)
    if announces:
        watch.announced()
    clock.advance(runs_s)
    warning = watch.warning(done=done)
    assert (warning.startswith(told), bool(warning)) == (True, bool(told))
    assert watch.warning(done=done) == ""
