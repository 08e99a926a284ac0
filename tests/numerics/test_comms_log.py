"""`comms_logger`: the engine's exchanges, counted."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from tests.support.training import config, make_engine, train
from tests.support.world import WorldPool
from zero_comm.exchange.comms_log import CommsLog
from zero_contract.errors import ConfigError
from zero_deepspeed import comm
from zero_engine.config import load_config


def summary_of_one_step(settings: dict[str, Any]) -> tuple[list[str], dict[str, int], list[int]]:
    """The printed lines, what the engine has counted itself, and the bytes of each unit's half."""
    engine = make_engine(config(1, comms_logger=settings))
    train(engine, 1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        comm.log_summary(show_straggler=True)
    halves = [unit.full.nbytes // 2 for unit in engine._core.units if unit.spec.trained]
    return printed.getvalue().splitlines(), dict(engine._core.collectives.bytes_sent), halves


def table_of(lines: list[str], kind: str) -> dict[int, int]:
    """Bytes of an exchange -> how many."""
    rows = [line.replace(",", "").split() for line in lines if line.startswith(kind)]
    return {int(row[1]): int(row[2]) for row in rows}


def test_the_summary_counts_every_exchange_of_the_engine(worlds: WorldPool) -> None:
    (lines, sent, halves), (silent, _, _) = worlds.run(2, summary_of_one_step, {"enabled": True})
    microbatches = table_of(lines, "gradients")
    # Five micro-batches on two ranks: three micro-steps.
    assert microbatches == {half: 3 * halves.count(half) for half in halves}
    for kind in ("gradients", "gather"):
        assert sum(size * count for size, count in table_of(lines, kind).items()) == sent[kind]
    assert [line.split()[:3] for line in lines[-2:]] == [["rank", str(r), "waited"] for r in (0, 1)]
    assert silent == []


def test_only_the_chosen_kinds_are_counted(worlds: WorldPool) -> None:
    settings = {"enabled": True, "prof_all": False, "prof_ops": ["gather"]}
    lines, _, _ = worlds.run(2, summary_of_one_step, settings)[0]
    assert {line.split()[0] for line in lines[1:-2]} == {"gather"}


def test_deepspeeds_names_of_operations_are_refused_where_they_would_count_nothing() -> None:
    with pytest.raises(
        ConfigError, match="'all_reduce' is not one of gradients, gather, pieces, broadcast"
    ):
        load_config({"comms_logger": {"prof_all": False, "prof_ops": ["all_reduce"]}})


def test_without_the_key_the_summary_says_how_to_count() -> None:
    assert CommsLog().lines() == [
        'exchanges were not counted; set "comms_logger": {"enabled": true}'
    ]
