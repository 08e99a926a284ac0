"""etcd is away while a job ends: its last save waits, and the job is DONE with it or fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, Cluster
from tests.support.etcd_server import EtcdServer, server
from tests.support.waiting import wait_for
from zero_checkpoint import find
from zero_contract.exit_codes import AgentExit
from zero_orchestrator.errors import StoreError
from zero_orchestrator.membership.keys import Keys
from zero_orchestrator.observe import status
from zero_orchestrator.store.etcd.client import EtcdStore

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

JOB = ROOT / "tests" / "support" / "ending_job.py"
MOMENTS = ("trained", "written", "assembled", "saved")
WAITS = "the last checkpoint of the script, of step 3, is written in "
"""The agent's event."""


class Ending(Cluster):
    """A job of two nodes with an etcd of its own, whose end is held up at one moment."""

    etcd: EtcdServer

    def hold_at(self, moment: str, *options: str) -> None:
        """Run to this moment, which all ranks that come to it have reached."""
        engine, *others = options
        self.script = [str(JOB), engine, str(self.directory), *others]
        for passed in MOMENTS:
            if passed != moment:
                self.let_pass(passed)
        self.start("a", "b", PYTHONPATH=str(ROOT))
        ranks = 1 if moment == "assembled" else 2
        wait_for(lambda: len(self._at(moment)) == ranks, 120, f"{moment} on {ranks} ranks")

    def let_pass(self, moment: str) -> None:
        (self.directory / moment).touch()

    def _at(self, moment: str) -> list[Path]:
        self.check_agents()
        return list(self.directory.glob(f"at-{moment}-*"))

    @property
    def saved(self) -> list[int]:
        """The steps of the checkpoints on disk."""
        root = self.directory / "checkpoints"
        return [c.manifest.step for c in find(root).candidates] if root.exists() else []

    def ends(self) -> tuple[str, int, int]:
        """Its state, restarts and round at its end, which etcd knows as the last checkpoint's."""
        self.wait_for_end()
        with contextlib.closing(EtcdStore(self.etcd.endpoint)) as store:
            ended = status.read(store, self.job)
        known = ended.checkpoint["step"] if ended.checkpoint else None
        assert known == (None if "zero_checkpoint" in self.script else 3)
        return ended.state, ended.restarts, ended.round

    def node_of(self, rank: int) -> str:
        """The node of a worker."""
        return next(e["node"] for e in self.events("worker") if e["rank"] == rank)


@pytest.fixture
def ending(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ending]:
    with server(tmp_path_factory.mktemp("etcd")) as etcd:
        job = Ending(
            tmp_path,
            etcd.endpoint,
            f"ending-{os.getpid()}",
            flags=("--nnodes=1:2", "--max-restarts=0", "--rdzv-conf=last_call_timeout=140"),
        )
        job.etcd = etcd
        yield job
        job.close()


@pytest.mark.parametrize("closes", ["CLOSES", "-"])
@pytest.mark.parametrize("saves", ["ASYNC", "-"])
@pytest.mark.parametrize("engine", ["engine", "protect", "checkpoints"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.corners(moment=["trained"], engine=["engine"], saves=["ASYNC"], closes=["-"])
def test_a_job_that_ends_without_etcd_is_done_with_its_last_checkpoint(
    ending: Ending, moment: str, engine: str, saves: str, closes: str
):
    ending.hold_at(moment, engine, saves, closes)
    ending.etcd.kill()
    ending.let_pass(moment)
    is_saved = moment == "saved"
    waits = "etcd cannot be reached" if is_saved else WAITS
    wait_for(lambda: waits in ending.output, 120, "a word about the outage")
    if not (is_saved and (saves, closes) == ("ASYNC", "-")):  # it may still be under way
        assert ending.saved == ([3] if is_saved else [])
    ending.etcd.start()
    assert ending.ends() == ("DONE", 0, 1)
    assert ending.saved == [3]


@pytest.mark.full
@pytest.mark.parametrize("moment", ["trained", "saved"])
def test_a_script_that_saves_by_zero_checkpoint_alone_publishes_without_etcd(
    ending: Ending, moment: str
):
    ending.hold_at(moment, "zero_checkpoint")
    ending.etcd.kill()
    ending.let_pass(moment)
    wait_for(lambda: ending.saved == [3], 60, "the checkpoint")
    wait_for(lambda: "etcd cannot be reached" in ending.output, 60, "a word about the outage")
    ending.etcd.start()
    assert ending.ends() == ("DONE", 0, 1)


def held_without_etcd(ending: Ending) -> None:
    """The last save is written, and waits for etcd."""
    ending.hold_at("trained", "engine", "-", "CLOSES")
    ending.etcd.kill()
    ending.let_pass("trained")
    wait_for(lambda: WAITS in ending.output, 120, "a word about the outage")


@pytest.mark.full
def test_an_outage_beyond_the_grace_fails_and_names_the_files_which_a_rename_publishes(
    ending: Ending,
):
    ending.flags = (*ending.flags, "--etcd-grace=4")
    held_without_etcd(ending)
    codes = {agent.wait() for agent in ending.everyone}
    assert codes == {AgentExit.NO_STORE}
    (told,) = set(
        re.findall(
            r"of step 3, is written in (\S+) and not published: to keep it, re", ending.output
        )
    )
    assert ending.saved == []
    manifest = Path(told, "MANIFEST.json")
    manifest.with_name("MANIFEST.json.tmp").rename(manifest)
    assert ending.saved == [3]


@pytest.mark.full
def test_the_death_of_the_node_that_waits_costs_a_restart_and_no_result(ending: Ending):
    ending.flags = (*ending.flags, "--max-restarts=1")
    held_without_etcd(ending)
    ending.agents.pop(ending.node_of(0)).kill_node()
    ending.etcd.start()
    assert ending.ends() == ("DONE", 1, 2)
    assert ending.saved == [3]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_told_to_leave_while_the_last_save_waits_leaves_with_it(
    ending: Ending, rank: int
):
    held_without_etcd(ending)
    told = ending.agents.pop(ending.node_of(rank))
    told.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: leaving" in told.output, 60, "a word about it")
    ending.etcd.start()
    assert told.wait() in (0, 128 + signal.SIGTERM)
    assert ending.ends() == ("DONE", 0, 1)
    assert ending.saved == [3]


@pytest.mark.full
def test_a_stop_that_is_asked_for_while_the_last_save_waits_keeps_it(ending: Ending):
    held_without_etcd(ending)
    ending.etcd.start(wait=False)
    with contextlib.closing(EtcdStore(ending.etcd.endpoint)) as store:
        wait_for(lambda: asks_to_stop(store, ending.job), 60, "the request to stop")
    codes = {agent.wait() for agent in ending.everyone}
    assert codes <= {AgentExit.OK, AgentExit.STOPPED}
    assert ending.saved == [3]


def asks_to_stop(store: EtcdStore, job: str) -> bool:
    try:
        return store.put(Keys(job).stop, '"enough"') > 0
    except StoreError:
        return False
