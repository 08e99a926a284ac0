"""The last save of a script, on a rank that waits for rank 0."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.files.place import place
from zero_checkpoint.last_save import LastSave
from zero_checkpoint.saving.publish import NotPublished
from zero_checkpoint.saving.staging import Outcome


def test_who_waits_for_rank_0_to_publish_the_last_save_is_heard_while_that_evaluates(tmp_path):
    store = HashStore()
    evaluating, other = (StoreConsensus(store, rank, 2, timeout_s=60) for rank in (0, 1))
    heard, published = threading.Event(), []
    link: Any = SimpleNamespace(
        leaving=False,
        leave_asked=False,
        heartbeat=heard.set,
        saved=lambda _: None,
        saved_file=lambda _: None,
        group_lost=threading.Event(),
    )
    saver: Any = SimpleNamespace(
        last_lacked_room=False, published=lambda *what: published.append(what)
    )
    schedule: Any = SimpleNamespace(failed_for_now=lambda: None)
    training: Any = SimpleNamespace(rank=1, cursor=SimpleNamespace(step=3))
    last = LastSave(training, link, saver, schedule, other, heard)
    request: Any = SimpleNamespace(step=3, tag="step3", root=place(tmp_path))
    last.begun(request)
    error = NotPublished("etcd did not take it", str(tmp_path / "step3"), None)
    last._note(Outcome(step=3, write_s=1.0, error=error))

    def rank_0() -> None:
        assert heard.wait(60)  # it evaluates until the agent has heard of the other
        evaluating.announce(dict)

    thread = threading.Thread(target=rank_0)
    thread.start()
    last.finish()
    thread.join(60)
    assert [what[0] for what in published] == [request]


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
