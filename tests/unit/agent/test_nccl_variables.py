"""Who decides about a worker whose peers are lost: torch's threads, or the agent."""

import os

import pytest

from zero_comm.worker.distributed import leave_failures_to_agent
from zero_contract.worker import ENV_SOCKET

ERRORS, MONITOR = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({ENV_SOCKET: "/s", ERRORS: "1"}, {ERRORS: "0", MONITOR: "0"}),  # what every worker gets
        ({ENV_SOCKET: "/s", ERRORS: "3", MONITOR: "1"}, {ERRORS: "3", MONITOR: "1"}),
        ({ERRORS: "1"}, {ERRORS: "1"}),  # under torchrun
    ],
)
def test_under_an_agent_nccl_ends_no_survivor_of_a_lost_peer(monkeypatch, given, left):
    environ: dict[str, str] = dict(given)
    monkeypatch.setattr(os, "environ", environ)
    leave_failures_to_agent()
    assert {name: environ[name] for name in (ERRORS, MONITOR) if name in environ} == left
