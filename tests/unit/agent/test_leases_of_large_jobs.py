"""How long a lease is, from what was typed: many nodes have longer ones, or etcd has no rest."""

from __future__ import annotations

import pytest

from tests.support.flags import parse
from zero_agent.command.resolve import resolve
from zero_agent.etcd.rdzv_conf import parse_rdzv_conf


@pytest.mark.parametrize(
    ("flags", "lease_s", "patience_s"),
    [
        ("--nnodes=1:4", 3, 6),
        ("--nnodes=1000", 8, 16),
        ("--nnodes=1:2000", 13, 26),
        ("--nnodes=1:100000", 15, 30),
        ("--nnodes=1000 --lease-ttl=5", 5, 10),
        ("--nnodes=4 --rdzv-conf=keep_alive_interval=2", 6, 12),
    ],
)
def test_a_lease_grows_with_the_job_and_what_waits_for_its_end_with_it(
    flags, lease_s, patience_s, tmp_path
):
    script = tmp_path / "train.py"
    script.touch()
    args = parse([*flags.split(), str(script)], {})
    config = resolve(args, parse_rdzv_conf(args.rdzv_conf), {})
    assert config.lease_ttl_s == lease_s
    assert config.timing.symptom_patience_s == patience_s
    assert config.timing.return_within_s > lease_s
