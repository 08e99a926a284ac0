"""Job files as environment variables of the agents."""

from __future__ import annotations

from dataclasses import fields

from tests.support.flags import parse
from tests.unit.jobfile.support import job
from zero_agent.command.resolve import resolve
from zero_agent.etcd.rdzv_conf import parse_rdzv_conf
from zero_agent.loop.config import AgentConfig
from zero_orchestrator.jobfile.reading.schema import JobFile
from zero_orchestrator.jobfile.reading.settings import FLAGS, settings


def agent_of(directory, more: str) -> AgentConfig:
    """The configuration of an agent with the environment variables of this job file."""
    variables = settings(job(directory, more).file)
    (directory / "train.py").touch()
    args = parse([str(directory / "train.py")], variables)
    return resolve(args, parse_rdzv_conf(""), variables)


def test_every_policy_of_a_job_file_is_the_agents_flag_of_that_name(tmp_path):
    config = agent_of(
        tmp_path,
        """\
max_restarts: 9
refill_after_steps: 1000
max_restarts_without_progress: 5
exclude_after: 4
exclude_for: 10m
node_unit: 2
join_timeout: 2h
etcd_grace: 0
preload: json,numpy
hang_timeout: off
health_check: test -e "/mnt/$USER" && nvidia-smi
health_check_timeout: 5
checkpoint: {ram_budget: 3Gi}
""",
    )
    spec = config.spec
    assert (spec.max_restarts, spec.refill_after_steps, spec.max_restarts_without_progress) == (
        9, 1000, 5,
    )  # fmt: skip
    assert (spec.exclude_after, spec.exclude_for_s, spec.node_unit) == (4, 600, 2)
    assert (config.join_timeout_s, config.etcd_grace_s) == (7200, 0)
    assert config.preload[-2:] == ("json", "numpy")
    assert not config.hang.enabled
    assert config.health_check == 'test -e "/mnt/$USER" && nvidia-smi'
    assert config.health_check_timeout_s == 5
    assert config.ram_budget_bytes == 3 * 2**30


def test_what_a_job_file_leaves_out_is_as_the_agent_has_it(tmp_path):
    variables = settings(job(tmp_path).file)
    assert set(variables) == {
        *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_MAX_RESTARTS", "PET_SHUTDOWN_TIMEOUT"),
        "OMP_NUM_THREADS",
    }
    assert set(FLAGS) < {one.name for one in fields(JobFile)}
