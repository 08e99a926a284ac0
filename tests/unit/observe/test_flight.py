"""Which collective does not match: the flight recorders of torch, as ranks have recorded them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch.distributed

from tests.support.cluster import environment
from tests.support.ports import free_port
from zero_comm.worker.flight_recorder import in_short
from zero_contract.worker import WaitReply, decode, encode
from zero_orchestrator.observe.detectors.flight import compare, from_answer
from zero_orchestrator.observe.detectors.hang import RankState, judge
from zero_orchestrator.observe.stacks import Frame

TORCH = {"name": "all_reduce", "filename": torch.distributed.__file__, "line": 3245}


def entry(number, name, sizes, *, line=31, state="scheduled", retired=True, group="0"):
    """An entry as torch 2.13 writes it, of NCCL or of gloo."""
    return {
        "frames": [TORCH, {"name": "train", "filename": "/app/train.py", "line": line}],
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "input_sizes": sizes,
        "state": state,
        "retired": retired,
        "is_p2p": False,
    }


def trace(*entries):
    """What a rank answers, as it arrives."""
    reply = WaitReply(request=1, collectives=tuple(in_short(entries)))
    got = decode(encode(reply))
    assert isinstance(got, WaitReply)
    return from_answer(got.collectives)


DONE = entry(1, "all_reduce", [[4]])
GATHER = entry(2, "_all_gather_base", [[8]], line=40, state="started", retired=False)
REDUCE = entry(2, "all_reduce", [[8]], line=52, state="started", retired=False)
LONGER = entry(2, "_all_gather_base", [[9]], line=40, state="started", retired=False)


@pytest.mark.parametrize(
    ("traces", "odd", "issued"),
    [
        ([[DONE, GATHER], [DONE, REDUCE], [DONE, GATHER]], [1], "all_reduce of [[8]]"),
        ([[DONE, GATHER], [DONE, GATHER], [DONE, LONGER]], [2], "_all_gather_base of [[9]]"),
        ([[DONE, GATHER], [DONE], [DONE, GATHER]], [1], None),
        ([[DONE, GATHER], [DONE], [DONE]], [1, 2], None),
    ],
)
def test_the_rank_whose_collective_differs_or_lacks_is_found(traces, odd, issued):
    found = compare({rank: trace(*entries) for rank, entries in enumerate(traces)})
    assert found is not None
    assert list(found.odd) == odd
    theirs = found.odd[odd[0]]
    assert (theirs and theirs.text.partition(",")[0]) == issued
    assert (found.usual.name, found.usual.number) == ("_all_gather_base", 2)


@pytest.mark.parametrize(
    "traces",
    [
        [[DONE, GATHER], [DONE, GATHER]],
        [[DONE], [DONE, entry(2, "broadcast", [[2]])]],  # it has ended: nobody waits
        [[entry(1, "gather", [[1]])], [entry(1, "gather", [[2]])]],  # sizes that may differ
        [[DONE], [entry(9, "all_reduce", [[1]], group="1")]],  # a group of other ranks
        [[DONE, entry(5, "all_reduce", [[4]])]] * 2,  # between them, a monitored barrier
        [[], []],
    ],
)
def test_collectives_that_match_are_no_verdict(traces):
    assert compare({rank: trace(*entries) for rank, entries in enumerate(traces)}) is None


def test_the_verdict_names_rank_node_and_line():
    wait = Frame(function="train", file="/app/train.py", line=60)
    traces = [trace(DONE, GATHER), trace(DONE), trace(DONE, GATHER)]
    ranks = [
        RankState(rank=rank, node=f"n{rank}", begun=5, frames=(wait,), collectives=one)
        for rank, one in enumerate(traces)
    ]
    hang = judge(ranks)
    assert hang is not None
    assert hang.ranks == (1,)
    assert hang.text == (
        "the collectives differ: rank 1 on n1 has not issued it, and is in train (train.py:60); "
        "2 ranks have issued _all_gather_base of [[8]], from train (train.py:40) (number 2 of "
        "group 0/default_pg)"
    )


RECORDS = """
import json, os, torch, torch.distributed as dist
from zero_comm.worker.flight_recorder import recorded
def train():
    dist.all_reduce(torch.ones(4))
os.environ.update(RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
train()
print(json.dumps(recorded()))
"""


@pytest.mark.full
def test_what_torch_has_recorded_is_told_with_its_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RECORDS)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**environment(), **place},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (found,) = json.loads(done.stdout)
    assert (found["name"], found["sizes"], found["number"]) == ("all_reduce", "[[4]]", 1)
    assert found["at"] == "train (script.py:5)"
