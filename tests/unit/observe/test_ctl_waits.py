"""`zero-ctl stop --wait` and `drain --wait` end with what they wait for, and with its etcd."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.written_job import Job, node
from zero_contract.exit_codes import CtlExit
from zero_orchestrator.ctl import cli
from zero_orchestrator.ctl.views import TableView
from zero_orchestrator.errors import StoreUnavailable
from zero_orchestrator.observe import ended


class Agents(MemoryStore):
    """A store whose job does what it is asked to, and takes the store with it."""

    def __init__(self, then):
        super().__init__(ManualClock())
        self._then, self._gone = then, False

    def txn(self, compares, writes):
        done = super().txn(compares, writes)
        if any("/stop" in one.key or "/drain/" in one.key for one in writes):
            self._gone = self._then(self)
        return done

    def get(self, key):
        self._answer()
        return super().get(key)

    def range(self, prefix, *, limit=0):
        self._answer()
        return super().range(prefix, limit=limit)

    def _answer(self):
        if self._gone:
            raise StoreUnavailable("cannot reach etcd: is it running there?")


def asked(store, line):
    args = cli.make_parser().parse_args(line.split())
    return cli._COMMANDS[args.command](args, store, TableView())


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Where the last words of jobs are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def leave(store, *, keeps=True, state="ACTIVE"):
    """The one node leaves, and its server ends with it."""
    job = Job(store)
    store.delete(job.keys.node("a"))
    job.round(1, state, "a")
    if keeps:
        ended.keep(store, "gpt")
    return True


@pytest.mark.parametrize(
    ("line", "state", "said"),
    [
        ("stop gpt --wait=20", "STOPPED", "job gpt has ended"),
        ("drain a gpt --wait=20", "ACTIVE", "node a has left job gpt"),
    ],
)
def test_what_takes_its_own_etcd_with_it_is_done(capsys, line, state, said):
    store = Agents(lambda store: leave(store, state=state))
    job = Job(store)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    assert asked(store, line) == CtlExit.OK
    assert capsys.readouterr().out.splitlines()[-1] == said


@pytest.mark.parametrize("line", ["stop gpt --wait=20", "drain a gpt --wait=20"])
def test_how_an_earlier_run_of_that_name_ended_says_nothing_about_this_one(line):
    store = Agents(lambda store: leave(store, keeps=False, state="STOPPED"))
    job = Job(store)
    job.round(1, "STOPPED", "a")
    ended.keep(store, "gpt")
    job.live("a")
    job.round(1, "ACTIVE", "a")
    with pytest.raises(StoreUnavailable):
        asked(store, line)


def test_a_drained_node_whose_next_agent_comes_at_once_has_left(capsys):
    def come_back(store):
        job = Job(store)
        again = dataclasses.replace(node("a"), incarnation="2")
        store.put(job.keys.node("a"), again.to_json(), lease=store.grant(3))
        return False

    store = Agents(come_back)
    job = Job(store)
    job.live("a")
    job.round(1, "ACTIVE", "a")
    assert asked(store, "drain a gpt --wait=0.5") == CtlExit.OK
    assert capsys.readouterr().out.splitlines()[-1] == "node a has left job gpt"


@pytest.mark.parametrize("text", [b"\xff\xfe", b"", b"[]", b'{"job": 1}'])
def test_a_damaged_last_word_is_none(text):
    ended._directory().mkdir(parents=True)
    ended._file("gpt").write_bytes(text)
    assert ended.find("gpt") is None
