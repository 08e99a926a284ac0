"""What the simulation has found in the product, each with the faults that showed it.

docs/simulation.md has the table. The seeds of random plans change with the plans; these do not.
"""

from __future__ import annotations

import inspect
import re

import pytest

from tests.simulation.test_simulation import simulated
from zero_orchestrator.membership.rounds import Timing
from zero_orchestrator.store.etcd.client import EtcdStore

FIVE = (
    "--setting nodes=5 min_nodes=4 steps=10 evaluation_s=50 --fault 0 start a "
    "--fault 0 start b --fault 0 start c --fault 0 start d --fault 0 start e"
)
FOUND = {
    "rank 0 works on after the others have ended": (
        "--setting nodes=2 slots=2 steps=5 evaluation_s=50 --fault 0 start a --fault 0 start b"
    ),
    "all nodes are cut off from etcd for longer than their leases": (
        "--setting nodes=3 steps=30 --fault 0 start a --fault 0 start b --fault 0 start c "
        "--fault 4 outage for 9.3 s"
    ),
    "rank 0 evaluates, and the others are at a last save that has found the disk full": (
        "--setting nodes=2 steps=10 evaluation_s=50 --fault 0 start a --fault 0 start b "
        "--fault 6 full-disk for 6 s"
    ),
    "etcd is restored from a copy that lacks what agents outside of the first have said": (
        f"{FIVE} --fault 5 restore-etcd-elsewhere for 25 s"
    ),
    "the same, and the restored etcd has the same id": (f"{FIVE} --fault 5 restore-etcd for 25 s"),
    "etcd is restored from a copy that lacks where the store of the round is": (
        "--seed 8134 --setting nodes=5 min_nodes=2 steps=10 --fault 0 start a --fault 0 start b "
        "--fault 0 start c --fault 0 start d --fault 0 start e --fault 0.98 outage for 4.54 s "
        "--fault 2.74 loss for 4.79 s --fault 6.4 restore-etcd for 3.33 s"
    ),
    "etcd is restored before an address is written, and once more after that": (
        "--seed 9052 --setting nodes=5 min_nodes=2 steps=10 save_every=2 memory_every=1 "
        "max_restarts=100 versions=--o-- --fault 0 start a --fault 0 start b --fault 0 start c "
        "--fault 0 start d --fault 0 start e --fault 2.05 restore-etcd for 1.16 s "
        "--fault 2.1 kill-agent d for 1.21 s --fault 4.13 restore-etcd for 7.32 s"
    ),
    "a node that gets SIGTERM goes while the others meet, and etcd has no leader": (
        "--seed 40621 --setting nodes=4 min_nodes=2 slots=1 memory_every=0 max_restarts=100 "
        "in_place=True start_up_s=3 forbidden=0.3 versions=---n --fault 0 start a --fault 0 "
        "start b --fault 0 start c --fault 0 start d --fault 0.77 slow-node d for 4.4 s "
        "--fault 1.09 slow-disk for 3.81 s --fault 4.52 sigterm c for 1.7 s --fault 6.4 "
        "slow-disk for 1.47 s --fault 6.41 no-leader for 4.94 s"
    ),
    "the checkpoint with which workers left is damaged before those that stay have loaded it": (
        "--setting nodes=3 min_nodes=2 steps=40 save_every=4 memory_every=1 in_place=True "
        "--fault 0 start a --fault 0 start b --fault 0 start c --fault 9 drain c for 10 s "
        "--fault 10.2 corrupt for 14 s"
    ),
    "etcd is restored from before the job while an agent registers": (
        "--seed 53520 --setting nodes=3 min_nodes=2 slots=2 steps=40 save_every=2 memory_every=1 "
        "step_s=0.5 max_restarts=100 in_place=True start_up_s=0.5 --fault 1 restore-etcd for "
        "7.62 s --fault 1.57 start c --fault 1.01 restore-etcd for 0.3 s --fault 1.33 slow-node c "
        "for 1.89 s --fault 8.03 slow-node c for 14.08 s --fault 9.01 restore-etcd for 2.92 s "
        "--fault 13.58 start a --fault 14.25 start b"
    ),
    "etcd is restored after an agent has agreed on the job, and before it has on a secret": (
        "--seed 65167 --setting nodes=5 min_nodes=3 slots=1 steps=10 step_s=0.2 max_restarts=100 "
        "in_place=True start_up_s=10 --fault 2.67 start a --fault 3.62 start b --fault 4.86 "
        "start d --fault 4.88 start e --fault 0.73 sigterm b for 7.48 s --fault 0.87 "
        "restore-etcd-elsewhere for 3.8 s --fault 1.77 drain b for 1.22 s --fault 2.32 slow-etcd "
        "for 2.87 s --fault 2.6 full-disk for 3.31 s"
    ),
    "etcd is restored twice from before a round, whose only node does not reach it": (
        "--seed 1795905505 --fault 0 start a --fault 0 start b --fault 0.01 start b for 0.28 s "
        "--fault 0.7 restore-etcd for 8.86 s --fault 3.73 kill-worker a for 13.37 s --fault 3.96 "
        "freeze b for 1.05 s --fault 4.09 restore-etcd-elsewhere for 1.06 s --fault 4.57 cut b "
        "etcd for 0.89 s --fault 8.49 alone b for 25 s --fault 33.5 heal"
    ),
}
"""What happens, and the arguments that make it happen."""


@pytest.mark.parametrize("arguments", FOUND.values(), ids=FOUND)
def test_what_was_found_once_is_not_found_again(arguments: str) -> None:
    first, *parts = arguments.split(" --")
    words = [part.split(" ", 1) for part in (first.removeprefix("--"), *parts)]
    flags = [word for name, value in words for word in (f"--{name}", value)]
    assert "job sim is done" in simulated("--seed", "1", "--free", *flags)


def test_a_link_that_carries_nothing_keeps_a_job_of_four_nodes_for_five_seconds() -> None:
    starts = [word for name in "abcd" for word in ("--fault", f"0 start {name}")]
    setting = "nodes=4 min_nodes=2 steps=12 step_s=1"
    told = simulated("--seed", "1", "--setting", setting, *starts, "--fault", "12 cut a c for 40 s")
    (again_s,) = re.findall(r"^ *([\d.]+) .* round 2 resumes", told, re.MULTILINE)
    assert 12.0 < float(again_s) < 17.0


def test_survivors_without_a_checkpoint_start_anew_at_once_and_for_no_further_restart() -> None:
    """Two of four nodes are cut off with their checkpoints in memory, before any is on disk."""
    starts = [word for name in "abcd" for word in ("--fault", f"0 start {name}")]
    pairs = ("a c", "a d", "b c", "b d")
    cuts = [word for pair in pairs for word in ("--fault", f"6 cut {pair} for 40 s")]
    setting = (
        "nodes=4 min_nodes=2 steps=60 save_every=500 memory_every=1 step_s=0.5 in_place=True "
        "start_up_s=0.5"
    )
    told = simulated("--seed", "1", "--setting", setting, *starts, *cuts)
    assert "there is no checkpoint in /checkpoints any more" in told
    assert "restart 2 of" not in told
    (again_s,) = re.findall(r"^ *([\d.]+) .* round 3 resumes", told, re.MULTILINE)
    assert float(again_s) < 13.0


def test_nodes_may_return_after_a_silence_for_longer_than_a_call_takes() -> None:
    timeout_s = inspect.signature(EtcdStore).parameters["timeout_s"].default
    assert Timing().return_within_s >= timeout_s + 1.0
