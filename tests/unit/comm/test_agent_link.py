"""What a worker tells its agent about its steps."""

import contextlib
import signal
import socket

import pytest
import torch
from msgspec import structs

from zero_comm.worker import agent_link
from zero_comm.worker.agent_link import AgentLink
from zero_contract.worker import ENV_SOCKET, Hello, Preparing, Progress, Saved, decode
from zero_engine.optim.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR


def test_the_time_of_a_save_is_reported_once_with_the_next_progress_of_the_worker(tmp_path):
    path = tmp_path / "agent.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as agent:
        agent.bind(str(path))
        agent.listen()
        link = AgentLink(rank=3, path=str(path))
        connection, _ = agent.accept()
        with connection, connection.makefile("rb") as lines:
            link.saved(0.5)  # before the first step: nothing to send it with
            link.heartbeat()
            link.preparing("loading x", 0.4)
            one = Progress(step=1, gradient_norm=2.0)
            link.progress(0, one)
            link.preparing("loading y")  # it takes steps
            link.saved(1.0)
            link.saved(0.25)
            link.heartbeat()
            link.heartbeat()
            link.close()
            told = [decode(line) for line in lines]
    assert isinstance(told[0], Hello)
    assert told[1] == Preparing(what="loading x", part=0.4)
    assert [(m.step, m.gradient_norm, m.saving_s) for m in told[2:]] == [
        (1, 2.0, 0.5),
        (1, 2.0, 1.25),
        (1, 2.0, 0.0),
    ]


def test_an_agent_that_stands_still_for_any_time_loses_reports_and_not_its_worker(tmp_path):
    path = tmp_path / "agent.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as agent:
        agent.bind(str(path))
        agent.listen()
        link = AgentLink(rank=3, path=str(path))
        connection, _ = agent.accept()
        with connection, connection.makefile("rb") as lines:
            for step in range(5000):  # more than the socket holds
                link.progress(0, Progress(step=step))
            told = [decode(next(lines)) for _ in range(50)]  # it goes on
            link.progress(0, Progress(step=5000))
            link.close()
            told += [decode(line) for line in lines]
    steps = [one.step for one in told[1:]]
    assert steps == [*range(len(steps) - 1), 5000]
    assert len(steps) < 5000, "the socket was full"


class Engine:
    """A client of the link."""


def test_a_process_has_one_connection_however_much_is_made_before_and_behind_its_engine(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(agent_link, "_link", None)
    monkeypatch.setenv(ENV_SOCKET, str(tmp_path / "agent.sock"))
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # keeps its handler
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as agent:
        agent.bind(str(tmp_path / "agent.sock"))
        agent.listen()
        links = [agent_link.agent_link(3) for _ in range(100)]  # as of the parameters of zero.Init
        engine = Engine()
        links[0].add(engine)
        links.append(agent_link.agent_link(3))
        assert all(link is links[0] for link in links)
        del engine
        after = agent_link.agent_link(3)
        first, _ = agent.accept()
        with first, first.makefile("rb") as lines:
            assert [decode(line).rank for line in lines] == [3], "the first one is closed"
        second, _ = agent.accept()
        agent.setblocking(False)
        with second, pytest.raises(BlockingIOError):
            agent.accept()
        after.close()


def test_a_scheduler_that_is_made_for_a_number_of_steps_says_how_many_the_run_has(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = torch.optim.lr_scheduler
    for scheduler, total_steps in (
        (WarmupDecayLR(optimizer, total_num_steps=400), 400),
        (WarmupCosineLR(optimizer, total_num_steps=500), 500),
        (schedulers.OneCycleLR(optimizer, max_lr=0.1, epochs=3, steps_per_epoch=50), 150),
        (schedulers.StepLR(optimizer, 30), 0),
        (WarmupLR(optimizer), 0),
        (None, 0),
    ):
        link = AgentLink(rank=0)
        link.note_schedule(scheduler)
        assert link.total_steps == total_steps, scheduler


def test_a_save_in_memory_says_nothing_of_the_rate_of_the_storage():
    link = AgentLink(rank=3)
    on_disk = Saved(step=1, committed=True, size_bytes=100, write_s=2.0)
    link.saved_file(on_disk)
    link.saved_file(structs.replace(on_disk, in_memory=True, write_s=0.5))
    assert link.step_times()[2:] == (50.0, 2.0)
