"""Where a worker that mpirun or srun has started finds its place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import TRAIN, environment, final_hash
from tests.support.ports import free_port
from zero_comm.worker.distributed import LAUNCHERS, Launcher, discover, first_of, init_distributed
from zero_contract.errors import ConfigError

TWO_OF_FOUR = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            "127.0.0.1",
        ),
        (
            {
                "PMI_RANK": "2",
                "PMI_SIZE": "4",
                "MPI_LOCALRANKID": "0",
                "MPI_LOCALNRANKS": "2",
                "MASTER_ADDR": "n0",
            },
            "n0",
        ),
        (
            {
                "MV2_COMM_WORLD_RANK": "2",
                "MV2_COMM_WORLD_SIZE": "4",
                "MV2_COMM_WORLD_LOCAL_RANK": "0",
                "MASTER_ADDR": "n0",
            },
            "n0",
        ),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "2",
                "SLURM_NTASKS": "9",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "0",
                "SLURM_JOB_NODELIST": "login,gpu[01-09]",
                "SLURM_STEP_NODELIST": "gpu[07-08]",
            },
            "gpu07",
        ),
        (
            {
                "PMI_RANK": "2",
                "PMI_SIZE": "4",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "2",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NODELIST": "gpu[07-08]",
            },
            "gpu07",
        ),
    ],
    ids=["Open MPI", "Intel MPI", "MVAPICH2", "Slurm", "Slurm with PMI-2"],
)
def test_a_launchers_variables_are_a_place(environ, address):
    assert discover(environ, 29500) == {**TWO_OF_FOUR, "MASTER_ADDR": address}


def test_a_batch_script_is_no_task_of_slurm():
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 29500) == {}


def test_hosts_that_nobody_names_are_an_error_with_the_remedy():
    environ = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        discover(environ, 29500)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[07-12,15],cpu1", "gpu07"),
        ("rack2-gpu[3,9]", "rack2-gpu3"),
        ("r[1-2]n[04-08]", "r1n04"),
    ],
)
def test_the_first_host_of_a_list(nodelist, host):
    assert first_of(nodelist) == host


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_a_worker_of_a_launcher_computes_on_the_device_of_its_number(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers of a node see both devices; nobody has set LOCAL_RANK."""
    chosen: list[int] = []
    found = dict.fromkeys((launcher.rank, launcher.local_rank), "1")
    found |= {launcher.world[0]: "2", "MASTER_ADDR": "127.0.0.1", launcher.only_with or "_": "0"}
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1] if chosen else 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    init_distributed()
    assert (chosen, found["LOCAL_RANK"]) == ([1], "1")


@pytest.mark.full
def test_srun_tasks_form_a_group_by_themselves():
    """Two processes with what srun gives them, and nothing else."""
    script = (
        "import zero_deepspeed, torch, torch.distributed as dist\n"
        f"zero_deepspeed.init_distributed(distributed_port={free_port()})\n"
        "mine = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(mine)\n"
        "print(dist.get_rank(), dist.get_world_size(), mine.item(), flush=True)\n"
        # Without it torch may abort while the interpreter ends, if the other rank is gone first.
        "dist.destroy_process_group()\n"
    )
    common = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    assert [task.communicate(timeout=120)[0] for task in tasks] == ["0 2 3.0\n", "1 2 3.0\n"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
def test_workers_of_a_real_mpirun_train_as_those_of_an_agent(tmp_path):
    """The example, run by `mpirun -n 2`, ends with the weights of a run in one process."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = {**environment(), **root, "MASTER_PORT": str(free_port())}
    small = ("--width=16", "--layers=1", "--length=16", "--samples=64")
    hashes = []
    for prefix in ([], ["mpirun", "-n", "2", "--oversubscribe"]):
        place = f"--checkpoints={tmp_path}/{len(prefix)}"
        command = [*prefix, sys.executable, str(TRAIN), *small, place]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"training on {2 if prefix else 1} workers" in done.stdout
        hashes.append(final_hash(done.stdout))
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("minutes", ["ten", "nan", "inf", "-inf", "0", "-1", "1e300"])
def test_a_timeout_that_is_none_is_an_error_that_names_the_variable(monkeypatch, minutes):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    with pytest.raises(ConfigError, match=f"DEEPSPEED_TIMEOUT={minutes}: "):
        init_distributed()
