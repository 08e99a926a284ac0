"""A store or a peer that is lost while the ranks still meet is no fault of those that are left."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from tests.support.cluster import environment
from tests.support.waiting import wait_for
from zero_contract.worker import ENV_SOCKET, ExitCode

HOST = """
import signal, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""
MEETS = {
    "initialize": "import torch, zero_deepspeed as zd; zd.initialize(model=torch.nn.Linear(2, 2),"
    " config={'train_batch_size': 2, 'optimizer': {'type': 'AdamW'}})",
    "init_distributed": "import zero_deepspeed; zero_deepspeed.init_distributed()",
}


@pytest.mark.parametrize("meets", MEETS.values(), ids=MEETS)
@pytest.mark.full
def test_a_worker_whose_store_is_lost_says_that_it_has_lost_its_peers(meets, tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        place = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", ENV_SOCKET: str(tmp_path / "nobody")}
        command, env = [sys.executable, "-c", meets], {**environment(), **place, **agent}
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as worker:
            store = TCPStore("127.0.0.1", port, is_master=False)
            wait_for(lambda: store.num_keys() > 1, 60, "a worker that waits for its peer")
            host.kill()
            _, told = worker.communicate(timeout=120)
    assert worker.returncode == ExitCode.PEER_LOST, told
    assert "leaving a broken group: meeting the other ranks: a peer is gone: " in told
