"""A load under DDP and HSDP: what ranks have alike is read once, and a peer's death ends it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_torch
from tests.support.world import GROUP_TIMEOUT_S, WorldError, WorldPool
from zero_checkpoint import find
from zero_checkpoint.loading import restore
from zero_checkpoint.loading.restore import Loaded
from zero_contract.errors import PeerLost
from zero_torch.state.shared_reads import SharedReads

WIDTH, LAYERS = 96, 3


class Layers(nn.Sequential):
    """Some layers, and a buffer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.register_buffer("scale", torch.rand(WIDTH))


def checkpoints(wrapper: str, seed: int) -> tuple[nn.Module, Any, zero_torch.Checkpoints]:
    model: nn.Module = Layers(seed)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif wrapper == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, zero_torch.protect(model, optimizer)


def state_of(model: nn.Module, optimizer: Any) -> list[float]:
    """A number for each tensor of a training: different weights have different ones."""
    moments = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg",)]
    tensors = [p.detach() for p in model.parameters()] + moments
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]
    return [float(each.double().square().sum()) for each in [*whole, *model.buffers()]]


def saved(directory: str) -> list[float]:
    model, optimizer, run = checkpoints("ddp", 1)
    model(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.step()
    run.save(directory)
    run.close()
    return state_of(model, optimizer)


def loaded(wrapper: str, directory: str) -> tuple[list[float], int]:
    """The state, and the bytes that this rank has read."""
    found: list[Loaded] = []
    load = restore.load

    def remembered(*args: Any, **options: Any) -> Loaded | None:
        result = load(*args, **options)
        assert result is not None
        found.append(result)
        return result

    model, optimizer, run = checkpoints(wrapper, 8)
    with mock.patch.object(restore, "load", remembered):
        run.load(directory)
    run.close()
    return state_of(model, optimizer), found[0].bytes_read


@pytest.mark.parametrize(
    ("wrapper", "world"), [("ddp", 4), pytest.param("hsdp", 4, marks=pytest.mark.full)]
)
def test_ranks_read_a_checkpoint_once_between_them(
    worlds: WorldPool, tmp_path: Path, wrapper: str, world: int
) -> None:
    (expected, *_) = worlds.run(3, saved, str(tmp_path))
    ranks = worlds.run(world, loaded, wrapper, str(tmp_path))
    assert [state for state, _ in ranks] == [expected] * world
    size = sum(file.size_bytes for file in find(tmp_path).candidates[0].manifest.files)
    assert size <= sum(read for _, read in ranks) <= 1.3 * size  # with the ends of blocks
    assert max(read for _, read in ranks) <= 1.5 * size / world


def load_beside_a_lost_peer(directory: str, lost: int) -> None:
    """A rank is killed when it has voted that it has read well, and gives nothing to the others."""
    rank = dist.get_rank()
    _, _, run = checkpoints("ddp", 8)
    if rank == lost:
        SharedReads.exchange = die  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"loaded state of all ranks on cpu, \d+: a peer is gone"):
        run.load(directory)
    assert time.monotonic() - began < GROUP_TIMEOUT_S / 2  # its patience has not ended
    Path(directory, f"rank{rank}").touch()
    os._exit(0)  # as a script's error ends it: a peer may wait for this survivor, not for the dead


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_survivors_of_a_peer_that_dies_while_it_loads_say_so_and_the_checkpoint_stays(
    worlds: WorldPool, tmp_path: Path
) -> None:
    (expected, *_) = worlds.run(3, saved, str(tmp_path))
    with pytest.raises(WorldError, match="rank 1 died, exit -9"):
        worlds.run(3, load_beside_a_lost_peer, str(tmp_path), 1)
    assert [(tmp_path / f"rank{rank}").exists() for rank in (0, 2)] == [True, True]
    ranks = worlds.run(2, loaded, "ddp", str(tmp_path))
    assert [state for state, _ in ranks] == [expected] * 2
