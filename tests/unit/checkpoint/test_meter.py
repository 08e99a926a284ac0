"""Long loads and saves log how far they have come; short ones log nothing."""

import logging

import torch

from tests.support.manual_clock import ManualClock
from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.files import meter
from zero_checkpoint.files.meter import Meter
from zero_checkpoint.format.pieces import PARAM, Piece, State, TensorId, TensorInfo
from zero_checkpoint.loading.restore import load
from zero_checkpoint.saving.commit import save

MIB = 1 << 20


def test_a_line_every_ten_seconds_says_what_is_left(caplog):
    caplog.set_level(logging.INFO, "zero_checkpoint")
    clock = ManualClock()
    one = Meter("loading x", 4096 * MIB, clock.now)
    for _ in range(21):
        clock.advance(1.0)
        one.add(64 * MIB)
    assert caplog.messages == [
        "loading x: rank 0 has done 640.0 MiB of 4.0 GiB, 64.0 MiB/s, about 54 s left",
        "loading x: rank 0 has done 1.2 GiB of 4.0 GiB, 64.0 MiB/s, about 44 s left",
    ]


def test_the_agent_is_told_every_second_how_much_is_done(caplog):
    clock, told = ManualClock(), []
    one = Meter("loading x", 100, clock.now, logs=False, tell=lambda *what: told.append(what))
    for _ in range(10):
        clock.advance(0.5)
        one.add(10)
    assert told == [("loading x", part) for part in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert caplog.messages == []


def state() -> State:
    data = torch.arange(3 << 20, dtype=torch.float32)
    tensor = TensorId(PARAM, "w")
    info = TensorInfo(tuple(data.shape), data.dtype)
    meta = {"engine": {"weight_hash": ""}, "client": {}}
    return State(tensors={tensor: info}, pieces=(Piece(tensor, 0, data),), meta=meta)


def test_a_save_and_a_load_count_every_byte_of_the_rank(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(meter, "EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "zero_checkpoint.files.meter")
    consensus = StoreConsensus.alone()
    path = save(tmp_path, state(), consensus, step=3, tag="t", round=0, fence=None)
    saved = caplog.messages[-1]
    size = f"{sum(file.stat().st_size for file in path.glob('r0*')) / MIB:.1f} MiB"
    assert saved.startswith(f"saving {path.name}: rank 0 has done {size} of {size}, ")
    caplog.clear()
    assert load(tmp_path, consensus, lambda manifest: state()) is not None
    loaded = caplog.messages[-1]
    assert loaded.startswith(f"loading {path.name}: rank 0 has done {size} of {size}, ")
