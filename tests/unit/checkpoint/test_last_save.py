"""The last save of a script: what is owed at its end, and a rank that waits for rank 0."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from zero_checkpoint import last_save
from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.errors import CheckpointError, DiskFull
from zero_checkpoint.files.place import place
from zero_checkpoint.files.storage import Disk
from zero_checkpoint.last_save import LastSave, after, missing
from zero_checkpoint.saving.publish import Attempt, NotPublished
from zero_checkpoint.saving.saver import Request
from zero_checkpoint.saving.staging import Outcome
from zero_contract.errors import CommitRefused


@pytest.fixture(autouse=True)
def at_exit(monkeypatch):
    """No script of a test is that of pytest."""
    monkeypatch.setattr(last_save, "_AT_EXIT", {})


class Script:
    """A rank of a training whose saves end as a test says; etcd answers at the end."""

    def __init__(self, root: Path, *, rank: int = 0, consensus: Any = None) -> None:
        self.root = root
        self.heard = threading.Event()
        self.published: list[tuple[int, str]] = []
        link: Any = SimpleNamespace(
            leaving=False,
            leave_asked=False,
            heartbeat=self.heard.set,
            saved=lambda _: None,
            saved_file=lambda _: None,
            group_lost=threading.Event(),
            fence=lambda *_, **__: None,
            launched=False,
        )
        saver: Any = SimpleNamespace(
            last_lacked_room=False, published=self._published, wait=lambda: None
        )
        schedule: Any = SimpleNamespace(failed_for_now=lambda: None, committed=lambda _: None)
        self.training: Any = SimpleNamespace(rank=rank, cursor=SimpleNamespace(step=0))
        alone: Any = SimpleNamespace(announce=lambda make: make(), on_wait=lambda: None)
        self.link = link
        self.last = LastSave(self.training, link, saver, schedule, consensus or alone, self)

    def _published(self, request: Request, path: Path) -> None:
        self.published.append((request.step, path.parent.name))

    def saves(self, step: int, how: str, name: str = "ckpt", *, aside: bool = False) -> Path:
        """Save at a step, in the background: it is published, written, or fails."""
        self.training.cursor.step = step
        request = request_of(step, self.root / name, aside=aside)
        self.last.begun(request)
        outcome = ended(how, request, disk=Disk() if self.training.rank == 0 else None)
        if isinstance(outcome.error, NotPublished):
            directory = Path(outcome.error.directory)
            directory.mkdir(parents=True)
            (directory / "r00000.safetensors").touch()
            (directory / "MANIFEST.json.tmp").touch()
        self.last._note(outcome)
        return self.root / name / f"step{step}"


def request_of(step: int, root: Path, *, aside: bool = False) -> Request:
    state: Any = None
    return Request(
        root=place(root), state=state, step=step, tag=f"t{step}", fence=None, aside=aside
    )


def ended(how: str, request: Request, disk: Disk | None = None) -> Outcome:
    path, error = request.root / f"step{request.step}", None
    if how == "written":
        manifest: Any = SimpleNamespace(
            meta={"engine": {"samples": 1}}, is_aside=request.aside, tag=request.tag
        )
        attempt = Attempt(path, manifest, "digest", disk) if disk is not None else None
        error = NotPublished("etcd did not take it", str(path), attempt)
    elif how != "published":
        error = DiskFull("no room") if how == "no room" else CheckpointError("the disk is broken")
    return Outcome(step=request.step, write_s=1.0, error=error, path=None if error else path)


@pytest.mark.parametrize("ends", ["finish", "at_exit"])
@pytest.mark.parametrize("later", [("best", False), ("ckpt", True)], ids=["elsewhere", "aside"])
def test_a_save_elsewhere_or_aside_leaves_what_is_written_to_be_published(tmp_path, later, ends):
    script = Script(tmp_path)
    name, aside = later
    script.saves(3, "written")
    script.saves(4, "published", name, aside=aside)
    assert not getattr(script.last, ends)()
    assert script.published == [(3, "ckpt")]
    assert (tmp_path / "ckpt" / "step3" / "MANIFEST.json").exists()


def test_of_two_that_are_written_in_one_directory_the_newer_one_is_published(tmp_path):
    script = Script(tmp_path)
    before = script.saves(3, "written")
    script.saves(4, "written")
    script.saves(4, "written", "best")
    script.last.finish()
    assert script.published == [(4, "ckpt"), (4, "best")]
    assert not before.exists()
    assert id(script.last) not in last_save._AT_EXIT


def test_a_script_that_trains_on_behind_a_failed_save_does_not_end_well_without_another(tmp_path):
    script = Script(tmp_path)
    script.saves(900, "fails")
    script.training.cursor.step = 950
    told = "its last checkpoint, of step 900, was not saved in .*ckpt: the disk is broken"
    with pytest.raises(CheckpointError, match=told):
        script.last.finish()
    assert script.last.at_exit() == "", "the script knows"
    script.saves(960, "fails")
    script.training.cursor.step = 970
    assert "of step 960, was not saved" in script.last.at_exit()
    script.saves(970, "published")
    assert script.last.at_exit() == ""


def test_an_older_save_that_is_written_is_published_at_exit_if_a_newer_one_has_failed(tmp_path):
    script = Script(tmp_path)
    script.saves(3, "written")
    script.saves(4, "fails")
    assert "of step 4, was not saved" in script.last.at_exit()
    assert script.published == [(3, "ckpt")]


@pytest.mark.parametrize("ends", ["finish", "at_exit"])
def test_under_torchrun_the_wait_for_etcd_ends_and_names_the_files_which_a_rename_publishes(
    tmp_path, monkeypatch, ends
):
    """zero-agent ends its workers after --etcd-grace."""
    monkeypatch.setattr(last_save, "ETCD_WAIT_S", 0.0, raising=False)
    script, tries = Script(tmp_path), iter([True, True, False])

    def refuse(_: str) -> None:
        raise CommitRefused("etcd did not take it", passing=next(tries))

    script.link.fence, script.link.launched = lambda *_, **__: refuse, True
    written = script.saves(3, "written")
    try:
        told = getattr(script.last, ends)()
    except CheckpointError as error:
        told = str(error)
    assert f"of step 3, is written in {written} and not published" in told
    assert (written / "MANIFEST.json.tmp").exists()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["ckpt", "best"]),
            st.booleans(),
            st.sampled_from(["published", "written", "fails", "no room"]),
        )
    )
)
def test_whatever_was_saved_last_in_a_directory_is_there_or_owed_and_nothing_newer_is_dropped(
    saves,
):
    debts, step, last, newest = {}, 0, {}, 0
    for steps, name, aside, how in saves:
        step += steps
        request = request_of(step, Path("/nowhere") / name, aside=aside)
        debts, in_vain = after(debts, request, ended(how, request, Disk()))
        last[name, aside] = step, how
        newest = step if how == "published" and not aside else newest
        assert all(
            each.request.root == request.root and each.request.aside == aside for each in in_vain
        )
        assert not in_vain or how in ("published", "written")
    owed = {(Path(root).name, aside): debt for (root, aside), debt in debts.items()}
    for key, (at, how) in last.items():
        debt = owed.get(key, last_save.Debt())
        if how == "written":
            assert debt.written is not None
            assert debt.written.request.step == at
        elif how != "published" and at >= newest:
            assert debt.owed is not None
            assert f"of step {at}, " in missing(debts)
        elif how == "published":
            assert debt == last_save.Debt()


def test_who_waits_for_rank_0_to_publish_the_last_save_is_heard_while_that_evaluates(tmp_path):
    store = HashStore()
    evaluating, other = (StoreConsensus(store, rank, 2, timeout_s=60) for rank in (0, 1))
    script = Script(tmp_path, rank=1, consensus=other)
    script.saves(3, "written")

    def rank_0() -> None:
        assert script.heard.wait(60)  # it evaluates until the agent has heard of the other
        evaluating.announce(dict)

    thread = threading.Thread(target=rank_0)
    thread.start()
    script.last.finish()
    thread.join(60)
    assert script.published == [(3, "ckpt")]


def test_a_script_with_a_closed_stdout_ends_with_1_if_its_last_checkpoint_is_missing():
    script = """
from types import SimpleNamespace
from zero_checkpoint import last_save
owed = SimpleNamespace(at_exit=lambda: "its last checkpoint was not saved")
last_save._AT_EXIT[0] = owed, None
"""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, script],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr.endswith("its last checkpoint was not saved: exit code 1\n")
    assert done.returncode == 1
