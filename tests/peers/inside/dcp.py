"""Cases of torch.distributed.checkpoint: what they save and load are universal checkpoints.

The writer and the reader of files are this tree's, in every process of a case, with the root where
the case has its checkpoint. Cases that ask for GPUs run on the CPU, with gloo.
"""

import itertools
import multiprocessing
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as peer
from torch.distributed import remote_device
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed._shard import sharded_tensor
from torch.testing._internal.distributed._tensor import common_dtensor

from zero_checkpoint.dcp import Reader, Writer

_steps = itertools.count()


class FileSystemWriter(Writer):
    """A save of a case is the next step."""

    def __init__(self, path, *_, **__):
        super().__init__(path)
        self.reset(None)

    def reset(self, checkpoint_id=None):
        step = next(_steps)
        super().__init__(checkpoint_id or self._root, step=step, tag=f"global_step{step}")


class FileSystemReader(Reader):
    """The newest checkpoint is the one that the case has saved last."""

    def __init__(self, path, *_, **__):
        super().__init__(path)

    def reset(self, checkpoint_id=None):
        if checkpoint_id is not None:
            super().__init__(checkpoint_id)


for _module in (peer, filesystem, format_utils, _storage_utils):
    _module.FileSystemWriter, _module.FileSystemReader = FileSystemWriter, FileSystemReader


def _of_any(*_, **__):
    return lambda case: case


def _fork(case):
    """Start the ranks of a case: PyTorch starts an interpreter for each, which takes seconds."""
    case._start_processes(multiprocessing.get_context("forkserver").Process)


common_distributed.MultiProcessTestCase._spawn_processes = _fork

for _name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
    for _module in (common_distributed, common_dtensor):
        setattr(_module, _name, _of_any)

_with_comms, _init_pg = sharded_tensor.with_comms, common_dtensor.DTensorTestBase.init_pg


def _with_comms_of_gloo(case=None, init_rpc=True, backend=""):
    return _with_comms(case, init_rpc, "gloo")


sharded_tensor.with_comms = _with_comms_of_gloo
common_dtensor.DTensorTestBase.init_pg = lambda case, *_, **__: _init_pg(case, False, "gloo")

_begin, _parse = dist.init_process_group, remote_device._remote_device.__init__


def _with_gloo(backend=None, *args, **named):
    named.pop("device_id", None)
    return _begin("gloo" if backend and "nccl" in backend else backend, *args, **named)


def _on_the_cpu(self, place):
    _parse(self, place.partition("/")[0] + "/cpu" if "/cuda" in str(place) else place)


dist.init_process_group = torch.distributed.distributed_c10d.init_process_group = _with_gloo
remote_device._remote_device.__init__ = _on_the_cpu
torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
torch.cuda.set_device = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")
os.environ.setdefault("BACKEND", "gloo")
