"""A script's heartbeat, and what the agent feels of it."""

import os
import subprocess
import sys

import zero_agent
from zero_agent.node.heartbeat import ENV_FILE, Beat, Heartbeats, parse
from zero_contract.worker import ENV_HEARTBEAT


def felt(heartbeats: Heartbeats) -> list[tuple[int, int | None]]:
    return [(rank, beat and beat.step) for rank, beat in heartbeats.beats()]


def test_each_beat_is_felt_once_with_its_step(tmp_path, monkeypatch):
    file = tmp_path / "pulse"
    heartbeats = Heartbeats({3: file, 4: tmp_path / "silent"})
    assert felt(heartbeats) == []
    monkeypatch.setenv(ENV_FILE, str(file))
    for step in (99, 100, 7):
        zero_agent.heartbeat(step)
        assert felt(heartbeats) == [(3, step)]
        assert felt(heartbeats) == []
    zero_agent.heartbeat()
    assert felt(heartbeats) == [(3, None)]


def test_a_beat_says_the_loss_the_samples_and_the_tokens_that_are_given(tmp_path, monkeypatch):
    file = tmp_path / "pulse"
    heartbeats = Heartbeats({0: file})
    monkeypatch.setenv(ENV_FILE, str(file))
    zero_agent.heartbeat(12, loss=0.53125, samples=96, tokens=98304, total_steps=400)
    assert list(heartbeats.beats()) == [(0, Beat(12, 0.53125, 96, 98304, 400))]
    zero_agent.heartbeat(13)
    assert list(heartbeats.beats()) == [(0, Beat(13))], "what the step before has said is gone"
    counts = {"samples": 10**18, "tokens": 10**20, "total_steps": 10**19}
    zero_agent.heartbeat(10**19, loss=-1.23456789e-300, **counts)
    assert list(heartbeats.beats()) == [(0, Beat(10**19, -1.23456789e-300, *counts.values()))]


def test_words_that_are_not_known_spoil_nothing():
    assert parse(b"7 loss=x samples=2.5 tokens=9 colour=red \n") == Beat(7, tokens=9)
    assert parse(b"seven loss=1") is None
    assert parse(b"  ") is None


def test_a_shell_may_touch_the_file(tmp_path):
    file = tmp_path / "pulse"
    heartbeats = Heartbeats({0: file})
    subprocess.run(["touch", str(file)], check=True)
    assert felt(heartbeats) == [(0, None)]
    file.write_text("12\n")
    os.utime(file, ns=(1, 1))
    assert felt(heartbeats) == [(0, 12)]
    file.write_bytes(b"\xff rubbish")
    os.utime(file, ns=(2, 2))
    assert felt(heartbeats) == [(0, None)]


def test_a_heartbeat_never_disturbs_the_script(tmp_path, monkeypatch):
    monkeypatch.delenv(ENV_FILE, raising=False)
    zero_agent.heartbeat(1)
    monkeypatch.setenv(ENV_FILE, str(tmp_path / "no" / "such" / "directory"))
    zero_agent.heartbeat(1)
    monkeypatch.setenv(ENV_FILE, str(tmp_path / "pulse"))
    zero_agent.heartbeat("no number")
    zero_agent.heartbeat(1, loss="no number")
    zero_agent.heartbeat(1, samples=None)
    assert not (tmp_path / "pulse").exists()


def test_the_import_is_cheap_and_the_name_is_the_contracts():
    question = (
        "import sys, zero_agent; print(*sorted(m for m in sys.modules if m.startswith('zero')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "zero_agent",
        "zero_agent.node",
        "zero_agent.node.heartbeat",
        "zero_agent.node.leave_request",
        "zero_contract",
        "zero_contract.kernel",
        "zero_contract.notices",
    ]
    assert ENV_FILE == ENV_HEARTBEAT
