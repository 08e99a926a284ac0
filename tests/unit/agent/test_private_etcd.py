"""`zero-ctl` without an endpoint finds the private etcd of a job of one node."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from zero_orchestrator.errors import SpecError
from zero_orchestrator.store import private_etcd


@pytest.fixture
def listening():
    """A function that listens at a free port, and returns its endpoint."""
    made: list[socket.socket] = []

    def listen() -> str:
        made.append(socket.create_server(("127.0.0.1", 0)))
        return f"127.0.0.1:{made[-1].getsockname()[1]}"

    yield listen
    for each in made:
        each.close()


def of_agent(tmp_path: Path, name: str, endpoint: str) -> Path:
    directory = tmp_path / f"zero-etcd-{name}"
    directory.mkdir()
    private_etcd.note(directory, endpoint)
    return directory


def test_the_one_private_server_that_answers_is_taken_if_no_shared_one_does(tmp_path, listening):
    mine, shared = listening(), listening()
    of_agent(tmp_path, "dead", "127.0.0.1:1")
    assert private_etcd.choose("127.0.0.1:1", [tmp_path]) == "127.0.0.1:1"
    of_agent(tmp_path, "alive", mine)
    assert private_etcd.choose("127.0.0.1:1", [tmp_path]) == mine
    assert private_etcd.choose(shared, [tmp_path]) == shared


def test_of_several_the_user_names_one(tmp_path, listening):
    first, second = listening(), listening()
    of_agent(tmp_path, "a", first)
    of_agent(tmp_path, "b", second)
    with pytest.raises(SpecError) as caught:
        private_etcd.choose("127.0.0.1:1", [tmp_path])
    assert str(caught.value) == (
        "2 jobs of one node run on this machine, each with an etcd of its own: name one of them "
        f"with --rdzv-endpoint={first}, --rdzv-endpoint={second}"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the note of another user")
def test_a_note_of_another_user_is_not_read(tmp_path, listening):
    directory = of_agent(tmp_path, "strange", listening())
    os.chown(directory / "endpoint", 65534, 65534)
    (tmp_path / "zero-etcd-pipe").mkdir()
    os.mkfifo(tmp_path / "zero-etcd-pipe" / "endpoint")  # a read would wait for ever
    os.chown(tmp_path / "zero-etcd-pipe" / "endpoint", 65534, 65534)
    assert private_etcd.running([tmp_path]) == []
